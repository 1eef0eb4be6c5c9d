/* See events.h. */
#include "events.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { HEAP_ARITY = 4, ROOM_FIRST = 64, LOT_SHIFT = 51 };

/* A message on its way to a step of its route, or, with step -1, the release of a train's next message. The owner is the
 * train's number, and above it, from bit 32 on, the message's place in the train's list. Messages of a stream have numbers
 * below 0: ~i is the i-th. */
struct event {
	double time_s;
	uint64_t made;
	int64_t owner;
	int32_t route, step;
};

struct resource {
	double *free_s; /* a heap, the server that is free first on top */
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
	struct events_message *list; /* or NULL: all alike, as the terms say */
	int64_t released, through;
};

/* Units under way, and the most there were in each bin. */
struct backlog {
	double units;
	double *bins;
	int64_t bin_count;
};

struct events {
	struct event *heap;
	int64_t heap_count, heap_room;
	bool top_is_taken; /* the event at the top is being followed, and its place may be had */
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

/* Make room for one more; the array moves. */
static int grow(void **array, int64_t count, int64_t *room, size_t size)
{
	int64_t wanted = *room ? 2 * *room : ROOM_FIRST;
	void *moved;

	if (count < *room)
		return 0;
	moved = realloc(*array, (size_t)wanted * size);
	if (!moved)
		return -ENOMEM;
	*array = moved;
	*room = wanted;
	return 0;
}

static inline bool before(const struct event *a, const struct event *b)
{
	return a->time_s < b->time_s || (a->time_s == b->time_s && a->made < b->made);
}

/* Let an event sink from the top to its place. */
static void sink(events *e, struct event event)
{
	int64_t at = 0;

	for (;;) {
		int64_t first = HEAP_ARITY * at + 1, least = first, child;

		if (first >= e->heap_count)
			break;
		for (child = first + 1; child < first + HEAP_ARITY && child < e->heap_count; child++)
			if (before(&e->heap[child], &e->heap[least]))
				least = child;
		if (!before(&e->heap[least], &event))
			break;
		e->heap[at] = e->heap[least];
		at = least;
	}
	e->heap[at] = event;
}

static int push(events *e, double time_s, int64_t owner, int32_t route, int32_t step)
{
	struct event event = {time_s, e->made++, owner, route, step};
	int64_t at = e->heap_count;
	int code;

	if (e->top_is_taken) { /* most events make one more: it takes the place of the one that is being taken */
		e->top_is_taken = false;
		sink(e, event);
		return 0;
	}
	code = grow((void **)&e->heap, e->heap_count, &e->heap_room, sizeof(*e->heap));
	if (code)
		return code;
	e->heap_count++;
	while (at > 0) {
		int64_t parent = (at - 1) / HEAP_ARITY;

		if (!before(&event, &e->heap[parent]))
			break;
		e->heap[at] = e->heap[parent];
		at = parent;
	}
	e->heap[at] = event;
	return 0;
}

events *events_open(double bin_s)
{
	events *e = calloc(1, sizeof(*e));

	if (e)
		e->bin_s = bin_s;
	return e;
}

void events_close(events *e)
{
	int64_t i;

	for (i = 0; i < e->resource_count; i++) {
		free(e->resources[i].free_s);
		free(e->resources[i].bins);
	}
	for (i = 0; i < e->route_count; i++)
		free(e->routes[i].steps);
	for (i = 0; i < EVENTS_KINDS; i++)
		free(e->backlogs[i].bins);
	for (i = 0; i < e->train_count; i++)
		free(e->trains[i].list);
	free(e->resources);
	free(e->routes);
	free(e->trains);
	free(e->heap);
	free(e);
}

int64_t events_add_resource(events *e, int64_t servers)
{
	struct resource *r;
	int code;

	if (servers < 1 || servers > EVENTS_SERVERS_MAX)
		return -EINVAL;
	code = grow((void **)&e->resources, e->resource_count, &e->resource_room, sizeof(*e->resources));
	if (code)
		return code;
	r = &e->resources[e->resource_count];
	memset(r, 0, sizeof(*r));
	r->servers = r->usage.servers = servers;
	r->free_s = calloc((size_t)servers, sizeof(*r->free_s));
	if (!r->free_s)
		return -ENOMEM;
	return e->resource_count++;
}

int64_t events_add_route(events *e, const struct events_step *steps, int64_t count)
{
	struct route *r;
	int64_t i;
	int code;

	if (count < 1 || count > INT32_MAX || e->route_count == INT32_MAX)
		return -EINVAL;
	for (i = 0; i < count; i++)
		if (steps[i].resource < 0 || steps[i].resource >= e->resource_count || !(steps[i].overhead_s >= 0) ||
		    !(steps[i].s_per_unit >= 0) || !(steps[i].latency_s >= 0) || steps[i].cuts_through < 0 ||
		    steps[i].cuts_through > 1)
			return -EINVAL;
	code = grow((void **)&e->routes, e->route_count, &e->route_room, sizeof(*e->routes));
	if (code)
		return code;
	r = &e->routes[e->route_count];
	r->steps = malloc((size_t)count * sizeof(*steps));
	if (!r->steps)
		return -ENOMEM;
	memcpy(r->steps, steps, (size_t)count * sizeof(*steps));
	r->count = count;
	return e->route_count++;
}

int64_t events_add_train(events *e, const struct events_train *terms)
{
	struct train *t;
	int code;

	if (terms->count < 1 || !(terms->interval_s >= 0) || !(terms->units >= 0) || !(terms->start_s >= e->now_s) ||
	    terms->route_first < 0 || terms->route_count < 1 || terms->route_offset < 0 ||
	    terms->route_first + terms->route_count > e->route_count || terms->kind < 0 || terms->kind >= EVENTS_KINDS)
		return -EINVAL;
	code = grow((void **)&e->trains, e->train_count, &e->train_room, sizeof(*e->trains));
	if (code)
		return code;
	t = &e->trains[e->train_count];
	t->terms = *terms;
	t->list = NULL;
	t->released = t->through = 0;
	code = push(e, terms->start_s, e->train_count, 0, -1);
	return code ? code : e->train_count++;
}

int64_t events_add_list(events *e, const struct events_message *messages, int64_t count, int64_t kind)
{
	struct events_train terms = {.count = count, .route_count = 1, .kind = kind};
	struct events_message *list;
	int64_t i, number;

	if (count < 1 || count > INT32_MAX || e->train_count > INT32_MAX)
		return -EINVAL;
	for (i = 0; i < count; i++) {
		const struct events_message *m = &messages[i];

		if (!(m->start_s >= (i ? messages[i - 1].start_s : e->now_s)) || !(m->units >= 0) || !(m->pages >= 0) ||
		    m->first < 0 || m->first >= e->route_count || m->then < -1 || m->then >= e->route_count)
			return -EINVAL;
	}
	list = malloc((size_t)count * sizeof(*list));
	if (!list)
		return -ENOMEM;
	memcpy(list, messages, (size_t)count * sizeof(*list));
	terms.start_s = list[0].start_s;
	number = events_add_train(e, &terms);
	if (number < 0)
		free(list);
	else
		e->trains[number].list = list;
	return number;
}

/* See that there are bins up to `last`; new ones hold `value`. */
static int reach(double **bins, int64_t *count, int64_t last, double value)
{
	double *moved;

	if (last < *count)
		return 0;
	moved = realloc(*bins, (size_t)(last + 1) * sizeof(*moved));
	if (!moved)
		return -ENOMEM;
	while (*count <= last)
		moved[(*count)++] = value;
	*bins = moved;
	return 0;
}

/* The bin of a time, or EVENTS_BINS_MAX for all that come later than there may be bins. */
static int64_t bin_at(const events *e, double time_s)
{
	double place = time_s / e->bin_s;

	return place < EVENTS_BINS_MAX ? (int64_t)place : EVENTS_BINS_MAX;
}

/* Add a stretch of service to the bins of its time. What lies beyond the last bin that there may be is left out. */
static int note_busy(events *e, struct resource *r, double start_s, double end_s)
{
	int64_t first = bin_at(e, start_s), last = bin_at(e, end_s), bin;
	int code;

	if (first == EVENTS_BINS_MAX)
		return 0;
	if (last == EVENTS_BINS_MAX)
		last--;
	code = reach(&r->bins, &r->bin_count, last, 0);
	if (code)
		return code;
	if (first == last) {
		r->bins[first] += end_s - start_s;
		return 0;
	}
	for (bin = first; bin <= last; bin++) {
		double from = fmax(start_s, (double)bin * e->bin_s), to = fmin(end_s, (double)(bin + 1) * e->bin_s);

		if (to > from)
			r->bins[bin] += to - from;
	}
	return 0;
}

/* Take the server that is free first, from `ready_s` on, and put it back with its new time. */
static double serve(struct resource *r, double ready_s, double service_s, double *start_s)
{
	double start = fmax(ready_s, r->free_s[0]), end = start + service_s, waited = start - ready_s;
	int64_t at = 0;

	for (;;) {
		int64_t child = 2 * at + 1;

		if (child >= r->servers)
			break;
		if (child + 1 < r->servers && r->free_s[child + 1] < r->free_s[child])
			child++;
		if (r->free_s[child] >= end)
			break;
		r->free_s[at] = r->free_s[child];
		at = child;
	}
	r->free_s[at] = end;
	r->usage.busy_s += service_s;
	r->usage.waited_s += waited;
	if (waited > r->usage.waited_max_s)
		r->usage.waited_max_s = waited;
	r->usage.served++;
	*start_s = start;
	return end;
}

int events_reserve(events *e, int64_t resource, double ready_s, double service_s, double *start_s, double *end_s)
{
	struct resource *r;

	if (resource < 0 || resource >= e->resource_count || !(ready_s >= 0) || !(service_s >= 0))
		return -EINVAL;
	r = &e->resources[resource];
	*end_s = serve(r, ready_s, service_s, start_s);
	return e->bin_s > 0 ? note_busy(e, r, *start_s, *end_s) : 0;
}

/* A message reaches a step of its route: it queues, is served, and goes on. */
static int arrive(events *e, const struct event *event, const struct events_step *step, double units, double pages)
{
	struct resource *r = &e->resources[step->resource];
	double transfer_s = units * step->s_per_unit, service_s = pages * step->overhead_s + transfer_s;
	double ready_s = step->cuts_through ? fmax(0, event->time_s - transfer_s) : event->time_s;
	double start_s, end_s = fmax(event->time_s, serve(r, ready_s, service_s, &start_s));
	int code;

	r->usage.units += units;
	if (e->bin_s > 0) {
		code = note_busy(e, r, start_s, start_s + service_s);
		if (code)
			return code;
	}
	return push(e, end_s + step->latency_s, event->owner, event->route, event->step + 1);
}

/* The message of a train that an event is about. */
static struct events_message message_of(const events *e, const struct event *event)
{
	const struct train *t = &e->trains[event->owner & UINT32_MAX];
	struct events_message plain = {0, t->terms.units, 1, event->route, -1};

	return t->list ? t->list[event->owner >> 32] : plain;
}

/* The stop that comes next, or NULL if the message is through. */
static const struct events_step *next_step(const events *e, const struct events_message *m, int32_t step)
{
	const struct route *r = &e->routes[m->first];

	if (step < r->count)
		return &r->steps[step];
	if (m->then < 0 || step - r->count >= e->routes[m->then].count)
		return NULL;
	return &e->routes[m->then].steps[step - r->count];
}

/* More, or less, is under way. */
static int note_backlog(events *e, int64_t kind, double units)
{
	struct backlog *b = &e->backlogs[kind];
	int64_t bin;
	int code;

	if (e->bin_s > 0) {
		bin = bin_at(e, e->now_s);
		if (bin == EVENTS_BINS_MAX)
			bin--;
		code = reach(&b->bins, &b->bin_count, bin, b->units);
		if (code)
			return code;
		if (b->units + units > b->bins[bin])
			b->bins[bin] = b->units + units;
	}
	b->units += units;
	return 0;
}

/* The next message of a train sets out, and with it all that are due. */
static int release(events *e, int64_t number, double now_s)
{
	struct train *t = &e->trains[number];
	const struct events_train *terms = &t->terms;
	double next_s = now_s;
	int code = 0;

	while (!code && t->released < terms->count && next_s <= now_s) {
		int64_t turn = (terms->route_offset + t->released) % terms->route_count;
		struct event message = {now_s, 0, number | (t->list ? t->released << 32 : 0),
					(int32_t)(terms->route_first + turn), 0};
		struct events_message m = message_of(e, &message);

		code = arrive(e, &message, &e->routes[m.first].steps[0], m.units, m.pages);
		t->released++;
		if (!code)
			code = note_backlog(e, terms->kind, m.units);
		if (t->released < terms->count)
			next_s = t->list ? t->list[t->released].start_s
					 : terms->start_s + (double)t->released * terms->interval_s;
	}
	if (!code && t->released < terms->count)
		code = push(e, next_s, number, 0, -1);
	return code;
}

/* What follows from an event. 1 if a train is through with it, whose note is then filled in; 0 if not; or -errno. */
static int follow(events *e, const struct event *event, struct events_note *note)
{
	const struct events_step *step;
	struct events_message m;
	struct train *t;
	int code;

	e->now_s = event->time_s;
	if (event->step < 0)
		return release(e, event->owner, event->time_s);
	if (event->owner < 0) {
		if (event->step < e->routes[event->route].count)
			return arrive(e, event, &e->routes[event->route].steps[event->step],
				      e->stream_units[~event->owner], 1);
		e->stream_done_s[~event->owner] = event->time_s;
		return 0;
	}
	m = message_of(e, event);
	step = next_step(e, &m, event->step);
	if (step)
		return arrive(e, event, step, m.units, m.pages);
	t = &e->trains[event->owner & UINT32_MAX];
	code = note_backlog(e, t->terms.kind, -m.units);
	if (code)
		return code;
	if (++t->through < t->terms.count)
		return 0;
	free(t->list);
	t->list = NULL;
	note->time_s = event->time_s;
	note->train = event->owner & UINT32_MAX;
	return 1;
}

/* Take the first event off the heap. */
static int take(events *e, struct events_note *note)
{
	struct event event = e->heap[0];
	int code;

	e->top_is_taken = true;
	code = follow(e, &event, note);
	if (e->top_is_taken) {
		e->top_is_taken = false;
		if (--e->heap_count)
			sink(e, e->heap[e->heap_count]);
	}
	return code;
}

int events_run(events *e, double until_s, struct events_note *note)
{
	while (e->heap_count && e->heap[0].time_s <= until_s) {
		int code = take(e, note);

		if (code)
			return code;
	}
	if (isfinite(until_s) && until_s > e->now_s)
		e->now_s = until_s;
	return 0;
}

int events_stream(events *e, const double *start_s, const double *units, const int32_t *routes, int64_t count,
		  double *done_s)
{
	struct events_note ignored;
	int64_t i;
	int code = 0;

	for (i = 0; i < count; i++)
		if (routes[i] < 0 || routes[i] >= e->route_count || !(units[i] >= 0) ||
		    !(start_s[i] >= (i ? start_s[i - 1] : e->now_s)))
			return -EINVAL;
	e->stream_units = units;
	e->stream_done_s = done_s;
	for (i = 0; i < count && code >= 0; i++) {
		while (e->heap_count && e->heap[0].time_s < start_s[i] && code >= 0)
			code = take(e, &ignored);
		if (code >= 0) {
			struct event message = {start_s[i], 0, ~i, routes[i], 0};

			e->now_s = start_s[i];
			code = arrive(e, &message, &e->routes[routes[i]].steps[0], units[i], 1);
		}
	}
	while (e->heap_count && code >= 0)
		code = take(e, &ignored);
	if (code < 0)
		e->heap_count = 0; /* what is under way may be of the stream, whose arrays go now */
	e->stream_units = NULL;
	e->stream_done_s = NULL;
	return code < 0 ? code : 0;
}

int events_usage_of(const events *e, int64_t resource, struct events_usage *out)
{
	if (resource < 0 || resource >= e->resource_count)
		return -EINVAL;
	*out = e->resources[resource].usage;
	return 0;
}

int64_t events_bins_of(const events *e, int64_t resource, double *out, int64_t room)
{
	const struct resource *r;

	if (resource < 0 || resource >= e->resource_count)
		return -EINVAL;
	r = &e->resources[resource];
	if (r->bin_count)
		memcpy(out, r->bins, (size_t)(r->bin_count < room ? r->bin_count : room) * sizeof(*out));
	return r->bin_count;
}

int64_t events_backlog_of(const events *e, int64_t kind, double *out, int64_t room)
{
	const struct backlog *b;

	if (kind < 0 || kind >= EVENTS_KINDS)
		return -EINVAL;
	b = &e->backlogs[kind];
	if (b->bin_count)
		memcpy(out, b->bins, (size_t)(b->bin_count < room ? b->bin_count : room) * sizeof(*out));
	return b->bin_count;
}

/* A step of splitmix64: every bit of the result depends on every bit of the number. */
static uint64_t mixed(uint64_t number)
{
	number += UINT64_C(0x9e3779b97f4a7c15);
	number = (number ^ number >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	number = (number ^ number >> 27) * UINT64_C(0x94d049bb133111eb);
	return number ^ number >> 31;
}

void events_scatter(const int64_t *blocks, int64_t count, int64_t layers, int64_t parts, int64_t ranks,
		    const int32_t *home_of_lot, int64_t drives, int64_t *counts)
{
	int64_t i, layer, rank;

	for (i = 0; i < count; i++) {
		uint64_t block = mixed((uint64_t)blocks[i]);

		for (layer = 0; layer < layers; layer++)
			for (rank = 0; rank < ranks; rank++) {
				uint64_t page = mixed(block ^ (uint64_t)(layer * ranks + rank));
				int64_t part = layer * parts / layers;

				counts[(part * ranks + rank) * drives + home_of_lot[page >> LOT_SHIFT]]++;
			}
	}
}
