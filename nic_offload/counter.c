/*
 * Counters, and the agent: operations that wait for a counter, lowest threshold first.
 *
 * What always holds: an operation leaves its heap once, and fires only when the counter has reached its threshold. Once
 * an operation has failed to move a counter, no operation that waits for the counter fires.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stdlib.h>

static int fires_before(const struct waiting *a, const struct waiting *b)
{
	return a->threshold != b->threshold ? a->threshold < b->threshold : a->sequence < b->sequence;
}

/* Each item in the heap knows its position, so removing one takes O(log n). */
static void put_at(struct tk_counter *counter, uint32_t at, struct waiting waiting)
{
	counter->heap[at] = waiting;
	waiting.work->place = at;
}

static void sift_up(struct tk_counter *counter, uint32_t at)
{
	struct waiting moving = counter->heap[at];
	for (uint32_t parent; at; at = parent) {
		parent = (at - 1) / 2;
		if (!fires_before(&moving, &counter->heap[parent]))
			break;
		put_at(counter, at, counter->heap[parent]);
	}
	put_at(counter, at, moving);
}

static void sift_down(struct tk_counter *counter, uint32_t at)
{
	struct waiting moving = counter->heap[at];
	for (;;) {
		uint32_t child = 2 * at + 1;
		if (child >= counter->count)
			break;
		if (child + 1 < counter->count && fires_before(&counter->heap[child + 1], &counter->heap[child]))
			child++;
		if (!fires_before(&counter->heap[child], &moving))
			break;
		put_at(counter, at, counter->heap[child]);
		at = child;
	}
	put_at(counter, at, moving);
}

static void heap_remove(struct tk_fabric *fabric, struct tk_counter *counter, uint32_t at)
{
	struct waiting last = counter->heap[--counter->count];
	fabric->statistics.waiting--;
	if (at == counter->count)
		return;
	put_at(counter, at, last);
	sift_up(counter, at);
	sift_down(counter, last.work->place);
}

void activate(struct tk_fabric *fabric, struct tk_counter *counter)
{
	if (counter->listed)
		return;
	grow_surely((void **)&fabric->active, &fabric->active_capacity, fabric->active_count, sizeof *fabric->active);
	fabric->active[fabric->active_count++] = counter;
	counter->listed = 1;
}

int wait_for_counter(struct tk_fabric *fabric, struct work *work)
{
	struct tk_counter *counter = work->op.trigger;
	if (__atomic_load_n(&counter->failed, __ATOMIC_RELAXED))
		return -EPIPE;
	if (grow((void **)&counter->heap, &counter->capacity, counter->count, sizeof *counter->heap))
		return -ENOMEM;
	work->state = WORK_WAITING;
	counter->heap[counter->count] =
		(struct waiting){.threshold = work->op.threshold, .sequence = work->sequence, .work = work};
	sift_up(counter, counter->count++);
	fabric->statistics.waiting++;
	activate(fabric, counter);
	return 0;
}

void stop_waiting(struct tk_fabric *fabric, struct work *work)
{
	struct tk_counter *counter = work->op.trigger;
	heap_remove(fabric, counter, work->place);
}

struct work *next_waiting(struct tk_fabric *fabric, struct tk_counter *counter)
{
	struct work *work = counter->heap[0].work;
	heap_remove(fabric, counter, 0);
	return work;
}

void fire(struct tk_fabric *fabric, struct work *work, uint64_t now_ns)
{
	uint64_t deadline_ns = work->op.deadline_ns;
	if (deadline_ns && now_ns >= deadline_ns) {
		finish(fabric, work, -ETIMEDOUT);
		return;
	}
	fabric->statistics.fired++;
	work->fired_ns = now_ns;
	if (work->op.group)
		group_fired(work->op.group, work->op.row, now_ns);
	if (work->op.flags & TK_REPORT_FIRED)
		report(fabric, TK_FIRED, work->op.tag, now_ns, 0, now_ns);
	if (!work->op.length && !(work->op.flags & TK_FLAG_PUT)) {
		finish(fabric, work, 0);
	} else if (work->op.sender) {
		sender_fire(fabric, work);
	} else if (work->called) {
		caller_fire(fabric, work);
	} else if (work->op.pieces ||
		   (work->op.flags & TK_VERIFY_CRC && work->op.length && !(work->op.flags & TK_GET))) {
		work->state = WORK_SUMMING;
		queue_push(&fabric->summing, work);
	} else {
		get_ready(fabric, work, WORK_READY);
	}
}

uint64_t counter_value(struct tk_counter *counter)
{
	return counter->word ? tk_word_load(counter->word) : fi_cntr_read(counter->nic);
}

/* Another store may have moved the word further meanwhile: it must not go backwards. */
static void raise_word(uint64_t *word, uint64_t value)
{
	uint64_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
	while (before < value &&
	       !__atomic_compare_exchange_n(word, &before, value, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
}

void counter_move(struct tk_counter *counter, uint64_t step, int set)
{
	if (counter->word && set)
		raise_word(counter->word, step);
	else if (counter->word)
		__atomic_add_fetch(counter->word, step, __ATOMIC_RELEASE);
	else if (!set)
		fi_cntr_add(counter->nic, step);
	else if (fi_cntr_read(counter->nic) < step)
		fi_cntr_set(counter->nic, step);
}

/* The first failure is the cause of all later ones, and is kept. */
void counter_fail(struct tk_fabric *fabric, struct tk_counter *counter, int status)
{
	if (!counter->failed)
		__atomic_store_n(&counter->failed, -status, __ATOMIC_RELEASE);
	activate(fabric, counter);
}

static int fail_all(struct tk_fabric *fabric, struct tk_counter *counter)
{
	if (nic_fail_waiting(fabric, counter) == NOT_YET)
		return 0;
	while (counter->count)
		finish(fabric, next_waiting(fabric, counter), -EPIPE);
	return 1;
}

static int fire_reached(struct tk_fabric *fabric, struct tk_counter *counter, uint64_t value)
{
	if (!counter->count || counter->heap[0].threshold > value)
		return 0;
	uint64_t now_ns = tk_now_ns();
	do
		fire(fabric, next_waiting(fabric, counter), now_ns);
	while (counter->count && counter->heap[0].threshold <= value);
	return 1;
}

static int poll_counter(struct tk_fabric *fabric, struct tk_counter *counter)
{
	if (__atomic_load_n(&counter->failed, __ATOMIC_RELAXED))
		return fail_all(fabric, counter);
	int busy = 0;
	if (counter->word) {
		uint64_t value = tk_word_load(counter->word);
		if (counter->nic && value != counter->mirrored && !fabric->nic.flushing)
			nic_follow_word(fabric, counter, value);
		busy = fire_reached(fabric, counter, value);
	}
	if (counter->nic && counter->count)
		busy |= nic_hand_over(fabric, counter);
	if (!counter->word && counter->count && !fabric->nic.flushing) /* operations for which the NIC has no room */
		busy |= fire_reached(fabric, counter, counter_value(counter));
	return busy;
}

static void deactivate(struct tk_fabric *fabric, uint32_t at)
{
	struct tk_counter *counter = fabric->active[at];
	free(counter->heap);
	counter->heap = NULL;
	counter->capacity = 0;
	counter->listed = 0;
	fabric->active[at] = fabric->active[--fabric->active_count];
}

/* A word that nothing waits for is not read: its owner may have unmapped it. */
int poll_counters(struct tk_fabric *fabric)
{
	int busy = 0;
	for (uint32_t i = 0; i < fabric->active_count;) {
		struct tk_counter *counter = fabric->active[i];
		if (counter->count || counter->held)
			busy |= poll_counter(fabric, counter);
		if (counter->count || counter->held)
			i++;
		else
			deactivate(fabric, i);
	}
	return busy;
}

void free_counter(struct tk_counter *counter)
{
	if (counter->nic)
		fi_close(&counter->nic->fid);
	free(counter->heap);
	free(counter->own_word);
	free(counter);
}

/* Counters that are in use, or still listed, are freed in a later round. */
void free_closed_counters(struct tk_fabric *fabric)
{
	if (!__atomic_load_n(&fabric->closing, __ATOMIC_RELAXED))
		return;
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_counter **link = &fabric->closing; *link;) {
		struct tk_counter *counter = *link;
		if (counter->listed || __atomic_load_n(&counter->uses, __ATOMIC_ACQUIRE)) {
			link = &counter->next;
			continue;
		}
		*link = counter->next;
		free_counter(counter);
	}
	pthread_mutex_unlock(&fabric->handle_lock);
}

/* Resets it to zero, and clears its failure: only while no operation waits for it or is to move it. Failed operations
 * that a NIC still holds prevent it too; a flush removes them. */
int core_reset_counter(struct tk_fabric *fabric, void *argument)
{
	struct tk_counter *counter = *(struct tk_counter **)argument;
	int is_used = __atomic_load_n(&counter->uses, __ATOMIC_ACQUIRE) != 0;
	if (fabric->nic.own_counters && fabric->nic.lost && is_used && nic_flush(fabric) == NOT_YET)
		return NOT_YET;
	if (__atomic_load_n(&counter->uses, __ATOMIC_ACQUIRE))
		return -EBUSY;
	if (counter->nic) {
		int status = fi_cntr_set(counter->nic, 0);
		if (status)
			return status;
		counter->mirrored = 0;
	}
	if (counter->word)
		tk_word_store(counter->word, 0);
	__atomic_store_n(&counter->failed, 0, __ATOMIC_RELEASE);
	return 0;
}
