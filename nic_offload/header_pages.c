/*
 * Makes header pages in batches: fixed bytes, a tag, zeros. The tag is 16 bytes of keyed BLAKE2b (RFC 7693) over a
 * name, a number and the fixed bytes, which together fit into one of its blocks.
 *
 * It doesn't know what the bytes mean; `kvstore.wire.record` does.
 */
#include "core.h"

#include <string.h>

#define BLOCK_BYTES 128
#define ROTATED(word, bits) ((word) >> (bits) | (word) << (64 - (bits)))

_Static_assert(TK_TAGGED_NAME + 8 + TK_TAGGED_FIXED == BLOCK_BYTES, "what a tag is made of is one block");

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

void tk_write_tagged(const void *key, const void *name, const struct tk_tagged *rows, uint32_t count)
{
	uint64_t keyed[8], block[BLOCK_BYTES / 8] = {0};
	memcpy(keyed, start, sizeof start);
	keyed[0] ^= 0x01010000 ^ TK_TAGGED_KEY << 8 ^ TK_TAGGED_TAG;
	memcpy(block, key, TK_TAGGED_KEY);
	compress(keyed, block, BLOCK_BYTES, 0);
	memcpy(block, name, TK_TAGGED_NAME);
	for (const struct tk_tagged *row = rows; row < rows + count; row++) {
		char *page = (char *)(uintptr_t)row->address;
		uint64_t h[8];
		memcpy(h, keyed, sizeof keyed);
		memcpy((char *)block + TK_TAGGED_NAME, &row->number, 8);
		memcpy((char *)block + TK_TAGGED_NAME + 8, row->fixed, TK_TAGGED_FIXED);
		compress(h, block, 2 * BLOCK_BYTES, 1);
		memcpy(page, row->fixed, TK_TAGGED_FIXED);
		memcpy(page + TK_TAGGED_FIXED, h, TK_TAGGED_TAG);
		memset(page + TK_TAGGED_FIXED + TK_TAGGED_TAG, 0, TK_TAGGED_PAGE - TK_TAGGED_FIXED - TK_TAGGED_TAG);
		if (row->end > row->used)
			memset(page + row->used, 0, row->end - row->used);
	}
}
