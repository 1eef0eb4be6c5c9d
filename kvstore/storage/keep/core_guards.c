/* Uses and guards of blocks: one word per row has a count per kind, the guard that lasts longest in the highest bits.
 *
 * Always holds: a count is changed only by its own kind; a row is guarded while any of its counts is not zero; no guard
 * ends on its own.
 */
#include "inside.h"

static uint64_t one_of(unsigned guard)
{
	return UINT64_C(1) << guard * KEEP_GUARD_BITS;
}

static uint64_t count_of(const keep_core *c, uint32_t row, unsigned guard)
{
	return c->rows[row].guards >> guard * KEEP_GUARD_BITS & UINT16_MAX;
}

/* One plus the longest-lasting guard in a word; 0: none. */
static unsigned longest_of(uint64_t word)
{
	return word == 0 ? 0 : (63 - (unsigned)__builtin_clzll(word)) / KEEP_GUARD_BITS + 1;
}

void keep_guards_change(keep_core *c, uint32_t row, uint64_t after)
{
	unsigned before = longest_of(c->rows[row].guards), now = longest_of(after);

	c->by_longest[before]--;
	c->by_longest[now]++;
	c->rows[row].guards = after;
	if (now == KEEP_PROTECTED + 1 && before != now)
		c->protected_pages += c->rows[row].pages;
	else if (before == KEEP_PROTECTED + 1 && before != now)
		c->protected_pages -= c->rows[row].pages;
}

/* Protects a row because one of its sessions is protected. Such sessions are few, so the count needs no limit. */
void keep_protect_row(keep_core *c, uint32_t row)
{
	keep_assert(count_of(c, row, KEEP_PROTECTED) < UINT16_MAX);
	keep_guards_change(c, row, c->rows[row].guards + one_of(KEEP_PROTECTED));
}

int keep_may_go(const keep_core *c, uint32_t row)
{
	return c->rows[row].guards == 0 && c->rows[row].followed == 0;
}

void keep_use(keep_core *c, uint32_t row, uint64_t now_ms)
{
	c->rows[row].used = keep_tick(c, now_ms);
	if (c->rows[row].state & KEEP_ASIDE) {
		c->rows[row].state &= ~KEEP_ASIDE;
		c->policy->kind->readmitted(c->policy, row, c->rows[row].pages);
	}
	c->policy->kind->touched(c->policy, row);
	keep_owners_touch(c, row);
}

/* Notes a use of a row whose guards have been changed; if it has none, it may expire again. */
void keep_lift(keep_core *c, uint32_t row, uint64_t now_ms)
{
	if (c->rows[row].state & KEEP_OVERDUE && c->rows[row].guards == 0) {
		c->rows[row].state &= ~KEEP_OVERDUE;
		keep_wheel_insert_again(&c->wheel, row);
	}
	keep_use(c, row, now_ms);
}

/* Notes uses, in their order; blocks that are not kept are ignored. */
void keep_core_touched(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t now_ms)
{
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);
		if (row != KEEP_NO_ID)
			keep_use(c, row, now_ms);
	}
}

/* Guards each of these blocks once more; sets `refused`, and returns the number of refusals. */
int keep_core_hold(keep_core *c, const uint64_t *generations, uint64_t count, unsigned guard, uint8_t *refused)
{
	int refusals = 0;

	if (guard >= KEEP_GUARDS)
		return -EINVAL;
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);

		if (row == KEEP_NO_ID)
			refused[i] = KEEP_UNKNOWN;
		else
			refused[i] = count_of(c, row, guard) >= c->limits.guards_of_a_kind ? KEEP_FULL : 0;
		if (refused[i] == 0)
			keep_guards_change(c, row, c->rows[row].guards + one_of(guard));
		refusals += refused[i] != 0;
	}
	return refusals;
}

static uint32_t protected_of(const keep_core *c, uint64_t session)
{
	uint32_t id = keep_map_find(&c->by_protected, session);

	return id == KEEP_NO_ID ? 0 : c->protected[id].blocks;
}

uint64_t keep_core_protected_blocks(const keep_core *c, uint64_t session)
{
	return protected_of(c, session);
}

static uint64_t held_by_sessions(const keep_core *c, uint32_t row)
{
	uint64_t count = 0;

	for (uint32_t link = c->rows[row].first_link; link != 0; link = c->chains.links[link - 1].next)
		count += c->rows[row].position < protected_of(c, c->chains.chains[c->chains.links[link - 1].chain].session);
	return count;
}

/* Releases one guard of each block; sets `refused`, and returns the number of refusals. Releasing the last one is a
 * use. */
int keep_core_release(keep_core *c, const uint64_t *generations, uint64_t count, unsigned guard, uint64_t now_ms,
		      uint8_t *refused)
{
	int refusals = 0;

	if (guard >= KEEP_GUARDS)
		return -EINVAL;
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);

		refused[i] = 0;
		if (row == KEEP_NO_ID)
			refused[i] = KEEP_UNKNOWN;
		else if (count_of(c, row, guard) == (guard == KEEP_PROTECTED ? held_by_sessions(c, row) : 0))
			refused[i] = KEEP_NOT_HELD; /* guards of its sessions are not released this way */
		refusals += refused[i] != 0;
		if (refused[i] != 0)
			continue;
		keep_guards_change(c, row, c->rows[row].guards - one_of(guard));
		if (c->rows[row].guards == 0)
			keep_lift(c, row, now_ms);
	}
	return refusals;
}

/* Releases a session's guard of one of its rows; returns whether it was the row's last guard. */
int keep_unprotect_row(keep_core *c, uint64_t session, uint32_t row)
{
	if (c->rows[row].position >= protected_of(c, session))
		return 0;
	keep_assert(count_of(c, row, KEEP_PROTECTED) > 0);
	keep_guards_change(c, row, c->rows[row].guards - one_of(KEEP_PROTECTED));
	return c->rows[row].guards == 0;
}

/* The rows of a session from a position on, up to another; returns how many. */
static uint32_t rows_of(const keep_core *c, uint64_t session, uint64_t first, uint64_t until, const uint32_t **rows)
{
	uint32_t chain = keep_chain_of(c, session), at;

	if (chain == KEEP_NO_ID)
		return 0;
	at = keep_chain_find(c, chain, first);
	*rows = c->chains.chains[chain].rows + at;
	return first < until ? keep_chain_find(c, chain, until) - at : 0;
}

static void unprotect_rows(keep_core *c, uint64_t session, uint64_t first, uint64_t until, uint64_t now_ms)
{
	const uint32_t *rows = NULL;
	uint32_t count = rows_of(c, session, first, until, &rows);

	for (uint32_t i = 0; i < count; i++)
		if (keep_unprotect_row(c, session, rows[i]))
			keep_lift(c, rows[i], now_ms);
}

static int note_protected(keep_core *c, uint64_t session, uint32_t blocks)
{
	uint32_t id = keep_map_find(&c->by_protected, session);

	if (id == KEEP_NO_ID) {
		if (c->by_protected.count >= c->limits.protected_sessions ||
		    keep_grow((void **)&c->protected, &c->protected_room, (uint64_t)c->protected_made + 1,
			      sizeof *c->protected) < 0 ||
		    keep_map_reserve(&c->by_protected, (uint64_t)c->protected_made + 1, c->protected,
				     sizeof *c->protected) < 0)
			return KEEP_FULL;
		id = c->free_protected;
		if (id != 0)
			c->free_protected = c->protected[--id].next_free;
		else
			id = c->protected_made++;
		c->protected[id].session = session;
		keep_map_add(&c->by_protected, id);
	}
	c->protected[id].blocks = blocks;
	return 0;
}

/* Protects a session's first blocks, current and future ones, until it is unprotected. The last call applies: fewer
 * blocks than before unprotect the others. Returns a refusal, or 0. */
int keep_core_protect(keep_core *c, uint64_t session, uint64_t blocks, uint64_t now_ms)
{
	uint64_t before = protected_of(c, session);
	const uint32_t *rows = NULL;
	uint32_t count;
	int refusal;

	if (blocks == 0 || blocks > c->limits.session_blocks)
		return -EINVAL;
	unprotect_rows(c, session, blocks, before, now_ms);
	refusal = note_protected(c, session, (uint32_t)blocks);
	if (refusal != 0)
		return refusal;
	count = rows_of(c, session, before, blocks, &rows);
	for (uint32_t i = 0; i < count; i++)
		keep_protect_row(c, rows[i]);
	return 0;
}

/* Ends the protection of a session's blocks; this counts as a use of them. */
int keep_core_unprotect(keep_core *c, uint64_t session, uint64_t now_ms)
{
	uint32_t id = keep_map_find(&c->by_protected, session);

	if (id == KEEP_NO_ID)
		return KEEP_NOT_HELD;
	unprotect_rows(c, session, 0, c->protected[id].blocks, now_ms);
	keep_map_remove(&c->by_protected, session);
	c->protected[id].next_free = c->free_protected;
	c->free_protected = id + 1;
	return 0;
}

int keep_core_is_guarded(const keep_core *c, uint64_t generation)
{
	uint32_t row = keep_row_of(c, generation);

	return row != KEEP_NO_ID && c->rows[row].guards != 0;
}
