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
void turn_let_go(struct turn *turn); /* frees it with its last user */

/* The progress thread's. */
void turn_end(struct turn *turn);    /* there are no more rounds; from now on no caller gets one */
void turn_sleeps(struct turn *turn); /* a caller may take the turn while the thread sleeps ... */
void turn_wakes(struct turn *turn);  /* ... and has it then until it gives it back */
void turn_pass(struct turn *turn);   /* between rounds: waits for as long as callers run them */

/* Any thread's. */
void turn_rouse(struct turn *turn);  /* what the caller waits for may have come from elsewhere */
void turn_waits(struct turn *turn, int more); /* counts callers that wait without running rounds */
/* Runs rounds, if the caller may, until `has_come` says so, or until `until_ns`. */
void turn_run(struct turn *turn, int (*has_come)(void *), void *argument, uint64_t until_ns);

#endif
