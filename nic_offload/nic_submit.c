/*
 * Hands operations to the NIC, as many as it has room for, each as one or more steps.
 *
 * What always holds: the first step is queued first. So if a NIC accepts only some of the steps, none of them waits for
 * a missing one, and no slot is lost.
 */
#define _GNU_SOURCE
#include "nic.h"

#include <errno.h>

#define TRY_AGAIN_NS 1000000u

static struct fi_deferred_work *add_step(struct slot *slot, struct fid_cntr *trigger, uint64_t threshold,
					 struct fid_cntr *completion, enum fi_op_type type)
{
	struct fi_deferred_work *step = &slot->steps[slot->steps_count++];
	*step = (struct fi_deferred_work){
		.triggering_cntr = trigger, .threshold = threshold, .completion_cntr = completion, .op_type = type};
	return step;
}

static void add_transfer(struct slot *slot, struct fi_deferred_work *step, int at, uint64_t flags)
{
	const struct tk_operation *op = &slot->work->op;
	struct fi_op_rma *rma = &slot->rma[at];
	*rma = (struct fi_op_rma){
		.ep = op->endpoint->fid,
		.msg = {.msg_iov = &slot->local[at],
			.desc = &slot->desc[at],
			.iov_count = 1,
			.addr = op->peer,
			.rma_iov = &slot->remote[at],
			.rma_iov_count = 1,
			.context = &step->context},
		.flags = flags,
	};
	step->op.rma = rma;
}

static void add_count(struct slot *slot, struct fi_deferred_work *step, int at, struct fid_cntr *counter,
		      uint64_t value)
{
	slot->counts[at] = (struct fi_op_cntr){.cntr = counter, .value = value};
	step->op.cntr = &slot->counts[at];
}

static void add_bytes(struct slot *slot, struct fid_cntr *trigger, uint64_t threshold)
{
	const struct tk_operation *op = &slot->work->op;
	int chained = has_flag(op), get = !!(op->flags & TK_GET);
	slot->local[0] = (struct iovec){(void *)op->local, op->length};
	slot->remote[0] = (struct fi_rma_iov){op->remote, op->length, op->remote_key};
	slot->desc[0] = op->region->desc;
	uint64_t flags = chained && !slot->is_reported ? 0 : FI_COMPLETION;
	if (!get)
		flags |= FI_DELIVERY_COMPLETE; /* later steps are chained to the arrival of the bytes */
	add_transfer(slot,
		     add_step(slot, trigger, threshold, chained ? slot->moved : moved_at_last(slot),
			      get ? FI_OP_READ : FI_OP_WRITE),
		     0, flags);
}

static void add_flag(struct slot *slot, struct fid_cntr *trigger, uint64_t threshold)
{
	const struct tk_operation *op = &slot->work->op;
	slot->flag_value = word_out(op->endpoint, (struct spot){op->flag_target, op->flag_key}, op->flag_value);
	slot->local[1] = (struct iovec){&slot->flag_value, sizeof slot->flag_value};
	slot->remote[1] = (struct fi_rma_iov){op->flag_target, sizeof slot->flag_value, op->flag_key};
	slot->desc[1] = NULL;
	add_transfer(slot, add_step(slot, trigger, threshold, moved_at_last(slot), FI_OP_WRITE), 1,
		     FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

static void make_steps(struct slot *slot)
{
	const struct tk_operation *op = &slot->work->op;
	struct fid_cntr *trigger = op->trigger->nic;
	uint64_t threshold = op->threshold;
	slot->steps_count = 0;
	/* A flag that waited for the bytes' counter would go out if they failed. */
	slot->cut = slot->is_reported = op->trigger->fabric->nic.failures_fire && has_bytes(op) && has_flag(op);
	if (has_bytes(op)) {
		add_bytes(slot, trigger, threshold);
		trigger = slot->moved;
		threshold = slot->moved_before + 1;
	}
	if (has_flag(op) && !slot->cut)
		add_flag(slot, trigger, threshold);
	if (!op->endpoint) {
		enum fi_op_type type = op->flags & TK_SET_COUNTER ? FI_OP_CNTR_SET : FI_OP_CNTR_ADD;
		/* This step detects the end of the operation. */
		add_count(slot, add_step(slot, trigger, threshold, NULL, FI_OP_CNTR_ADD), 0, slot->done, 1);
		add_count(slot, add_step(slot, trigger, threshold, NULL, type), 1, op->completion->nic, op->step);
	}
}

static int queue_steps(struct tk_fabric *fabric, struct slot *slot)
{
	int status = fi_control(&fabric->domains->fid->fid, FI_QUEUE_WORK, &slot->steps[0]);
	if (status || slot->steps_count == 1)
		return status;
	if (fi_control(&fabric->domains->fid->fid, FI_QUEUE_WORK, &slot->steps[1])) {
		slot->cut = 1;
		slot->steps_count = 1;
		fabric->nic.room++;
	}
	return 0;
}

/* The NIC's counter follows the word only forwards: after a word that went back it would fire at once. */
static int waits_at_the_nic(const struct tk_operation *op)
{
	return !op->trigger->word || op->threshold > op->trigger->mirrored;
}

/* A transfer ends by adding one to a counter; it can't change a counter in another way. */
static int counts_as_a_nic_does(const struct tk_operation *op)
{
	if (!op->endpoint)
		return has_counter(op);
	return !has_counter(op) || (op->step == 1 && !(op->flags & TK_SET_COUNTER));
}

/* Whether the NIC can hold it. Not if its bytes must be checksummed, or gathered from pieces, which is done here, or if
 * it is a put by grant, which gets its slot when it fires. */
static int may_be_held(const struct tk_fabric *fabric, const struct work *work)
{
	const struct tk_operation *op = &work->op;
	return !op->sender && !op->pieces && (!(op->flags & TK_VERIFY_CRC) || !op->length) && op->threshold <= nic_value_max(&fabric->nic) &&
	       waits_at_the_nic(op) && counts_as_a_nic_does(op);
}

static int hand_one(struct tk_fabric *fabric, struct work *work)
{
	struct nic *nic = &fabric->nic;
	struct slot *slot = nic_take_slot(fabric);
	if (!slot)
		return -ENOSPC;
	slot->work = work;
	slot->endpoint = work->op.endpoint;
	make_steps(slot);
	nic->room -= slot->steps_count;
	int status = queue_steps(fabric, slot);
	work->slot = slot;
	work->state = WORK_HELD;
	work->op.trigger->held++;
	nic->held++;
	if (!status) {
		fabric->statistics.handed++;
		return 0;
	}
	nic_leave(fabric, slot, 0);
	work->state = WORK_WAITING;
	return -ENOSPC;
}

/* Whether its deadline has passed: the NIC would fire it anyway. */
static int is_over(const struct work *work)
{
	return work->op.deadline_ns && tk_now_ns() >= work->op.deadline_ns;
}

/* Hands over as many as fit, lowest threshold first. An operation that can't be held also keeps back those above it:
 * the agent will fire them all, and the order in which operations are queued is not the order in which they fire. */
int nic_hand_over(struct tk_fabric *fabric, struct tk_counter *counter)
{
	struct nic *nic = &fabric->nic;
	int busy = 0;
	if (nic->flushing || counter->is_behind || (nic->try_again_ns && fabric->now_ns < nic->try_again_ns))
		return 0;
	nic->try_again_ns = 0;
	while (counter->count && nic->room >= STEPS_MAX && may_be_held(fabric, counter->heap[0].work)) {
		struct work *work = next_waiting(fabric, counter);
		if (is_over(work)) {
			finish(fabric, work, -ETIMEDOUT);
			continue;
		}
		if (hand_one(fabric, work)) {
			nic->try_again_ns = tk_now_ns() + TRY_AGAIN_NS;
			int status = wait_for_counter(fabric, work);
			if (status)
				finish(fabric, work, status);
			break;
		}
		busy = 1;
	}
	return busy;
}
