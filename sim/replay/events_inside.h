/* The internal state of the simulator's core: the events (events.c), and the resources with their measurements
 * (resources.c). */
#ifndef SIM_REPLAY_EVENTS_INSIDE_H
#define SIM_REPLAY_EVENTS_INSIDE_H

#include "events.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A message on its way to a step of its route, or, with step -1, the release of a train's next message. The owner is
 * the train's number, and above it, from bit 32, the message's position in the train's list. Messages of a stream have
 * negative numbers: ~i is the i-th. */
struct event {
	double time_s;
	uint64_t made;
	int64_t owner;
	int32_t route, step;
};

struct resource {
	double *free_s; /* a heap; the server that is free first is on top */
	int64_t servers;
	struct events_usage usage;
	double *bins;
	int64_t bin_count;
};

struct route {
	struct events_step *steps;
	int64_t count;
};

struct train {
	struct events_train terms;
	struct events_message *list; /* NULL: all alike, by the train's terms */
	int64_t released, through;
};

/* Units under way, and their maximum in each bin. */
struct backlog {
	double units;
	double *bins;
	int64_t bin_count;
};

struct events {
	struct event *heap;
	int64_t heap_count, heap_room;
	bool top_is_taken; /* the event at the top is being processed, and its place may be reused */
	struct resource *resources;
	int64_t resource_count, resource_room;
	struct route *routes;
	int64_t route_count, route_room;
	struct train *trains;
	int64_t train_count, train_room;
	uint64_t made;
	double bin_s, now_s;
	struct backlog backlogs[EVENTS_KINDS];
	const double *stream_units;
	double *stream_done_s;
};

/* Make room for one more; the array may move. */
int events_grow(void **array, int64_t count, int64_t *room, size_t size);

/* Take the server that is free first, from `ready_s` on, and put it back with its new time, which is returned. */
double events_serve(struct resource *r, double ready_s, double service_s, double *start_s);

/* Add a stretch of service to the bins of its time. Times beyond the last possible bin are left out. */
int events_note_busy(events *e, struct resource *r, double start_s, double end_s);

/* Note that more (or, if negative, fewer) units are under way. */
int events_note_backlog(events *e, int64_t kind, double units);

#endif
