/*
 * The progress thread's handling of queued work: it takes work in, cancels it, ends it at its deadline, and drops it
 * with its endpoint.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define DRAIN_NS 20000000u /* for what is on the wire when an endpoint is closed */

static void take_in(struct tk_fabric *fabric, struct work *work)
{
	int status = 0;
	adopt(fabric, work);
	switch (work->kind) {
	case WORK_OPERATION:
		fabric->statistics.armed++;
		if (work->reading)
			reader_begin(work);
		else if (work->op.trigger)
			status = wait_for_counter(fabric, work);
		else
			fire(fabric, work, tk_now_ns());
		break;
	case WORK_LANDING:
		status = watch_add(&fabric->landings, (const uint64_t *)work->landing.word,
				   flag_awaited(&work->landing), work);
		break;
	case WORK_ACK:
		status = watch_add(&fabric->acks, (const uint64_t *)work->ack.word, 0, work);
		if (!status && ack_in(&work->ack, fabric->acks.items[work->place].before)) /* it arrived before its watch */
			fabric->acks.items[work->place].before = 0;
		break;
	}
	if (status)
		fail(fabric, work, status);
}

static int is_get(const struct work *work)
{
	return work->kind == WORK_OPERATION && work->op.flags & TK_GET;
}

/* Removes an item from wherever it waits. False if its bytes are already on the wire, or have moved. */
static int withdraw(struct tk_fabric *fabric, struct work *work)
{
	switch (work->state) {
	case WORK_WAITING:
		if (work->kind == WORK_OPERATION)
			stop_waiting(fabric, work);
		else
			watch_remove(work->kind == WORK_LANDING ? &fabric->landings : &fabric->acks, work);
		return 1;
	case WORK_UNGRANTED:
		queue_remove(work->called ? caller_queue(work) : sender_queue(work), work);
		return 1;
	case WORK_HELD:
		return nic_withdraw(fabric, work);
	case WORK_READING: /* the drive may still be reading it; the result is ignored */
		reader_withdraw(work);
		return 1;
	case WORK_SUMMING:
		if (is_get(work))
			return 0;
		queue_remove(&fabric->summing, work);
		return 1;
	case WORK_READY:
		queue_remove(&endpoint_of(work)->ready, work);
		return 1;
	default:
		return 0;
	}
}

static int is_wanted(const struct cancellation *wanted, const struct work *work)
{
	uint64_t tag = wanted->desk ? work->op.flag_value >> ACK_CODE_BITS : tag_of(work);
	uint64_t first = 0, end = wanted->count; /* the tags are in order */
	if (wanted->desk && !(work->desk == wanted->desk && work->batch))
		return 0;
	while (first < end) {
		uint64_t middle = first + (end - first) / 2;
		if (wanted->tags[middle] < tag)
			first = middle + 1;
		else
			end = middle;
	}
	return first < wanted->count && wanted->tags[first] == tag;
}

/* From a NIC with its own counters, operations can only be taken back by a flush, which takes back all of them. */
static int flush_if_held(struct tk_fabric *fabric, const struct cancellation *wanted)
{
	if (!fabric->nic.own_counters || !fabric->nic.held)
		return 0;
	for (struct work *work = fabric->all; work; work = work->after)
		if (work->state == WORK_HELD && !work->slot->fired && is_wanted(wanted, work))
			return nic_flush(fabric);
	return 0;
}

/* Taking one back may end another one whose chain has failed: it stays in the list that is walked, as ended. */
static int cancel_all(struct tk_fabric *fabric, const struct cancellation *wanted)
{
	int cancelled = 0;
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		if (wanted ? !is_wanted(wanted, work) : work->kind != WORK_OPERATION)
			continue;
		if (withdraw(fabric, work)) {
			fail(fabric, work, -ECANCELED);
			cancelled++;
		}
	}
	return cancelled;
}

int core_cancel(struct tk_fabric *fabric, void *argument)
{
	return flush_if_held(fabric, argument) == NOT_YET ? NOT_YET : cancel_all(fabric, argument);
}

int core_flush(struct tk_fabric *fabric, void *unused)
{
	if (fabric->nic.own_counters && (fabric->nic.held || fabric->nic.lost) && nic_flush(fabric) == NOT_YET)
		return NOT_YET;
	return cancel_all(fabric, NULL);
}

/* Drops everything that the endpoint still has to do. Landed blocks are in our memory and stay landed. */
static void withdraw_all(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		if (endpoint_of(work) != endpoint)
			continue;
		if (work->kind == WORK_LANDING && work->state == WORK_SUMMING) {
			work->landing.endpoint = NULL;
			work->acked = 1; /* or there is no peer to notify */
		} else if (work->kind == WORK_LANDING && work->state == WORK_READY) {
			landed(fabric, work);
		} else if (work->state == WORK_FLAG_READY) {
			drop(fabric, work);
		} else if (work->state == WORK_SUMMING && is_get(work)) {
			queue_remove(&fabric->summing, work);
			drop(fabric, work);
		} else if (work->state == WORK_SHARED) {
			queue_remove(&fabric->shared, work);
			drop(fabric, work);
		} else if (withdraw(fabric, work)) {
			if (work->kind == WORK_LANDING)
				fail(fabric, work, -ECANCELED);
			else
				drop(fabric, work);
		}
	}
	endpoint->ready = (struct queue){0};
}

static void unlist_ready(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	struct tk_endpoint *at = fabric->ready_first;
	fabric->ready_first = fabric->ready_last = NULL;
	for (struct tk_endpoint *next; at; at = next) {
		next = at->next_ready;
		at->is_ready = 0;
		if (at != endpoint)
			list_ready(fabric, at);
	}
}

/* It may still be connecting; an endpoint that has been stalled for longer will not recover in a moment. */
static int may_still_post(const struct tk_endpoint *endpoint, uint64_t now_ns)
{
	return endpoint->stalled && now_ns - endpoint->stalled_ns < DRAIN_NS;
}

/* Messages on the wire get a moment to arrive. Not every provider cancels them when its endpoint is closed: a peer of
 * shm may read one later, and crashes if it can't find its sender; a peer of `sockets` is left with half a message; and
 * rxm, which does cancel them, sometimes crashes in doing so. */
static void drain_endpoint(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	uint64_t until_ns = tk_now_ns() + DRAIN_NS;
	for (uint64_t now_ns; (now_ns = tk_now_ns()) < until_ns;) {
		if (!endpoint->in_flight && !may_still_post(endpoint, now_ns))
			break;
		if (!drain_completions(fabric) && !nic_poll(fabric))
			sched_yield();
	}
}

/* Memory that is bound to the endpoint loses its access rights before the endpoint is closed. */
static void close_regions_of(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_region *region = fabric->regions; region; region = region->next)
		if (region->endpoint == endpoint) {
			fi_close(&region->mr->fid);
			region->mr = NULL;
			region->endpoint = NULL;
		}
	pthread_mutex_unlock(&fabric->handle_lock);
}

/* The endpoint's operations are not reported: its owner, which closes it, knows that all are over. Completions that the
 * provider queued before the endpoint was closed are taken before the items are freed. A provider with its own thread
 * may complete an operation later still: then the items are kept until it does. */
int close_endpoint(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	int unflushed = fabric->nic.own_counters && nic_is_tied_to(fabric, endpoint) ? nic_flush(fabric) : 0;
	if (unflushed) { /* or NOT_YET */
		withdraw_all(fabric, endpoint); /* what was taken back before the flush must not fire during it */
		return unflushed;
	}
	receivers_end(fabric, endpoint);
	lanes_forget(fabric, endpoint);
	withdraw_all(fabric, endpoint);
	drain_endpoint(fabric, endpoint);
	stop_streams(fabric, endpoint);
	close_regions_of(fabric, endpoint);
	int status = fi_close(&endpoint->fid->fid);
	while (drain_completions(fabric))
		;
	withdraw_all(fabric, endpoint);
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		if (endpoint_of(work) != endpoint)
			continue;
		if (work->state == WORK_HELD) {
			nic_give_up(fabric, work);
			drop(fabric, work);
			continue;
		}
		fabric->in_flight--;
		work->failed = -ECANCELED;
		if (work->op.completion)
			counter_fail(fabric, work->op.completion, -ECANCELED);
		disown(fabric, work);
		if (fabric->streams)
			recycle(fabric, work);
		else
			work->state = WORK_STRANDED;
	}
	unlist_ready(fabric, endpoint);
	ring_doorbells(fabric);
	return status;
}

static void unlist(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	pthread_mutex_lock(&fabric->handle_lock);
	struct tk_endpoint **link = &fabric->endpoints;
	while (*link != endpoint)
		link = &(*link)->next;
	*link = endpoint->next;
	pthread_mutex_unlock(&fabric->handle_lock);
}

int core_close_endpoint(struct tk_fabric *fabric, void *argument)
{
	struct tk_endpoint *endpoint = *(struct tk_endpoint **)argument;
	rest_look_again(fabric);
	int status = close_endpoint(fabric, endpoint);
	if (status != NOT_YET && status != TK_UNFLUSHED)
		unlist(fabric, endpoint);
	return status;
}

/* Bytes on the wire can't be recalled, and landed bytes are only being checksummed. Operations at a NIC with its own
 * counters could be, but a flush for each deadline would delay everything else by a second. */
static int may_expire(const struct work *work)
{
	return work->state == WORK_WAITING || work->state == WORK_UNGRANTED || work->state == WORK_HELD ||
	       work->state == WORK_READING ||
	       (work->kind == WORK_OPERATION && (work->state == WORK_SUMMING || work->state == WORK_READY));
}

static void too_late(struct tk_fabric *fabric, struct work *work)
{
	if (may_expire(work) && withdraw(fabric, work)) {
		fail(fabric, work, -ETIMEDOUT);
	} else if (work->kind == WORK_OPERATION && !work->late) {
		work->late = 1;
		fabric->statistics.late++;
		if (!(work->op.flags & TK_QUIET))
			report(fabric, TK_LATE, work->op.tag, 0, 0, tk_now_ns());
	}
}

int expire(struct tk_fabric *fabric)
{
	uint64_t now_ns = fabric->now_ns;
	if (now_ns < fabric->next_deadline_ns)
		return 0;
	fabric->next_deadline_ns = UINT64_MAX;
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		uint64_t deadline_ns = deadline_of(work);
		if (!deadline_ns || work->state == WORK_OVER)
			continue;
		if (now_ns < deadline_ns) {
			if (deadline_ns < fabric->next_deadline_ns)
				fabric->next_deadline_ns = deadline_ns;
		} else {
			too_late(fabric, work);
		}
	}
	return 1;
}

/* Returns whether there was work; -1 when the fabric is being closed. */
int take_inbox(struct tk_fabric *fabric)
{
	if (!__atomic_exchange_n(&fabric->posted_something, 0, __ATOMIC_SEQ_CST))
		return 0;
	pthread_mutex_lock(&fabric->inbox_lock);
	struct work *work = fabric->inbox.head;
	fabric->inbox = (struct queue){0};
	struct command *command = fabric->caller_runs ? NULL : fabric->command;
	int stop = fabric->stop;
	fabric->is_recalled = fabric->caller_runs && (fabric->command || stop);
	if (command) { /* the next caller may queue one */
		fabric->command = NULL;
		pthread_cond_broadcast(&fabric->command_done);
	}
	if (command && command->abandoned) {
		free(command);
		command = NULL;
	}
	pthread_mutex_unlock(&fabric->inbox_lock);

	for (struct work *next; work; work = next) {
		next = work->next;
		take_in(fabric, work);
	}
	if (command)
		run_command(fabric, command);
	return stop ? -1 : 1;
}
