/*
 * A work item: its queues, its end, and the reports about it.
 *
 * What always holds: an item is in one place at a time (a queue, a heap, a watch, or on the wire), and is not reused
 * before the round in which it ended is over.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_A_BATCH 64
#define EVENTS_PACE_NS 1000000u
#define EVENTS_STREAM 8u /* with fewer items under way, a caller may be waiting for exactly this one */

void queue_push(struct queue *queue, struct work *work)
{
	work->next = NULL;
	work->previous = queue->tail;
	if (queue->tail)
		queue->tail->next = work;
	else
		queue->head = work;
	queue->tail = work;
}

struct work *queue_pop(struct queue *queue)
{
	struct work *work = queue->head;
	queue->head = work->next;
	if (queue->head)
		queue->head->previous = NULL;
	else
		queue->tail = NULL;
	return work;
}

void queue_remove(struct queue *queue, struct work *work)
{
	if (work->previous)
		work->previous->next = work->next;
	else
		queue->head = work->next;
	if (work->next)
		work->next->previous = work->previous;
	else
		queue->tail = work->previous;
}

int grow(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes)
{
	if (count < *capacity)
		return 0;
	uint32_t wanted = *capacity ? *capacity * 2 : 64;
	void *larger = realloc(*items, wanted * item_bytes);
	if (!larger)
		return -ENOMEM;
	*items = larger;
	*capacity = wanted;
	return 0;
}

static void nap(void)
{
	struct timespec a_while = {.tv_nsec = 1000000};
	nanosleep(&a_while, NULL);
}

void grow_surely(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes)
{
	while (grow(items, capacity, count, item_bytes))
		nap();
}

void report(struct tk_fabric *fabric, enum tk_event_kind kind, uint64_t tag, uint64_t value, int status,
		   uint64_t time_ns)
{
	grow_surely((void **)&fabric->pending, &fabric->pending_capacity, fabric->pending_count,
		    sizeof *fabric->pending);
	fabric->pending[fabric->pending_count++] =
		(struct tk_event){.tag = tag, .value = value, .time_ns = time_ns, .kind = kind, .status = status};
}

/* Word by word, so that readers need no lock; before the events, so that an event is already counted when it is
 * taken. */
static void show_statistics(struct tk_fabric *fabric)
{
	fabric->statistics.in_flight = fabric->in_flight;
	fabric->statistics.held = fabric->nic.held;
	fabric->statistics.slots_lost = fabric->nic.lost;
	fabric->statistics.watches = fabric->landings.count + fabric->acks.count;
	const uint64_t *from = (const uint64_t *)&fabric->statistics;
	uint64_t *to = (uint64_t *)&fabric->shown;
	for (size_t i = 0; i < sizeof fabric->shown / sizeof *to; i++)
		__atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
}

/* Makes room for all pending events. Under the lock of events. */
static int make_room(struct tk_fabric *fabric)
{
	int status = 0;
	if (fabric->events_first)
		memmove(fabric->events, fabric->events + fabric->events_first,
			fabric->events_count * sizeof *fabric->events);
	fabric->events_first = 0;
	while (!status && fabric->events_capacity < fabric->events_count + fabric->pending_count)
		status = grow((void **)&fabric->events, &fabric->events_capacity, fabric->events_capacity,
			      sizeof *fabric->events);
	return status;
}

void publish(struct tk_fabric *fabric)
{
	show_statistics(fabric);
	if (!fabric->pending_count)
		return;
	pthread_mutex_lock(&fabric->event_lock);
	while (make_room(fabric)) { /* not under the lock: taking events makes room */
		pthread_mutex_unlock(&fabric->event_lock);
		nap();
		pthread_mutex_lock(&fabric->event_lock);
	}
	memcpy(fabric->events + fabric->events_count, fabric->pending,
	       fabric->pending_count * sizeof *fabric->pending);
	__atomic_store_n(&fabric->events_count, fabric->events_count + fabric->pending_count, __ATOMIC_RELAXED);
	fabric->pending_count = 0;
	if (!fabric->signalled) {
		uint64_t one = 1;
		fabric->signalled = write(fabric->event_fd, &one, sizeof one) == sizeof one;
	}
	pthread_mutex_unlock(&fabric->event_lock);
}

/* Wake-ups of the reader are paced, as a network card paces its interrupts. The first event after a quiet time is
 * reported at once; in a stream, events are collected for a short time. A wake-up costs the reader several times as
 * much as an event, and on few cores it takes that time from the network, which then never delivers enough for a
 * batch. */
void publish_soon(struct tk_fabric *fabric)
{
	show_statistics(fabric);
	if (!fabric->pending_count)
		return;
	uint64_t now_ns = fabric->now_ns;
	int stream = fabric->landings.count + fabric->acks.count + fabric->in_flight + fabric->reading >= EVENTS_STREAM;
	if (stream && fabric->pending_count < EVENTS_A_BATCH && now_ns - fabric->published_ns < EVENTS_PACE_NS)
		return;
	fabric->published_ns = now_ns;
	publish(fabric);
}

uint64_t deadline_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_OPERATION:
		return work->op.deadline_ns;
	case WORK_LANDING:
		return work->landing.deadline_ns;
	default:
		return work->ack.deadline_ns;
	}
}

uint64_t tag_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_OPERATION:
		return work->op.tag;
	case WORK_LANDING:
		return work->landing.tag;
	default:
		return work->ack.tag;
	}
}

struct tk_endpoint *endpoint_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_OPERATION:
		return work->op.endpoint;
	case WORK_LANDING:
		return work->landing.endpoint;
	default:
		return work->ack.endpoint;
	}
}

void adopt(struct tk_fabric *fabric, struct work *work)
{
	work->before = NULL;
	work->after = fabric->all;
	if (fabric->all)
		fabric->all->before = work;
	fabric->all = work;
	uint64_t deadline_ns = deadline_of(work);
	if (deadline_ns && deadline_ns < fabric->next_deadline_ns)
		fabric->next_deadline_ns = deadline_ns;
}

void unpair(struct work *work)
{
	if (work->partner)
		work->partner->partner = NULL;
	work->partner = NULL;
}

static void stop_using(uint64_t *uses)
{
	__atomic_sub_fetch(uses, 1, __ATOMIC_RELEASE);
}

void disown(struct tk_fabric *fabric, struct work *work)
{
	if (work->before)
		work->before->after = work->after;
	else
		fabric->all = work->after;
	if (work->after)
		work->after->before = work->before;
	if (work->kind == WORK_ACK) {
		unpair(work);
		shared_over(work);
		if (work->ack.group)
			group_release(work->ack.group);
	}
	if (work->kind != WORK_OPERATION)
		return;
	if (work->op.group)
		group_release(work->op.group);
	if (work->shelved)
		over_at_desk(work, work->failed);
	if (work->batch)
		reader_put_over(work);
	if (work->op.sender)
		sender_put_over(fabric, work);
	if (work->called)
		caller_put_over(fabric, work);
	if (work->op.region)
		stop_using(&work->op.region->uses);
	if (work->op.pieces)
		pieces_release(work->op.pieces);
	if (work->op.trigger)
		stop_using(&work->op.trigger->uses);
	if (work->op.completion)
		stop_using(&work->op.completion->uses);
}

/* An item returns to the free list after the round, so no address of it that is still held in the round can refer to a
 * reused item. */
void recycle(struct tk_fabric *fabric, struct work *work)
{
	work->next = fabric->finished;
	fabric->finished = work;
}

void release(struct tk_fabric *fabric, struct work *work)
{
	if (work->is_word)
		forget_word(work);
	disown(fabric, work);
	work->state = WORK_OVER;
	recycle(fabric, work);
}

/* Ends it without an event; only its waiters are notified. */
void drop(struct tk_fabric *fabric, struct work *work)
{
	work->failed = -ECANCELED;
	if (work->kind == WORK_OPERATION && work->op.completion)
		counter_fail(fabric, work->op.completion, -ECANCELED);
	release(fabric, work);
}

static void count_end(struct tk_fabric *fabric, const struct tk_operation *op, int status)
{
	struct tk_statistics *statistics = &fabric->statistics;
	if (!status) {
		statistics->done++;
		statistics->acks_sent += !op->length && op->flags & TK_QUIET;
		if (op->flags & TK_GET)
			statistics->got_bytes += op->length;
		else
			statistics->put_bytes += op->length;
	} else if (status == -ECANCELED) {
		statistics->cancelled++;
	} else {
		statistics->failed++;
		statistics->expired += status == -ETIMEDOUT;
	}
}

/* Operations that wait for its counter see it moved, or fail, before the end is reported. */
void finish(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->is_word) { /* no counter or waiter depends on it */
		release(fabric, work);
		return;
	}
	const struct tk_operation *op = &work->op;
	int cause = status == -EPIPE && op->trigger ? op->trigger->failed : 0; /* the first failure; 0: this one is */
	work->failed = status;
	count_end(fabric, op, status);
	if (op->completion && status)
		counter_fail(fabric, op->completion, cause ? -cause : status);
	else if (op->completion && !work->counted && !__atomic_load_n(&op->completion->failed, __ATOMIC_RELAXED))
		counter_move(op->completion, op->step, op->flags & TK_SET_COUNTER);
	enum tk_event_kind good = op->flags & TK_SENT_PUT ? TK_SENT : TK_DONE;
	if (!(op->flags & (status ? TK_QUIET : TK_QUIET | TK_ACKED_PUT)))
		report(fabric, status ? TK_FAILED : good, op->tag, status ? (uint64_t)cause : work->posted_ns, status,
		       tk_now_ns());
	release(fabric, work);
}

void fail(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->kind == WORK_OPERATION) {
		finish(fabric, work, status);
		return;
	}
	report(fabric, TK_WATCH_FAILED, tag_of(work), 0, status, tk_now_ns());
	release(fabric, work);
}

void landed(struct tk_fabric *fabric, struct work *work)
{
	uint64_t value = work->landing.desk ? work->landing.generation : work->crc;
	if (work->landing.desk)
		receivers_notify(fabric);
	report(fabric, TK_LANDED, work->landing.tag, value, 0, work->fired_ns);
	release(fabric, work);
}

void list_ready(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	if (endpoint->is_ready)
		return;
	endpoint->is_ready = 1;
	endpoint->next_ready = NULL;
	if (fabric->ready_last)
		fabric->ready_last->next_ready = endpoint;
	else
		fabric->ready_first = endpoint;
	fabric->ready_last = endpoint;
}

void get_ready(struct tk_fabric *fabric, struct work *work, enum work_state state)
{
	struct tk_endpoint *endpoint = endpoint_of(work);
	work->state = state;
	queue_push(&endpoint->ready, work);
	list_ready(fabric, endpoint);
}
