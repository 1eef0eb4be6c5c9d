/*
 * Memory for blocks: page-aligned, faulted in before it is needed, and copied in pieces.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

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
