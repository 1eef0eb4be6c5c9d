/* The heap of events, and their processing: messages along their routes. See events.h. */
#include "events_inside.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEAP_ARITY = 4 };

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

	if (e->top_is_taken) { /* most events create another one, which then replaces the one that is being processed */
		e->top_is_taken = false;
		sink(e, event);
		return 0;
	}
	code = events_grow((void **)&e->heap, e->heap_count, &e->heap_room, sizeof(*e->heap));
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
	code = events_grow((void **)&e->routes, e->route_count, &e->route_room, sizeof(*e->routes));
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
	code = events_grow((void **)&e->trains, e->train_count, &e->train_room, sizeof(*e->trains));
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

/* A message arrives at a step of its route: it queues, is served, and goes on. */
static int arrive(events *e, const struct event *event, const struct events_step *step, double units, double pages)
{
	struct resource *r = &e->resources[step->resource];
	double transfer_s = units * step->s_per_unit, service_s = pages * step->overhead_s + transfer_s;
	double ready_s = step->cuts_through ? fmax(0, event->time_s - transfer_s) : event->time_s;
	double start_s, end_s = fmax(event->time_s, events_serve(r, ready_s, service_s, &start_s));
	int code;

	r->usage.units += units;
	if (e->bin_s > 0) {
		code = events_note_busy(e, r, start_s, start_s + service_s);
		if (code)
			return code;
	}
	return push(e, end_s + step->latency_s, event->owner, event->route, event->step + 1);
}

/* The message of a train to which an event belongs. */
static struct events_message message_of(const events *e, const struct event *event)
{
	const struct train *t = &e->trains[event->owner & UINT32_MAX];
	struct events_message plain = {0, t->terms.units, 1, event->route, -1};

	return t->list ? t->list[event->owner >> 32] : plain;
}

/* The next stop, or NULL if the message has finished. */
static const struct events_step *next_step(const events *e, const struct events_message *m, int32_t step)
{
	const struct route *r = &e->routes[m->first];

	if (step < r->count)
		return &r->steps[step];
	if (m->then < 0 || step - r->count >= e->routes[m->then].count)
		return NULL;
	return &e->routes[m->then].steps[step - r->count];
}

/* Sends the next message of a train, and all others that are due. */
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
			code = events_note_backlog(e, terms->kind, m.units);
		if (t->released < terms->count)
			next_s = t->list ? t->list[t->released].start_s
					 : terms->start_s + (double)t->released * terms->interval_s;
	}
	if (!code && t->released < terms->count)
		code = push(e, next_s, number, 0, -1);
	return code;
}

/* Processes an event. Returns 1, with its note, if it finishes a train; 0 if not; or -errno. */
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
	code = events_note_backlog(e, t->terms.kind, -m.units);
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
		e->heap_count = 0; /* messages in flight may belong to the stream, whose arrays are valid only during this call */
	e->stream_units = NULL;
	e->stream_done_s = NULL;
	return code < 0 ? code : 0;
}
