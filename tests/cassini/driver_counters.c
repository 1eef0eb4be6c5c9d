/* Counters, their doorbells and their write-back words. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNTERS 2047
#define VALID CXI_WRITE_BACK_VALID
#define FAILURES(count) ((uint64_t)(count) << CXI_WRITE_BACK_FAILURE_SHIFT)

static void counters_add_set_and_refuse_values_out_of_range(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side);
	GIVES(0, fi_cntr_add(counter, 5));
	GIVES(0, fi_cntr_add(counter, 6));
	GIVES(11, fi_cntr_read(counter));
	GIVES(0, fi_cntr_set(counter, FI_CXI_CNTR_SUCCESS_MAX));
	GIVES(FI_CXI_CNTR_SUCCESS_MAX, fi_cntr_read(counter));
	GIVES(-FI_EINVAL, fi_cntr_add(counter, FI_CXI_CNTR_SUCCESS_MAX + 1));
	GIVES(-FI_EINVAL, fi_cntr_set(counter, FI_CXI_CNTR_SUCCESS_MAX + 1));
	GIVES(0, fi_cntr_adderr(counter, 3));
	GIVES(3, fi_cntr_readerr(counter));
	GIVES(-FI_EINVAL, fi_cntr_adderr(counter, 128));
	GIVES(-FI_EINVAL, fi_cntr_seterr(counter, 128));
	GIVES(0, fi_cntr_adderr(counter, 126));
	GIVES(127, fi_cntr_readerr(counter));
	GIVES(0, fi_cntr_seterr(counter, 0));
	GIVES(0, fi_cntr_readerr(counter));
	GIVES(FI_CXI_CNTR_SUCCESS_MAX, fi_cntr_read(counter));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

static void counters_open_only_with_attributes_of_cxi(void)
{
	struct side side;
	struct fid_cntr *counter;
	side_open(&side);
	struct fi_cntr_attr attr = {.events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_FD};
	GIVES(-FI_ENOSYS, fi_cntr_open(side.domain, &attr, &counter, NULL));
	attr.wait_obj = FI_WAIT_POLLFD;
	GIVES(-FI_ENOSYS, fi_cntr_open(side.domain, &attr, &counter, NULL));
	attr.wait_obj = FI_WAIT_NONE;
	attr.flags = 1;
	GIVES(-FI_ENOSYS, fi_cntr_open(side.domain, &attr, &counter, NULL));
	attr.flags = 0;
	attr.events = (enum fi_cntr_events)7;
	GIVES(-FI_ENOSYS, fi_cntr_open(side.domain, &attr, &counter, NULL));
	attr.events = FI_CNTR_EVENTS_COMP;
	GIVES(0, fi_cntr_open(side.domain, &attr, &counter, NULL));
	GIVES(0, fi_cntr_add(counter, 1));
	GIVES(-FI_EINVAL, fi_cntr_wait(counter, 1, -1));
	void *ops;
	GIVES(-FI_EINVAL, fi_open_ops(&counter->fid, "cxi_other_ops", 0, &ops, NULL));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

static void there_are_2047_counters(void)
{
	static struct fid_cntr *counters[COUNTERS];
	struct side side;
	struct fid_cntr *one_more;
	side_open(&side);
	for (int i = 0; i < COUNTERS; i++)
		counters[i] = counter_new(&side);
	GIVES(-FI_EDOMAIN, fi_cntr_open(side.domain, NULL, &one_more, NULL));
	ring(counters[COUNTERS - 1], 9);
	GIVES(9, fi_cntr_read(counters[COUNTERS - 1]));
	GIVES(0, fi_cntr_read(counters[COUNTERS - 2]));
	GIVES(0, fi_close(&counters[COUNTERS - 1]->fid));
	counters[COUNTERS - 1] = counter_new(&side);
	GIVES(0, fi_cntr_read(counters[COUNTERS - 1]));
	for (int i = 0; i < COUNTERS; i++)
		GIVES(0, fi_close(&counters[i]->fid));
	side_close(&side);
}

static void *add_later(void *counter)
{
	GIVES(0, fi_cntr_add(counter, 1));
	return NULL;
}

static void a_wait_ends_at_the_count_a_failure_or_the_timeout(void)
{
	struct side side;
	pthread_t thread;
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side);
	GIVES(-FI_ETIMEDOUT, fi_cntr_wait(counter, 1, 20));
	HOLDS(!pthread_create(&thread, NULL, add_later, counter));
	GIVES(0, fi_cntr_wait(counter, 1, -1));
	HOLDS(!pthread_join(thread, NULL));
	GIVES(0, fi_cntr_wait(counter, 0, 0));
	GIVES(-FI_EINVAL, fi_cntr_wait(counter, FI_CXI_CNTR_SUCCESS_MAX + 1, 0));
	store(doorbell(counter, CXI_DOORBELL_ADD_FAILURE), 1);
	int status = fi_cntr_wait(counter, 100, 5000);
	/* The failure came before the wait or within it: then it ends the wait. */
	if (status == -FI_ETIMEDOUT)
		HOLDS(fi_cntr_readerr(counter) == 1);
	else
		GIVES(-FI_EAVAIL, status);
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

static void doorbells_add_and_reset(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side);
	HOLDS((uintptr_t)doorbell(counter, 0) % (uintptr_t)sysconf(_SC_PAGESIZE) == 0);
	ring(counter, 3);
	ring(counter, 4);
	GIVES(7, fi_cntr_read(counter));
	uint64_t *failures = doorbell(counter, CXI_DOORBELL_ADD_FAILURE);
	store(failures, 5);
	BECOMES(word_at(failures) == 0);
	GIVES(5, fi_cntr_readerr(counter));
	GIVES(7, fi_cntr_read(counter));
	store(doorbell(counter, CXI_DOORBELL_RESET), 0);
	BECOMES(fi_cntr_read(counter) == 0);
	GIVES(5, fi_cntr_readerr(counter));
	store(doorbell(counter, CXI_DOORBELL_RESET_FAILURE), 0);
	BECOMES(fi_cntr_readerr(counter) == 0);
	ring(counter, FI_CXI_CNTR_SUCCESS_MAX);
	GIVES(FI_CXI_CNTR_SUCCESS_MAX, fi_cntr_read(counter));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

static void the_doorbells_length_is_less_than_a_page(void)
{
	struct side side;
	void *page;
	size_t length;
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side);
	GIVES(0, counter_ops(counter)->get_mmio_addr(&counter->fid, &page, &length));
	HOLDS(length == sizeof(void *));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

static void the_write_back_word_is_written_only_when_specified(void)
{
	struct side side;
	uint64_t words[2] = {0, 0};
	side_open(&side);
	struct fid_cntr *counter = counter_new(&side), *other = counter_new(&side);
	struct fi_cxi_cntr_ops *ops = counter_ops(counter);
	GIVES(-FI_EINVAL, ops->set_wb_buffer(&counter->fid, NULL, 8));
	GIVES(-FI_EINVAL, ops->set_wb_buffer(&counter->fid, words, 7));
	GIVES(-FI_EINVAL, ops->set_wb_buffer(&counter->fid, (char *)words + 4, 8));
	GIVES(0, fi_cntr_add(counter, 1));
	GIVES(0, ops->set_wb_buffer(&counter->fid, words, sizeof words));
	HOLDS(word_at(words) == (VALID | 1)); /* a new buffer */
	ring(counter, 1);
	/* Another counter has been read meanwhile: the NIC had every chance to write. */
	ring(other, 1);
	GIVES(1, fi_cntr_read(other));
	HOLDS(word_at(words) == (VALID | 1));
	GIVES(2, fi_cntr_read(counter));
	HOLDS(word_at(words) == (VALID | 2)); /* somebody read */
	GIVES(-FI_ETIMEDOUT, fi_cntr_wait(counter, 5, 0));
	ring(counter, 1);
	HOLDS(word_at(words) == (VALID | 2));
	ring(counter, 2);
	BECOMES(word_at(words) == (VALID | 5)); /* the threshold of a wait */
	GIVES(0, fi_cntr_adderr(counter, 2));
	HOLDS(word_at(words) == (VALID | FAILURES(2) | 5)); /* the first failure, and no other */
	GIVES(0, fi_cntr_adderr(counter, 1));
	HOLDS(word_at(words) == (VALID | FAILURES(2) | 5));
	store(doorbell(counter, CXI_DOORBELL_RESET), 0);
	BECOMES(word_at(words) == (VALID | FAILURES(3))); /* a reset */
	store(doorbell(counter, CXI_DOORBELL_RESET_FAILURE), 0);
	BECOMES(word_at(words) == VALID);
	HOLDS(words[1] == 0);
	GIVES(0, fi_close(&counter->fid));
	GIVES(0, fi_close(&other->fid));
	side_close(&side);
}

/* On cxi the flag writes back the triggering counter, one above the threshold: so it works as its manual shows it,
 * with one counter as both trigger and end. */
static void work_can_request_a_write_back_of_its_trigger(void)
{
	struct side from, to;
	uint64_t word = 0, end_word = 0;
	pair_open(&from, &to);
	struct fid_cntr *counter = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = counter, .end = counter, .threshold = 1, .key = to.key, .length = 8};
	put.flags = FI_CXI_CNTR_WB;
	GIVES(0, counter_ops(counter)->set_wb_buffer(&counter->fid, &word, sizeof word));
	GIVES(0, counter_ops(end)->set_wb_buffer(&end->fid, &end_word, sizeof end_word));
	GIVES(0, queue_put(&from, &put));
	ring(counter, 1);
	BECOMES(word_at(&word) == (VALID | 2));
	put.threshold = 3;
	put.end = end;
	GIVES(0, queue_put(&from, &put));
	ring(counter, 2);
	BECOMES(word_at(&word) == (VALID | 4));
	HOLDS(word_at(&end_word) == VALID);
	BECOMES(fi_cntr_read(end) == 1);
	expect_nothing(&from);
	GIVES(0, fi_close(&counter->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void a_cached_counter_returns_the_last_written_word(void)
{
	struct side side;
	struct fid_cntr *counter;
	struct fi_cntr_attr attr = {.wait_obj = FI_WAIT_UNSPEC, .flags = FI_CXI_CNTR_CACHED};
	side_open(&side);
	GIVES(0, fi_cntr_open(side.domain, &attr, &counter, NULL));
	GIVES(0, fi_cntr_add(counter, 2));
	GIVES(0, fi_cntr_read(counter));
	GIVES(2, fi_cntr_read(counter));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

/* In a child, which has to end with SIGABRT and a sentence. */
static void aborts(size_t offset, uint64_t first, uint64_t second)
{
	int said[2], how;
	char text[200] = "";
	HOLDS(!pipe(said));
	pid_t child = fork();
	if (!child) {
		struct side side;
		dup2(said[1], STDERR_FILENO);
		side_open(&side);
		struct fid_cntr *counter = counter_new(&side);
		ring(counter, first);
		store(doorbell(counter, offset), second);
		for (;;)
			pause();
	}
	close(said[1]);
	HOLDS(read(said[0], text, sizeof text - 1) > 0);
	HOLDS(waitpid(child, &how, 0) == child);
	HOLDS(WIFSIGNALED(how) && WTERMSIG(how) == SIGABRT);
	HOLDS(strstr(text, "software cassini: "));
}

static void undefined_behaviour_aborts_with_a_message(void)
{
	aborts(CXI_DOORBELL_ADD, FI_CXI_CNTR_SUCCESS_MAX, 1);
	aborts(CXI_DOORBELL_ADD, 1, FI_CXI_CNTR_SUCCESS_MAX + 1);
	aborts(CXI_DOORBELL_ADD_FAILURE, 1, 128);
	aborts(CXI_DOORBELL_RESET, 1, 5);
	aborts(CXI_DOORBELL_RESET_FAILURE, 1, 5);
}

const struct rule counter_rules[] = {
	{"counters_add_set_and_refuse_values_out_of_range", counters_add_set_and_refuse_values_out_of_range},
	{"counters_open_only_with_attributes_of_cxi", counters_open_only_with_attributes_of_cxi},
	{"there_are_2047_counters", there_are_2047_counters},
	{"a_wait_ends_at_the_count_a_failure_or_the_timeout",
	 a_wait_ends_at_the_count_a_failure_or_the_timeout},
	{"doorbells_add_and_reset", doorbells_add_and_reset},
	{"the_doorbells_length_is_less_than_a_page", the_doorbells_length_is_less_than_a_page},
	{"the_write_back_word_is_written_only_when_specified", the_write_back_word_is_written_only_when_specified},
	{"work_can_request_a_write_back_of_its_trigger", work_can_request_a_write_back_of_its_trigger},
	{"a_cached_counter_returns_the_last_written_word", a_cached_counter_returns_the_last_written_word},
	{"undefined_behaviour_aborts_with_a_message", undefined_behaviour_aborts_with_a_message},
	{NULL, NULL},
};
