/*
 * Takes operations back from a NIC with its own counters (cxi), by a flush of its whole domain: everything that has not
 * fired is dropped without a report; what has fired continues for as long as its peer lets it.
 *
 * What always holds: an operation that is known to have fired is not taken back, so it is not sent twice. Operations
 * that come back wait in our own queue, and are handed over again or cancelled there. If the bytes of an operation
 * were under way, the flush dropped its flag, and the agent puts it once the bytes have arrived.
 *
 * The flush takes a second, and a separate thread waits for it. Meanwhile nothing is handed over, and no counter of the
 * NIC is read or set, because that would have to wait for the flush; everything else goes on. Operations that wait for a
 * word are taken back before the flush begins, and the agent fires them: only we move the NIC's counter for a word, so
 * none of them can have fired, and none can until the flush has dropped it, because the counter stands still until then.
 * Operations that wait for a counter without a word make no progress until the flush ends. Commands that need it are
 * postponed until then (core.c).
 *
 * If a flush fails, the NIC has all that it had, and may fire what waits for a counter without a word. So no endpoint
 * that its steps refer to is closed, and no memory of the fabric is freed (TK_UNFLUSHED).
 *
 * After a flush nothing is handed over for REST_FACTOR times as long as it took (but for a short one), and the agent fires
 * in the NIC's place. So endpoints that are closed one after another cost one flush, and the NIC stands still a tenth of
 * the time at most.
 *
 * What can't be known: whether an operation whose counter reached its threshold during the flush had fired before it.
 * It had most of a second to complete. If it did not, it has not gone out, unless something else that went to the same
 * peer is stuck as well.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>

#define SHORT_NS 100000000u
#define REST_FACTOR 9u

static int is_reached(const struct slot *slot)
{
	const struct tk_operation *op = &slot->work->op;
	return fi_cntr_read(op->trigger->nic) >= op->threshold;
}

static int is_pair(const struct slot *slot)
{
	return slot->work->op.length && slot->work->op.flags & TK_FLAG_PUT;
}

static int have_moved(const struct slot *slot)
{
	return is_pair(slot) && fi_cntr_read(slot->moved) > slot->moved_before;
}

/* From here on the agent puts the flag: the NIC had no flag, or has dropped it, which is certain only later. */
void nic_put_flag(struct tk_fabric *fabric, struct slot *slot, int lost)
{
	struct work *work = slot->work;
	if (!slot->fired)
		fabric->statistics.fired++;
	slot->moved_before++;
	nic_leave(fabric, slot, lost);
	get_ready(fabric, work, WORK_FLAG_READY);
}

/* Whether the bytes of an operation whose flag is not at the NIC have arrived. */
int nic_follow_cut(struct tk_fabric *fabric, struct slot *slot)
{
	if (!have_moved(slot))
		return 0;
	nic_put_flag(fabric, slot, 0);
	return 1;
}

static void goes_on(struct tk_fabric *fabric, struct slot *slot, int cut)
{
	slot->cut = cut;
	if (!slot->fired)
		nic_fired(fabric, slot, tk_now_ns());
}

/* Whether an operation to the same peer that fired before the flush has not completed yet. */
static int is_stuck(const struct nic *nic, const struct slot *slot)
{
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		const struct slot *other = &nic->slots[i];
		if (other->work && other->reached_before && other->work->op.endpoint == slot->work->op.endpoint &&
		    other->work->op.peer == slot->work->op.peer)
			return 1;
	}
	return 0;
}

/* The NIC had only its bytes. If they have fired, the operation continues as before. */
static void settle_cut(struct tk_fabric *fabric, struct slot *slot)
{
	if (!slot->is_reported && have_moved(slot))
		nic_put_flag(fabric, slot, 0);
	else if (slot->reached_before || have_moved(slot) || (is_reached(slot) && is_stuck(&fabric->nic, slot)))
		goes_on(fabric, slot, 1);
	else if (!slot->fired)
		nic_taken_back(fabric, slot, is_reached(slot));
}

static void settle_flushed(struct tk_fabric *fabric, struct slot *slot)
{
	if (slot->lost) {
		slot->trigger->is_behind = 0;
		slot->moved_before = fi_cntr_read(slot->moved);
		slot->done_before = fi_cntr_read(slot->done);
		nic_find_again(fabric, slot);
	} else if (!slot->work->op.endpoint) {
		if (fi_cntr_read(slot->done) > slot->done_before)
			nic_settle(fabric, slot);
		else
			nic_taken_back(fabric, slot, 0);
	} else if (slot->cut) {
		settle_cut(fabric, slot);
	} else if (slot->moved_by_then) {
		goes_on(fabric, slot, 0);
	} else if (have_moved(slot)) {
		nic_put_flag(fabric, slot, 1);
	} else if (slot->reached_before || slot->fired || (is_reached(slot) && is_stuck(&fabric->nic, slot))) {
		goes_on(fabric, slot, is_pair(slot));
	} else {
		nic_taken_back(fabric, slot, is_reached(slot));
	}
}

static void settle_all(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	while (drain_completions(fabric))
		;
	for (uint32_t i = 0; i < nic->slots_opened; i++)
		if (nic->slots[i].work || nic->slots[i].lost)
			settle_flushed(fabric, &nic->slots[i]);
	uint64_t now_ns = tk_now_ns(), took_ns = now_ns - nic->flush_began_ns;
	nic->try_again_ns = took_ns < SHORT_NS ? 0 : now_ns + REST_FACTOR * took_ns;
}

static void look_before(struct nic *nic)
{
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		struct slot *slot = &nic->slots[i];
		slot->moved_by_then = slot->work && have_moved(slot);
		slot->reached_before = slot->work && is_reached(slot);
	}
}

/* The steps stay at the NIC until a flush has succeeded. Until then the counter that they wait for must not move. */
static void take_back_early(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	for (uint32_t i = 0; i < nic->slots_opened; i++) {
		struct slot *slot = &nic->slots[i];
		if (!slot->work || slot->fired)
			continue;
		struct tk_counter *trigger = slot->work->op.trigger;
		if (!trigger->word || slot->work->op.threshold <= trigger->mirrored)
			continue;
		trigger->is_behind = 1;
		nic_taken_back(fabric, slot, 1);
	}
}

static void flush_now(struct tk_fabric *fabric)
{
	int status = fi_control(&fabric->domains->fid->fid, FI_FLUSH_WORK, NULL);
	fabric->nic.flush_status = status ? TK_UNFLUSHED : 0;
}

static void *flush(void *argument)
{
	struct tk_fabric *fabric = argument;
	flush_now(fabric);
	__atomic_store_n(&fabric->nic.flushed, 1, __ATOMIC_RELEASE);
	fabric_wake(fabric);
	return NULL;
}

static void end_flush(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	pthread_join(nic->flusher, NULL);
	nic->flushing = 0;
	if (!nic->flush_status)
		settle_all(fabric);
}

int nic_flush(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	if (nic->just_flushed)
		return nic->flush_status;
	if (nic->flushing)
		return NOT_YET;
	take_back_early(fabric);
	look_before(nic);
	nic->flushed = 0;
	nic->flush_began_ns = tk_now_ns();
	nic->flushing = !pthread_create(&nic->flusher, NULL, flush, fabric);
	if (nic->flushing)
		return NOT_YET;
	flush_now(fabric);
	if (!nic->flush_status)
		settle_all(fabric);
	return nic->flush_status;
}

int nic_end_flush(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	if (!nic->flushing || !__atomic_load_n(&nic->flushed, __ATOMIC_ACQUIRE))
		return 0;
	end_flush(fabric);
	return 1;
}

void nic_flush_at_last(struct tk_fabric *fabric)
{
	struct nic *nic = &fabric->nic;
	if (nic->flushing || (nic->own_counters && (nic->held || nic->lost)))
		nic_flush(fabric);
	if (nic->flushing)
		end_flush(fabric);
	nic->just_flushed = 1;
}

/* The counter has failed, and operations that wait for it fail as they come back: if a NIC kept them they might still
 * fire, since any process with the doorbell can move the counter. */
int nic_fail_waiting(struct tk_fabric *fabric, struct tk_counter *counter)
{
	if (!counter->held)
		return 0;
	return fabric->nic.own_counters ? nic_flush(fabric) : nic_take_back(fabric, counter);
}
