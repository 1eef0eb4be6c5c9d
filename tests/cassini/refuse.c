/*
 * Missing functions: every entry of libfabric's tables returns -FI_ENOSYS until it is replaced, so that no call uses
 * a NULL pointer. And the stand-in's messages.
 */
#include "cassini.h"

#include <rdma/fi_atomic.h>
#include <rdma/fi_collective.h>
#include <rdma/fi_tagged.h>
#include <stdio.h>
#include <stdlib.h>

struct fi_ops_msg no_messages;
struct fi_ops_tagged no_tagged;
struct fi_ops_atomic no_atomics;
struct fi_ops_collective no_collectives;
struct fi_ops_rma no_rma;

/* It reads no argument, so it can replace a function of any signature on every machine that libfabric runs
 * on: callers clean up their own arguments, and a short result fits where a long one is given. */
static ssize_t refused(void)
{
	return -FI_ENOSYS;
}

/* A table is its size and then nothing but pointers to functions. */
void refuse_all(void *table, size_t bytes)
{
	ssize_t (**slots)(void) = table;
	for (size_t i = 1; i < bytes / sizeof *slots; i++)
		slots[i] = refused;
	*(size_t *)table = bytes;
}

/* The behaviour of the hardware is undefined here: the stand-in aborts with a message. */
int say(int status, const char *sentence)
{
	fprintf(stderr, "software cassini: %s\n", sentence);
	return status;
}

void give_up(const char *sentence)
{
	say(0, sentence);
	abort();
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&no_messages, sizeof no_messages);
	refuse_all(&no_tagged, sizeof no_tagged);
	refuse_all(&no_atomics, sizeof no_atomics);
	refuse_all(&no_collectives, sizeof no_collectives);
	refuse_all(&no_rma, sizeof no_rma);
}
