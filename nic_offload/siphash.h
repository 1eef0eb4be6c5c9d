/*
 * SipHash-2-4, all at once or in parts.
 */
#ifndef TRIGGERKV_SIPHASH_H
#define TRIGGERKV_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

struct siphash {
	uint64_t v[4], length;
};

void siphash_begin(struct siphash *hash, const uint64_t secret[2]);
void siphash_words(struct siphash *hash, const void *data, size_t length); /* a multiple of 8 */
uint64_t siphash_end(struct siphash *hash, const void *data, size_t length);
uint64_t tk_siphash(const uint64_t secret[2], const void *data, size_t length);

#endif
