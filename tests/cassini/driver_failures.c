/* Deferred work that fails, and other work at the same time. */
#include "driver.h"

static void a_failure_is_counted_and_reported_and_fires_nothing(void)
{
	struct side from, to;
	void *context;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *middle = counter_new(&from), *end = counter_new(&from);
	struct put bad = {.trigger = trigger, .end = middle, .threshold = 1, .length = 64, .context = &to};
	struct put dependent = {.trigger = middle, .end = end, .threshold = 1, .key = to.key, .length = 8};
	bad.key = to.key ^ 1ULL << 20;
	GIVES(0, queue_put(&from, &bad));
	GIVES(0, queue_put(&from, &dependent));
	ring(trigger, 1);
	BECOMES(fi_cntr_readerr(middle) == 1);
	HOLDS(fi_cntr_read(middle) == 0);
	GIVES(FI_EIO, end_of(&from, &context)); /* though no entry was asked for */
	HOLDS(context == &to);
	expect_nothing(&from);
	HOLDS(fi_cntr_read(end) == 0 && fi_cntr_readerr(end) == 0);
	HOLDS(word_at(to.memory) == 0);
	setenv("SOFT_CASSINI_FLUSH_MS", "1", 1);
	GIVES(0, fi_control(&from.domain->fid, FI_FLUSH_WORK, NULL));
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&middle->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void an_error_hides_later_entries_until_it_is_read(void)
{
	struct side from, to;
	void *context;
	struct fi_cq_msg_entry entry;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .length = 64, .flags = FI_COMPLETION};
	put.key = to.key ^ 1ULL << 20;
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_readerr(end) == 1);
	put.key = to.key;
	GIVES(0, queue_put(&from, &put));
	BECOMES(fi_cntr_read(end) == 1);
	struct fi_cq_err_entry error = {0};
	GIVES(-FI_EAGAIN, fi_cq_readerr(from.cq, &error, 0)); /* that alone brings nothing in */
	GIVES(-FI_EAVAIL, fi_cq_read(from.cq, &entry, 1));
	GIVES(-FI_EAVAIL, fi_cq_read(from.cq, &entry, 1));
	GIVES(FI_EIO, end_of(&from, &context));
	GIVES(0, end_of(&from, &context));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void one_bad_key_fails_one_operation(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	for (int i = 0; i < 40; i++) {
		struct put put = {.trigger = trigger,
				  .end = end,
				  .threshold = 1,
				  .key = i % 10 == 5 ? to.key ^ 1ULL << 20 : to.key,
				  .source = from.memory + i * 512,
				  .offset = (uint64_t)i * 512,
				  .length = 512};
		GIVES(0, queue_put(&from, &put));
	}
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) + fi_cntr_readerr(end) == 40);
	HOLDS(fi_cntr_readerr(end) == 4);
	for (int i = 0; i < 40; i++)
		HOLDS(i % 10 == 5 ? to.memory[i * 512] == 0 :
				    !memcmp(to.memory + i * 512, from.memory + i * 512, 512));
	for (int i = 0; i < 4; i++) {
		void *context;
		GIVES(FI_EIO, end_of(&from, &context));
	}
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void more_failures_than_a_counter_holds_stop_counting(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .length = 8};
	put.key = to.key ^ 1ULL << 20;
	GIVES(0, fi_cntr_adderr(end, 126));
	for (int i = 0; i < 4; i++)
		GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	for (int i = 0; i < 4; i++) {
		void *context;
		GIVES(FI_EIO, end_of(&from, &context));
	}
	GIVES(127, fi_cntr_readerr(end));
	HOLDS(fi_cntr_read(end) == 0);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

/* Operations without a request can fail too; the error then has the endpoint's context. */
static void a_failed_inject_is_reported_with_the_endpoints_context(void)
{
	struct side from, to;
	void *context;
	pair_open(&from, &to);
	GIVES(0, fi_inject_write(from.ep, from.memory, 8, from.peer, MEMORY_BYTES, to.key));
	GIVES(FI_EIO, end_of(&from, &context));
	HOLDS(context == &from);
	pair_close(&from, &to);
}

static void an_absent_peer_is_a_failure(void)
{
	struct side from, to;
	void *context;
	setenv("SOFT_CASSINI_UNREACHABLE_MS", "200", 1);
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 512};
	GIVES(0, queue_put(&from, &put));
	side_close(&to);
	ring(trigger, 1);
	BECOMES(fi_cntr_readerr(end) == 1);
	HOLDS(end_of(&from, &context) > 0);
	HOLDS(fi_cntr_read(end) == 0);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	side_close(&from);
}

static void closing_an_endpoint_drops_operations_in_flight(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = MEMORY_BYTES};
	put.flags = FI_COMPLETION;
	for (int i = 0; i < 200; i++)
		GIVES(0, queue_put(&from, &put));
	GIVES(0, fi_cntr_add(trigger, 1));
	GIVES(0, fi_close(&from.region->fid));
	GIVES(0, fi_close(&from.ep->fid));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	from.ep = endpoint_new(&from);
	from.region = region_new(&from, from.ep, from.memory, MEMORY_BYTES, FI_REMOTE_WRITE, NULL);
	pair_close(&from, &to);
}

const struct rule failure_rules[] = {
	{"a_failure_is_counted_and_reported_and_fires_nothing", a_failure_is_counted_and_reported_and_fires_nothing},
	{"an_error_hides_later_entries_until_it_is_read",
	 an_error_hides_later_entries_until_it_is_read},
	{"one_bad_key_fails_one_operation", one_bad_key_fails_one_operation},
	{"more_failures_than_a_counter_holds_stop_counting", more_failures_than_a_counter_holds_stop_counting},
	{"a_failed_inject_is_reported_with_the_endpoints_context",
	 a_failed_inject_is_reported_with_the_endpoints_context},
	{"an_absent_peer_is_a_failure", an_absent_peer_is_a_failure},
	{"closing_an_endpoint_drops_operations_in_flight", closing_an_endpoint_drops_operations_in_flight},
	{NULL, NULL},
};
