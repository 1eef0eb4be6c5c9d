/*
 * Deferred work: operations that wait for a counter's threshold, and fire without the application.
 *
 * What always holds: nothing fires before its counter reaches its threshold (counter_reached), nothing fires twice; a
 * slot is held from queueing until firing; all arguments are copied in the call. Operations that fire at the same time
 * have no order: the newest goes first, so that no caller relies on the opposite.
 */
#include "cassini.h"

#include <stdlib.h>
#include <time.h>

#define FLAGS_ALLOWED                                                                                                  \
	(FI_MORE | FI_COMPLETION | FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE | FI_TRANSMIT_COMPLETE | FI_CXI_CNTR_WB)
#define FLUSH_MS 1000

static unsigned slots_taken; /* of all domains of the process: the service is one */

static int take_slots(unsigned count)
{
	static int said;
	unsigned others = (unsigned)setting("SOFT_CASSINI_DEPTH_TAKEN", 0);
	if (__atomic_add_fetch(&slots_taken, count, __ATOMIC_RELAXED) + others <= TRIGGERS_MAX)
		return 0;
	__atomic_sub_fetch(&slots_taken, count, __ATOMIC_RELAXED);
	if (!setting("FI_CXI_ENABLE_TRIG_OP_LIMIT", 0) && !__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
		say(0, "there is more deferred work than slots; without FI_CXI_ENABLE_TRIG_OP_LIMIT a NIC takes it and "
		       "what happens then is not known.");
	return -FI_ENOSPC;
}

static void give_slots(unsigned count)
{
	__atomic_sub_fetch(&slots_taken, count, __ATOMIC_RELAXED);
}

static void trigger_add(struct counter *on, struct trigger *trigger)
{
	trigger->next = on->triggers;
	on->triggers = trigger;
	if (trigger->fires != FIRES_WRITE_BACK)
		on->uses++;
	if (trigger->target)
		trigger->target->uses++;
	if (trigger->op)
		trigger->op->endpoint->triggered++;
	/* If it is reached already, it fires with the next call of work_fire. */
	counter_look(on);
}

/* The trigger has left its list; its operation is the caller's. */
static void trigger_free(struct counter *on, struct trigger *trigger)
{
	if (trigger->fires != FIRES_WRITE_BACK)
		on->uses--;
	if (trigger->target)
		trigger->target->uses--;
	if (trigger->op)
		trigger->op->endpoint->triggered--;
	give_slots(1);
	free(trigger);
}

static void fire(struct counter *on, struct trigger *trigger)
{
	switch (trigger->fires) {
	case FIRES_OP:
		endpoint_start(trigger->op);
		break;
	case FIRES_ADD:
		counter_add(trigger->target, trigger->value);
		break;
	case FIRES_SET:
		counter_set(trigger->target, trigger->value);
		break;
	case FIRES_WRITE_BACK:
		counter_write_back(on);
		break;
	}
	trigger_free(on, trigger);
}

static int is_early(const struct domain *domain, const struct counter *counter)
{
	return domain->late_ns && now_ns() < counter->moved_ns + domain->late_ns && now_ns() < domain->late_until_ns;
}

/* An operation that fires may move counters, so this repeats until none has moved. It ends because each operation
 * leaves its list when it fires. */
void work_fire(struct domain *domain)
{
	struct counter *early = NULL;
	while (domain->moved) {
		struct counter *counter = domain->moved;
		domain->moved = counter->next_moved;
		if (is_early(domain, counter)) {
			counter->next_moved = early;
			early = counter;
			continue;
		}
		counter->moved = 0;
		for (struct trigger **at = &counter->triggers; *at;) {
			struct trigger *trigger = *at;
			if (counter_reached(counter) < trigger->threshold) {
				at = &trigger->next;
				continue;
			}
			*at = trigger->next;
			fire(counter, trigger);
		}
	}
	domain->moved = early;
}

static int queue_write_back(struct counter *counter, uint64_t threshold)
{
	struct trigger *trigger = calloc(1, sizeof *trigger);
	if (!trigger)
		return -FI_ENOMEM;
	trigger->fires = FIRES_WRITE_BACK;
	trigger->threshold = threshold;
	trigger_add(counter, trigger);
	return 0;
}

/* Hardware takes a slot without checking whether one is free. */
int work_wait_for(struct counter *counter, uint64_t threshold)
{
	if (take_slots(1))
		return say(-FI_EAGAIN, "fi_cntr_wait needs a trigger's slot, and none is free.");
	int status = queue_write_back(counter, threshold);
	if (status)
		give_slots(1);
	return status;
}

/* Its triggers are not examined any more. */
void work_forget_moved(struct counter *counter)
{
	struct counter **at = &counter->domain->moved;
	while (*at && *at != counter)
		at = &(*at)->next_moved;
	if (*at)
		*at = counter->next_moved;
	counter->moved = 0;
}

/* Remove the triggers of waits that timed out. */
void work_forget_waits(struct counter *counter)
{
	while (counter->triggers) {
		struct trigger *trigger = counter->triggers;
		counter->triggers = trigger->next;
		trigger_free(counter, trigger);
	}
}

static int queue_counter_op(struct domain *domain, const struct fi_deferred_work *work)
{
	const struct fi_op_cntr *op = work->op.cntr;
	struct counter *on = (struct counter *)work->triggering_cntr;
	if (!op || !op->cntr || work->completion_cntr)
		return -FI_EINVAL;
	struct counter *target = (struct counter *)op->cntr;
	if (target->domain != domain)
		return say(-FI_EINVAL, "deferred work names a counter of another domain.");
	if (op->value > FI_CXI_CNTR_SUCCESS_MAX)
		return say(-FI_EINVAL, "deferred work adds more to a counter, or sets it higher, than it can hold.");
	struct trigger *trigger = calloc(1, sizeof *trigger);
	if (!trigger)
		return -FI_ENOMEM;
	trigger->fires = work->op_type == FI_OP_CNTR_SET ? FIRES_SET : FIRES_ADD;
	trigger->threshold = work->threshold;
	trigger->target = target;
	trigger->value = op->value;
	trigger_add(on, trigger);
	return 0;
}

static int queue_rma(struct domain *domain, const struct fi_deferred_work *work)
{
	const struct fi_op_rma *rma = work->op.rma;
	const struct fi_msg_rma *message = &rma->msg;
	struct endpoint *endpoint = (struct endpoint *)rma->ep;
	struct counter *on = (struct counter *)work->triggering_cntr;
	if (!message->msg_iov || message->iov_count > 1 || !message->rma_iov || message->rma_iov_count != 1)
		return -FI_EINVAL;
	if (endpoint->domain != domain || !endpoint->enabled)
		return say(-FI_EINVAL, "deferred work names an endpoint of another domain, or one not enabled.");
	struct rma wanted = {
		.kind = work->op_type == FI_OP_READ ? OP_READ : OP_WRITE,
		.buffer = message->iov_count ? message->msg_iov[0].iov_base : NULL,
		.length = message->iov_count ? message->msg_iov[0].iov_len : 0,
		.peer = message->addr,
		.offset = message->rma_iov[0].addr,
		.key = message->rma_iov[0].key,
		.flags = rma->flags & ~FI_MORE,
		.context = message->context,
		.deferred = 1,
		.counter = (struct counter *)work->completion_cntr,
	};
	struct op *op;
	int status = rma_prepare(endpoint, &wanted, &op);
	if (status)
		return status;
	struct trigger *trigger = calloc(1, sizeof *trigger);
	if (!trigger || rma->flags & ~FLAGS_ALLOWED) {
		status = trigger ? -FI_EINVAL : -FI_ENOMEM;
		free(trigger);
		op_free(op);
		return status;
	}
	trigger->fires = FIRES_OP;
	trigger->threshold = work->threshold;
	trigger->op = op;
	trigger_add(on, trigger);
	return 0;
}

static int verify(const struct domain *domain, const struct fi_deferred_work *work)
{
	if (!work->triggering_cntr)
		return -FI_EINVAL;
	switch (work->op_type) {
	case FI_OP_READ:
	case FI_OP_WRITE:
		if (!work->op.rma || !work->op.rma->ep)
			return say(-FI_EINVAL, "deferred work names no operation or no endpoint.");
		break;
	case FI_OP_CNTR_SET:
	case FI_OP_CNTR_ADD:
		break;
	case FI_OP_SEND:
	case FI_OP_RECV:
	case FI_OP_TSEND:
	case FI_OP_TRECV:
	case FI_OP_ATOMIC:
	case FI_OP_FETCH_ATOMIC:
	case FI_OP_COMPARE_ATOMIC:
		return say(-FI_ENOSYS, "cxi defers messages and atomics too, the stand-in doesn't.");
	default:
		return -FI_EINVAL;
	}
	const struct counter *on = (const struct counter *)work->triggering_cntr;
	const struct counter *end = (const struct counter *)work->completion_cntr;
	if (on->domain != domain || (end && end->domain != domain))
		return say(-FI_EINVAL, "deferred work names a counter of another domain.");
	if (work->threshold > FI_CXI_CNTR_SUCCESS_MAX)
		return say(-FI_EINVAL, "deferred work waits for more than a counter can hold.");
	return 0;
}

int work_queue(struct domain *domain, struct fi_deferred_work *work)
{
	int status = verify(domain, work);
	if (status)
		return status;
	int is_rma = work->op_type == FI_OP_READ || work->op_type == FI_OP_WRITE;
	int writes_back = is_rma && work->op.rma->flags & FI_CXI_CNTR_WB;
	unsigned slots = writes_back ? 2 : 1;
	pthread_mutex_lock(&domain->commands);
	domain_lock(domain);
	status = take_slots(slots);
	if (!status) {
		status = is_rma ? queue_rma(domain, work) : queue_counter_op(domain, work);
		if (status)
			give_slots(slots);
		/* The *triggering* counter is written back, at one more than the threshold, as in the provider. */
		else if (writes_back && queue_write_back((struct counter *)work->triggering_cntr, work->threshold + 1))
			give_up("there is no memory for a write-back.");
		work_fire(domain);
	}
	domain_unlock(domain);
	pthread_mutex_unlock(&domain->commands);
	return status;
}

static void drop_all(struct domain *domain)
{
	for (struct counter *counter = domain->counters; counter; counter = counter->next) {
		while (counter->triggers) {
			struct trigger *trigger = counter->triggers;
			struct op *op = trigger->op;
			counter->triggers = trigger->next;
			trigger_free(counter, trigger);
			if (op)
				op_free(op);
		}
	}
}

/* Drops all of the domain's unfired work, without an entry or a count. It takes a second, and other commands wait for
 * it: queueing work, and reading a counter. The first ones may be set to fail, and then drop nothing. */
int work_flush(struct domain *domain)
{
	long flush_ms = setting("SOFT_CASSINI_FLUSH_MS", FLUSH_MS);
	struct timespec pause = {.tv_sec = flush_ms / 1000, .tv_nsec = flush_ms % 1000 * 1000000};
	pthread_mutex_lock(&domain->commands);
	hold_flush();
	domain_lock(domain);
	int fails = domain->flushes_to_fail > 0;
	domain->flushes_to_fail -= fails;
	if (!fails)
		drop_all(domain);
	domain_unlock(domain);
	nanosleep(&pause, NULL);
	domain_lock(domain);
	for (struct endpoint *endpoint = domain->endpoints; endpoint; endpoint = endpoint->next)
		endpoint_progress(endpoint);
	domain_unlock(domain);
	pthread_mutex_unlock(&domain->commands);
	return fails ? -FI_EIO : 0;
}
