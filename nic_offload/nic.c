/*
 * libfabric's deferred work: operations that the NIC holds and fires by itself.
 *
 * An operation becomes one or two steps at the NIC: its bytes wait for the operation's own counter, its flag waits
 * for a counter that moves when the bytes have been delivered, and the last of them moves the operation's completion
 * counter. The first step is queued first. If the NIC has no room for the second, or must not have it, the operation is
 * `cut`: the agent does the second step once the first is done.
 *
 * What always holds: an operation is either in our own queue or at the NIC, never in both. A slot at the NIC is reused
 * only when nothing unfinished can refer to it, and counts as lost until then. Operations for which the NIC has no room
 * are fired by the agent. No operation waits at a NIC for a counter that a failed transfer could bring to its
 * threshold: fi_trigger(3) compares thresholds with successes plus failures, the source of cxi with successes. Each NIC
 * is probed when it is opened (nic_probe.c); if the result is unclear it counts as the first kind.
 *
 * There are two kinds of NIC. `sockets` moves none of our counters: they are words, and the NIC's counter is made to
 * follow the word here, so it is known which operations have fired; an unfired operation is taken back by closing its
 * counter. `sockets` reports no completions, loses operations whose peer is dead, and stalls with a full ring until
 * it is kicked. `cxi` moves counters itself, and a GPU moves them through doorbells; completions show what has fired,
 * and unfired operations are taken back by a flush of the whole domain (nic_flush.c).
 */
#define _GNU_SOURCE
#include "cxi.h"
#include "nic.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SOCKETS_DEPTH 512u /* limit of steps: the ring has about a thousand, and queueing slows down as they grow */
#define SOCKETS_VALUE_MAX ((uint64_t)INT32_MAX) /* its counters are 32-bit, and signed */
#define CXI_VALUE_MAX (((uint64_t)1 << 48) - 1)
#define KICK_NS 1000000u

uint64_t nic_value_max(const struct nic *nic)
{
	return nic->own_counters ? CXI_VALUE_MAX : SOCKETS_VALUE_MAX;
}

static uint32_t depth_of_cxi(struct tk_fabric *fabric)
{
	struct cxi_domain_ops *ops = NULL;
	size_t depth = CXI_DEPTH;
	if (!fi_open_ops(&fabric->domains->fid->fid, CXI_DOMAIN_OPS, 0, (void **)&ops, NULL))
		ops->get_dwq_depth(&fabric->domains->fid->fid, &depth);
	return (uint32_t)depth;
}

void nic_counter_close(struct fid_cntr *counter)
{
	if (counter)
		fi_close(&counter->fid);
}

int nic_counter(struct tk_fabric *fabric, struct fid_cntr **out)
{
	struct fi_cntr_attr attr = {.events = FI_CNTR_EVENTS_COMP, .wait_obj = FI_WAIT_NONE};
	return fi_cntr_open(fabric->domains->fid, &attr, out, NULL);
}

int nic_open(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	nic->own_counters = !strcmp(fabric->info->fabric_attr->prov_name, "cxi");
	nic->silent = !nic->own_counters;
	nic->depth = nic->room = nic->own_counters ? depth_of_cxi(fabric) : SOCKETS_DEPTH;
	nic->slots_count = nic->depth;
	nic->slots = calloc(nic->slots_count, sizeof *nic->slots);
	if (!nic->slots)
		return -ENOMEM;
	nic->used = 1;
	nic->failures_fire = nic->own_counters && nic_failures_fire(fabric);
	return 0;
}

void nic_close(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		nic_counter_close(nic->slots[i].moved);
		nic_counter_close(nic->slots[i].done);
	}
}

/* --- slots */

static int open_slot(struct tk_fabric *fabric, struct slot *slot)
{
	int status = nic_counter(fabric, &slot->moved);
	if (!status && (status = nic_counter(fabric, &slot->done))) {
		nic_counter_close(slot->moved);
		slot->moved = NULL;
	}
	return status;
}

struct slot *nic_take_slot(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	struct slot *slot = nic->free;
	if (slot) {
		nic->free = slot->next;
		return slot;
	}
	if (nic->slots_opened == nic->slots_count || open_slot(fabric, &nic->slots[nic->slots_opened]))
		return NULL;
	return &nic->slots[nic->slots_opened++];
}

static void free_slot(struct tk_fabric *fabric, struct slot *slot)
{
	slot->work = NULL;
	slot->fired = slot->lost = 0;
	slot->next = fabric->nic.free;
	fabric->nic.free = slot;
	fabric->nic.room += slot->steps_count;
}

/* The flag of an operation that is over may still wait for the slot's first counter, which will therefore never be
 * moved again: nothing unfinished moves it, and it can be replaced. */
int nic_renew_moved(struct tk_fabric *fabric, struct slot *slot)
{
	struct fid_cntr *fresh;
	int status = nic_counter(fabric, &fresh);
	if (status)
		return status;
	nic_counter_close(slot->moved);
	slot->moved = fresh;
	slot->moved_before = 0;
	return 0;
}

/* The operation leaves the NIC, and its slot becomes lost or free. */
void nic_leave(struct tk_fabric *fabric, struct slot *slot, int lost)
{
	struct work *work = slot->work;
	struct nic *nic = &fabric->nic;
	nic->held--;
	if (slot->fired) {
		nic->fired--;
		fabric->in_flight--;
		work->op.endpoint->in_flight--;
	} else {
		work->op.trigger->held--;
	}
	work->slot = NULL;
	slot->cut = slot->is_reported = 0;
	if (!lost) {
		free_slot(fabric, slot);
		return;
	}
	slot->work = NULL;
	slot->lost = 1;
	nic->lost++;
	/* the NIC's steps still refer to these */
	slot->trigger = work->op.trigger;
	slot->completion = has_counter(&work->op) ? work->op.completion : NULL;
	__atomic_add_fetch(&slot->trigger->uses, 1, __ATOMIC_RELAXED);
	if (slot->completion)
		__atomic_add_fetch(&slot->completion->uses, 1, __ATOMIC_RELAXED);
}

void nic_find_again(struct tk_fabric *fabric, struct slot *slot)
{
	__atomic_sub_fetch(&slot->trigger->uses, 1, __ATOMIC_RELEASE);
	if (slot->completion)
		__atomic_sub_fetch(&slot->completion->uses, 1, __ATOMIC_RELEASE);
	fabric->nic.lost--;
	free_slot(fabric, slot);
}

void nic_settle(struct tk_fabric *fabric, struct slot *slot)
{
	struct work *work = slot->work;
	if (moved_at_last(slot) == slot->done)
		slot->done_before++;
	if (has_bytes(&work->op) && has_flag(&work->op))
		slot->moved_before++;
	work->counted = has_counter(&work->op) && !slot->cut;
	if (!slot->fired)
		fabric->statistics.fired++;
	nic_leave(fabric, slot, 0);
	finish(fabric, work, 0);
}

static void settle_failed(struct tk_fabric *fabric, struct slot *slot, int status)
{
	struct work *work = slot->work;
	/* Chained steps are still waiting, and are dropped with the counter that they wait for. */
	int waiting = slot->steps_count > 1 && !slot->cut;
	if (!slot->fired)
		fabric->statistics.fired++;
	nic_leave(fabric, slot, waiting && (fabric->nic.own_counters || nic_renew_moved(fabric, slot)));
	finish(fabric, work, status);
}

/* --- firing, completion */

void nic_fired(struct tk_fabric *fabric, struct slot *slot, uint64_t now_ns)
{
	struct work *work = slot->work;
	slot->fired = 1;
	fabric->nic.fired++;
	fabric->in_flight++;
	work->op.endpoint->in_flight++;
	work->op.trigger->held--;
	work->fired_ns = now_ns;
	fabric->statistics.fired++;
	if (work->op.group && work->op.trigger->word)
		group_fired(work->op.group, work->op.row, now_ns);
	if (work->op.flags & TK_REPORT_FIRED && work->op.trigger->word)
		report(fabric, TK_FIRED, work->op.tag, now_ns, 0, now_ns);
}

/* Moves the NIC's counter to the value of the word. If the NIC doesn't move counters itself, this fires operations. */
void nic_follow_word(struct tk_fabric *fabric, struct tk_counter *counter, uint64_t value)
{
	struct nic *nic = &fabric->nic;
	if (value > nic_value_max(nic))
		value = nic_value_max(nic);
	if (value <= counter->mirrored || counter->is_behind)
		return;
	if (counter->held) {
		uint64_t now_ns = tk_now_ns();
		for (uint32_t i = 0; i < nic->slots_opened; i++) {
			struct slot *slot = &nic->slots[i];
			if (slot->work && !slot->fired && slot->work->op.trigger == counter &&
			    slot->work->op.threshold <= value && slot->work->op.endpoint)
				nic_fired(fabric, slot, now_ns);
		}
	}
	fi_cntr_add(counter->nic, value - counter->mirrored);
	counter->mirrored = value;
}

static struct slot *slot_of(struct nic *nic, const void *context)
{
	uintptr_t at = (uintptr_t)context - (uintptr_t)nic->slots;
	if (!nic->slots || (uintptr_t)context < (uintptr_t)nic->slots || at >= nic->slots_count * sizeof *nic->slots)
		return NULL;
	return &nic->slots[at / sizeof *nic->slots];
}

/* Whether the completion is of one of the NIC's steps. */
int nic_completed(struct tk_fabric *fabric, void *context, int status)
{
	struct slot *slot = slot_of(&fabric->nic, context);
	if (!slot)
		return 0;
	if (!slot->work)
		return 1; /* the slot is lost, and its operation has ended */
	int transfers = has_bytes(&slot->work->op) + has_flag(&slot->work->op);
	if (status)
		settle_failed(fabric, slot, status);
	else if (slot->cut && slot->is_reported)
		nic_put_flag(fabric, slot, 0);
	else if (context == &slot->steps[transfers - 1].context)
		nic_settle(fabric, slot);
	return 1;
}

/* After a full ring, operations that should have fired wait for the next movement of their counter. */
static void kick(struct slot *slot)
{
	fi_cntr_add(slot->work->op.trigger->nic, 0);
	fi_cntr_add(slot->moved, 0);
}

/* Finds completions that no queue reports. */
int nic_poll(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	if (nic->flushing || (!nic->held && !nic->lost))
		return 0;
	uint64_t now_ns = fabric->now_ns;
	int busy = 0, kicking = nic->silent && nic->fired && now_ns - nic->kicked_ns > KICK_NS;
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		struct slot *slot = &nic->slots[i];
		if (!slot->work && !slot->lost)
			continue;
		if (slot->cut && !slot->is_reported && nic_follow_cut(fabric, slot)) {
			busy = 1;
			continue;
		}
		int transfers = slot->work && slot->work->op.endpoint;
		if (!nic->silent && (transfers || slot->lost))
			continue; /* the queue reports transfers, and only a flush frees lost slots */
		if (!slot->fired && !slot->lost && nic->silent)
			continue;
		if (fi_cntr_read(slot->done) > slot->done_before) {
			busy = 1;
			if (slot->work) {
				nic_settle(fabric, slot);
				continue;
			}
			slot->done_before++;
			if (!nic_renew_moved(fabric, slot))
				nic_find_again(fabric, slot);
		} else if (kicking && slot->work) {
			kick(slot);
		}
	}
	if (kicking)
		nic->kicked_ns = now_ns;
	return busy;
}

/* --- taking back */

void nic_taken_back(struct tk_fabric *fabric, struct slot *slot, int lost)
{
	struct work *work = slot->work;
	nic_leave(fabric, slot, lost);
	fabric->statistics.taken_back++;
	int status = wait_for_counter(fabric, work);
	if (status)
		finish(fabric, work, status);
}

/* Takes back all unfired operations that wait for this counter, by replacing it: an operation that waits for a closed
 * counter never fires. Only for a NIC that doesn't move counters itself. */
int nic_take_back(struct tk_fabric *fabric, struct tk_counter *counter)
{
	struct nic *nic = &fabric->nic;
	struct fid_cntr *fresh;
	int status = nic_counter(fabric, &fresh);
	if (status)
		return status;
	fi_cntr_set(fresh, counter->mirrored);
	nic_counter_close(counter->nic);
	counter->nic = fresh;
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		struct slot *slot = &nic->slots[i];
		if (!slot->work || slot->fired || slot->work->op.trigger != counter)
			continue;
		nic_taken_back(fabric, slot, slot->steps_count > 1 && nic_renew_moved(fabric, slot));
	}
	return 0;
}

/* Moves an operation into our own queue and removes it from there, if it has not fired. */
int nic_withdraw(struct tk_fabric *fabric, struct work *work)
{
	if (fabric->nic.own_counters || work->slot->fired)
		return 0;
	nic_take_back(fabric, work->op.trigger);
	if (work->state != WORK_WAITING)
		return 0;
	stop_waiting(fabric, work);
	return 1;
}

/* The work item is freed; the NIC's steps for it remain. */
void nic_give_up(struct tk_fabric *fabric, struct work *work)
{
	nic_leave(fabric, work->slot, 1);
}

int nic_is_tied_to(const struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	const struct nic *nic = &fabric->nic;
	for (uint32_t i = 0; i < nic->slots_opened; i++)
		if ((nic->slots[i].work || nic->slots[i].lost) && nic->slots[i].endpoint == endpoint)
			return 1;
	return 0;
}
