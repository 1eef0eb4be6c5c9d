/* Room for new pieces, by evicting kept ones; and pieces whose records are gone: see hot.h. */
#include "hot_inside.h"

enum { AT_ONCE = 256 };

static uint8_t has_ended(const struct keep_uses *uses, uint64_t number)
{
	uint8_t ended = 1;

	if (uses != NULL)
		uses->end(uses->self, &number, 1, &ended);
	return ended;
}

/* Frees pieces whose last uncounted use has ended. Returns 1 if a refused caller should try again. */
int keep_hot_release_gone(keep_hot *h, const struct keep_uses *uses)
{
	uint32_t next, last = h->rings.links[KEEP_HOT_GONE].before;
	int retry = 0;

	for (uint32_t id = h->rings.links[KEEP_HOT_GONE].after; id != KEEP_HOT_GONE; id = next) {
		int is_last = id == last;

		next = h->rings.links[id].after;
		if (has_ended(uses, h->pieces[id].known_as)) {
			h->pieces[id].known_as = 0;
			keep_rings_unlink(&h->rings, id);
			retry |= keep_hot_release(h, &id, 1);
		}
		if (is_last)
			break;
	}
	return retry;
}

void keep_hot_retire(keep_hot *h, uint32_t id, uint64_t known_as, const struct keep_uses *uses)
{
	struct keep_piece *piece = keep_hot_piece(h, id);

	keep_assert(piece->generation == 0 && piece->known_as == 0);
	if (has_ended(uses, known_as))
		return;
	piece->users++;
	piece->known_as = known_as;
	keep_rings_push(&h->rings, KEEP_HOT_GONE, id);
}

void keep_hot_forget(keep_hot *h, uint32_t id, const struct keep_uses *uses)
{
	uint64_t generation = keep_hot_piece(h, id)->generation;

	if (generation == 0)
		return;
	keep_hot_lose(h, id);
	keep_hot_retire(h, id, generation, uses);
	if (h->pieces[id].users == 0)
		keep_hot_release_pages(h, id);
}

void keep_hot_drop(keep_hot *h, const uint64_t *generations, uint64_t count, const struct keep_uses *uses)
{
	for (uint64_t i = 0; i < count; i++) {
		uint32_t id = keep_map_find(&h->by_generation, generations[i]);

		if (id != KEEP_NO_ID)
			keep_hot_forget(h, id, uses);
	}
}

void keep_hot_replace(keep_hot *h, const uint8_t *names, const uint64_t *generations, uint64_t count,
		      const struct keep_uses *uses)
{
	uint64_t hashes[KEEP_WARMED_AT_ONCE];

	for (uint64_t i = 0; i < count; i++) {
		uint32_t id;

		if (i % KEEP_WARMED_AT_ONCE == 0)
			keep_hot_warm_names(h, names + i * KEEP_HOT_NAME_BYTES, keep_warmed_at_once(count - i), hashes);
		id = keep_map_find(&h->by_name, hashes[i % KEEP_WARMED_AT_ONCE]);
		if (id != KEEP_NO_ID && h->pieces[id].generation != generations[i])
			keep_hot_forget(h, id, uses);
	}
}

void keep_hot_erase(keep_hot *h, const uint8_t *names, uint64_t count, const struct keep_uses *uses)
{
	for (uint64_t i = 0; i < count; i++) {
		uint32_t id = keep_map_find(&h->by_name, keep_hot_name(h, names + i * KEEP_HOT_NAME_BYTES));

		if (id != KEEP_NO_ID) {
			h->pieces[id].is_erased = 1;
			keep_hot_forget(h, id, uses);
		}
	}
}

/* Whether a piece is in the guaranteed share of its owner, or would be if `pages` more of the owner's were evicted. */
static int is_guaranteed(const keep_hot *h, const struct keep_piece *piece, uint64_t pages, uint64_t tenants)
{
	return tenants > 1 && piece->owner > 0 && h->owned[piece->owner] < h->pages / (2 * tenants) + pages;
}

/* Evicts one kept piece: the first of a ring that is not in use. Guaranteed ones are moved to the end of the ring, so
 * that they are not examined each time. */
static int evict_from(keep_hot *h, uint32_t ring, int is_sparing, uint32_t owner, uint64_t tenants, const struct keep_uses *uses)
{
	uint32_t next, last = h->rings.links[ring].before;

	for (uint32_t id = h->rings.links[ring].after; id != ring; id = next) {
		const struct keep_piece *piece = &h->pieces[id];

		next = h->rings.links[id].after;
		if (is_sparing && piece->owner != owner && is_guaranteed(h, piece, piece->pages, tenants)) {
			keep_rings_unlink(&h->rings, id);
			keep_rings_push(&h->rings, ring, id);
		} else if (piece->users == 0 && has_ended(uses, piece->generation)) {
			h->said.evicted++;
			keep_hot_lose(h, id);
			keep_hot_release_pages(h, id);
			return 1;
		}
		if (id == last)
			break;
	}
	return 0;
}

static int evict_one(keep_hot *h, uint32_t owner, uint64_t tenants, const struct keep_uses *uses)
{
	for (int is_sparing = 1; is_sparing >= 0; is_sparing--)
		for (uint32_t ring = KEEP_HOT_PROBATION; ring <= KEEP_HOT_PROTECTED; ring++)
			if (evict_from(h, ring, is_sparing, owner, tenants, uses))
				return 1;
	return 0;
}

int64_t keep_hot_take(keep_hot *h, uint64_t pages, uint32_t owner, uint64_t tenants, const struct keep_uses *uses)
{
	int64_t start;
	int error = keep_hot_reserve(h);

	if (error < 0)
		return error;
	start = keep_extents_allocate(h->unused, pages);
	if (start == KEEP_NONE) {
		keep_hot_release_gone(h, uses);
		start = keep_extents_allocate(h->unused, pages);
	}
	while (start == KEEP_NONE) {
		if (!evict_one(h, owner, tenants, uses)) {
			h->has_refused = 1;
			return KEEP_NONE;
		}
		start = keep_extents_allocate(h->unused, pages);
	}
	return start < 0 ? start : (int64_t)keep_hot_taken(h, (uint64_t)start, pages);
}

/* Evicts the oldest kept pieces, up to the first of another size, and takes them at once. */
static int take_oldest(keep_hot *h, uint64_t pages, uint32_t most, uint64_t tenants, const struct keep_uses *uses, uint32_t *out)
{
	uint64_t generations[AT_ONCE];
	uint32_t found[AT_ONCE], count = 0, taken = 0;
	uint8_t ended[AT_ONCE];

	for (uint32_t id = h->rings.links[KEEP_HOT_PROBATION].after; id != KEEP_HOT_PROBATION && count < most && count < AT_ONCE;
	     id = h->rings.links[id].after) {
		const struct keep_piece *piece = &h->pieces[id];

		if (piece->pages != pages || piece->users > 0 || is_guaranteed(h, piece, most * pages, tenants))
			break;
		generations[count] = piece->generation;
		found[count++] = id;
	}
	if (count == 0)
		return 0;
	memset(ended, 1, count);
	if (uses != NULL)
		uses->end(uses->self, generations, (int)count, ended);
	for (uint32_t i = 0; i < count; i++)
		if (ended[i]) {
			struct keep_piece *piece = &h->pieces[found[i]];
			uint64_t start = piece->start;

			h->said.evicted++;
			keep_hot_lose(h, found[i]);
			*piece = (struct keep_piece){0};
			keep_rings_push(&h->rings, KEEP_HOT_UNUSED, found[i]);
			out[taken++] = keep_hot_taken(h, start, pages);
		}
	return (int)taken;
}

int keep_hot_take_many(keep_hot *h, uint64_t pages, uint32_t most, uint64_t tenants, const struct keep_uses *uses,
		       struct keep_room *out)
{
	uint32_t ids[AT_ONCE], count = 0;

	while (count < most && !h->has_refused) {
		int64_t id = keep_hot_take(h, pages, 0, tenants, uses);
		uint32_t more = 1;

		if (id == KEEP_NONE)
			h->has_refused = 0; /* no caller waits for this one */
		if (id < 0)
			break;
		ids[0] = (uint32_t)id;
		if (keep_extents_longest(h->unused) < pages && count + 1 < most)
			more += (uint32_t)take_oldest(h, pages, most - count - 1 < AT_ONCE - 1 ? most - count - 1 : AT_ONCE - 1,
						      tenants, uses, ids + 1);
		for (uint32_t i = 0; i < more; i++)
			out[count++] = (struct keep_room){
			    (uint64_t)(uintptr_t)h->memory + h->pieces[ids[i]].start * (uint64_t)KEEP_PAGE_BYTES,
			    (uint32_t)pages, ids[i]};
	}
	return (int)count;
}

int64_t keep_hot_wipe_free(keep_hot *h, uint64_t page, uint64_t pages_max)
{
	uint64_t extent[2];

	h->wipes += page == 0;
	while (keep_extents_after(h->unused, page, extent, 1) == 1) {
		uint64_t first = extent[0] > page ? extent[0] : page, until = extent[0] + extent[1];

		if (until > h->used_until)
			until = h->used_until;
		if (until > first + pages_max)
			until = first + pages_max;
		if (first >= until)
			break;
		keep_hot_wipe(h, first, until - first);
		pages_max -= until - first;
		page = until;
		if (pages_max == 0) {
			h->unwiped = page;
			return (int64_t)page;
		}
	}
	h->unwiped = UINT64_MAX;
	return KEEP_NONE;
}
