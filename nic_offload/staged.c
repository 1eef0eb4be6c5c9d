/*
 * Staging memory between rooms and drives; it is excluded from core dumps.
 */
#define _GNU_SOURCE
#include "staged.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

int staged_open(struct staged *staged, uint32_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return -ENOMEM;
	madvise(memory, bytes, MADV_HUGEPAGE);
	madvise(memory, bytes, MADV_DONTDUMP);
	*staged = (struct staged){.memory = memory, .bytes = bytes};
	return 0;
}

void staged_close(struct staged *staged)
{
	if (staged->memory)
		munmap(staged->memory, staged->bytes);
	staged->memory = NULL;
}

char *staged_take(struct staged *staged, uint32_t size, uint32_t *taken)
{
	if (!staged->in_use)
		staged->at = 0;
	uint32_t to_end = staged->bytes - staged->at;
	uint32_t at = to_end < size ? 0 : staged->at, skipped = to_end < size ? to_end : 0;
	if (staged->in_use + skipped + size > staged->bytes)
		return NULL;
	staged->at = at + size;
	*taken = skipped + size;
	staged->in_use += *taken;
	return staged->memory + at;
}

void staged_give(struct staged *staged, uint32_t taken)
{
	staged->in_use -= taken;
}
