/*
 * Finds out what a NIC with its own counters compares thresholds with: successes, as in the source of cxi, or successes
 * plus failures, as in fi_trigger(3).
 *
 * A step that doesn't fire can't be told from one that is late. So steps that must fire are timed beside it, on the
 * same counter: one before it, and the step itself afterwards.
 *
 * What always holds: failures are assumed to fire unless the step was given LATENESS_FACTOR times as long as those took.
 * So also if the NIC has no slot left, or a step is lost. Then nothing is handed over that would be wrong where failures
 * fire.
 */
#define _GNU_SOURCE
#include "nic.h"

#include <time.h>

#define POLL_NS 100000u
#define POLLS 100u	    /* for a step that may fire: 10 ms at least */
#define POLLS_STUCK 10000u /* for one that must; then it is lost */
#define LATENESS_FACTOR 16u

/* The number of polls until the counter has the value, or more than the maximum. They are counted, not timed: if this
 * machine stops for a while, so may the NIC. */
static unsigned polls_until(struct fid_cntr *counter, uint64_t value, unsigned polls_max)
{
	static const struct timespec pause = {.tv_nsec = POLL_NS};
	unsigned polls = 0;
	while (fi_cntr_read(counter) < value && polls++ < polls_max)
		nanosleep(&pause, NULL);
	return polls;
}

static int queue_step(struct tk_fabric *fabric, struct fid_cntr *counted, uint64_t threshold, struct fid_cntr *seen)
{
	struct fi_op_cntr count = {.cntr = seen, .value = 1};
	struct fi_deferred_work step = {.triggering_cntr = counted, .threshold = threshold,
					.op_type = FI_OP_CNTR_ADD, .op.cntr = &count};
	return fi_control(&fabric->domains->fid->fid, FI_QUEUE_WORK, &step);
}

/* One step waits for one success, a second for two. Does the second fire after a success and a failure? */
static int probe(struct tk_fabric *fabric, struct fid_cntr *counted, struct fid_cntr *seen)
{
	unsigned queued = 0, late = 0;
	while (queued < 2 && !queue_step(fabric, counted, queued + 1, seen))
		queued++;
	int fires = queued < 2; /* other processes have the slots */
	if (!fires) {
		fi_cntr_add(counted, 1);
		late = polls_until(seen, 1, POLLS_STUCK);
		fi_cntr_adderr(counted, 1);
		fires = polls_until(seen, 2, POLLS) <= POLLS;
	}
	fi_cntr_add(counted, 1);
	late += polls_until(seen, queued, POLLS_STUCK);
	if (late > POLLS_STUCK)
		fi_control(&fabric->domains->fid->fid, FI_FLUSH_WORK, NULL);
	return fires || late > POLLS / LATENESS_FACTOR;
}

int nic_failures_fire(struct tk_fabric *fabric)
{
	struct fid_cntr *counted = NULL, *seen = NULL;
	int fires = nic_counter(fabric, &counted) || nic_counter(fabric, &seen) || probe(fabric, counted, seen);
	nic_counter_close(counted);
	nic_counter_close(seen);
	return fires;
}
