/*
 * Words of memory that others store to, and memory for blocks.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <sys/mman.h>

/* Huge pages where the kernel has them, and all of them there before the first block comes: a fault for each
 * page would cost the first blocks several times what their bytes do. */
int tk_memory_populate(void *address, size_t length)
{
	madvise(address, length, MADV_HUGEPAGE);
	return madvise(address, length, MADV_POPULATE_WRITE) ? -errno : 0;
}

uint64_t tk_word_load(const void *address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
}

void tk_word_store(void *address, uint64_t value)
{
	__atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
}
