/*
 * BLAKE2b (RFC 7693) of messages that fit into one of its blocks.
 */
#ifndef TRIGGERKV_BLAKE2B_H
#define TRIGGERKV_BLAKE2B_H

#include <stdint.h>

#define BLAKE2B_BLOCK 128
#define BLAKE2B_KEY 32
#define BLAKE2B_PERSON 16

/* The state after the key, from which each message starts. */
struct blake2b {
	uint64_t h[8];
};

void blake2b_begin(struct blake2b *keyed, const uint8_t key[BLAKE2B_KEY], const uint8_t *person, unsigned digest_bytes);
/* `block` is the message, of this many bytes, padded with zeros. */
void blake2b_end(const struct blake2b *keyed, const uint64_t block[BLAKE2B_BLOCK / 8], unsigned message_bytes,
		 void *digest, unsigned digest_bytes);
/* The same without a key. */
void blake2b_unkeyed(const uint8_t person[BLAKE2B_PERSON], const uint64_t block[BLAKE2B_BLOCK / 8],
		     unsigned message_bytes, void *digest, unsigned digest_bytes);

#endif
