/*
 * Authenticated encryption of streams: AES-256-GCM, from a library.
 */
#ifndef TRIGGERKV_AEAD_H
#define TRIGGERKV_AEAD_H

#include "core.h"

struct aead; /* one stream at a time, on one thread */

struct aead *aead_open(void); /* NULL: there is no libcrypto, or no memory */
void aead_close(struct aead *aead);
/* All return 0 or a negative errno. A stream begins with its associated data, gets its bytes in steps, and is ended. A
 * NULL key means the key of the previous stream, which must have had the same direction. */
int aead_begin(struct aead *aead, int decrypts, const uint8_t *key, const uint8_t nonce[TK_AEAD_NONCE],
	       const void *associated, size_t length);
int aead_step(struct aead *aead, void *to, const void *from, size_t length); /* `to` may be `from` */
void aead_forget(struct aead *aead); /* overwrites the key of its last stream; the next one needs a key */
int aead_end(struct aead *aead, uint8_t tag[TK_AEAD_TAG]); /* writes the tag, or checks it: -EBADMSG */
void wipe(void *secret, size_t length);

#endif
