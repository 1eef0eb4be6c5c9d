/* The free extents of one drive: best fit, from the start of an extent; of several that fit equally well, the one that
 * has had its length for the longest time.
 *
 * Always holds: free extents never overlap and never adjoin; each is in `by_start` as (start, length, number) and in
 * `by_length` as (length, number, start), where numbers ascend with every change; `free_pages` is their sum. A call
 * that would free a page twice, or one beyond the drive, is refused before anything is changed.
 */
#include "inside.h"

struct keep_extents {
	uint64_t first, until;           /* pages */
	uint64_t held_first, held_until; /* free pages that must not be allocated */
	uint64_t free_pages, number;
	struct keep_runs by_start, by_length;
	struct keep_runs pins; /* (start, how many pins beside the first, pages released meanwhile) */
};

keep_extents *keep_extents_new(uint64_t first, uint64_t until)
{
	keep_extents *e = calloc(1, sizeof *e);

	if (e != NULL) {
		e->first = first;
		e->until = until;
	}
	return e;
}

void keep_extents_free(keep_extents *e)
{
	keep_runs_free(&e->by_start);
	keep_runs_free(&e->by_length);
	keep_runs_free(&e->pins);
	free(e);
}

static int reserve(keep_extents *e)
{
	int error = keep_runs_reserve(&e->by_start, 1);

	return error < 0 ? error : keep_runs_reserve(&e->by_length, 1);
}

static void add(keep_extents *e, uint64_t start, uint64_t length)
{
	e->number++;
	keep_runs_insert(&e->by_start, (struct keep_item){start, length, e->number});
	keep_runs_insert(&e->by_length, (struct keep_item){length, e->number, start});
	e->free_pages += length;
}

static void forget_length(keep_extents *e, const struct keep_item *extent)
{
	struct keep_place place = keep_runs_find(&e->by_length, extent->b, extent->c);
	const struct keep_item *item = keep_runs_at(&e->by_length, place);

	keep_assert(item != NULL && item->a == extent->b && item->b == extent->c && item->c == extent->a);
	keep_runs_remove(&e->by_length, place);
	e->free_pages -= extent->b;
}

static void drop(keep_extents *e, struct keep_place place)
{
	forget_length(e, keep_runs_at(&e->by_start, place));
	keep_runs_remove(&e->by_start, place);
}

/* Changes an extent in place; its neighbours stay the same. */
static void change(keep_extents *e, struct keep_place place, uint64_t start, uint64_t length)
{
	struct keep_item *item = keep_runs_at(&e->by_start, place);

	forget_length(e, item);
	e->number++;
	*item = (struct keep_item){start, length, e->number};
	keep_runs_changed(&e->by_start, place);
	keep_runs_insert(&e->by_length, (struct keep_item){length, e->number, start});
	e->free_pages += length;
}

/* Makes these extents free, in this order; nothing free is between or beside them. */
int keep_extents_fill(keep_extents *e, const uint64_t *starts, const uint64_t *lengths, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		int error = reserve(e);
		if (error < 0)
			return error;
		keep_assert(lengths[i] > 0 && starts[i] >= e->first && starts[i] + lengths[i] <= e->until);
		add(e, starts[i], lengths[i]);
	}
	return 0;
}

int64_t keep_extents_allocate(keep_extents *e, uint64_t length)
{
	struct keep_place place = keep_runs_find(&e->by_length, length, 0);
	const struct keep_item *found;
	struct keep_item taken;
	int error = length == 0 ? -EINVAL : reserve(e);

	if (error < 0)
		return error;
	while ((found = keep_runs_at(&e->by_length, place)) != NULL && found->c < e->held_until &&
	       found->c + length > e->held_first)
		place = keep_runs_next(&e->by_length, place);
	if (found == NULL)
		return KEEP_NONE;
	taken = *found;
	place = keep_runs_find(&e->by_start, taken.c, 0);
	keep_assert(keep_runs_at(&e->by_start, place)->c == taken.b);
	if (taken.a == length)
		drop(e, place);
	else
		change(e, place, taken.c + length, taken.a - length);
	return (int64_t)taken.c;
}

static int free_now(keep_extents *e, uint64_t start, uint64_t length)
{
	struct keep_place after = keep_runs_find(&e->by_start, start, 0), before = after;
	const struct keep_item *right = keep_runs_at(&e->by_start, after), *left = NULL;
	int joins_right, joins_left, error = reserve(e);

	if (error < 0)
		return error;
	if (keep_runs_before(&e->by_start, &before))
		left = keep_runs_at(&e->by_start, before);
	if ((right != NULL && right->a < start + length) || (left != NULL && left->a + left->b > start))
		return -EINVAL; /* part of it is already free */
	joins_right = right != NULL && right->a == start + length;
	joins_left = left != NULL && left->a + left->b == start;
	if (joins_right)
		length += right->b;
	if (joins_left) {
		uint64_t first = left->a;
		length += left->b;
		if (joins_right)
			drop(e, after); /* items before it don't move, unless runs are joined */
		change(e, keep_runs_find(&e->by_start, first, 0), first, length);
	} else if (joins_right) {
		change(e, after, start, length);
	} else {
		add(e, start, length);
	}
	return 0;
}

static struct keep_item *pins_of(keep_extents *e, uint64_t start, struct keep_place *place)
{
	struct keep_item *item;

	*place = keep_runs_find(&e->pins, start, 0);
	item = keep_runs_at(&e->pins, *place);
	return item != NULL && item->a == start ? item : NULL;
}

int keep_extents_release(keep_extents *e, uint64_t start, uint64_t length)
{
	struct keep_place place;
	struct keep_item *pinned;

	if (length == 0 || start < e->first || start + length > e->until || start + length < start)
		return -EINVAL;
	pinned = pins_of(e, start, &place);
	if (pinned == NULL)
		return free_now(e, start, length);
	if (pinned->c != 0)
		return -EINVAL; /* it was released before */
	pinned->c = length;
	return 0;
}

/* Pairs of start and length. Stops at the first one that can't be released; those before it are. */
int keep_extents_release_all(keep_extents *e, const uint64_t *pairs, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		int error = keep_extents_release(e, pairs[2 * i], pairs[2 * i + 1]);
		if (error < 0)
			return error;
	}
	return 0;
}

/* Pins all of them or none; returns 0, or an error. */
int keep_extents_pin(keep_extents *e, const uint64_t *starts, uint64_t count)
{
	struct keep_place place;
	int error = 0;

	for (uint64_t i = 0; i < count; i++) {
		struct keep_item *pinned = pins_of(e, starts[i], &place);
		if (pinned == NULL)
			error = keep_runs_reserve(&e->pins, 1);
		if (error < 0) {
			while (i-- > 0)
				keep_extents_unpin(e, &starts[i], 1); /* nothing is released meanwhile, so it can't fail */
			return error;
		}
		if (pinned == NULL)
			keep_runs_insert(&e->pins, (struct keep_item){starts[i], 0, 0});
		else
			pinned->b++; /* starts are unique, so the order doesn't matter */
	}
	return 0;
}

/* Stops at the first one that can't be unpinned; those before it are. */
int keep_extents_unpin(keep_extents *e, const uint64_t *starts, uint64_t count)
{
	struct keep_place place;

	for (uint64_t i = 0; i < count; i++) {
		struct keep_item *pinned = pins_of(e, starts[i], &place);
		if (pinned == NULL)
			return -EINVAL;
		if (pinned->b > 0) {
			pinned->b--;
			continue;
		}
		if (pinned->c != 0) {
			int error = free_now(e, starts[i], pinned->c);
			if (error < 0)
				return error;
		}
		keep_runs_remove(&e->pins, place);
	}
	return 0;
}

int keep_extents_is_pinned(keep_extents *e, uint64_t start)
{
	struct keep_place place;

	return pins_of(e, start, &place) != NULL;
}

void keep_extents_hold(keep_extents *e, uint64_t start, uint64_t until)
{
	e->held_first = start;
	e->held_until = until;
}

uint64_t keep_extents_pages(const keep_extents *e)
{
	return e->free_pages;
}

uint64_t keep_extents_count(const keep_extents *e)
{
	return e->by_start.items;
}

uint64_t keep_extents_longest(const keep_extents *e)
{
	struct keep_place end = {e->by_length.count, 0};

	return keep_runs_before(&e->by_length, &end) ? keep_runs_at(&e->by_length, end)->a : 0;
}

uint64_t keep_extents_pinned(const keep_extents *e)
{
	return e->pins.items;
}

uint64_t keep_extents_bytes(const keep_extents *e)
{
	return keep_runs_bytes(&e->by_start) + keep_runs_bytes(&e->by_length) + keep_runs_bytes(&e->pins);
}

/* The pages of the free extent that begins here; 0 if there is none. */
uint64_t keep_extents_at(const keep_extents *e, uint64_t start)
{
	const struct keep_item *item = keep_runs_at(&e->by_start, keep_runs_find(&e->by_start, start, 0));

	return item != NULL && item->a == start ? item->b : 0;
}

/* The free extents that end after a page, in order, as starts and lengths; returns how many. */
uint64_t keep_extents_after(const keep_extents *e, uint64_t page, uint64_t *out, uint64_t room)
{
	struct keep_place place = keep_runs_find(&e->by_start, page, 0), before = place;
	const struct keep_item *item;
	uint64_t count = 0;

	if (keep_runs_before(&e->by_start, &before)) {
		item = keep_runs_at(&e->by_start, before);
		if (item->a + item->b > page)
			place = before;
	}
	for (; count < room && (item = keep_runs_at(&e->by_start, place)) != NULL; count++) {
		out[2 * count] = item->a;
		out[2 * count + 1] = item->b;
		place = keep_runs_next(&e->by_start, place);
	}
	return count;
}

/* The starts of the extents of the longest length below `below`, in the order in which they reached that length.
 * Returns how many; `length` is set to that length, 0 if there is none. */
uint64_t keep_extents_of_length(const keep_extents *e, uint64_t below, uint64_t *out, uint64_t room, uint64_t *length)
{
	struct keep_place place = keep_runs_find(&e->by_length, below, 0);
	const struct keep_item *item;
	uint64_t count = 0;

	*length = 0;
	if (!keep_runs_before(&e->by_length, &place))
		return 0;
	*length = keep_runs_at(&e->by_length, place)->a;
	place = keep_runs_find(&e->by_length, *length, 0);
	while (count < room && (item = keep_runs_at(&e->by_length, place)) != NULL && item->a == *length) {
		out[count++] = item->c;
		place = keep_runs_next(&e->by_length, place);
	}
	return count;
}
