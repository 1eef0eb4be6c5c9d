/* Ordered items, in runs of up to KEEP_RUN_ITEMS, and an array with the first item of each run.
 *
 * A search is two bisections. An insertion moves at most one run's items, and the places of runs when a run is
 * split; nothing is ever rebuilt, and a run that has lost most of its items is joined with its neighbour, so the
 * memory follows the number of items. Once `keep_runs_reserve` has succeeded, an insertion can't fail.
 */
#include "inside.h"

static int is_less(uint64_t a, uint64_t b, uint64_t than_a, uint64_t than_b)
{
	return a < than_a || (a == than_a && b < than_b);
}

void keep_runs_free(struct keep_runs *runs)
{
	for (uint32_t i = 0; i < runs->count; i++)
		free(runs->tops[i].run);
	while (runs->spare_count > 0)
		free(runs->spares[--runs->spare_count]);
	free(runs->tops);
}

uint64_t keep_runs_bytes(const struct keep_runs *runs)
{
	return (uint64_t)(runs->count + runs->spare_count) * sizeof(struct keep_run) + runs->room * sizeof *runs->tops;
}

/* Reserves memory for this many insertions. */
int keep_runs_reserve(struct keep_runs *runs, unsigned insertions)
{
	int error = keep_grow((void **)&runs->tops, &runs->room, (uint64_t)runs->count + insertions, sizeof *runs->tops);

	if (error < 0)
		return error;
	keep_assert(insertions <= KEEP_SPARES_MAX);
	while (runs->spare_count < insertions) {
		struct keep_run *run = malloc(sizeof *run);
		if (run == NULL)
			return -ENOMEM;
		runs->spares[runs->spare_count++] = run;
	}
	return 0;
}

/* The last run that begins at or before a key; the first one, if all begin after it. */
static uint32_t run_of(const struct keep_runs *runs, uint64_t a, uint64_t b)
{
	uint32_t low = 0, high = runs->count;

	while (high - low > 1) {
		uint32_t middle = low + (high - low) / 2;
		if (is_less(a, b, runs->tops[middle].a, runs->tops[middle].b))
			high = middle;
		else
			low = middle;
	}
	return low;
}

static uint32_t at_of(const struct keep_run *run, uint64_t a, uint64_t b)
{
	uint32_t low = 0, high = run->count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		if (is_less(run->items[middle].a, run->items[middle].b, a, b))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* The place of the first item that is not before a key; it may be the end. */
struct keep_place keep_runs_find(const struct keep_runs *runs, uint64_t a, uint64_t b)
{
	struct keep_place place = {0, 0};

	if (runs->count == 0)
		return place;
	place.run = run_of(runs, a, b);
	place.at = at_of(runs->tops[place.run].run, a, b);
	if (place.at == runs->tops[place.run].run->count)
		place = (struct keep_place){place.run + 1, 0};
	return place;
}

/* The item at a place; NULL at the end. */
struct keep_item *keep_runs_at(const struct keep_runs *runs, struct keep_place place)
{
	return place.run < runs->count ? &runs->tops[place.run].run->items[place.at] : NULL;
}

struct keep_place keep_runs_next(const struct keep_runs *runs, struct keep_place place)
{
	if (++place.at == runs->tops[place.run].run->count)
		place = (struct keep_place){place.run + 1, 0};
	return place;
}

/* The place before another one, which may be the end; 0 if there is none. */
int keep_runs_before(const struct keep_runs *runs, struct keep_place *place)
{
	if (place->at > 0) {
		place->at--;
		return 1;
	}
	if (place->run == 0)
		return 0;
	place->run--;
	place->at = runs->tops[place->run].run->count - 1;
	return 1;
}

static void note_first(struct keep_runs *runs, uint32_t at)
{
	runs->tops[at].a = runs->tops[at].run->items[0].a;
	runs->tops[at].b = runs->tops[at].run->items[0].b;
}

/* Must be called after an item was changed in place. */
void keep_runs_changed(struct keep_runs *runs, struct keep_place place)
{
	if (place.at == 0)
		note_first(runs, place.run);
}

static struct keep_run *open_run(struct keep_runs *runs, uint32_t at)
{
	struct keep_run *run;

	keep_assert(runs->spare_count > 0 && runs->count < runs->room);
	run = runs->spares[--runs->spare_count];
	run->count = 0;
	memmove(&runs->tops[at + 1], &runs->tops[at], (runs->count - at) * sizeof *runs->tops);
	runs->tops[at].run = run;
	runs->count++;
	return run;
}

static void close_run(struct keep_runs *runs, uint32_t at)
{
	struct keep_run *run = runs->tops[at].run;

	runs->count--;
	memmove(&runs->tops[at], &runs->tops[at + 1], (runs->count - at) * sizeof *runs->tops);
	if (runs->spare_count < KEEP_SPARES_MAX)
		runs->spares[runs->spare_count++] = run;
	else
		free(run);
}

static void move_items(struct keep_run *to, uint32_t to_at, const struct keep_run *from, uint32_t from_at, uint32_t count)
{
	memmove(&to->items[to_at], &from->items[from_at], count * sizeof *to->items);
}

void keep_runs_insert(struct keep_runs *runs, struct keep_item item)
{
	uint32_t at = 0, where = runs->count > 0 ? run_of(runs, item.a, item.b) : 0;
	struct keep_run *run = runs->count > 0 ? runs->tops[where].run : open_run(runs, 0);

	at = at_of(run, item.a, item.b);
	keep_assert(at == run->count || run->items[at].a != item.a || run->items[at].b != item.b);
	if (run->count == KEEP_RUN_ITEMS) {
		/* Appends mostly come in sequence: then the full run stays full. */
		uint32_t kept = at == run->count ? run->count : run->count / 2;
		struct keep_run *after = open_run(runs, where + 1);

		move_items(after, 0, run, kept, run->count - kept);
		after->count = run->count - kept;
		run->count = kept;
		if (after->count > 0)
			note_first(runs, where + 1);
		if (at > kept || after->count == 0) {
			at -= kept;
			where++;
			run = after;
		}
	}
	move_items(run, at + 1, run, at, run->count - at);
	run->items[at] = item;
	run->count++;
	runs->items++;
	if (at == 0)
		note_first(runs, where);
}

/* Joins a run with the one after it if they are short enough. */
static int join(struct keep_runs *runs, uint32_t at)
{
	struct keep_run *into, *from;

	if (at + 1 >= runs->count)
		return 0;
	into = runs->tops[at].run;
	from = runs->tops[at + 1].run;
	if (into->count + from->count > KEEP_RUN_ITEMS / 4 * 3)
		return 0;
	move_items(into, into->count, from, 0, from->count);
	into->count += from->count;
	close_run(runs, at + 1);
	return 1;
}

void keep_runs_remove(struct keep_runs *runs, struct keep_place place)
{
	struct keep_run *run = runs->tops[place.run].run;

	keep_assert(place.run < runs->count && place.at < run->count);
	run->count--;
	runs->items--;
	move_items(run, place.at, run, place.at + 1, run->count - place.at);
	if (run->count == 0) {
		close_run(runs, place.run);
		return;
	}
	if (place.at == 0)
		note_first(runs, place.run);
	if (run->count <= KEEP_RUN_ITEMS / 4 && !join(runs, place.run) && place.run > 0)
		join(runs, place.run - 1);
}
