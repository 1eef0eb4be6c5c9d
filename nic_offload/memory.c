/*
 * Memory for blocks: page-aligned, faulted in before it is needed, and copied in pieces.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

void copy_plain(void *to, const void *from, size_t length)
{
	memcpy(to, from, length);
}

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE 64

/* For much memory that is written whole: its lines are not read first, and the cache keeps what it has. */
void copy_past_cache(void *target, const void *source, size_t length)
{
	char *to = target;
	const char *from = source;
	size_t first = -(uintptr_t)to % LINE;
	if (length < first + LINE) {
		memcpy(to, from, length);
		return;
	}
	memcpy(to, from, first);
	for (; length - first >= LINE; first += LINE)
		for (int part = 0; part < LINE; part += (int)sizeof(__m128i))
			_mm_stream_si128((__m128i *)(to + first + part),
					 _mm_loadu_si128((const __m128i *)(from + first + part)));
	memcpy(to + first, from + first, length - first);
	_mm_sfence(); /* before others are told of these bytes */
}
#else
void copy_past_cache(void *target, const void *source, size_t length)
{
	memcpy(target, source, length);
}
#endif

/* Huge pages where the kernel has them, all populated before the first block arrives: a fault for each page would cost
 * the first blocks several times as much as copying their bytes. */
int tk_memory_populate(void *address, size_t length)
{
	madvise(address, length, MADV_HUGEPAGE);
	madvise(address, length, MADV_DONTDUMP); /* keeps users' data out of core dumps */
	return madvise(address, length, MADV_POPULATE_WRITE) ? -errno : 0;
}

void tk_copy_runs(const struct tk_run *runs, size_t count, const uint64_t *sources, uint64_t target)
{
	for (const struct tk_run *run = runs; run < runs + count; run++)
		memcpy((char *)(uintptr_t)target + run->target,
		       (const char *)(uintptr_t)sources[run->piece] + run->source, run->length);
}
