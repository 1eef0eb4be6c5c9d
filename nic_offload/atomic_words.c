/*
 * 64-bit words of memory that other threads and processes store to.
 */
#include "core.h"

#include <unistd.h>

uint64_t tk_word_load(const void *address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
}

void tk_word_store(void *address, uint64_t value)
{
	__atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
}

/* A thread that goes to sleep first increments the count and then reads the words, so either the store sees the sleeper
 * or the sleeper sees the store. If the pipe is full, all threads have been woken already. */
void tk_word_ring(void *address, uint64_t value, struct tk_bell *bell, int pipe_fd)
{
	__atomic_store_n((uint64_t *)address, value, __ATOMIC_SEQ_CST);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST)) {
		ssize_t ignored = write(pipe_fd, "", 1);
		(void)ignored;
	}
}
