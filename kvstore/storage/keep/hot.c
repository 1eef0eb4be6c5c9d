/* Pieces of the hot memory, and which of them are kept: see hot.h. */
#include "hot_inside.h"

keep_hot *keep_hot_new(uint64_t pages, char *memory, const uint8_t *secret)
{
	keep_hot *h = calloc(1, sizeof *h);

	if (h == NULL)
		return NULL;
	h->memory = memory;
	h->pages = pages;
	h->protected_max = pages / 5 * 4 + pages % 5 * 4 / 5;
	h->unwiped = UINT64_MAX;
	memcpy(h->secret, secret, sizeof h->secret);
	h->unused = keep_extents_new(0, pages);
	if (h->unused == NULL || keep_hot_reserve(h) < 0 || keep_hot_owners(h, 1) < 0 ||
	    (pages > 0 && keep_extents_release(h->unused, 0, pages) < 0)) {
		keep_hot_free(h);
		return NULL;
	}
	return h;
}

void keep_hot_free(keep_hot *h)
{
	if (h->unused != NULL)
		keep_extents_free(h->unused);
	keep_map_free(&h->by_generation);
	keep_map_free(&h->by_name);
	free(h->rings.links);
	free(h->pieces);
	free(h->owned);
	free(h);
}

/* Makes room for one more piece. */
int keep_hot_reserve(keep_hot *h)
{
	uint64_t wanted = (uint64_t)h->made + KEEP_HOT_RINGS + 1;
	int error = 0;

	if (h->made > 0 && keep_rings_is_linked(&h->rings, KEEP_HOT_UNUSED))
		return 0;
	if (wanted > KEEP_NO_ID)
		return -ENOMEM;
	error = keep_grow((void **)&h->pieces, &h->room, wanted, sizeof *h->pieces);
	if (error == 0)
		error = keep_rings_reach(&h->rings, wanted);
	if (error == 0)
		error = keep_map_reserve(&h->by_generation, wanted, &h->pieces->generation, sizeof *h->pieces);
	return error < 0 ? error : keep_map_reserve(&h->by_name, wanted, &h->pieces->name, sizeof *h->pieces);
}

/* Notes that the pages of a piece are in use, by one user. `keep_hot_reserve` was called before. */
uint32_t keep_hot_taken(keep_hot *h, uint64_t start, uint64_t pages)
{
	uint32_t id = h->rings.links[KEEP_HOT_UNUSED].after;

	if (id == KEEP_HOT_UNUSED)
		id = KEEP_HOT_RINGS + h->made++;
	else
		keep_rings_unlink(&h->rings, id);
	if (start + pages > h->used_until)
		h->used_until = start + pages;
	if (h->unwiped != UINT64_MAX && start + pages > h->unwiped)
		keep_hot_wipe(h, start, pages); /* the pass in progress would skip these pages */
	h->pieces[id] = (struct keep_piece){.start = (uint32_t)start, .pages = (uint32_t)pages, .users = 1, .wipes = h->wipes};
	return id;
}

struct keep_piece *keep_hot_piece(const keep_hot *h, uint32_t id)
{
	keep_assert(id >= KEEP_HOT_RINGS && id < KEEP_HOT_RINGS + h->made && h->pieces[id].pages > 0);
	return &h->pieces[id];
}

void keep_hot_wipe(keep_hot *h, uint64_t start, uint64_t pages)
{
	if (h->memory != NULL)
		memset(h->memory + start * KEEP_PAGE_BYTES, 0, pages * KEEP_PAGE_BYTES);
}

/* Frees the pages of a piece that has no user and isn't kept. */
void keep_hot_release_pages(keep_hot *h, uint32_t id)
{
	struct keep_piece *piece = &h->pieces[id];

	if (piece->is_erased || piece->wipes != h->wipes)
		keep_hot_wipe(h, piece->start, piece->pages);
	keep_assert(keep_extents_release(h->unused, piece->start, piece->pages) == 0);
	*piece = (struct keep_piece){0};
	keep_rings_push(&h->rings, KEEP_HOT_UNUSED, id);
}

static void lose_name(keep_hot *h, struct keep_piece *piece)
{
	if (piece->name != 0)
		keep_map_remove(&h->by_name, piece->name);
	piece->name = 0;
}

/* Clears the record of a piece. */
void keep_hot_lose(keep_hot *h, uint32_t id)
{
	struct keep_piece *piece = &h->pieces[id];

	keep_rings_unlink(&h->rings, id);
	keep_map_remove(&h->by_generation, piece->generation);
	lose_name(h, piece);
	if (piece->is_protected)
		h->said.protected_pages -= piece->pages;
	h->said.kept_pages -= piece->pages;
	h->said.kept--;
	h->owned[piece->owner] -= piece->pages;
	piece->generation = 0;
	piece->owner = piece->is_protected = 0;
	piece->wipes = h->wipes;
}

uint64_t keep_hot_name(const keep_hot *h, const uint8_t *name)
{
	uint64_t hash = tk_siphash(h->secret, name, KEEP_HOT_NAME_BYTES);

	return hash > 0 ? hash : 1;
}

/* Makes the digests of names, and prefetches into the cache what a search for them will read. */
void keep_hot_warm_names(const keep_hot *h, const uint8_t *names, uint64_t count, uint64_t *hashes)
{
	for (uint64_t i = 0; i < count; i++)
		hashes[i] = keep_hot_name(h, names + i * KEEP_HOT_NAME_BYTES);
	keep_map_warm(&h->by_name, hashes, sizeof *hashes, count);
}

/* A record was requested again: it is protected from now on, and the oldest ones no longer, if there are too many. */
static void protect(keep_hot *h, uint32_t id)
{
	struct keep_piece *piece = &h->pieces[id];

	keep_rings_unlink(&h->rings, id);
	keep_rings_push(&h->rings, KEEP_HOT_PROTECTED, id);
	if (!piece->is_protected) {
		piece->is_protected = 1;
		h->said.protected_pages += piece->pages;
		while (h->said.protected_pages > h->protected_max) {
			uint32_t oldest = h->rings.links[KEEP_HOT_PROTECTED].after;

			h->pieces[oldest].is_protected = 0;
			h->said.protected_pages -= h->pieces[oldest].pages;
			keep_rings_unlink(&h->rings, oldest);
			keep_rings_push(&h->rings, KEEP_HOT_PROBATION, oldest);
		}
	}
}

void keep_hot_keep(keep_hot *h, const uint32_t *pieces, const uint64_t *generations, const uint8_t *names, uint64_t count,
		   uint32_t owner)
{
	uint64_t hashes[KEEP_WARMED_AT_ONCE];

	keep_assert(owner < h->owners);
	for (uint64_t i = 0; i < count; i++) {
		struct keep_piece *piece = keep_hot_piece(h, pieces[i]);
		uint32_t same = keep_map_find(&h->by_generation, generations[i]);

		if (names != NULL && i % KEEP_WARMED_AT_ONCE == 0)
			keep_hot_warm_names(h, names + i * KEEP_HOT_NAME_BYTES, keep_warmed_at_once(count - i), hashes);
		if (same != KEEP_NO_ID)
			protect(h, same); /* two requests read it before either could find it here */
		if (same != KEEP_NO_ID || piece->generation > 0 || piece->known_as > 0)
			continue;
		piece->generation = generations[i];
		keep_map_add(&h->by_generation, pieces[i]);
		if (names != NULL) {
			uint64_t name = hashes[i % KEEP_WARMED_AT_ONCE];
			uint32_t before = keep_map_find(&h->by_name, name);

			if (before != KEEP_NO_ID)
				lose_name(h, &h->pieces[before]);
			piece->name = name;
			keep_map_add(&h->by_name, pieces[i]);
		}
		piece->owner = owner;
		piece->wipes = h->wipes;
		h->owned[owner] += piece->pages;
		h->said.kept_pages += piece->pages;
		h->said.kept++;
		keep_rings_push(&h->rings, KEEP_HOT_PROBATION, pieces[i]);
	}
}

int keep_hot_owners(keep_hot *h, uint32_t owners)
{
	int error = keep_grow((void **)&h->owned, &h->owners_room, owners, sizeof *h->owned);

	if (error == 0 && owners > h->owners)
		h->owners = owners;
	return error;
}

uint64_t keep_hot_owned_pages(const keep_hot *h, uint32_t owner)
{
	return owner < h->owners ? h->owned[owner] : 0;
}

int64_t keep_hot_peek(const keep_hot *h, uint64_t generation)
{
	uint32_t id = keep_map_find(&h->by_generation, generation);

	return id == KEEP_NO_ID ? KEEP_NONE : (int64_t)id;
}

/* Counts a request that finds its record here. */
static uint32_t request(keep_hot *h, uint64_t generation)
{
	uint32_t id = keep_map_find(&h->by_generation, generation);

	if (id != KEEP_NO_ID) {
		protect(h, id);
		h->said.found++;
	}
	return id;
}

int64_t keep_hot_find(keep_hot *h, uint64_t generation)
{
	uint32_t id = request(h, generation);

	if (id == KEEP_NO_ID) {
		h->said.not_found++;
		return KEEP_NONE;
	}
	h->pieces[id].users++;
	return id;
}

void keep_hot_touch(keep_hot *h, const uint64_t *generations, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		request(h, generations[i]);
}

void keep_hot_use(keep_hot *h, uint32_t id)
{
	keep_hot_piece(h, id)->users++;
}

/* Whether a refused caller should try again; reported once. */
static int take_refused(keep_hot *h)
{
	int has_refused = h->has_refused;

	h->has_refused = 0;
	return has_refused;
}

int keep_hot_release(keep_hot *h, const uint32_t *pieces, uint64_t count)
{
	int retry = 0;

	for (uint64_t i = 0; i < count; i++) {
		struct keep_piece *piece = keep_hot_piece(h, pieces[i]);

		keep_assert(piece->users > 0);
		piece->users--;
		if (piece->users > 0)
			continue;
		if (piece->generation == 0)
			keep_hot_release_pages(h, pieces[i]);
		retry |= take_refused(h);
	}
	return retry;
}

int keep_hot_look_again(keep_hot *h, const struct keep_uses *uses)
{
	int retry = keep_hot_release_gone(h, uses);

	return retry | take_refused(h);
}

void keep_hot_say(const keep_hot *h, struct keep_hot_said *out)
{
	*out = h->said;
}

uint64_t keep_hot_start(const keep_hot *h, uint32_t id)
{
	return keep_hot_piece(h, id)->start;
}

uint64_t keep_hot_pages(const keep_hot *h, uint32_t id)
{
	return keep_hot_piece(h, id)->pages;
}

uint64_t keep_hot_sum(const keep_hot *h, const uint32_t *pieces, uint64_t count)
{
	uint64_t pages = 0;

	for (uint64_t i = 0; i < count; i++)
		pages += keep_hot_piece(h, pieces[i])->pages;
	return pages;
}

uint64_t keep_hot_generation(const keep_hot *h, uint32_t id)
{
	return keep_hot_piece(h, id)->generation;
}

uint64_t keep_hot_users(const keep_hot *h, uint32_t id)
{
	return keep_hot_piece(h, id)->users;
}

int keep_hot_has_refused(const keep_hot *h)
{
	return h->has_refused;
}
