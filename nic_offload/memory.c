/*
 * Memory for blocks: page-aligned, faulted in before it is needed, and copied in pieces.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* since Linux 6.1 */
#endif
#define SMALL_PAGE 4096u
#define HUGE_PAGE (2u << 20)
#define HUGE_PAGE_NS UINT64_C(20000000) /* average time allowed for one: fragmented memory has to be moved */
#define HUGE_PAGES_MORE 64u /* the time for this many is allowed beyond that */

/* Huge pages where the kernel has them, all populated before the first block arrives: a fault for each page would cost
 * the first blocks several times as much as copying their bytes. */
int tk_memory_populate(void *address, size_t length)
{
	madvise(address, length, MADV_HUGEPAGE);
	madvise(address, length, MADV_DONTDUMP); /* keeps users' data out of core dumps */
	return madvise(address, length, MADV_POPULATE_WRITE) ? -errno : 0;
}

/* The first multiple of a huge page's size. */
static char *aligned(char *range)
{
	return range + -(uintptr_t)range % HUGE_PAGE;
}

/* Puts shared memory that is not used yet into huge pages, as far as the kernel has them; returns how much is in them.
 *
 * By default Linux gives shared memory small pages, whatever `madvise` says. They take nine times as long to allocate,
 * and drives may be half as fast with them. But it collapses a range in which one page is present, if the range is
 * mapped at a multiple of a huge page's size. So it is mapped there for as long as this takes. If it takes too long,
 * because memory is fragmented, the rest stays in small pages. */
size_t tk_memory_collapse(int fd, size_t length)
{
	size_t done = 0, reserved = length + HUGE_PAGE;
	uint64_t until_ns = tk_now_ns() + HUGE_PAGES_MORE * HUGE_PAGE_NS;
	char *range = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (range == MAP_FAILED)
		return 0;
	char *memory = aligned(range);
	if (mmap(memory, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED)
		for (; done + HUGE_PAGE <= length && tk_now_ns() < until_ns; done += HUGE_PAGE, until_ns += HUGE_PAGE_NS)
			if (madvise(memory + done, SMALL_PAGE, MADV_POPULATE_WRITE) ||
			    madvise(memory + done, HUGE_PAGE, MADV_COLLAPSE))
				break;
	munmap(range, reserved);
	return done;
}

static size_t whole_pages(size_t length)
{
	return (length + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE;
}

/* Leaves a hole between mappings, of this length and at a multiple of a huge page's size: Linux maps there what is mapped
 * next and fits, unless it fits further up. NULL: there is none. */
void *tk_memory_make_hole(size_t length)
{
	size_t size = whole_pages(length);
	char *around = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (around == MAP_FAILED)
		return NULL;
	if (!munmap(aligned(around), size))
		return around;
	munmap(around, size + HUGE_PAGE);
	return NULL;
}

/* Unmaps what is around the hole, and nothing in it. */
void tk_memory_leave_hole(void *around, size_t length)
{
	char *begin = around, *hole = aligned(begin), *after = hole + whole_pages(length);
	size_t before = (size_t)(hole - begin);
	if (before)
		munmap(begin, before);
	munmap(after, HUGE_PAGE - before);
}

void tk_copy_runs(const struct tk_run *runs, size_t count, const uint64_t *sources, uint64_t target)
{
	for (const struct tk_run *run = runs; run < runs + count; run++)
		memcpy((char *)(uintptr_t)target + run->target,
		       (const char *)(uintptr_t)sources[run->piece] + run->source, run->length);
}
