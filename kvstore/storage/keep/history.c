/* The reasons for the last removals of blocks: a fixed number of them, the newest of each name. Names are stored as
 * keyed digests, so that clients can't make them collide. */
#include "inside.h"
#include "siphash.h"

enum { NAME_BYTES = 48, HEAD = 0 };

struct removal {
	uint64_t name; /* 0: this entry was never used */
	struct keep_gone gone;
};

struct keep_history {
	uint64_t secret[2];
	struct removal *removals; /* from 1; 0 is the head of the ring */
	uint32_t room, size, made;
	struct keep_rings rings; /* oldest first */
	struct keep_map by_name;
};

keep_history *keep_history_new(uint32_t size, const uint8_t *secret)
{
	keep_history *h = calloc(1, sizeof *h);
	uint64_t places = (uint64_t)size + 1;

	if (h == NULL)
		return NULL;
	h->size = size;
	memcpy(h->secret, secret, sizeof h->secret);
	if (keep_grow((void **)&h->removals, &h->room, places, sizeof *h->removals) < 0 ||
	    keep_rings_reach(&h->rings, places) < 0 ||
	    keep_map_reserve(&h->by_name, places, &h->removals->name, sizeof *h->removals) < 0) {
		keep_history_free(h);
		return NULL;
	}
	return h;
}

void keep_history_free(keep_history *h)
{
	keep_map_free(&h->by_name);
	free(h->rings.links);
	free(h->removals);
	free(h);
}

static uint64_t digest_of(const keep_history *h, const uint8_t *name)
{
	uint64_t digest = tk_siphash(h->secret, name, NAME_BYTES);

	return digest > 0 ? digest : 1;
}

void keep_history_add(keep_history *h, const uint8_t *names, const struct keep_gone *gone, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		uint64_t name = digest_of(h, names + i * NAME_BYTES);
		uint32_t at = keep_map_find(&h->by_name, name);

		if (at == KEEP_NO_ID && h->made < h->size) {
			at = ++h->made;
		} else {
			if (at == KEEP_NO_ID)
				at = h->rings.links[HEAD].after;
			keep_map_remove(&h->by_name, h->removals[at].name);
			keep_rings_unlink(&h->rings, at);
		}
		h->removals[at] = (struct removal){name, gone[i]};
		keep_map_add(&h->by_name, at);
		keep_rings_push(&h->rings, HEAD, at);
	}
}

int keep_history_of(const keep_history *h, const uint8_t *name, struct keep_gone *out)
{
	uint32_t at = keep_map_find(&h->by_name, digest_of(h, name));

	if (at == KEEP_NO_ID)
		return 0;
	*out = h->removals[at].gone;
	return 1;
}

/* Fills in the last session of each removed block; 0 if it was in none, or isn't remembered. Returns how many aren't
 * 0. */
uint64_t keep_history_sessions(const keep_history *h, const uint8_t *names, uint64_t count, uint64_t *out)
{
	uint64_t found = 0;

	for (uint64_t i = 0; i < count; i++) {
		uint32_t at = h->made > 0 ? keep_map_find(&h->by_name, digest_of(h, names + i * NAME_BYTES)) : KEEP_NO_ID;

		out[i] = at == KEEP_NO_ID ? 0 : h->removals[at].gone.session;
		found += out[i] > 0;
	}
	return found;
}
