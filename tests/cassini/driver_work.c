/* Deferred work that succeeds: when it fires, what it moves, and its entries. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <unistd.h>

static void fires_at_its_threshold_and_not_before(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 3, .key = to.key, .offset = 64, .length = 4096};
	GIVES(0, queue_put(&from, &put));
	GIVES(0, fi_cntr_add(trigger, 2));
	/* Other work on the same path has arrived meanwhile, so this one would have too. */
	struct put other = put;
	other.threshold = 1;
	other.offset = 32768;
	GIVES(0, queue_put(&from, &other));
	BECOMES(fi_cntr_read(end) == 1);
	HOLDS(!memcmp(to.memory + 32768, from.memory, 4096));
	HOLDS(to.memory[64] == 0);
	GIVES(0, fi_cntr_add(trigger, 1));
	BECOMES(fi_cntr_read(end) == 2);
	HOLDS(!memcmp(to.memory + 64, from.memory, 4096));
	GIVES(0, fi_cntr_add(trigger, 5));
	HOLDS(fi_cntr_read(end) == 2);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void a_doorbell_moves_bytes_without_any_call(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = MEMORY_BYTES};
	GIVES(0, queue_put(&from, &put));
	uint64_t *word = doorbell(trigger, CXI_DOORBELL_ADD);
	store(word, 1); /* from here on libfabric is not called until the last byte is there */
	BECOMES(!memcmp(to.memory, from.memory, MEMORY_BYTES));
	BECOMES(fi_cntr_read(end) == 1);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void one_doorbell_fires_a_whole_chain(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *counters[5];
	for (int i = 0; i < 5; i++)
		counters[i] = counter_new(&from);
	for (int i = 3; i >= 0; i--) {
		struct put put = {.trigger = counters[i],
				  .end = counters[i + 1],
				  .threshold = 1,
				  .key = to.key,
				  .source = from.memory + i * 8,
				  .offset = (uint64_t)i * 8,
				  .length = 8};
		GIVES(0, queue_put(&from, &put));
	}
	ring(counters[0], 1);
	BECOMES(word_at(to.memory + 24) == word_at(from.memory + 24));
	HOLDS(!memcmp(to.memory, from.memory, 32));
	BECOMES(fi_cntr_read(counters[4]) == 1);
	expect_nothing(&from);
	for (int i = 0; i < 5; i++)
		GIVES(0, fi_close(&counters[i]->fid));
	pair_close(&from, &to);
}

static void a_read_can_be_deferred(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&to), *end = counter_new(&to);
	struct put get = {.trigger = trigger,
			  .end = end,
			  .threshold = 1,
			  .key = from.key,
			  .offset = 128,
			  .length = 8192,
			  .type = FI_OP_READ};
	GIVES(0, queue_put(&to, &get));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 1);
	HOLDS(!memcmp(to.memory, from.memory + 128, 8192));
	expect_nothing(&to);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void counters_can_be_added_to_and_set(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *trigger = counter_new(&side), *added = counter_new(&side), *set = counter_new(&side);
	GIVES(0, fi_cntr_add(set, 100));
	GIVES(0, queue_count(&side, FI_OP_CNTR_ADD, trigger, 2, added, 7));
	GIVES(0, queue_count(&side, FI_OP_CNTR_SET, added, 7, set, 5));
	GIVES(0, queue_count(&side, FI_OP_CNTR_ADD, trigger, 2, trigger, 10)); /* its own trigger, once */
	ring(trigger, 1);
	HOLDS(fi_cntr_read(added) == 0);
	ring(trigger, 1);
	BECOMES(fi_cntr_read(added) == 7);
	HOLDS(fi_cntr_read(set) == 5);
	HOLDS(fi_cntr_read(trigger) == 12);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&added->fid));
	GIVES(0, fi_close(&set->fid));
	side_close(&side);
}

static void insertion_order_is_not_firing_order(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *trigger = counter_new(&side), *set = counter_new(&side);
	GIVES(0, queue_count(&side, FI_OP_CNTR_SET, trigger, 1, set, 11));
	GIVES(0, queue_count(&side, FI_OP_CNTR_SET, trigger, 1, set, 22));
	ring(trigger, 1);
	HOLDS(fi_cntr_read(set) == 11);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&set->fid));
	side_close(&side);
}

static void a_threshold_reached_already_fires_at_once(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 0, .key = to.key, .length = 16};
	GIVES(0, queue_put(&from, &put));
	BECOMES(fi_cntr_read(end) == 1);
	HOLDS(!memcmp(to.memory, from.memory, 16));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void a_requested_entry_has_the_context_of_its_message(void)
{
	struct side from, to;
	void *context, *asked = &from.peer;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 512};
	GIVES(0, queue_put(&from, &put));
	put.flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
	put.context = asked;
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 2);
	GIVES(0, end_of(&from, &context));
	HOLDS(context == asked);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void a_completion_counter_is_optional(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from);
	struct put put = {.trigger = trigger, .threshold = 1, .key = to.key, .length = 512};
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(!memcmp(to.memory, from.memory, 512));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	pair_close(&from, &to);
}

static void the_peers_address_is_taken_when_the_work_is_queued(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from);
	struct put put = {.trigger = trigger, .threshold = 1, .key = to.key, .length = 512};
	GIVES(0, queue_put(&from, &put));
	GIVES(0, fi_av_remove(from.av, &from.peer, 1, 0));
	GIVES(-FI_EINVAL, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(!memcmp(to.memory, from.memory, 512));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	pair_close(&from, &to);
}

static void a_flush_drops_unfired_work_without_an_entry(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 512};
	put.flags = FI_COMPLETION;
	setenv("SOFT_CASSINI_FLUSH_MS", "1", 1);
	for (int i = 0; i < 10; i++)
		GIVES(0, queue_put(&from, &put));
	GIVES(0, queue_count(&from, FI_OP_CNTR_ADD, trigger, 1, end, 1));
	GIVES(0, fi_control(&from.domain->fid, FI_FLUSH_WORK, NULL));
	ring(trigger, 1);
	/* Work queued after the flush fires, so what was queued before would have. */
	put.offset = 4096;
	GIVES(0, queue_put(&from, &put));
	BECOMES(fi_cntr_read(end) == 1);
	void *context;
	GIVES(0, end_of(&from, &context));
	expect_nothing(&from);
	HOLDS(to.memory[0] == 0 && fi_cntr_readerr(end) == 0);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void *flush(void *domain)
{
	GIVES(0, fi_control(&((struct fid_domain *)domain)->fid, FI_FLUSH_WORK, NULL));
	return NULL;
}

/* A flush holds the queue of commands until it ends, a second by default: reading a counter meanwhile waits for it. */
static void a_flush_delays_every_command_by_a_second(void)
{
	struct side side;
	pthread_t thread;
	double longest = 0, began = seconds_now();
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side);
	HOLDS(!pthread_create(&thread, NULL, flush, side.domain));
	while (longest < 0.2 && seconds_now() - began < WAIT_S) {
		double before = seconds_now();
		fi_cntr_read(counter);
		longest = seconds_now() - before > longest ? seconds_now() - before : longest;
	}
	HOLDS(longest >= 0.2);
	HOLDS(!pthread_join(thread, NULL));
	HOLDS(seconds_now() - began >= 1);
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

const struct rule work_rules[] = {
	{"fires_at_its_threshold_and_not_before", fires_at_its_threshold_and_not_before},
	{"a_doorbell_moves_bytes_without_any_call", a_doorbell_moves_bytes_without_any_call},
	{"one_doorbell_fires_a_whole_chain", one_doorbell_fires_a_whole_chain},
	{"a_read_can_be_deferred", a_read_can_be_deferred},
	{"counters_can_be_added_to_and_set", counters_can_be_added_to_and_set},
	{"insertion_order_is_not_firing_order", insertion_order_is_not_firing_order},
	{"a_threshold_reached_already_fires_at_once", a_threshold_reached_already_fires_at_once},
	{"a_requested_entry_has_the_context_of_its_message",
	 a_requested_entry_has_the_context_of_its_message},
	{"a_completion_counter_is_optional", a_completion_counter_is_optional},
	{"the_peers_address_is_taken_when_the_work_is_queued", the_peers_address_is_taken_when_the_work_is_queued},
	{"a_flush_drops_unfired_work_without_an_entry", a_flush_drops_unfired_work_without_an_entry},
	{"a_flush_delays_every_command_by_a_second", a_flush_delays_every_command_by_a_second},
	{NULL, NULL},
};
