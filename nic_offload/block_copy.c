/*
 * Copies of blocks out of memory that another process may write to, each checksummed on its way (shared.c, direct.c).
 *
 * A step of bytes is copied into a buffer of our own that stays in the cache, checksummed there, and written to its
 * destination from there. So the destination gets the bytes that were checksummed, and nothing is read twice. All bytes
 * are checksummed, even if only a part is wanted. While a step is written, the next one is fetched into the cache: the
 * two then take as long as the slower of them.
 */
#include "progress.h"

#include <string.h>

#define BYTES_A_STEP (8u << 10) /* two of them fit into a core's first cache: this one, and the next */
#define MANY_BYTES (1u << 20) /* of one get: more than fits into its caller's cache */

static void copy_plain(void *to, const void *from, size_t length, const void *next)
{
	(void)next;
	memcpy(to, from, length);
}

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE 64

/* For large copies that overwrite whole cache lines: the lines are not read first, and the cache keeps its contents. */
static void copy_past_cache(void *target, const void *source, size_t length, const void *next)
{
	char *to = target;
	const char *from = source, *ahead = next;
	size_t first = -(uintptr_t)to % LINE;
	if (length < first + LINE) {
		memcpy(to, from, length);
		return;
	}
	memcpy(to, from, first);
	for (; length - first >= LINE; first += LINE) {
		if (ahead)
			_mm_prefetch(ahead + first, _MM_HINT_T0);
		for (int part = 0; part < LINE; part += (int)sizeof(__m128i))
			_mm_stream_si128((__m128i *)(to + first + part),
					 _mm_loadu_si128((const __m128i *)(from + first + part)));
	}
	memcpy(to + first, from + first, length - first);
	_mm_sfence(); /* before other threads learn of these bytes */
}
#else
#define copy_past_cache copy_plain
#endif

copy_bytes copy_for(uint64_t bytes)
{
	return bytes < MANY_BYTES ? copy_plain : copy_past_cache;
}

void block_copy_into(struct block_copy *block, uint64_t address, struct tk_pieces *pieces, uint32_t skip, uint32_t part)
{
	block->skip = part ? skip : 0;
	block->part = part ? part : block->length;
	block->to = (char *)(uintptr_t)address;
	block->pieces = pieces && tk_pieces_bytes(pieces) == block->part ? pieces : NULL;
}

static void step(struct block_copy *block, uint32_t bytes)
{
	_Alignas(64) char buffer[BYTES_A_STEP];
	const char *from = block->from + block->done, *next = from + bytes;
	memcpy(buffer, from, bytes);
	block->crc32c = tk_crc32c(buffer, bytes, block->crc32c);
	uint32_t first = block->done < block->skip ? block->skip : block->done, last = block->skip + block->part;
	uint32_t end = last < block->done + bytes ? last : block->done + bytes;
	block->done += bytes;
	if (block->done == block->length)
		next = block->then;
	if (first >= end)
		return;
	const char *wanted = buffer + (first - (block->done - bytes));
	if (block->pieces)
		pieces_fill(block->pieces, &block->filled, wanted, end - first, block->copy, next);
	else
		block->copy(block->to + (first - block->skip), wanted, end - first, next);
}

uint32_t block_copy_some(struct block_copy *block, uint32_t bytes_max)
{
	uint32_t before = block->done;
	while (block->done < block->length && block->done - before < bytes_max) {
		uint32_t left = block->length - block->done;
		step(block, left < BYTES_A_STEP ? left : BYTES_A_STEP);
	}
	return block->done - before;
}
