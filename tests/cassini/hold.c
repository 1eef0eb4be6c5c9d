/*
 * Steps of the NIC that a test holds up, so that a race happens each time: a flush before it drops anything, and writes
 * of up to a length, as they fire. They apply to all domains of the process.
 *
 * What always holds: a write that fired while writes are held stays at the NIC until they are released, also if later
 * ones are not held any more.
 */
#include "cassini.h"

#include <time.h>

#define LOOK_NS 100000

static size_t bytes_max;
static unsigned turn = 1, writes, flushes;
static int holds_flushes;

void hold_write(struct op *op)
{
	if (op->kind != OP_WRITE || !op->length || op->length > __atomic_load_n(&bytes_max, __ATOMIC_ACQUIRE))
		return;
	op->held_in = __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
	__atomic_add_fetch(&writes, 1, __ATOMIC_RELEASE);
}

int is_held(const struct op *op)
{
	return op->held_in == __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
}

void hold_flush(void)
{
	const struct timespec pause = {.tv_nsec = LOOK_NS};
	__atomic_add_fetch(&flushes, 1, __ATOMIC_RELEASE);
	while (__atomic_load_n(&holds_flushes, __ATOMIC_ACQUIRE))
		nanosleep(&pause, NULL);
	__atomic_sub_fetch(&flushes, 1, __ATOMIC_RELEASE);
}

EXPORTED void soft_cassini_hold_writes(size_t length)
{
	__atomic_store_n(&bytes_max, length, __ATOMIC_RELEASE);
}

EXPORTED unsigned soft_cassini_writes_held(void)
{
	return __atomic_load_n(&writes, __ATOMIC_ACQUIRE);
}

EXPORTED void soft_cassini_release_writes(void)
{
	__atomic_store_n(&writes, 0, __ATOMIC_RELEASE);
	__atomic_add_fetch(&turn, 1, __ATOMIC_RELEASE);
}

EXPORTED void soft_cassini_hold_flushes(int hold)
{
	__atomic_store_n(&holds_flushes, hold, __ATOMIC_RELEASE);
}

EXPORTED unsigned soft_cassini_flushes_held(void)
{
	return __atomic_load_n(&flushes, __ATOMIC_ACQUIRE);
}
