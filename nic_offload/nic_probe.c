/*
 * Finds out what a NIC with its own counters compares thresholds with: successes, as in the source of cxi, or successes
 * plus failures, as in fi_trigger(3).
 *
 * What always holds: if the probe has no result, or the NIC has no slot left for it, failures are assumed to fire: then
 * nothing is handed over that would be wrong there.
 */
#define _GNU_SOURCE
#include "nic.h"

#define PROBE_NS 5000000u	   /* a step that should fire does so within this time */
#define PROBE_STUCK_NS 1000000000u /* time after which a step that must fire is considered lost */

static int wait_for(struct fid_cntr *counter, uint64_t value, uint64_t timeout_ns)
{
	uint64_t until_ns = tk_now_ns() + timeout_ns;
	while (fi_cntr_read(counter) < value)
		if (tk_now_ns() >= until_ns)
			return 0;
	return 1;
}

/* A step with a threshold of two, and a counter with one success and one failure: does the step fire? */
static int step_fires(struct tk_fabric *fabric, struct fid_cntr *counted, struct fid_cntr *seen)
{
	struct fi_op_cntr count = {.cntr = seen, .value = 1};
	struct fi_deferred_work step = {.triggering_cntr = counted, .threshold = 2, .op_type = FI_OP_CNTR_ADD,
					.op.cntr = &count};
	if (fi_control(&fabric->domains->fid->fid, FI_QUEUE_WORK, &step))
		return 1; /* other processes have all slots */
	fi_cntr_adderr(counted, 1);
	fi_cntr_add(counted, 1);
	if (wait_for(seen, 1, PROBE_NS))
		return 1;
	fi_cntr_add(counted, 1);
	int fires = !wait_for(seen, 1, PROBE_STUCK_NS);
	if (fires)
		fi_control(&fabric->domains->fid->fid, FI_FLUSH_WORK, NULL);
	return fires;
}

int nic_failures_fire(struct tk_fabric *fabric)
{
	struct fid_cntr *counted = NULL, *seen = NULL;
	int fires = nic_counter(fabric, &counted) || nic_counter(fabric, &seen) || step_fires(fabric, counted, seen);
	nic_counter_close(counted);
	nic_counter_close(seen);
	return fires;
}
