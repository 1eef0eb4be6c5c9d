/*
 * Caller-driven progress: whose turn it is to run a fabric's rounds, its progress thread's or a waiting caller's.
 *
 * A caller that waits for a group runs the rounds itself. Then a call involves no other thread of this process: the
 * caller sends it and takes its answer. With a thread in between, each call costs two more wake-ups, which take as long
 * as all the rest.
 *
 * A caller that waits for what has come already runs a single round, if there is something new to send: so puts that
 * are armed one after the other are under way while their caller is busy with the next.
 *
 * The progress thread runs the rounds whenever no caller does. When a caller takes the turn, the thread steps aside,
 * and comes back TURN_NS after the last caller has left: most callers call again at once. Stores to flag words, and
 * arrivals, in that time are seen then. If another caller waits, the thread comes back at once.
 *
 * What always holds: one thread at a time runs rounds. A caller waits neither for another caller's rounds nor beyond
 * its deadline. No rounds are run after the progress thread has ended. Only the progress thread runs the rounds of a
 * fabric that serves peers, or whose NIC moves counters, and only it executes commands: these may take long.
 */
#define _GNU_SOURCE
#include "turn.h"

#include "progress.h"

#include <stdlib.h>
#include <unistd.h>

#define TURN_NS 500000u
#define TAKE_NS 10000000u /* the longest time that a caller waits for the end of the progress thread's round */

enum { NOBODY, THREAD, CALLER };

struct turn {
	pthread_mutex_t lock; /* of all that follows, except atomic fields */
	pthread_cond_t left;   /* signalled by a caller that leaves; the progress thread waits for it */
	pthread_cond_t passed; /* signalled by the progress thread; callers wait for it */
	struct tk_fabric *fabric; /* NULL: no more rounds */
	pid_t pid;		  /* of the process that opened it */
	int has;
	int goes_on;  /* the progress thread runs the next round */
	int is_aside; /* it waits until a caller leaves */
	int polls;    /* it sleeps until something arrives, and no caller had the turn when it went to sleep */
	uint64_t taken, left_ns; /* how many times callers took the turn, and when it was last left */
	uint32_t wanted;  /* atomic: callers that wait until the turn is passed */
	uint32_t waiters; /* atomic: callers that wait without the turn */
	uint32_t users;	  /* atomic */
};

struct turn *turn_open(struct tk_fabric *fabric)
{
	struct turn *turn = calloc(1, sizeof *turn);
	if (!turn)
		return NULL;
	pthread_mutex_init(&turn->lock, NULL);
	init_condition(&turn->left);
	init_condition(&turn->passed);
	turn->fabric = fabric;
	turn->pid = getpid();
	turn->has = THREAD;
	turn->users = 1;
	return turn;
}

void turn_use(struct turn *turn)
{
	__atomic_add_fetch(&turn->users, 1, __ATOMIC_RELAXED);
}

void turn_release(struct turn *turn)
{
	if (__atomic_sub_fetch(&turn->users, 1, __ATOMIC_ACQ_REL))
		return;
	pthread_mutex_destroy(&turn->lock);
	pthread_cond_destroy(&turn->left);
	pthread_cond_destroy(&turn->passed);
	free(turn);
}

/* --- the progress thread */

/* Under the lock. Waits until no caller has the turn or is about to take it again. */
static void take_back(struct turn *turn)
{
	uint64_t taken = turn->taken - 1, now_ns;
	while (turn->has == CALLER || !turn->goes_on) {
		now_ns = tk_now_ns();
		if (turn->has == CALLER && turn->taken == taken) {
			turn->is_aside = 1;
			pthread_cond_wait(&turn->left, &turn->lock);
			turn->is_aside = 0;
		} else if (turn->has == CALLER || __atomic_load_n(&turn->wanted, __ATOMIC_RELAXED)) {
			taken = turn->taken;
			wait_for_condition(&turn->left, &turn->lock, now_ns + TURN_NS);
		} else if (now_ns < turn->left_ns + TURN_NS) {
			wait_for_condition(&turn->left, &turn->lock, turn->left_ns + TURN_NS);
		} else {
			break;
		}
	}
	turn->goes_on = 0;
	turn->has = THREAD;
}

/* Under the lock. */
static void pass(struct turn *turn)
{
	turn->has = NOBODY;
	if (__atomic_load_n(&turn->wanted, __ATOMIC_RELAXED))
		pthread_cond_broadcast(&turn->passed);
}

void turn_sleeps(struct turn *turn)
{
	pthread_mutex_lock(&turn->lock);
	pass(turn);
	turn->polls = 1;
	pthread_mutex_unlock(&turn->lock);
}

void turn_wakes(struct turn *turn)
{
	pthread_mutex_lock(&turn->lock);
	turn->polls = 0;
	take_back(turn);
	pthread_mutex_unlock(&turn->lock);
}

void turn_pass(struct turn *turn)
{
	if (!__atomic_load_n(&turn->wanted, __ATOMIC_RELAXED))
		return;
	pthread_mutex_lock(&turn->lock);
	pass(turn);
	take_back(turn);
	pthread_mutex_unlock(&turn->lock);
}

void turn_end(struct turn *turn)
{
	pthread_mutex_lock(&turn->lock);
	turn->fabric = NULL;
	pass(turn);
	pthread_mutex_unlock(&turn->lock);
}

/* --- any thread */

int turn_is_ours(const struct turn *turn)
{
	return turn->pid == getpid();
}

void turn_rouse(struct turn *turn)
{
	pthread_mutex_lock(&turn->lock);
	if (turn->has == CALLER)
		fabric_rouse(turn->fabric);
	pthread_mutex_unlock(&turn->lock);
}

void turn_waits(struct turn *turn, int more)
{
	__atomic_add_fetch(&turn->waiters, more, __ATOMIC_SEQ_CST);
}

/* Under the lock. */
static int may_take(const struct turn *turn)
{
	return turn->fabric && turn->has != CALLER && !turn->goes_on &&
	       !__atomic_load_n(&turn->waiters, __ATOMIC_SEQ_CST) && callers_may_run(turn->fabric);
}

/* Under the lock. */
static struct tk_fabric *take_now(struct turn *turn)
{
	if (!may_take(turn) || turn->has != NOBODY)
		return NULL;
	turn->has = CALLER;
	turn->taken++;
	return turn->fabric;
}

/* Returns NULL if the caller must wait without the turn. */
static struct tk_fabric *take(struct turn *turn, uint64_t until_ns)
{
	struct tk_fabric *fabric;
	uint64_t late_ns = tk_now_ns() + TAKE_NS;
	if (until_ns > late_ns)
		until_ns = late_ns;
	pthread_mutex_lock(&turn->lock);
	__atomic_add_fetch(&turn->wanted, 1, __ATOMIC_RELAXED);
	while (may_take(turn) && turn->has == THREAD && tk_now_ns() < until_ns)
		wait_for_condition(&turn->passed, &turn->lock, until_ns);
	__atomic_sub_fetch(&turn->wanted, 1, __ATOMIC_RELAXED);
	fabric = take_now(turn);
	pthread_mutex_unlock(&turn->lock);
	return fabric;
}

static void leave(struct turn *turn, int goes_on)
{
	pthread_mutex_lock(&turn->lock);
	turn->has = NOBODY;
	turn->left_ns = tk_now_ns();
	turn->goes_on = goes_on || __atomic_load_n(&turn->waiters, __ATOMIC_SEQ_CST);
	if (turn->polls)
		fabric_rouse(turn->fabric);
	else if (turn->goes_on || turn->is_aside)
		pthread_cond_signal(&turn->left);
	pthread_mutex_unlock(&turn->lock);
}

void turn_run(struct turn *turn, int (*has_come)(void *), void *argument, uint64_t until_ns)
{
	struct tk_fabric *fabric = take(turn, until_ns);
	if (!fabric)
		return;
	rounds_begin(fabric, until_ns);
	while (!has_come(argument) && rounds_go_on(fabric))
		;
	leave(turn, rounds_end(fabric));
}

void turn_step(struct turn *turn)
{
	struct tk_fabric *fabric = NULL;
	pthread_mutex_lock(&turn->lock);
	if (turn->has == NOBODY && turn->fabric && rounds_are_due(turn->fabric)) /* nobody else looks there */
		fabric = take_now(turn);
	pthread_mutex_unlock(&turn->lock);
	if (!fabric)
		return;
	rounds_begin(fabric, 0);
	rounds_go_on(fabric);
	leave(turn, rounds_end(fabric));
}
