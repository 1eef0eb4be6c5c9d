/* The resources at which messages queue, and measurements of resources and of trains under way, in bins of time. */
#include "events_inside.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM_FIRST = 64 };

int events_grow(void **array, int64_t count, int64_t *room, size_t size)
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

int64_t events_add_resource(events *e, int64_t servers)
{
	struct resource *r;
	int code;

	if (servers < 1 || servers > EVENTS_SERVERS_MAX)
		return -EINVAL;
	code = events_grow((void **)&e->resources, e->resource_count, &e->resource_room, sizeof(*e->resources));
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

/* Make bins up to `last`; new ones hold `value`. */
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

/* The bin of a time, or EVENTS_BINS_MAX for times beyond the last possible bin. */
static int64_t bin_at(const events *e, double time_s)
{
	double place = time_s / e->bin_s;

	return place < EVENTS_BINS_MAX ? (int64_t)place : EVENTS_BINS_MAX;
}

int events_note_busy(events *e, struct resource *r, double start_s, double end_s)
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

double events_serve(struct resource *r, double ready_s, double service_s, double *start_s)
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
	*end_s = events_serve(r, ready_s, service_s, start_s);
	return e->bin_s > 0 ? events_note_busy(e, r, *start_s, *end_s) : 0;
}

int events_note_backlog(events *e, int64_t kind, double units)
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
