/*
 * BLAKE2b of short messages: tags of header pages, derived keys, and tags of erase domains.
 */
#define _GNU_SOURCE
#include "blake2b.h"

#include <string.h>

#define ROTATED(word, bits) ((word) >> (bits) | (word) << (64 - (bits)))

static const uint64_t start[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
				  0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
static const uint8_t orders[10][16] = {
	{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
	{11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
	{9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
	{12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
	{6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static void mix(uint64_t *a, uint64_t *b, uint64_t *c, uint64_t *d, uint64_t x, uint64_t y)
{
	*a += *b + x;
	*d = ROTATED(*d ^ *a, 32);
	*c += *d;
	*b = ROTATED(*b ^ *c, 24);
	*a += *b + y;
	*d = ROTATED(*d ^ *a, 16);
	*c += *d;
	*b = ROTATED(*b ^ *c, 63);
}

static void compress(uint64_t h[8], const uint64_t m[16], uint64_t length, int is_last)
{
	uint64_t v[16];
	memcpy(v, h, sizeof start);
	memcpy(v + 8, start, sizeof start);
	v[12] ^= length;
	v[14] ^= is_last ? UINT64_MAX : 0;
	for (int round = 0; round < 12; round++) {
		const uint8_t *o = orders[round % 10];
		for (int i = 0; i < 4; i++)
			mix(&v[i], &v[4 + i], &v[8 + i], &v[12 + i], m[o[2 * i]], m[o[2 * i + 1]]);
		for (int i = 0; i < 4; i++)
			mix(&v[i], &v[4 + (i + 1) % 4], &v[8 + (i + 2) % 4], &v[12 + (i + 3) % 4], m[o[8 + 2 * i]],
			    m[o[9 + 2 * i]]);
	}
	for (int i = 0; i < 8; i++)
		h[i] ^= v[i] ^ v[8 + i];
}

static void begin(uint64_t h[8], unsigned key_bytes, const uint8_t *person, unsigned digest_bytes)
{
	uint64_t named[2] = {0};
	memcpy(h, start, sizeof start);
	h[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
	if (person)
		memcpy(named, person, sizeof named);
	h[6] ^= named[0];
	h[7] ^= named[1];
}

void blake2b_begin(struct blake2b *keyed, const uint8_t key[BLAKE2B_KEY], const uint8_t *person, unsigned digest_bytes)
{
	uint64_t block[BLAKE2B_BLOCK / 8] = {0};
	begin(keyed->h, BLAKE2B_KEY, person, digest_bytes);
	memcpy(block, key, BLAKE2B_KEY);
	compress(keyed->h, block, BLAKE2B_BLOCK, 0);
	explicit_bzero(block, sizeof block);
}

void blake2b_end(const struct blake2b *keyed, const uint64_t block[BLAKE2B_BLOCK / 8], unsigned message_bytes,
		 void *digest, unsigned digest_bytes)
{
	uint64_t h[8];
	memcpy(h, keyed->h, sizeof h);
	compress(h, block, BLAKE2B_BLOCK + message_bytes, 1);
	memcpy(digest, h, digest_bytes);
	explicit_bzero(h, sizeof h);
}

void blake2b_unkeyed(const uint8_t person[BLAKE2B_PERSON], const uint64_t block[BLAKE2B_BLOCK / 8],
		     unsigned message_bytes, void *digest, unsigned digest_bytes)
{
	uint64_t h[8];
	begin(h, 0, person, digest_bytes);
	compress(h, block, message_bytes, 1);
	memcpy(digest, h, digest_bytes);
}
