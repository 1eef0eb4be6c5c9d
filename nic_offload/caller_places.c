/*
 * The progress thread's part of a caller: it sends calls and takes their answers. caller.c makes the calls.
 *
 * What always holds: a call is sent once it has a place, and the place is reused once the answer has been read.
 */
#define _GNU_SOURCE
#include "caller_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The address of a place's flag, at the node. */
static uint64_t flag_of(const struct tk_caller_setup *setup, uint32_t number)
{
	return setup->area + (uint64_t)number * 8;
}

/* Under the lock; -1 if all are in use. */
static int find_place(const struct tk_caller *caller)
{
	for (int i = 0; i < TK_CALL_PLACES; i++)
		if (caller->places[i].state == PLACE_FREE)
			return i;
	return -1;
}

/* Under the lock. */
static void waits_no_more(struct tk_caller *caller, const struct called *called)
{
	caller->waiting--;
	caller->waiting_bytes -= called->length;
}

static int watch_answer(struct tk_fabric *fabric, struct work *work, uint32_t number)
{
	struct called *called = work->called;
	struct work *watch = called->watch;
	const struct tk_caller *caller = called->caller;
	const struct tk_caller_setup *setup = &caller->setup;
	watch->ack = (struct tk_ack_watch){
		.tag = work->op.tag + 1,
		.endpoint = setup->endpoint,
		.word = setup->words + (uint64_t)setup->ack_words[number] * 8,
		.generation = caller->places[number].generation,
		.deadline_ns = called->answer_ns ? tk_now_ns() + called->answer_ns : 0,
		.group = work->op.group,
		.final_code = 1,
		.good_max = called->good_code,
		.row = work->op.row,
	};
	if (watch_add(&fabric->acks, (const uint64_t *)watch->ack.word, 0, watch))
		return -ENOMEM;
	watch->caller = called->caller;
	watch->grant = number + 1;
	if (watch->fetch)
		shared_asked(watch->fetch, number);
	group_use(watch->ack.group);
	adopt(fabric, watch);
	watch->partner = work;
	work->partner = watch;
	return 0;
}

static void fill_place(struct work *work, uint32_t number)
{
	const struct called *called = work->called;
	const struct tk_caller *caller = called->caller;
	const struct tk_caller_setup *setup = &caller->setup;
	struct tk_operation *op = &work->op;
	op->local = setup->calls + (uint64_t)number * TK_CALL_BYTES;
	op->remote = setup->area + TK_CALL_AREA_HEAD + (uint64_t)number * TK_CALL_BYTES;
	op->flag_target = flag_of(setup, number);
	op->flag_value = caller->places[number].generation;
	struct call_head *head = (struct call_head *)op->local;
	memcpy(head, called->bytes, called->length);
	head->generation = op->flag_value;
	head->ack_word = setup->ack_words[number];
	head->crc32c = tk_crc32c((char *)head + sizeof head->crc32c, called->length - sizeof head->crc32c, 0);
	uint64_t tag = tk_endpoint_tag(setup->endpoint, op->flag_target, op->flag_key, op->flag_value, head, called->length);
	memcpy((char *)head + called->length, &tag, tag_bytes(setup->endpoint));
}

/* Gives the call a place, if one is free; then the call is ready to be posted. */
static int find_it_a_place(struct tk_fabric *fabric, struct work *work)
{
	struct tk_caller *caller = work->called->caller;
	pthread_mutex_lock(&caller->lock);
	int number = find_place(caller);
	int found = number >= 0 && !watch_answer(fabric, work, (uint32_t)number);
	if (found) {
		struct place *place = &caller->places[number];
		place->state = PLACE_CALLED;
		place->tag = work->called->tag;
		work->grant = (uint32_t)number + 1;
		waits_no_more(caller, work->called);
		fill_place(work, (uint32_t)number);
	}
	pthread_mutex_unlock(&caller->lock);
	return found;
}

void caller_fire(struct tk_fabric *fabric, struct work *work)
{
	struct queue *unplaced = caller_queue(work);
	if (!unplaced->head && find_it_a_place(fabric, work)) {
		get_ready(fabric, work, WORK_READY);
	} else {
		work->state = WORK_UNGRANTED;
		queue_push(unplaced, work);
	}
}

struct queue *caller_queue(const struct work *work)
{
	return &work->called->caller->unplaced;
}

int poll_callers(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_caller *caller = fabric->callers; caller; caller = caller->next)
		while (caller->unplaced.head && find_it_a_place(fabric, caller->unplaced.head)) {
			get_ready(fabric, queue_pop(&caller->unplaced), WORK_READY);
			busy = 1;
		}
	return busy;
}

uint64_t caller_word(const struct tk_caller *caller, uint64_t address)
{
	return (address - caller->setup.words) / 8;
}

/* Rows that had their word before it was awaited are looked at once more. */
int shared_words_came(struct tk_fabric *fabric)
{
	int came = 0, has_rows = 0;
	for (struct tk_caller *caller = fabric->callers; caller; caller = caller->next) {
		if (!__atomic_load_n(&caller->rows, __ATOMIC_ACQUIRE))
			continue;
		uint64_t count = tk_word_load(&((const struct shared_row *)caller->shared.rows)->count);
		came |= count != caller->words_seen;
		caller->words_seen = count;
		has_rows = 1;
	}
	came |= has_rows && fabric->acks.has_new;
	fabric->acks.has_new = 0;
	return came;
}

uint64_t shared_word(const struct tk_fabric *fabric, const struct work *watch)
{
	const struct tk_caller *caller = fabric->callers;
	while (caller && caller->setup.endpoint != watch->ack.endpoint)
		caller = caller->next;
	uint64_t number = caller ? caller_word(caller, watch->ack.word) : 0;
	if (!caller || number >= __atomic_load_n(&caller->rows, __ATOMIC_ACQUIRE))
		return 0;
	uint64_t word = tk_word_load(&((const struct shared_row *)caller->shared.rows)[number].word);
	uint32_t code = word & ((1u << ACK_CODE_BITS) - 1);
	return word >> ACK_CODE_BITS == watch->ack.generation && code > watch->code ? word : 0;
}

void caller_read(struct tk_caller *caller, uint32_t place)
{
	pthread_mutex_lock(&caller->lock);
	free_place(&caller->places[place]);
	pthread_mutex_unlock(&caller->lock);
}

uint32_t caller_answered(struct tk_fabric *fabric, struct work *watch, uint32_t code)
{
	struct tk_caller *caller = watch->caller;
	uint32_t number = watch->grant - 1;
	struct place *place = &caller->places[number];
	uint64_t answer = caller->setup.answers + (uint64_t)number * ANSWER_BYTES;
	pthread_mutex_lock(&caller->lock);
	if (code == CALL_DONE)
		free_place(place);
	else
		place->state = PLACE_ANSWERED;
	pthread_mutex_unlock(&caller->lock);
	int is_read = code == CALL_WHERE && watch->fetch && shared_where(fabric, watch, caller->setup.region, answer);
	return is_read ? CALL_DONE : code;
}

/* The put of a call is over. A call that was never posted leaves its place and generation to the next one. */
void caller_put_over(struct tk_fabric *fabric, struct work *work)
{
	struct called *called = work->called;
	struct tk_caller *caller = called->caller;
	struct work *watch = work->partner;
	unpair(work);
	if (!work->grant) {
		pthread_mutex_lock(&caller->lock);
		waits_no_more(caller, called);
		pthread_mutex_unlock(&caller->lock);
		shared_over(called->watch);
		recycle(fabric, called->watch);
	} else if (!work->posted_ns && watch) {
		pthread_mutex_lock(&caller->lock);
		caller->places[work->grant - 1].state = PLACE_FREE;
		pthread_mutex_unlock(&caller->lock);
		watch_remove(&fabric->acks, watch);
		release(fabric, watch);
	}
	free(called);
	work->called = NULL;
}
