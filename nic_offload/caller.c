/*
 * The caller: makes a client's calls to its node over the fabric. One step sets up the watches for the words that will
 * answer the call, and the put that writes the call into one of our places and from there into the same place on the
 * node.
 *
 * The progress thread assigns the place. If all places are in use the call waits; its bytes are already copied and
 * everything it needs is allocated, so it can't be refused later. When an answer frees a place, the next call is sent.
 *
 * What always holds: a place is reused only after its answer: after DONE, or after BYTES once the reader has confirmed
 * that it has read them. Calls are sent in order, and the generations of a place only rise. A call whose deadline
 * passes before it is sent ends and is never sent; it has used no generation, and its place serves the next call. A
 * call is queued completely or not at all: if it is larger than a place, or too many calls are waiting, it is refused,
 * and the application uses gRPC.
 *
 * What it doesn't do: read answers, or decide what a failed call means. The application gets both as words or events.
 */
#define _GNU_SOURCE
#include "caller_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int add_caller(struct tk_fabric *fabric, void *argument)
{
	struct tk_caller *caller = *(struct tk_caller **)argument;
	caller->next = fabric->callers;
	fabric->callers = caller;
	return 0;
}

static int remove_caller(struct tk_fabric *fabric, void *argument)
{
	struct tk_caller *caller = *(struct tk_caller **)argument, **link = &fabric->callers;
	while (*link && *link != caller)
		link = &(*link)->next;
	if (*link)
		*link = caller->next;
	return 0;
}

static void free_caller(struct tk_caller *caller)
{
	pthread_mutex_destroy(&caller->lock);
	free(caller);
}

int tk_caller_open(const struct tk_caller_setup *setup, struct tk_caller **out)
{
	const struct tk_region *region = setup->region;
	if (!setup->endpoint || !region || setup->calls % 8 || setup->calls < region->address ||
	    setup->calls + (uint64_t)TK_CALL_PLACES * TK_CALL_BYTES > region->address + region->length ||
	    setup->answers % 8 || setup->answers < region->address ||
	    setup->answers + (uint64_t)TK_CALL_PLACES * ANSWER_BYTES > region->address + region->length)
		return -EINVAL;
	struct tk_caller *caller = calloc(1, sizeof *caller);
	if (!caller)
		return -ENOMEM;
	caller->setup = *setup;
	caller->fabric = setup->endpoint->fabric;
	pthread_mutex_init(&caller->lock, NULL);
	for (int i = 0; i < TK_CALL_PLACES; i++)
		caller->places[i].generation = setup->first_generation;
	int status = on_the_thread(caller->fabric, add_caller, &caller, sizeof caller);
	if (status) {
		if (status != TK_STUCK)
			free_caller(caller);
		return status;
	}
	*out = caller;
	return 0;
}

int tk_caller_close(struct tk_caller *caller)
{
	int status = on_the_thread(caller->fabric, remove_caller, &caller, sizeof caller);
	if (status != TK_STUCK)
		free_caller(caller);
	return status;
}

void tk_caller_share(struct tk_caller *caller, const struct tk_shared *shared)
{
	caller->shared = *shared;
	__atomic_store_n(&caller->rows, shared->rows ? shared->rows_count : 0, __ATOMIC_RELEASE);
	__atomic_store_n(&caller->shares, shared->length > 0, __ATOMIC_RELEASE);
}

uint64_t tk_caller_shared(const struct tk_caller *caller)
{
	return __atomic_load_n(&caller->shared_blocks, __ATOMIC_RELAXED);
}

void caller_shared(struct tk_caller *caller, int is_good)
{
	if (is_good)
		__atomic_add_fetch(&caller->shared_blocks, 1, __ATOMIC_RELAXED);
	else
		__atomic_store_n(&caller->shares, 0, __ATOMIC_RELEASE);
}

int tk_caller_free(struct tk_caller *caller)
{
	int count = 0;
	pthread_mutex_lock(&caller->lock);
	for (int i = 0; i < TK_CALL_PLACES; i++)
		count += caller->places[i].state == PLACE_FREE;
	count -= (int)caller->waiting;
	pthread_mutex_unlock(&caller->lock);
	return count > 0 ? count : 0;
}

/* Under the lock. The place with the answer to the call of this tag, or -ENOENT. */
static int find_answer(const struct tk_caller *caller, uint64_t tag)
{
	for (int i = 0; i < TK_CALL_PLACES; i++)
		if (caller->places[i].state == PLACE_ANSWERED && caller->places[i].tag == tag)
			return i;
	return -ENOENT;
}

int tk_caller_answer(struct tk_caller *caller, uint64_t tag, uint64_t *generation)
{
	pthread_mutex_lock(&caller->lock);
	int number = find_answer(caller, tag);
	if (number >= 0)
		*generation = caller->places[number].generation;
	pthread_mutex_unlock(&caller->lock);
	return number;
}

void tk_caller_read(struct tk_caller *caller, uint64_t tag)
{
	pthread_mutex_lock(&caller->lock);
	int number = find_answer(caller, tag), wake = number >= 0 && caller->waiting;
	if (number >= 0)
		free_place(&caller->places[number]);
	pthread_mutex_unlock(&caller->lock);
	if (wake)
		fabric_wake(caller->fabric);
}

/* --- making a call; any thread */

/* Returns the bytes of a call as they will be put, without the fields that depend on the place. NULL: no memory. */
static struct called *write_call(struct tk_caller *caller, const struct tk_call *call, const void *metadata,
				 const void *rows, size_t rows_bytes)
{
	uint32_t metadata_bytes = (call->metadata_bytes + CALL_ALIGN - 1) / CALL_ALIGN * CALL_ALIGN;
	struct call_head head = {
		.length = (uint32_t)(sizeof head + metadata_bytes + rows_bytes),
		.kind = call->kind,
		.flags = call->flags,
		.durability = call->durability,
		.metadata_bytes = metadata_bytes,
		.blocks = call->blocks,
		.lease_ms = call->lease_ms,
		.expires_unix_ms = call->expires_unix_ms,
	};
	memcpy(head.fingerprint, call->fingerprint, sizeof head.fingerprint);
	struct called *called = malloc(sizeof *called + head.length);
	if (!called)
		return NULL;
	uint64_t now_ns = tk_now_ns();
	*called = (struct called){
		.caller = caller,
		.tag = call->tag,
		.answer_ns = call->deadline_ns > now_ns ? call->deadline_ns - now_ns : 0,
		.good_code = call->good_code,
		.length = head.length,
	};
	char *at = called->bytes;
	memcpy(at, &head, sizeof head);
	memcpy(at + sizeof head, metadata, call->metadata_bytes);
	memset(at + sizeof head + call->metadata_bytes, 0, metadata_bytes - call->metadata_bytes);
	memcpy(at + sizeof head + metadata_bytes, rows, rows_bytes);
	return called;
}

/* Watches the words in which the node reports each block's arrival, or why it did not arrive. */
static void watch_blocks(const struct tk_caller *caller, const struct tk_call *call, const char *rows,
			 struct shared_fetch *fetch)
{
	for (uint32_t i = 0; i < call->blocks; i++, rows += call_row_bytes(call->kind)) {
		const struct call_fetch_row *row = (const void *)rows;
		struct tk_ack_watch watch = {
			.tag = call->tag + 2 * i,
			.endpoint = caller->setup.endpoint,
			.word = caller->setup.words + (uint64_t)row->ack_word * 8,
			.generation = row->ack_generation,
			.deadline_ns = call->blocks_deadline_ns,
			.group = call->group,
			.final_code = 1,
			.good_max = UINT8_MAX,
			.row = i,
		};
		struct work *work = enqueue_ack(caller->fabric, &watch);
		if (fetch)
			shared_watches(fetch, work, i);
	}
}

/* The deadline for sending a call: not later than its blocks' deadline. */
static uint64_t goes_out_until(const struct tk_call *call)
{
	uint64_t blocks_ns = call->blocks_deadline_ns, answer_ns = call->deadline_ns;
	return blocks_ns && (!answer_ns || blocks_ns < answer_ns) ? blocks_ns : answer_ns;
}

/* Queued after the watches of its blocks: of deadlines that end together the last one queued is reported first, so the
 * application learns that the call was never sent before it learns that a block did not arrive. */
static void queue_call(const struct tk_caller *caller, const struct tk_call *call, struct called *called,
		       struct shared_fetch *fetch)
{
	const struct tk_caller_setup *setup = &caller->setup;
	struct tk_operation put = {
		.tag = call->tag + 2 * (uint64_t)call->blocks,
		.endpoint = setup->endpoint,
		.peer = setup->peer,
		.remote_key = setup->area_key,
		.flag_key = setup->area_key,
		.deadline_ns = goes_out_until(call),
		.group = call->group,
		.row = call->row,
		.region = setup->region,
		.length = called->length + tag_bytes(setup->endpoint),
		.flags = TK_FLAG_PUT | TK_ACKED_PUT,
	};
	called->watch = take_free(caller->fabric, WORK_ACK);
	if (fetch)
		shared_watches(fetch, called->watch, call->blocks);
	enqueue_operation(caller->fabric, &put)->called = called;
}

static int has_room(const struct tk_caller *caller, const struct called *called)
{
	return caller->waiting < TK_CALLS_WAITING && called->length <= TK_CALLS_WAITING_BYTES - caller->waiting_bytes;
}

int tk_caller_call(struct tk_caller *caller, const struct tk_call *call, const void *metadata, const void *rows,
		   size_t rows_bytes, const struct tk_wanted *wanted)
{
	struct tk_fabric *fabric = caller->fabric;
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	int is_fetch = call_fetches(call->kind);
	if (is_fetch && rows_bytes != call->blocks * call_row_bytes(call->kind))
		return -EINVAL;
	if (sizeof(struct call_head) + call->metadata_bytes + CALL_ALIGN + rows_bytes + TK_TAG_BYTES > TK_CALL_BYTES)
		return -EMSGSIZE;
	struct shared_fetch *fetch = NULL;
	int shares = is_fetch && wanted && __atomic_load_n(&caller->shares, __ATOMIC_ACQUIRE);
	if (shares) /* if there is no memory for this, it is an ordinary call */
		fetch = shared_fetch(caller, &caller->shared, call->blocks, rows, call_row_bytes(call->kind), wanted);
	struct called *called = write_call(caller, call, metadata, rows, rows_bytes);
	if (!called) {
		shared_fetch_free(fetch);
		return -ENOMEM;
	}
	if (fetch)
		((struct call_head *)called->bytes)->flags |= CALL_SHARES | (caller->shared.rows ? CALL_ROWS : 0);
	pthread_mutex_lock(&caller->lock);
	if (has_room(caller, called)) {
		pthread_mutex_lock(&fabric->inbox_lock);
		status = reserve_work(fabric, 2 + (is_fetch ? call->blocks : 0));
		if (!status && is_fetch)
			watch_blocks(caller, call, rows, fetch);
		if (!status)
			queue_call(caller, call, called, fetch);
		pthread_mutex_unlock(&fabric->inbox_lock);
	} else {
		status = -EBUSY;
	}
	if (!status) {
		caller->waiting++;
		caller->waiting_bytes += called->length;
	}
	pthread_mutex_unlock(&caller->lock);
	if (status) {
		shared_fetch_free(fetch);
		free(called);
	} else {
		fabric_wake(fabric);
	}
	return status;
}
