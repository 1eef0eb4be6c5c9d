/* Settings that inject faults: failures that fire, writes that fail, writes in any order; and memory of a device. */
#define _GNU_SOURCE
#include "driver.h"

#include <sys/mman.h>
#include <unistd.h>

#define WRITES 64

static void failures_fire_if_thresholds_include_them(void)
{
	struct side from, to;
	void *context;
	setenv("SOFT_CASSINI_ERRORS_COUNT", "1", 1);
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *middle = counter_new(&from), *end = counter_new(&from);
	struct put bad = {.trigger = trigger, .end = middle, .threshold = 1, .length = 64, .context = &to};
	struct put dependent = {.trigger = middle, .end = end, .threshold = 1, .key = to.key, .length = 8};
	bad.key = to.key ^ 1ULL << 20;
	GIVES(0, queue_put(&from, &bad));
	GIVES(0, queue_put(&from, &dependent));
	ring(trigger, 1);
	GIVES(FI_EIO, end_of(&from, &context));
	BECOMES(fi_cntr_read(end) == 1);
	HOLDS(fi_cntr_read(middle) == 0 && fi_cntr_readerr(middle) == 1);
	HOLDS(!memcmp(to.memory, from.memory, 8));
	expect_nothing(&from);
	/* Failures added by software count too. */
	GIVES(0, queue_count(&from, FI_OP_CNTR_ADD, trigger, 3, end, 1));
	GIVES(0, fi_cntr_adderr(trigger, 1));
	HOLDS(fi_cntr_read(end) == 1);
	GIVES(0, fi_cntr_adderr(trigger, 1));
	HOLDS(fi_cntr_read(end) == 2);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&middle->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

/* Alternately before the first byte, and after half of them. A single word never fails. */
static void every_nth_write_fails_if_configured(void)
{
	struct side from, to;
	setenv("SOFT_CASSINI_FAIL_EVERY", "3", 1);
	pair_open(&from, &to);
	for (size_t i = 0; i < 6; i++) {
		void *context;
		GIVES(0, fi_inject_write(from.ep, from.memory, 8, from.peer, 32768, to.key));
		GIVES(0, fi_write(from.ep, from.memory, 4096, NULL, from.peer, i * 4096, to.key, &from));
		if (i % 3 == 2)
			GIVES(FI_EIO, end_of(&from, &context));
		size_t came = i == 2 ? 0 : i == 5 ? 2048 : 4096;
		BECOMES(!memcmp(to.memory + i * 4096, from.memory, came));
		HOLDS(came == 4096 || to.memory[i * 4096 + came] == 0);
	}
	expect_nothing(&from);
	pair_close(&from, &to);
}

/* How often a word arrived before an earlier one. */
static int overtaken(struct side *from, struct side *to)
{
	int count = 0;
	uint64_t *words = (uint64_t *)to->memory;
	memset(to->memory, 0, MEMORY_BYTES);
	for (uint64_t i = 0; i < WRITES; i++) {
		uint64_t value = i + 1;
		GIVES(0, fi_inject_write(from->ep, &value, 8, from->peer, i * 8, to->key));
	}
	for (int seen = 0; seen < WRITES;) {
		seen = 0;
		for (int i = WRITES - 1; i >= 0; i--)
			seen += word_at(&words[i]) != 0;
		for (int i = WRITES - 1, later = 0; i >= 0; i--) {
			later |= word_at(&words[i]) != 0;
			count += later && !word_at(&words[i]);
		}
		expect_nothing(from);
	}
	return count;
}

static void pair_with_order(struct side *from, struct side *to, uint64_t order)
{
	order_asked = order;
	setenv("SOFT_CASSINI_REORDER", "1", 1);
	pair_open(from, to);
}

static void writes_overtake_each_other_if_configured(void)
{
	struct side from, to;
	pair_with_order(&from, &to, 0);
	BECOMES(overtaken(&from, &to));
	pair_close(&from, &to);
}

static void a_requested_order_is_kept(void)
{
	struct side from, to;
	pair_with_order(&from, &to, FI_ORDER_WAW);
	for (int i = 0; i < 50; i++)
		HOLDS(!overtaken(&from, &to));
	pair_close(&from, &to);
}

static int is_whole_at_its_end(struct side *from, struct side *to, uint64_t flags)
{
	void *context;
	struct iovec local = {from->memory, 4096};
	struct fi_rma_iov remote = {0, 4096, to->key};
	struct fi_msg_rma message = {.msg_iov = &local, .iov_count = 1, .addr = from->peer, .rma_iov = &remote,
				     .rma_iov_count = 1, .context = from};
	memset(to->memory, 0, 4096);
	GIVES(0, fi_writemsg(from->ep, &message, FI_COMPLETION | flags));
	GIVES(0, end_of(from, &context));
	int whole = !memcmp(to->memory, from->memory, 4096);
	BECOMES(!memcmp(to->memory, from->memory, 4096));
	return whole;
}

static void only_a_confirmed_write_is_complete_at_its_end(void)
{
	struct side from, to;
	int whole = 0;
	pair_with_order(&from, &to, 0);
	for (int i = 0; i < 50; i++) {
		HOLDS(is_whole_at_its_end(&from, &to, FI_DELIVERY_COMPLETE));
		whole += is_whole_at_its_end(&from, &to, 0);
	}
	HOLDS(whole < 50);
	pair_close(&from, &to);
}

static int registered(struct side *side, void *memory, struct fid_mr **region)
{
	struct iovec range = {memory, 4096};
	struct fi_mr_attr attr = {.mr_iov = &range, .iov_count = 1, .access = FI_REMOTE_WRITE, .iface = FI_HMEM_CUDA};
	return fi_mr_regattr(side->domain, &attr, 0, region);
}

static void memory_of_a_device_is_written_if_registered(void)
{
	struct side from, to;
	struct fid_mr *region;
	void *context;
	int fd = memfd_create("device", 0);
	GIVES(0, ftruncate(fd, 8192));
	char *apart = mmap(NULL, 8192, PROT_NONE, MAP_SHARED, fd, 0);
	char *bytes = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	HOLDS(apart != MAP_FAILED && bytes != MAP_FAILED);
	setenv("SOFT_CASSINI_HMEM", "1", 1);
	side_open(&from);
	GIVES(-FI_ENOSYS, registered(&from, apart, &region));
	side_close(&from);
	side_open(&from);
	side_open_with(&to, FI_RMA | FI_HMEM, 0, FI_SELECTIVE_COMPLETION);
	char name[8];
	name_of(to.ep, name);
	meet(&from, name);
	GIVES(-FI_EINVAL, registered(&to, bytes, &region));
	GIVES(0, registered(&to, apart + 4096, &region));
	GIVES(0, fi_mr_bind(region, &to.ep->fid, 0));
	GIVES(0, fi_mr_enable(region));
	memset(from.memory, 7, 64);
	struct iovec local = {from.memory, 64};
	struct fi_rma_iov remote = {32, 64, fi_mr_key(region)};
	struct fi_msg_rma message = {.msg_iov = &local, .iov_count = 1, .addr = from.peer, .rma_iov = &remote,
				     .rma_iov_count = 1, .context = &from};
	GIVES(0, fi_writemsg(from.ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	GIVES(0, end_of(&from, &context));
	HOLDS(!memcmp(bytes + 4096 + 32, from.memory, 64) && !bytes[4096 + 31] && !bytes[4096 + 96]);
	GIVES(0, fi_close(&region->fid));
	side_close(&from);
	side_close(&to);
}

const struct rule setting_rules[] = {
	{"failures_fire_if_thresholds_include_them", failures_fire_if_thresholds_include_them},
	{"every_nth_write_fails_if_configured", every_nth_write_fails_if_configured},
	{"writes_overtake_each_other_if_configured", writes_overtake_each_other_if_configured},
	{"a_requested_order_is_kept", a_requested_order_is_kept},
	{"only_a_confirmed_write_is_complete_at_its_end", only_a_confirmed_write_is_complete_at_its_end},
	{"memory_of_a_device_is_written_if_registered", memory_of_a_device_is_written_if_registered},
	{NULL, NULL},
};
