/*
 * Counters: 48 bits of successes, 7 of failures, a doorbell page and a write-back word.
 *
 * The write-back word is not written for every step. It is written on request (fi_cntr_read, a new buffer),
 * when the threshold of a wait or of a deferred operation with FI_CXI_CNTR_WB is reached, when the
 * counter is reset through its doorbell, and when the first failure comes.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct fi_ops fid_ops;
static struct fi_ops_cntr counter_ops;

static struct counter *counter_of(struct fid *fid)
{
	return (struct counter *)fid;
}

void counter_write_back(struct counter *counter)
{
	uint64_t word = CXI_WRITE_BACK_VALID | counter->failure << CXI_WRITE_BACK_FAILURE_SHIFT | counter->success;
	__atomic_store_n(counter->write_back, word, __ATOMIC_RELEASE);
}

static uint64_t word_of(const struct counter *counter)
{
	return __atomic_load_n(counter->write_back, __ATOMIC_ACQUIRE);
}

static uint64_t successes(uint64_t word)
{
	return word & FI_CXI_CNTR_SUCCESS_MAX;
}

static uint64_t failures(uint64_t word)
{
	return word >> CXI_WRITE_BACK_FAILURE_SHIFT & FI_CXI_CNTR_FAILURE_MAX;
}

/* cxi's source says successes; fi_trigger(3) says successes and failures. Which holds is a setting. */
uint64_t counter_reached(const struct counter *counter)
{
	return counter->success + (counter->domain->errors_count ? counter->failure : 0);
}

/* Triggers are examined later, by work_fire. */
void counter_look(struct counter *counter)
{
	if (counter->moved)
		return;
	counter->moved = 1;
	counter->moved_ns = now_ns();
	counter->next_moved = counter->domain->moved;
	counter->domain->moved = counter;
}

void counter_add(struct counter *counter, uint64_t value)
{
	if (counter->success + value > FI_CXI_CNTR_SUCCESS_MAX)
		give_up("a counter went beyond 2^48 - 1 successes.");
	counter->success += value;
	counter_look(counter);
}

/* A doorbell resets to 0 only, and a reset writes back. */
void counter_set(struct counter *counter, uint64_t value)
{
	counter->success = value;
	if (!value)
		counter_write_back(counter);
	counter_look(counter);
}

/* Failures come from peers too, so too many are not the application's mistake: the count stops at its maximum. */
void counter_add_failure(struct counter *counter, uint64_t value)
{
	int first = !counter->failure && value;
	counter->failure += value;
	if (counter->failure > FI_CXI_CNTR_FAILURE_MAX)
		counter->failure = FI_CXI_CNTR_FAILURE_MAX;
	if (first)
		counter_write_back(counter);
	counter_look(counter);
}

void counter_set_failure(struct counter *counter, uint64_t value)
{
	counter->failure = value;
	if (!value)
		counter_write_back(counter);
}

/* Reading a counter is software: it drains the queues of the endpoints that the counter is bound to. A counter that
 * only deferred work completes on is bound to none. */
static void progress(struct counter *counter)
{
	for (struct endpoint *endpoint = counter->domain->endpoints; endpoint; endpoint = endpoint->next)
		if (endpoint->write_counter == counter || endpoint->read_counter == counter)
			endpoint_progress(endpoint);
}

static uint64_t read_word(struct counter *counter)
{
	struct domain *domain = counter->domain;
	domain_lock(domain);
	progress(counter);
	domain_unlock(domain);

	pthread_mutex_lock(&domain->commands);
	domain_lock(domain);
	uint64_t cached = word_of(counter);
	if (doorbell_poll(counter))
		work_fire(domain);
	counter_write_back(counter);
	uint64_t word = counter->flags & FI_CXI_CNTR_CACHED ? cached : word_of(counter);
	domain_unlock(domain);
	pthread_mutex_unlock(&domain->commands);
	return word;
}

static uint64_t counter_read(struct fid_cntr *fid)
{
	return successes(read_word(counter_of(&fid->fid)));
}

static uint64_t counter_read_failures(struct fid_cntr *fid)
{
	return failures(read_word(counter_of(&fid->fid)));
}

/* Anything but an add and a reset goes through the queue of commands, and waits there for a flush. */
static int change(struct fid_cntr *fid, uint64_t value, uint64_t value_max, int is_command,
		  void (*how)(struct counter *, uint64_t))
{
	struct counter *counter = counter_of(&fid->fid);
	struct domain *domain = counter->domain;
	if (value > value_max)
		return -FI_EINVAL;
	if (is_command)
		pthread_mutex_lock(&domain->commands);
	domain_lock(domain);
	doorbell_poll(counter);
	how(counter, value);
	work_fire(domain);
	domain_unlock(domain);
	if (is_command)
		pthread_mutex_unlock(&domain->commands);
	return 0;
}

static int add(struct fid_cntr *fid, uint64_t value)
{
	return change(fid, value, FI_CXI_CNTR_SUCCESS_MAX, 0, counter_add);
}

static int set(struct fid_cntr *fid, uint64_t value)
{
	return change(fid, value, FI_CXI_CNTR_SUCCESS_MAX, value != 0, counter_set);
}

static int add_failure(struct fid_cntr *fid, uint64_t value)
{
	return change(fid, value, FI_CXI_CNTR_FAILURE_MAX, 0, counter_add_failure);
}

static int set_failure(struct fid_cntr *fid, uint64_t value)
{
	return change(fid, value, FI_CXI_CNTR_FAILURE_MAX, value != 0, counter_set_failure);
}

/* It reads only the write-back word, and takes a trigger's slot, which a timeout doesn't release. */
static int counter_wait(struct fid_cntr *fid, uint64_t threshold, int timeout_ms)
{
	struct counter *counter = counter_of(&fid->fid);
	struct domain *domain = counter->domain;
	if (counter->wait == FI_WAIT_NONE || threshold > FI_CXI_CNTR_SUCCESS_MAX)
		return -FI_EINVAL;
	uint64_t failures_before = failures(word_of(counter));
	uint64_t until_ns = timeout_ms < 0 ? UINT64_MAX : now_ns() + (uint64_t)timeout_ms * 1000000u;

	pthread_mutex_lock(&domain->commands);
	domain_lock(domain);
	int status = work_wait_for(counter, threshold);
	work_fire(domain);
	domain_unlock(domain);
	pthread_mutex_unlock(&domain->commands);
	while (!status) {
		uint64_t word = word_of(counter);
		if (successes(word) >= threshold)
			return 0;
		if (failures(word) != failures_before)
			return -FI_EAVAIL;
		if (now_ns() >= until_ns)
			return -FI_ETIMEDOUT;
		sched_yield();
		domain_lock(domain);
		progress(counter);
		domain_unlock(domain);
	}
	return status;
}

static int set_write_back_buffer(struct fid *fid, void *buffer, size_t length)
{
	struct counter *counter = counter_of(fid);
	if (!buffer || length < sizeof(uint64_t))
		return -FI_EINVAL;
	if ((uintptr_t)buffer % sizeof(uint64_t))
		return say(-FI_EINVAL, "a write-back word must lie on a multiple of 8 bytes.");
	domain_lock(counter->domain);
	counter->write_back = buffer;
	counter_write_back(counter);
	domain_unlock(counter->domain);
	return 0;
}

/* As in the provider, the length is that of a pointer and not of the page. */
static int get_doorbell(struct fid *fid, void **address, size_t *length)
{
	*address = doorbell_page(counter_of(fid));
	*length = sizeof(void *);
	return 0;
}

static struct fi_cxi_cntr_ops extension = {.set_wb_buffer = set_write_back_buffer, .get_mmio_addr = get_doorbell};

static int ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context)
{
	(void)fid, (void)flags, (void)context;
	if (strcmp(name, FI_CXI_COUNTER_OPS))
		return -FI_EINVAL;
	*ops = &extension;
	return 0;
}

static int control(struct fid *fid, int command, void *argument)
{
	struct counter *counter = counter_of(fid);
	switch (command) {
	case FI_GETOPSFLAG:
		memcpy(argument, &counter->flags, sizeof counter->flags);
		return 0;
	case FI_SETOPSFLAG:
		memcpy(&counter->flags, argument, sizeof counter->flags);
		return 0;
	default:
		return -FI_EINVAL;
	}
}

static int counter_close(struct fid *fid)
{
	struct counter *counter = counter_of(fid);
	struct domain *domain = counter->domain;
	int status = 0;
	domain_lock(domain);
	if (counter->bound) {
		status = -FI_EBUSY;
	} else if (counter->uses) {
		/* The provider would free it, and then use it when the queue is drained. */
		status = say(-FI_EBUSY, "a counter was closed that work, or a request not yet drained, still needs.");
	} else {
		work_forget_waits(counter);
		work_forget_moved(counter);
		struct counter **at = &domain->counters;
		while (*at != counter)
			at = &(*at)->next;
		*at = counter->next;
		doorbell_give_back(counter);
		domain->users--;
	}
	domain_unlock(domain);
	if (!status)
		free(counter);
	return status;
}

static int verify(const struct fi_cntr_attr *attr)
{
	if (attr->events != FI_CNTR_EVENTS_COMP)
		return -FI_ENOSYS;
	if (attr->wait_obj != FI_WAIT_NONE && attr->wait_obj != FI_WAIT_UNSPEC && attr->wait_obj != FI_WAIT_YIELD)
		return -FI_ENOSYS;
	return attr->flags & ~FI_CXI_CNTR_CACHED ? -FI_ENOSYS : 0;
}

int counter_open(struct fid_domain *fid, struct fi_cntr_attr *attr, struct fid_cntr **out, void *context)
{
	struct domain *domain = (struct domain *)fid;
	int status = attr ? verify(attr) : 0;
	if (status)
		return status;
	struct counter *counter = calloc(1, sizeof *counter);
	if (!counter)
		return -FI_ENOMEM;
	counter->fid.fid = (struct fid){.fclass = FI_CLASS_CNTR, .context = context, .ops = &fid_ops};
	counter->fid.ops = &counter_ops;
	counter->domain = domain;
	counter->wait = attr ? attr->wait_obj : FI_WAIT_YIELD;
	counter->flags = attr ? attr->flags : 0;
	counter->write_back = &counter->own_write_back;
	domain_lock(domain);
	status = doorbell_take(counter);
	if (!status) {
		counter_write_back(counter);
		counter->next = domain->counters;
		domain->counters = counter;
		domain->users++;
	}
	domain_unlock(domain);
	if (status) {
		free(counter);
		return status;
	}
	*out = &counter->fid;
	return 0;
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = counter_close;
	fid_ops.control = control;
	fid_ops.ops_open = ops_open;
	counter_ops = (struct fi_ops_cntr){
		.size = sizeof counter_ops,
		.read = counter_read,
		.readerr = counter_read_failures,
		.add = add,
		.set = set,
		.wait = counter_wait,
		.adderr = add_failure,
		.seterr = set_failure,
	};
}
