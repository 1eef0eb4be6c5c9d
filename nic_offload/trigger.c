/*
 * The trigger agent: puts that wait for flag words, lowest threshold first.
 *
 * What always holds: a put leaves its heap once, and only when the word has reached its threshold.
 */
#define _GNU_SOURCE
#include "parts.h"

#include <errno.h>
#include <stdlib.h>

static int fires_before(const struct work *a, const struct work *b)
{
	if (a->put.threshold != b->put.threshold)
		return a->put.threshold < b->put.threshold;
	return a->sequence < b->sequence;
}

static void sift_up(struct trigger *trigger, uint32_t at)
{
	struct work *work = trigger->heap[at];
	for (uint32_t parent; at; at = parent) {
		parent = (at - 1) / 2;
		if (!fires_before(work, trigger->heap[parent]))
			break;
		trigger->heap[at] = trigger->heap[parent];
	}
	trigger->heap[at] = work;
}

static void sift_down(struct trigger *trigger, uint32_t at)
{
	struct work *work = trigger->heap[at];
	for (;;) {
		uint32_t child = 2 * at + 1;
		if (child >= trigger->count)
			break;
		if (child + 1 < trigger->count && fires_before(trigger->heap[child + 1], trigger->heap[child]))
			child++;
		if (!fires_before(trigger->heap[child], work))
			break;
		trigger->heap[at] = trigger->heap[child];
		at = child;
	}
	trigger->heap[at] = work;
}

static void heap_remove(struct trigger *trigger, uint32_t at)
{
	struct work *last = trigger->heap[--trigger->count];
	if (at == trigger->count)
		return;
	trigger->heap[at] = last;
	sift_up(trigger, at);
	sift_down(trigger, at);
}

int wait_for_flag(struct tk_fabric *fabric, struct work *work)
{
	const uint64_t *word = (const uint64_t *)work->put.trigger;
	uint32_t at = fabric->triggers_count;
	while (at && fabric->triggers[at - 1].word != word)
		at--;
	struct trigger *trigger;
	if (at) {
		trigger = &fabric->triggers[at - 1];
	} else {
		if (grow((void **)&fabric->triggers, &fabric->triggers_capacity, fabric->triggers_count,
			 sizeof *fabric->triggers))
			return -ENOMEM;
		trigger = &fabric->triggers[fabric->triggers_count++];
		*trigger = (struct trigger){.word = word};
	}
	if (grow((void **)&trigger->heap, &trigger->capacity, trigger->count, sizeof *trigger->heap))
		return -ENOMEM;
	trigger->heap[trigger->count] = work;
	sift_up(trigger, trigger->count++);
	fabric->statistics.puts_waiting++;
	return 0;
}

void stop_waiting(struct tk_fabric *fabric, struct work *work)
{
	for (uint32_t t = 0; t < fabric->triggers_count; t++) {
		struct trigger *trigger = &fabric->triggers[t];
		if (trigger->word != (const uint64_t *)work->put.trigger)
			continue;
		for (uint32_t at = 0; at < trigger->count; at++)
			if (trigger->heap[at] == work) {
				heap_remove(trigger, at);
				fabric->statistics.puts_waiting--;
				return;
			}
	}
}

void fire(struct tk_fabric *fabric, struct work *work, uint64_t now_ns)
{
	uint64_t deadline_ns = work->put.deadline_ns;
	if (deadline_ns && now_ns >= deadline_ns) {
		finish_put(fabric, work, -ETIMEDOUT);
		return;
	}
	fabric->statistics.fired++;
	work->fired_ns = now_ns;
	if (work->put.flags & TK_REPORT_FIRED)
		report(fabric, TK_PUT_FIRED, work->put.tag, now_ns, 0, now_ns);
	if (work->put.flags & TK_VERIFY_CRC && work->put.length) {
		work->state = WORK_SUMMING;
		queue_push(&fabric->summing, work);
	} else {
		get_ready(fabric, work, WORK_READY);
	}
}

static void fire_reached(struct tk_fabric *fabric, struct trigger *trigger, uint64_t value)
{
	uint64_t now_ns = tk_now_ns();
	do {
		struct work *work = trigger->heap[0];
		heap_remove(trigger, 0);
		fabric->statistics.puts_waiting--;
		fire(fabric, work, now_ns);
	} while (trigger->count && trigger->heap[0]->put.threshold <= value);
}

/* A word for which no put waits is not even read: its owner may have unmapped it. */
int poll_flags(struct tk_fabric *fabric)
{
	int busy = 0;
	for (uint32_t t = 0; t < fabric->triggers_count; t++) {
		struct trigger *trigger = &fabric->triggers[t];
		if (trigger->count) {
			uint64_t value = tk_word_load(trigger->word);
			if (trigger->heap[0]->put.threshold <= value) {
				fire_reached(fabric, trigger, value);
				busy = 1;
			}
		}
		if (!trigger->count) {
			free(trigger->heap);
			*trigger = fabric->triggers[--fabric->triggers_count];
			t--;
		}
	}
	return busy;
}
