/*
 * Shared by the files about libfabric's deferred work, nic.c (slots, firing, taking back) and nic_submit.c (handing
 * operations to the NIC), and by other readers of slots.
 */
#ifndef TRIGGERKV_NIC_H
#define TRIGGERKV_NIC_H

#include "progress.h"

static inline int has_bytes(const struct tk_operation *op)
{
	return op->length > 0;
}

static inline int has_flag(const struct tk_operation *op)
{
	return !!(op->flags & TK_FLAG_PUT);
}

/* Whether the NIC itself moves the counter that the operation is to move. A transfer may fail, and operations that wait
 * for its counter must not fire then: where failures fire too, we move the counter once the transfer has succeeded. */
static inline int has_counter(const struct tk_operation *op)
{
	const struct tk_counter *counter = op->completion;
	return counter && !counter->word && !(op->endpoint && counter->fabric->nic.failures_fire);
}

/* The counter that the last step moves. */
static inline struct fid_cntr *moved_at_last(const struct slot *slot)
{
	const struct tk_operation *op = &slot->work->op;
	return op->endpoint && has_counter(op) ? op->completion->nic : slot->done;
}

uint64_t nic_value_max(const struct nic *nic);
void nic_counter_close(struct fid_cntr *counter); /* or NULL */
int nic_failures_fire(struct tk_fabric *fabric);
struct slot *nic_take_slot(struct tk_fabric *fabric);
int nic_renew_moved(struct tk_fabric *fabric, struct slot *slot);

#endif
