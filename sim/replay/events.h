/* A discrete-event core: trains of messages that queue, first come first served, at resources along routes.
 *
 * Always holds: events are processed in the order of time, and of creation where times are equal, so a run depends only
 * on its input. No result is returned for a time that is not over yet.
 *
 * No queue is stored: messages arrive at a resource in the order of time, so the end of a message's service is known
 * when it arrives (Lindley's recursion). A message costs one event per step.
 *
 * Not thread-safe, and no preemption: service always runs to its end.
 */
#ifndef SIM_REPLAY_EVENTS_H
#define SIM_REPLAY_EVENTS_H

#include <stdint.h>

enum { EVENTS_SERVERS_MAX = 65536, EVENTS_BINS_MAX = 4096, EVENTS_KINDS = 4, EVENTS_LOTS = 8192 };

/* One stop of a route. A message of u units in p pages holds a server for p * overhead_s + u * s_per_unit, and reaches
 * the next stop latency_s after that. A stop that cuts through serves while the stop before it does: a message that
 * arrives has held its server for as long as its units take, if the server was free then. */
struct events_step {
	double overhead_s, s_per_unit, latency_s;
	int64_t resource, cuts_through;
};

/* `count` messages of `units` each, one every interval_s from start_s on. The first takes the route
 * route_first + route_offset, the next one the following, around `route_count` routes. Messages that were sent and have
 * not finished are counted by kind, which is any number below EVENTS_KINDS. */
struct events_train {
	double start_s, interval_s, units;
	int64_t count, route_first, route_count, route_offset, kind;
};

/* A message of a train that lists its messages: it takes the stops of the route `first`, then those of `then` (-1: no
 * more). */
struct events_message {
	double start_s, units, pages;
	int32_t first, then;
};

/* The last message of a train has finished. */
struct events_note {
	double time_s;
	int64_t train;
};

struct events_usage {
	double busy_s, waited_s, waited_max_s, units;
	int64_t served, servers;
};

typedef struct events events;

events *events_open(double bin_s);
void events_close(events *e);

/* Each returns a number from 0, or -errno. */
int64_t events_add_resource(events *e, int64_t servers);
int64_t events_add_route(events *e, const struct events_step *steps, int64_t count);
int64_t events_add_train(events *e, const struct events_train *train);

/* A train of these messages, in the order of their start. They are copied. */
int64_t events_add_list(events *e, const struct events_message *messages, int64_t count, int64_t kind);

/* Take a server of a resource from `ready_s` on, or from when one is free. That may be before the time last returned: a
 * server that has been idle since then counts as having begun then. */
int events_reserve(events *e, int64_t resource, double ready_s, double service_s, double *start_s, double *end_s);

/* Run until `until_s`, or until a train has finished: 1 and its note; 0 at `until_s`; or -errno. */
int events_run(events *e, double until_s, struct events_note *note);

/* Single messages in the order of time; `done_s` gets when each has finished. Everything else runs meanwhile. */
int events_stream(events *e, const double *start_s, const double *units, const int32_t *routes, int64_t count,
		  double *done_s);

int events_usage_of(const events *e, int64_t resource, struct events_usage *out);

/* Seconds of service in each bin of time; returns how many bins there are. */
int64_t events_bins_of(const events *e, int64_t resource, double *out, int64_t room);

/* The most units of a kind under way in each bin of time; returns how many bins there are. */
int64_t events_backlog_of(const events *e, int64_t kind, double *out, int64_t room);

/* Count pages by location: the pages of `count` blocks, one for each layer and rank. A page's lot is drawn from these
 * three numbers; `home_of_lot` has the drive of each of the EVENTS_LOTS lots. The layers fall into `parts` of about the
 * same length. Adds to counts[(part * ranks + rank) * drives + drive]. */
void events_scatter(const int64_t *blocks, int64_t count, int64_t layers, int64_t parts, int64_t ranks,
		    const int32_t *home_of_lot, int64_t drives, int64_t *counts);

#endif
