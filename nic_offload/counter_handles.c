/*
 * Opens, changes, reads and closes counters. Any thread.
 *
 * What always holds: everything that changes what the progress thread reads is done by that thread. In a child after
 * fork every call is refused.
 */
#define _GNU_SOURCE
#include "cxi.h"
#include "progress.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CACHE_LINE 64

static int open_nic_counter(struct tk_fabric *fabric, void *argument)
{
	struct tk_counter *counter = *(struct tk_counter **)argument;
	return nic_counter(fabric, &counter->nic);
}

int tk_counter_open(struct tk_fabric *fabric, void *word, struct tk_bell *bell, int pipe_fd,
		    struct tk_counter **out)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	if ((uintptr_t)word % 8)
		return -EINVAL;
	if (bell && rest_listen(fabric, pipe_fd))
		bell = NULL; /* it is still polled now and then */
	struct tk_counter *counter = calloc(1, sizeof *counter);
	if (!counter)
		return -ENOMEM;
	counter->fabric = fabric;
	counter->word = word;
	counter->bell = bell;
	if (!word && !fabric->nic.own_counters)
		counter->word = counter->own_word = aligned_alloc(CACHE_LINE, CACHE_LINE);
	int status = 0;
	if (!word && !fabric->nic.own_counters && !counter->own_word)
		status = -ENOMEM;
	if (!status && counter->own_word)
		*counter->own_word = 0;
	if (!status && fabric->nic.used)
		status = on_the_thread(fabric, open_nic_counter, &counter, sizeof counter);
	if (status == TK_STUCK)
		return status; /* the thread may still be using it */
	if (status) {
		free(counter->own_word);
		free(counter);
		return status;
	}
	pthread_mutex_lock(&fabric->handle_lock);
	counter->next = fabric->counters;
	fabric->counters = counter;
	pthread_mutex_unlock(&fabric->handle_lock);
	*out = counter;
	return 0;
}

/* The thread frees it once no operation waits for it or is to move it; the caller doesn't wait for that. */
int tk_counter_close(struct tk_counter *counter)
{
	struct tk_fabric *fabric = counter->fabric;
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_counter **link = &fabric->counters; *link; link = &(*link)->next)
		if (*link == counter) {
			*link = counter->next;
			break;
		}
	counter->next = fabric->closing;
	__atomic_store_n(&fabric->closing, counter, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&fabric->handle_lock);
	return 0;
}

/* A counter over a word, in use until `counter_put_down`. Batches that wait for the same word share it, and it is freed
 * after the last of them. The word stays mapped while a batch waits, so it is the same word, with the same bell. */
int counter_over_word(struct tk_fabric *fabric, void *word, struct tk_bell *bell, int pipe_fd, struct tk_counter **out)
{
	pthread_mutex_lock(&fabric->handle_lock);
	struct tk_counter *counter = fabric->closing;
	while (counter && !(counter->is_shared && counter->word == word && counter->bell == bell &&
			    __atomic_load_n(&counter->uses, __ATOMIC_ACQUIRE)))
		counter = counter->next;
	if (counter)
		__atomic_add_fetch(&counter->uses, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&fabric->handle_lock);
	int status = counter ? 0 : tk_counter_open(fabric, word, bell, pipe_fd, &counter);
	if (status)
		return status;
	if (!counter->is_shared) {
		counter->is_shared = 1;
		counter->uses = 1;
		tk_counter_close(counter);
	}
	*out = counter;
	return 0;
}

void counter_put_down(struct tk_counter *counter)
{
	__atomic_sub_fetch(&counter->uses, 1, __ATOMIC_RELEASE);
}

static int has_word(const struct tk_counter *counter, uint64_t address)
{
	for (; counter; counter = counter->next)
		if ((uintptr_t)counter->word == address)
			return 1;
	return 0;
}

int tk_words_watched(struct tk_fabric *fabric, uint64_t *addresses, size_t count)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->handle_lock);
	for (size_t i = 0; i < count; i++)
		if (!has_word(fabric->counters, addresses[i]) && !has_word(fabric->closing, addresses[i]))
			addresses[i] = 0;
	pthread_mutex_unlock(&fabric->handle_lock);
	return 0;
}

int tk_counter_reset(struct tk_counter *counter)
{
	return on_the_thread(counter->fabric, core_reset_counter, &counter, sizeof counter);
}

struct movement {
	struct tk_counter *counter;
	uint64_t value;
	int set;
};

/* Runs on the progress thread if the NIC has the value, because the thread may replace the NIC's counter. */
static int move(struct tk_fabric *fabric, void *argument)
{
	struct movement *movement = argument;
	struct tk_counter *counter = movement->counter;
	if (__atomic_load_n(&counter->failed, __ATOMIC_ACQUIRE))
		return -EPIPE;
	if (movement->set && !counter->word && fabric->nic.flushing)
		return NOT_YET;
	if (movement->set && movement->value < counter_value(counter))
		return -ERANGE;
	counter_move(counter, movement->value, movement->set);
	return 0;
}

static int move_counter(struct tk_counter *counter, uint64_t value, int set)
{
	struct movement movement = {.counter = counter, .value = value, .set = set};
	if (!fabric_is_ours(counter->fabric))
		return -ECHILD;
	if (!counter->word)
		return on_the_thread(counter->fabric, move, &movement, sizeof movement);
	int status = move(counter->fabric, &movement);
	if (!status)
		fabric_wake(counter->fabric);
	return status;
}

int tk_counter_add(struct tk_counter *counter, uint64_t value)
{
	return move_counter(counter, value, 0);
}

int tk_counter_set(struct tk_counter *counter, uint64_t value)
{
	return move_counter(counter, value, 1);
}

struct reading {
	struct tk_counter *counter;
	uint64_t value;
};

static int read_counter(struct tk_fabric *fabric, void *argument)
{
	struct reading *reading = argument;
	if (!reading->counter->word && fabric->nic.flushing)
		return NOT_YET;
	reading->value = counter_value(reading->counter);
	return 0;
}

int tk_counter_read(struct tk_counter *counter, uint64_t *value)
{
	struct reading reading = {.counter = counter};
	if (!fabric_is_ours(counter->fabric))
		return -ECHILD;
	int status = counter->word ? read_counter(counter->fabric, &reading) :
				     on_the_thread(counter->fabric, read_counter, &reading, sizeof reading);
	*value = reading.value;
	return status;
}

int tk_counter_failed(struct tk_counter *counter)
{
	return __atomic_load_n(&counter->failed, __ATOMIC_ACQUIRE);
}

int tk_counter_doorbell(struct tk_counter *counter, uint64_t *address, int *adds)
{
	if (!fabric_is_ours(counter->fabric))
		return -ECHILD;
	*adds = !counter->word;
	if (counter->word) {
		*address = (uintptr_t)counter->word;
		return 0;
	}
	struct cxi_counter_ops *ops = NULL;
	void *page = NULL;
	size_t length = 0;
	int status = fi_open_ops(&counter->nic->fid, CXI_COUNTER_OPS, 0, (void **)&ops, NULL);
	if (!status)
		status = ops->get_mmio_addr(&counter->nic->fid, &page, &length);
	*address = (uintptr_t)page; /* a store to its first word adds */
	return status;
}
