/* The blocks of each owner with a quota: an exact LRU order and a count of pages.
 *
 * It exists beside the policy, which orders all blocks. An owner is a small number; 0 means none, and rows without an
 * owner are neither ordered nor counted here, and cost nothing as long as no later row has an owner.
 *
 * Always holds:
 *
 * - A row with an owner is counted with it, from `keep_owners_take` to `keep_owners_leave`.
 * - A row in an owner's ring was used after all rows before it in that ring. Stamps come from one counter for all
 *   drives of a store, so the least recently used row can be found across several drives.
 * - Adding, touching and removing a row is O(1), and so is finding the least recently used one.
 *
 * Rows that may not be evicted are set aside here whenever they are in the policy. It knows no limits. 16 bytes per
 * row, if any row has an owner.
 */
#include "inside.h"

int keep_owners_init(struct keep_owners *owners, uint64_t owners_max)
{
	keep_assert(owners_max < UINT16_MAX); /* a row has 16 bits for its owner */
	owners->uses = &owners->own_uses;
	owners->heads = (uint32_t)owners_max + 1;
	owners->pages = calloc(owners->heads, sizeof *owners->pages);
	return owners->pages == NULL ? -ENOMEM : keep_rings_reach(&owners->rings, owners->heads);
}

void keep_owners_free(struct keep_owners *owners)
{
	free(owners->pages);
	free(owners->stamps);
	free(owners->rings.links);
}

int keep_owners_reserve(struct keep_owners *owners, uint64_t rows)
{
	int error = keep_grow((void **)&owners->stamps, &owners->stamps_room, rows, sizeof *owners->stamps);

	return error < 0 ? error : keep_rings_reach(&owners->rings, owners->heads + rows);
}

static void stamp(struct keep_owners *owners, uint32_t row, uint32_t owner)
{
	owners->stamps[row] = ++*owners->uses;
	keep_rings_push(&owners->rings, owner, owners->heads + row);
}

/* Records the owner of a new row, as used just now. Memory was reserved. */
void keep_owners_take(keep_core *c, uint32_t row, uint32_t owner)
{
	c->rows[row].owner = (uint16_t)owner;
	c->owners.pages[owner] += c->rows[row].pages;
	stamp(&c->owners, row, owner);
}

/* Notes a use. A row that was set aside is put back. */
void keep_owners_touch(keep_core *c, uint32_t row)
{
	uint32_t owner = c->rows[row].owner;

	if (owner == 0)
		return;
	keep_rings_unlink(&c->owners.rings, c->owners.heads + row);
	stamp(&c->owners, row, owner);
}

/* Sets the last use of a row to that of `place`, unless it was used later. */
void keep_owners_inherit(keep_core *c, uint32_t row, uint32_t place)
{
	struct keep_owners *owners = &c->owners;
	uint32_t node = owners->heads + row, other = owners->heads + place;

	if (c->rows[row].owner == 0 || !keep_rings_is_linked(&owners->rings, other))
		return;
	keep_assert(c->rows[row].owner == c->rows[place].owner);
	if (keep_rings_is_linked(&owners->rings, node)) {
		if (owners->stamps[row] > owners->stamps[place])
			return;
		keep_rings_unlink(&owners->rings, node);
	}
	keep_rings_push(&owners->rings, owners->rings.links[other].after, node);
	owners->stamps[row] = owners->stamps[place];
}

/* Forgets a row that is gone. */
void keep_owners_leave(keep_core *c, uint32_t row)
{
	uint32_t owner = c->rows[row].owner;

	if (owner == 0)
		return;
	keep_rings_unlink(&c->owners.rings, c->owners.heads + row);
	keep_assert(c->owners.pages[owner] >= c->rows[row].pages);
	c->owners.pages[owner] -= c->rows[row].pages;
	c->rows[row].owner = 0;
}

void keep_core_share_uses(keep_core *c, uint64_t *uses)
{
	c->owners.uses = uses;
}

uint64_t keep_core_owned_pages(const keep_core *c, uint64_t owner)
{
	return owner < c->owners.heads ? c->owners.pages[owner] : 0;
}

struct aged {
	uint32_t used, order, row;
};

static int by_age(const void *one, const void *other)
{
	const struct aged *a = one, *b = other;

	if (a->used != b->used)
		return a->used < b->used ? -1 : 1;
	return a->order < b->order ? -1 : a->order > b->order;
}

/* Notes the owner of these blocks, which are all of its blocks, oldest first.
 *
 * Their order is known only by last use and age, and not at all across several drives. So they are spread evenly over
 * the stamps given so far. */
int keep_core_own(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t owner)
{
	struct keep_owners *owners = &c->owners;
	uint64_t before = *owners->uses;
	uint32_t known = 0;
	struct aged *aged;

	if (owner == 0 || owner >= owners->heads || owners->pages[owner] != 0 || count > UINT32_MAX)
		return -EINVAL;
	aged = malloc((count + 1) * sizeof *aged);
	if (aged == NULL || keep_owners_reserve(owners, c->rows_made) < 0) {
		free(aged);
		return -ENOMEM;
	}
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);
		if (row != KEEP_NO_ID)
			aged[known] = (struct aged){c->rows[row].used, known, row}, known++;
	}
	qsort(aged, known, sizeof *aged, by_age);
	for (uint32_t i = 0; i < known; i++) {
		uint32_t row = aged[i].row;

		keep_assert(c->rows[row].owner == 0);
		c->rows[row].owner = (uint16_t)owner;
		owners->pages[owner] += c->rows[row].pages;
		owners->stamps[row] = (uint64_t)((unsigned __int128)before * (i + 1) / known);
		keep_rings_push(&owners->rings, (uint32_t)owner, owners->heads + row);
	}
	free(aged);
	return 0;
}

static uint32_t oldest(const struct keep_owners *owners, uint64_t owner)
{
	uint32_t node = owners->rings.links[owner].after;

	return node < owners->heads ? KEEP_NO_ID : node - owners->heads;
}

/* The stamp of the owner's block to be evicted first; KEEP_NONE if none may be evicted. */
int64_t keep_core_oldest_use(keep_core *c, uint64_t owner, int64_t *steps)
{
	uint32_t row;

	if (owner == 0 || owner >= c->owners.heads)
		return -EINVAL;
	while ((row = oldest(&c->owners, owner)) != KEEP_NO_ID) {
		if (keep_may_go(c, row))
			return (int64_t)c->owners.stamps[row];
		if (*steps <= 0)
			return KEEP_NONE;
		keep_rings_unlink(&c->owners.rings, c->owners.heads + row);
		--*steps;
	}
	return KEEP_NONE;
}

/* Evicts an owner's oldest blocks, to make room for its own, until they add up to `pages`, the next one was used at
 * stamp `before` or later, or the steps are used up; returns how many. */
uint64_t keep_core_evict_oldest(keep_core *c, uint64_t owner, uint64_t pages, uint64_t blocks_max, uint64_t before,
				int64_t *steps, uint64_t now_ms, struct keep_gone *out)
{
	uint64_t count = 0, got = 0;

	while (got < pages && count < blocks_max) {
		int64_t use = keep_core_oldest_use(c, owner, steps);

		if (use < 0 || *steps <= 0 || (uint64_t)use >= before)
			break;
		keep_forget(c, oldest(&c->owners, owner), KEEP_QUOTA, now_ms, &out[count]);
		got += out[count++].pages;
	}
	return count;
}
