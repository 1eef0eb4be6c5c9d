/*
 * Makes header pages in batches: fixed bytes, a tag, zeros. The tag is 16 bytes of keyed BLAKE2b over a name, a number
 * and the fixed bytes, which together fit into one BLAKE2b block.
 *
 * What it doesn't do: interpret the bytes; `kvstore.wire.record` does.
 */
#include "blake2b.h"
#include "core.h"

#include <string.h>

_Static_assert(TK_TAGGED_NAME + 8 + TK_TAGGED_FIXED == BLAKE2B_BLOCK, "what a tag is made of is one block");
_Static_assert(TK_TAGGED_KEY == BLAKE2B_KEY, "");

void tk_write_tagged(const void *key, const void *name, const struct tk_tagged *rows, uint32_t count)
{
	struct blake2b keyed;
	uint64_t block[BLAKE2B_BLOCK / 8];
	blake2b_begin(&keyed, key, NULL, TK_TAGGED_TAG);
	memcpy(block, name, TK_TAGGED_NAME);
	for (const struct tk_tagged *row = rows; row < rows + count; row++) {
		char *page = (char *)(uintptr_t)row->address;
		memcpy((char *)block + TK_TAGGED_NAME, &row->number, 8);
		memcpy((char *)block + TK_TAGGED_NAME + 8, row->fixed, TK_TAGGED_FIXED);
		memcpy(page, row->fixed, TK_TAGGED_FIXED);
		blake2b_end(&keyed, block, BLAKE2B_BLOCK, page + TK_TAGGED_FIXED, TK_TAGGED_TAG);
		memset(page + TK_TAGGED_FIXED + TK_TAGGED_TAG, 0, TK_TAGGED_PAGE - TK_TAGGED_FIXED - TK_TAGGED_TAG);
		if (row->end > row->used)
			memset(page + row->used, 0, row->end - row->used);
	}
}
