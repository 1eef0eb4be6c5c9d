/*
 * The rounds of a fabric, and the progress thread, which runs them whenever no caller does (turn.c).
 *
 * One round: take the inbox, drain completions, check flag words and watched words, post what is ready, compute a
 * bounded piece of CRC, post what that made ready, report. After a round that found nothing to do, the thread that ran it idles (idle.c).
 */
#define _GNU_SOURCE
#include "progress.h"
#include "turn.h"

#include <sys/prctl.h>

/* Returns -1 when the fabric is being closed, or was given up because of a command that its caller counts as lost. */
static int run_round(struct tk_fabric *fabric)
{
	fabric->now_ns = tk_now_ns();
	int busy = run_put_off(fabric), taken = take_inbox(fabric);
	if (taken < 0)
		return -1;
	busy |= taken;
	int moved = fabric->wire_is_quiet ? 0 : progress_wire(fabric);
	fabric->wire_is_quiet = 0;
	if (__atomic_load_n(&fabric->stuck, __ATOMIC_ACQUIRE))
		return -1;
	moved |= poll_landings(fabric);
	moved |= poll_receivers(fabric);
	moved |= poll_lanes(fabric);
	moved |= poll_readers(fabric);
	moved |= poll_shared_reads(fabric);
	moved |= poll_acks(fabric);
	if (moved && fabric->overslept)
		rest_overslept(fabric);
	fabric->overslept = 0;
	busy |= moved;
	busy |= nic_poll(fabric);
	busy |= poll_counters(fabric);
	busy |= poll_senders(fabric);
	busy |= poll_callers(fabric);
	busy |= post_ready(fabric);
	if (make_checksums(fabric))
		busy |= post_ready(fabric) | 1; /* what was ready before them was not to wait for them */
	ring_doorbells(fabric);
	poll_desks(fabric);
	poll_cold(fabric);
	report_over(fabric);
	busy |= expire(fabric);
	publish_soon(fabric);
	give_back_finished(fabric);
	free_closed_counters(fabric);
	fabric->statistics.loops++;
	return busy;
}

static void rest_if_idle(struct tk_fabric *fabric, int busy)
{
	if (busy || rest(fabric, fabric->now_ns - fabric->busy_ns))
		fabric->busy_ns = tk_now_ns();
}

int callers_may_run(const struct tk_fabric *fabric)
{
	return fabric_is_ours(fabric) && !__atomic_load_n(&fabric->is_serving, __ATOMIC_RELAXED) && !fabric->nic.used;
}

void rounds_begin(struct tk_fabric *fabric, uint64_t until_ns)
{
	stop_sleeping(fabric);
	fabric->statistics.turns++;
	fabric->caller_runs = 1;
	fabric->rest_until_ns = until_ns;
	fabric->busy_ns = tk_now_ns();
}

int rounds_go_on(struct tk_fabric *fabric)
{
	int busy = run_round(fabric);
	if (busy < 0 || fabric->is_recalled || fabric->now_ns >= fabric->rest_until_ns)
		return 0;
	rest_if_idle(fabric, busy);
	return 1;
}

int rounds_end(struct tk_fabric *fabric)
{
	fabric->caller_runs = 0;
	if (fabric->is_recalled) /* so that the thread finds it too */
		__atomic_store_n(&fabric->posted_something, 1, __ATOMIC_SEQ_CST);
	return fabric->is_recalled;
}

void *core_progress(void *argument)
{
	struct tk_fabric *fabric = argument;
	prctl(PR_SET_TIMERSLACK, 1000UL); /* so that naps are not extended */
	fabric->busy_ns = tk_now_ns();
	for (int busy; (busy = run_round(fabric)) >= 0;) {
		rest_if_idle(fabric, busy);
		turn_pass(fabric->turn);
	}
	nic_flush_at_last(fabric);
	for (struct tk_endpoint *endpoint = fabric->endpoints; endpoint; endpoint = endpoint->next)
		if (close_endpoint(fabric, endpoint) == TK_UNFLUSHED)
			fabric->end_status = TK_UNFLUSHED;
	refuse_put_off(fabric);
	lanes_end(fabric);
	readers_end(fabric);
	groups_end(fabric);
	turn_end(fabric->turn);
	pthread_mutex_lock(&fabric->inbox_lock);
	fabric->ended = 1;
	pthread_cond_broadcast(&fabric->command_done);
	pthread_mutex_unlock(&fabric->inbox_lock);
	return NULL;
}
