/*
 * Words of memory that others store to.
 */
#include "core.h"

uint64_t tk_word_load(const void *address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
}

void tk_word_store(void *address, uint64_t value)
{
	__atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
}
