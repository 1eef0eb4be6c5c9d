/*
 * The NIC: a thread for each domain that polls the doorbells, fires due triggers and moves bytes.
 *
 * What always holds: it calls nothing of the application and needs no call of it. It naps while nothing moves, for
 * a time that a doorbell may wait and no longer.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <sched.h>
#include <time.h>

#define IDLE_TURNS 16 /* each takes CPU time from other threads */
#define LONG_IDLE_TURNS 256 /* 10 ms and more */
#define NAP_NS 50000
#define LONG_NAP_NS 400000

static int turn(struct domain *domain)
{
	int busy = 0;
	for (struct counter *counter = domain->counters; counter; counter = counter->next)
		busy |= doorbell_poll(counter);
	work_fire(domain);
	for (struct endpoint *endpoint = domain->endpoints; endpoint; endpoint = endpoint->next)
		if (endpoint->enabled)
			busy |= wire_turn(endpoint);
	work_fire(domain);
	return busy;
}

void nic_wake(struct domain *domain)
{
	domain->idle = 0;
	pthread_cond_signal(&domain->work);
}

static void nap(struct domain *domain)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += domain->idle > LONG_IDLE_TURNS ? LONG_NAP_NS : NAP_NS;
	if (until.tv_nsec >= 1000000000) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000;
	}
	pthread_cond_timedwait(&domain->work, &domain->lock, &until);
}

void *nic_run(void *argument)
{
	struct domain *domain = argument;
	pthread_mutex_lock(&domain->lock);
	while (!domain->stop) {
		domain->idle = turn(domain) ? 0 : domain->idle + 1;
		if (domain->idle > IDLE_TURNS) {
			nap(domain);
			continue;
		}
		/* A mutex is not fair: waiting callers go first. */
		pthread_mutex_unlock(&domain->lock);
		do
			sched_yield();
		while (__atomic_load_n(&domain->waiting, __ATOMIC_ACQUIRE));
		pthread_mutex_lock(&domain->lock);
	}
	pthread_mutex_unlock(&domain->lock);
	return NULL;
}
