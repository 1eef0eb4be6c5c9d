/* Exact LRU: one ring, the coldest row first; 16 bytes per row. */
#include "inside.h"

enum { HEAD = 0, HEADS = 1 };

struct lru {
	keep_policy policy;
	struct keep_rings rings; /* a row's node is the row plus one */
	uint64_t *use_of;        /* of each row: the number of its last use; ascends along the ring */
	uint32_t use_room;
	uint64_t uses;
};

static struct lru *of(keep_policy *p)
{
	return (struct lru *)p;
}

static void lru_free(keep_policy *p)
{
	free(of(p)->rings.links);
	free(of(p)->use_of);
	free(p);
}

static int lru_reserve(keep_policy *p, uint64_t rows)
{
	int error = keep_rings_reach(&of(p)->rings, HEADS + rows);

	return error < 0 ? error : keep_grow((void **)&of(p)->use_of, &of(p)->use_room, rows, sizeof *of(p)->use_of);
}

static void enter(struct lru *lru, uint32_t row)
{
	keep_rings_push(&lru->rings, HEAD, HEADS + row);
	lru->use_of[row] = ++lru->uses;
}

static void lru_admitted(keep_policy *p, uint32_t row, uint32_t pages, uint64_t name)
{
	(void)pages, (void)name;
	enter(of(p), row);
}

static void lru_readmitted(keep_policy *p, uint32_t row, uint32_t pages)
{
	(void)pages;
	enter(of(p), row);
}

/* Sets the last use of a row to that of `place`, unless it was used later. */
static void lru_inherited(keep_policy *p, uint32_t row, uint32_t pages, uint32_t place)
{
	struct lru *lru = of(p);

	(void)pages;
	if (keep_rings_is_linked(&lru->rings, HEADS + row)) {
		if (lru->use_of[row] > lru->use_of[place])
			return;
		keep_rings_unlink(&lru->rings, HEADS + row);
	}
	keep_rings_push(&lru->rings, lru->rings.links[HEADS + place].after, HEADS + row);
	lru->use_of[row] = lru->use_of[place];
}

static void lru_touched(keep_policy *p, uint32_t row)
{
	keep_rings_unlink(&of(p)->rings, HEADS + row);
	enter(of(p), row);
}

static void lru_removed(keep_policy *p, uint32_t row)
{
	keep_rings_unlink(&of(p)->rings, HEADS + row);
}

static void lru_evicted(keep_policy *p, uint32_t row, uint64_t name)
{
	(void)name;
	keep_rings_unlink(&of(p)->rings, HEADS + row);
}

static int64_t lru_candidate(keep_policy *p, int64_t *steps)
{
	uint32_t node = of(p)->rings.links[HEAD].after;

	(void)steps;
	return node == HEAD ? KEEP_NONE : (int64_t)node - HEADS;
}

static uint64_t lru_ghosts(const keep_policy *p)
{
	(void)p;
	return 0;
}

static const struct keep_policy_kind KIND = {
	lru_free,    lru_reserve, lru_admitted, lru_readmitted, lru_readmitted, lru_inherited,
	lru_touched, lru_removed, lru_evicted,  lru_candidate,  lru_ghosts,
};

keep_policy *keep_policy_lru(void)
{
	struct lru *lru = calloc(1, sizeof *lru);

	if (lru == NULL)
		return NULL;
	lru->policy.kind = &KIND;
	if (lru_reserve(&lru->policy, 0) < 0) {
		lru_free(&lru->policy);
		return NULL;
	}
	return &lru->policy;
}
