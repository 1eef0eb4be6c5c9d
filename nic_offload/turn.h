/*
 * Whose turn it is to run a fabric's rounds: its progress thread's, or that of a caller that waits for a group.
 */
#ifndef TRIGGERKV_TURN_H
#define TRIGGERKV_TURN_H

#include <stdint.h>

struct tk_fabric;
struct turn;

struct turn *turn_open(struct tk_fabric *fabric);
void turn_use(struct turn *turn);
void turn_release(struct turn *turn); /* frees it with its last user */

/* On the progress thread. */
void turn_end(struct turn *turn);    /* no more rounds: from now on no caller gets the turn */
void turn_sleeps(struct turn *turn); /* a caller may take the turn while the thread sleeps ... */
void turn_wakes(struct turn *turn);  /* ... and a caller that took it keeps it until it leaves */
void turn_pass(struct turn *turn);   /* between rounds: lets waiting callers run rounds, until they have left */

/* On any thread. */
int turn_is_ours(const struct turn *turn); /* false in a child after fork, where the threads that hold locks are missing */
void turn_rouse(struct turn *turn);  /* an awaited event may have come from another thread */
void turn_waits(struct turn *turn, int more); /* counts callers that wait without running rounds */
/* Runs rounds, if the caller may, until `has_come` returns true or until `until_ns`. */
void turn_run(struct turn *turn, int (*has_come)(void *), void *argument, uint64_t until_ns);
/* Runs a round, if the caller may at once, for what callers have posted or fired since the last one. */
void turn_step(struct turn *turn);

#endif
