/* Refused deferred work, and bounded resources: slots for triggers, requests of an endpoint. */
#include "driver.h"

#define DEPTH 504

static int queue_one(struct side *side, struct fid_cntr *trigger, struct fid_cntr *target)
{
	return queue_count(side, FI_OP_CNTR_ADD, trigger, 1, target, 1);
}

static void every_version_of_the_extension_reports_the_depth(void)
{
	struct side side;
	char name[] = "dom_ops_v1";
	side_open(&side);
	for (; name[9] <= '6'; name[9]++) {
		struct fi_cxi_dom_ops *ops;
		size_t depth = 0;
		GIVES(0, fi_open_ops(&side.domain->fid, name, 0, (void **)&ops, NULL));
		GIVES(0, ops->get_dwq_depth(&side.domain->fid, &depth));
		HOLDS(depth == DEPTH);
		GIVES(-FI_EINVAL, ops->get_dwq_depth(&side.ep->fid, &depth));
	}
	void *none;
	GIVES(-FI_EINVAL, fi_open_ops(&side.domain->fid, name, 0, &none, NULL));
	side_close(&side);
}

static void beyond_the_depth_there_is_no_space_in_any_domain(void)
{
	struct side one, two;
	side_open(&one);
	side_open(&two);
	struct fid_cntr *trigger = counter_new(&one), *target = counter_new(&one);
	struct fid_cntr *trigger_two = counter_new(&two), *target_two = counter_new(&two);
	for (int i = 0; i < DEPTH; i++)
		GIVES(0, queue_one(&one, trigger, target));
	GIVES(-FI_ENOSPC, queue_one(&one, trigger, target));
	GIVES(-FI_ENOSPC, queue_one(&two, trigger_two, target_two));
	/* A slot is free again once it has fired, not before. */
	GIVES(0, fi_cntr_add(trigger, 1));
	HOLDS(fi_cntr_read(target) == DEPTH);
	for (int i = 0; i < DEPTH; i++)
		GIVES(0, queue_one(&two, trigger_two, target_two));
	GIVES(-FI_ENOSPC, queue_one(&one, trigger, target));
	setenv("SOFT_CASSINI_FLUSH_MS", "1", 1);
	GIVES(0, fi_control(&two.domain->fid, FI_FLUSH_WORK, NULL));
	GIVES(0, queue_one(&one, trigger, target));
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&target->fid));
	GIVES(0, fi_close(&trigger_two->fid));
	GIVES(0, fi_close(&target_two->fid));
	side_close(&one);
	side_close(&two);
}

static void other_processes_take_from_the_same_depth(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *trigger = counter_new(&side), *target = counter_new(&side);
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "500", 1);
	for (int i = 0; i < 4; i++)
		GIVES(0, queue_one(&side, trigger, target));
	GIVES(-FI_ENOSPC, queue_one(&side, trigger, target));
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "499", 1);
	GIVES(0, queue_one(&side, trigger, target));
	ring(trigger, 1);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&target->fid));
	side_close(&side);
}

static void a_write_back_costs_a_second_slot(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 8};
	put.flags = FI_CXI_CNTR_WB;
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "503", 1);
	GIVES(-FI_ENOSPC, queue_put(&from, &put));
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "502", 1);
	GIVES(0, queue_put(&from, &put));
	GIVES(-FI_ENOSPC, queue_one(&from, trigger, end));
	/* The put has fired at 1, the write-back waits for 2. */
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 1);
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "503", 1);
	GIVES(-FI_ENOSPC, queue_one(&from, trigger, end));
	ring(trigger, 1);
	GIVES(0, queue_one(&from, trigger, end));
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void a_wait_that_timed_out_keeps_its_slot(void)
{
	struct side side;
	side_open(&side);
	struct fid_cntr *trigger = counter_new(&side), *target = counter_new(&side);
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "503", 1);
	GIVES(-FI_ETIMEDOUT, fi_cntr_wait(trigger, 5, 1));
	GIVES(-FI_ENOSPC, queue_one(&side, trigger, target));
	GIVES(-FI_EAGAIN, fi_cntr_wait(trigger, 5, 1));
	GIVES(0, fi_cntr_add(trigger, 5));
	GIVES(0, queue_one(&side, trigger, target));
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&target->fid));
	side_close(&side);
}

static void requests_come_back_only_when_the_queue_is_read(void)
{
	struct side from, to;
	char address[8];
	side_open_with(&from, FI_RMA, 4, FI_SELECTIVE_COMPLETION);
	side_open(&to);
	name_of(to.ep, address);
	meet(&from, address);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 8};
	for (int i = 0; i < 4; i++)
		GIVES(0, queue_put(&from, &put));
	GIVES(-FI_EAGAIN, queue_put(&from, &put));
	ring(trigger, 1);
	/* The counter is bound to no endpoint, so reading it drains nothing. */
	BECOMES(fi_cntr_read(end) == 4);
	GIVES(-FI_EAGAIN, queue_put(&from, &put));
	GIVES(-FI_EAGAIN, fi_write(from.ep, from.memory, 512, NULL, from.peer, 0, to.key, NULL));
	/* Without bytes, and without an entry asked for, none is needed. */
	put.length = 0;
	GIVES(0, queue_put(&from, &put));
	GIVES(0, fi_inject_write(from.ep, from.memory, 8, from.peer, 0, to.key));
	put.length = 8;
	expect_nothing(&from);
	for (int i = 0; i < 4; i++)
		GIVES(0, queue_put(&from, &put));
	BECOMES(fi_cntr_read(end) == 9);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	side_close(&from);
	side_close(&to);
}

static void deferred_work_with_unsupported_flags_is_refused(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 8};
	const uint64_t refused[] = {FI_FENCE, FI_REMOTE_CQ_DATA, FI_INJECT, FI_INJECT_COMPLETE, FI_TRIGGER, FI_CXI_HRP};
	const uint64_t taken[] = {FI_MORE, FI_DELIVERY_COMPLETE, FI_MATCH_COMPLETE, FI_TRANSMIT_COMPLETE};
	for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
		put.flags = refused[i];
		GIVES(-FI_EINVAL, queue_put(&from, &put));
	}
	for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
		put.flags = taken[i];
		GIVES(0, queue_put(&from, &put));
	}
	put.flags = FI_INJECT;
	put.length = 193;
	GIVES(-FI_EMSGSIZE, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 4);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static int queue_ranges(struct side *from, struct fid_cntr *trigger, size_t local_count, size_t remote_count)
{
	struct iovec local[2] = {{from->memory, 8}, {from->memory + 8, 8}};
	struct fi_rma_iov remote[2] = {{0, 8, from->key}, {8, 8, from->key}};
	struct fi_op_rma rma = {.ep = from->ep, .msg = {.addr = from->peer}};
	rma.msg.msg_iov = local;
	rma.msg.iov_count = local_count;
	rma.msg.rma_iov = remote;
	rma.msg.rma_iov_count = remote_count;
	struct fi_deferred_work work = {.triggering_cntr = trigger, .op_type = FI_OP_WRITE, .op.rma = &rma};
	work.threshold = 1;
	return fi_control(&from->domain->fid, FI_QUEUE_WORK, &work);
}

static void invalid_work_is_refused(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *stranger = counter_new(&to);
	struct put put = {.threshold = 1, .key = to.key, .length = 8};
	GIVES(-FI_EINVAL, queue_put(&from, &put));
	put.trigger = stranger;
	GIVES(-FI_EINVAL, queue_put(&from, &put));
	put.trigger = trigger;
	put.threshold = FI_CXI_CNTR_SUCCESS_MAX + 1;
	GIVES(-FI_EINVAL, queue_put(&from, &put));
	put.threshold = 1;
	put.key = 1ULL << 40;
	GIVES(-FI_EKEYREJECTED, queue_put(&from, &put));
	put.key = to.key;
	put.length = (size_t)UINT32_MAX + 1;
	GIVES(-FI_EMSGSIZE, queue_put(&from, &put));

	GIVES(-FI_EINVAL, queue_ranges(&from, trigger, 2, 1));
	GIVES(-FI_EINVAL, queue_ranges(&from, trigger, 1, 2));
	GIVES(-FI_EINVAL, queue_ranges(&from, trigger, 1, 0));

	GIVES(-FI_EINVAL, queue_count(&from, FI_OP_CNTR_ADD, trigger, 1, NULL, 1));
	GIVES(-FI_EINVAL, queue_count(&from, FI_OP_CNTR_ADD, NULL, 1, trigger, 1));
	struct fi_op_cntr op = {.cntr = trigger, .value = 1};
	struct fi_deferred_work work = {.triggering_cntr = trigger, .completion_cntr = trigger, .threshold = 1};
	work.op_type = FI_OP_CNTR_SET;
	work.op.cntr = &op;
	GIVES(-FI_EINVAL, fi_control(&from.domain->fid, FI_QUEUE_WORK, &work));
	GIVES(-FI_EINVAL, fi_control(&from.domain->fid, FI_QUEUE_WORK, NULL));
	GIVES(-FI_EINVAL, fi_control(&from.domain->fid, FI_CANCEL_WORK, &work));
	work.op_type = (enum fi_op_type)999;
	GIVES(-FI_EINVAL, fi_control(&from.domain->fid, FI_QUEUE_WORK, &work));
	/* Nothing of all this took a slot. */
	setenv("SOFT_CASSINI_DEPTH_TAKEN", "503", 1);
	GIVES(0, queue_one(&from, trigger, trigger));
	ring(trigger, 1);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&stranger->fid));
	pair_close(&from, &to);
}

static void objects_needed_by_work_do_not_close(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = to.key, .length = 8};
	GIVES(0, queue_put(&from, &put));
	GIVES(-FI_EBUSY, fi_close(&trigger->fid));
	GIVES(-FI_EBUSY, fi_close(&end->fid));
	GIVES(0, fi_close(&from.region->fid));
	GIVES(-FI_EBUSY, fi_close(&from.ep->fid));
	from.region = region_new(&from, from.ep, from.memory, 8, FI_REMOTE_WRITE, NULL);
	setenv("SOFT_CASSINI_FLUSH_MS", "1", 1);
	GIVES(0, fi_control(&from.domain->fid, FI_FLUSH_WORK, NULL));
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 1);
	/* It has counted, and the request that stands for it is still there. */
	GIVES(-FI_EBUSY, fi_close(&end->fid));
	GIVES(0, fi_close(&trigger->fid));
	expect_nothing(&from);
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

const struct rule slot_rules[] = {
	{"every_version_of_the_extension_reports_the_depth", every_version_of_the_extension_reports_the_depth},
	{"beyond_the_depth_there_is_no_space_in_any_domain", beyond_the_depth_there_is_no_space_in_any_domain},
	{"other_processes_take_from_the_same_depth", other_processes_take_from_the_same_depth},
	{"a_write_back_costs_a_second_slot", a_write_back_costs_a_second_slot},
	{"a_wait_that_timed_out_keeps_its_slot", a_wait_that_timed_out_keeps_its_slot},
	{"requests_come_back_only_when_the_queue_is_read", requests_come_back_only_when_the_queue_is_read},
	{"deferred_work_with_unsupported_flags_is_refused", deferred_work_with_unsupported_flags_is_refused},
	{"invalid_work_is_refused", invalid_work_is_refused},
	{"objects_needed_by_work_do_not_close", objects_needed_by_work_do_not_close},
	{NULL, NULL},
};
