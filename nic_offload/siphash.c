/*
 * SipHash-2-4: a keyed hash. Without the key it is not possible to choose names that collide.
 */
#include "siphash.h"

#include <string.h>

#define ROTATED(word, bits) ((word) << (bits) | (word) >> (64 - (bits)))

static void mix(uint64_t v[4], int rounds)
{
	while (rounds--) {
		v[0] += v[1];
		v[2] += v[3];
		v[1] = ROTATED(v[1], 13) ^ v[0];
		v[3] = ROTATED(v[3], 16) ^ v[2];
		v[0] = ROTATED(v[0], 32) + v[3];
		v[2] += v[1];
		v[1] = ROTATED(v[1], 17) ^ v[2];
		v[3] = ROTATED(v[3], 21) ^ v[0];
		v[2] = ROTATED(v[2], 32);
	}
}

static void take(uint64_t v[4], uint64_t word)
{
	v[3] ^= word;
	mix(v, 2);
	v[0] ^= word;
}

void siphash_begin(struct siphash *hash, const uint64_t secret[2])
{
	*hash = (struct siphash){.v = {secret[0] ^ 0x736f6d6570736575, secret[1] ^ 0x646f72616e646f6d,
				       secret[0] ^ 0x6c7967656e657261, secret[1] ^ 0x7465646279746573}};
}

void siphash_words(struct siphash *hash, const void *data, size_t length)
{
	const uint8_t *at = data;
	for (size_t left = length; left >= 8; left -= 8, at += 8) {
		uint64_t word;
		memcpy(&word, at, 8);
		take(hash->v, word);
	}
	hash->length += length;
}

uint64_t siphash_end(struct siphash *hash, const void *data, size_t length)
{
	uint64_t *v = hash->v;
	siphash_words(hash, data, length);
	uint64_t last = hash->length << 56;
	const uint8_t *rest = (const uint8_t *)data + length / 8 * 8;
	for (size_t i = 0; i < length % 8; i++)
		last |= (uint64_t)rest[i] << (8 * i);
	take(v, last);
	v[2] ^= 0xff;
	mix(v, 4);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

uint64_t tk_siphash(const uint64_t secret[2], const void *data, size_t length)
{
	struct siphash hash;
	siphash_begin(&hash, secret);
	return siphash_end(&hash, data, length);
}
