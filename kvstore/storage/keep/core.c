/* The core of eviction: which blocks are evicted, when, and why. It must be notified of all changes to blocks.
 *
 * Always holds:
 *
 * - A block with a guard is not evicted, whatever its age or time to live. One that expires meanwhile is removed when
 *   its last guard ends.
 * - A block is evicted for room only while it is a tail (see chains.c), so what remains of a session is a prefix.
 *   Blocks after a gap with another cause are evicted before all others.
 * - A use of a block counts as a use of all blocks before it in its sessions, since they are needed with it. So under
 *   LRU the least recently used block is always a tail, and exactly that one is evicted.
 * - Guards end with a use: lifting the last one touches the block.
 * - The policy holds the rows that may be evicted; others are *set aside* lazily, when the policy offers one. No
 *   unguarded tail is set aside.
 * - The same holds for the blocks of each owner among themselves (see owners.c), which are evicted in LRU order when
 *   the owner makes room for itself, whatever the policy.
 * - A block is found by its generation or its first page only.
 *
 * Blocks are numbered by rows inside, and by their generations outside. This file: new blocks, and queries;
 * core_guards.c: uses and guards; core_sessions.c: positions in sessions; core_removals.c: removals.
 */
#include "inside.h"

keep_core *keep_core_new(keep_policy *policy, int knows_names, const struct keep_limits *limits)
{
	keep_core *c = calloc(1, sizeof *c);

	if (c == NULL)
		return NULL;
	c->policy = policy;
	c->knows_names = knows_names;
	c->limits = *limits;
	if (keep_wheel_init(&c->wheel, limits->now_ms, limits->tick_ms) < 0 ||
	    keep_owners_init(&c->owners, limits->owners) < 0) {
		keep_core_free(c);
		return NULL;
	}
	return c;
}

void keep_core_free(keep_core *c)
{
	free(c->rows);
	free(c->names);
	free(c->protected);
	keep_map_free(&c->by_generation);
	keep_map_free(&c->by_start);
	keep_map_free(&c->by_protected);
	keep_wheel_free(&c->wheel);
	keep_chains_free(&c->chains);
	keep_owners_free(&c->owners);
	free(c);
}

uint32_t keep_row_of(const keep_core *c, uint64_t generation)
{
	return keep_map_find(&c->by_generation, generation);
}

uint32_t keep_tick(const keep_core *c, uint64_t now_ms)
{
	return now_ms < c->limits.now_ms ? 0 : (uint32_t)((now_ms - c->limits.now_ms) / c->limits.tick_ms);
}

/* Reserves memory for this many rows, except their links to sessions. */
static int reserve_rows(keep_core *c, uint64_t rows, int expire, int owned)
{
	int error = rows > UINT32_MAX / 2 ? -ENOMEM : keep_grow((void **)&c->rows, &c->rows_room, rows, sizeof *c->rows);

	if (error < 0 || c->rows == NULL)
		return error; /* nothing to reserve while there is no row */
	error = keep_map_reserve(&c->by_generation, rows, &c->rows[0].generation, sizeof *c->rows);
	if (error == 0)
		error = keep_map_reserve(&c->by_start, rows, &c->rows[0].start, sizeof *c->rows);
	c->by_generation.keys = (const char *)&c->rows[0].generation;
	c->by_start.keys = (const char *)&c->rows[0].start;
	if (error == 0 && c->knows_names)
		error = keep_grow((void **)&c->names, &c->names_room, rows, sizeof *c->names);
	if (error == 0)
		error = keep_policy_reserve(c->policy, rows);
	if (error == 0 && expire)
		error = keep_wheel_reserve(&c->wheel, rows);
	if (error == 0 && owned)
		error = keep_owners_reserve(&c->owners, rows);
	return error;
}

static void enter(keep_core *c, uint32_t row, uint64_t generation, uint64_t start, uint64_t pages)
{
	c->rows[row] = (struct keep_row){.generation = generation, .start = start, .pages = (uint32_t)pages};
	c->total_pages += pages;
	keep_map_add(&c->by_generation, row);
	keep_assert(start == 0 || keep_map_find(&c->by_start, start) == KEEP_NO_ID);
	if (start != 0)
		keep_map_add(&c->by_start, row);
}

/* Adds the blocks on the drive to an empty core, in ascending order of generations. Their uses are unknown, so they
 * count as used in that order, before all later blocks. */
int keep_core_restore(keep_core *c, const uint64_t *generations, const uint64_t *starts, const uint32_t *pages,
		      const uint64_t *expiries_ms, uint64_t count)
{
	int error, expire = 0;

	for (uint64_t i = 0; i < count; i++) {
		if (pages[i] == 0 || (i > 0 && generations[i] <= generations[i - 1]))
			return -EINVAL;
		expire |= expiries_ms[i] != 0;
	}
	if (c->rows_made != 0)
		return -EINVAL;
	error = reserve_rows(c, count, expire, 0);
	if (error < 0)
		return error;
	if (count == 0)
		return 0;
	keep_map_expect(&c->by_generation, count);
	keep_map_expect(&c->by_start, count);
	for (uint32_t row = 0; row < count; row++) {
		if (row % KEEP_WARMED_AT_ONCE == 0) {
			uint64_t ahead = keep_warmed_at_once(count - row);

			keep_map_warm(&c->by_generation, &generations[row], sizeof *generations, ahead);
			keep_map_warm(&c->by_start, &starts[row], sizeof *starts, ahead);
		}
		enter(c, row, generations[row], starts[row], pages[row]);
		c->policy->kind->restored(c->policy, row, pages[row]);
		keep_wheel_insert(&c->wheel, row, expiries_ms[row]);
	}
	c->rows_made = (uint32_t)count;
	return 0;
}

static uint32_t take_row(keep_core *c)
{
	uint32_t row = c->free_row;

	if (row == 0)
		return c->rows_made++;
	c->free_row = c->rows[row - 1].first_link;
	c->free_rows--;
	return row - 1;
}

/* Notes blocks that gets can find from now on; sets `refused`, and returns the number of refusals: KEEP_EXISTS for the
 * block itself, the others for its place in its session. */
int keep_core_admitted(keep_core *c, const struct keep_record *records, uint64_t count, uint64_t now_ms, uint8_t *refused)
{
	int error, expire = 0, owned = 0, refusals = 0;

	if (count == 0)
		return 0; /* then `records` may be NULL */
	keep_map_warm(&c->by_generation, &records->generation, sizeof *records, count);
	keep_map_warm(&c->by_start, &records->start, sizeof *records, count);
	for (uint64_t i = 0; i < count; i++) {
		const struct keep_record *record = &records[i];

		if (record->pages == 0 || record->pages > UINT32_MAX || record->owner >= c->owners.heads ||
		    (record->start != 0 && keep_map_find(&c->by_start, record->start) != KEEP_NO_ID))
			return -EINVAL;
		expire |= record->expires_ms != 0;
		owned |= record->owner != 0;
	}
	error = reserve_rows(c, c->rows_made + (count > c->free_rows ? count - c->free_rows : 0), expire, owned);
	if (error < 0)
		return error;
	for (uint64_t i = 0; i < count; i++) {
		const struct keep_record *record = &records[i];
		uint32_t row;

		refused[i] = 0;
		if (keep_row_of(c, record->generation) != KEEP_NO_ID) {
			refused[i] = KEEP_EXISTS;
			refusals++;
			continue;
		}
		row = take_row(c);
		enter(c, row, record->generation, record->start, record->pages);
		c->rows[row].used = keep_tick(c, now_ms);
		if (c->knows_names)
			c->names[row] = record->name;
		if (record->expires_ms != 0)
			keep_wheel_insert(&c->wheel, row, record->expires_ms);
		c->policy->kind->admitted(c->policy, row, (uint32_t)record->pages, record->name);
		if (record->owner != 0)
			keep_owners_take(c, row, (uint32_t)record->owner);
		if (record->session != 0)
			refused[i] = (uint8_t)keep_settle(c, row, record->session, record->position, now_ms);
		refusals += refused[i] != 0;
	}
	return refusals;
}

/* Changes when a block expires; 0: never. */
int keep_core_renewed(keep_core *c, uint64_t generation, uint64_t expires_ms)
{
	uint32_t row = keep_row_of(c, generation);
	int error;

	if (row == KEEP_NO_ID)
		return 0;
	error = expires_ms == 0 ? 0 : keep_wheel_reserve(&c->wheel, c->rows_made);
	if (error < 0)
		return error;
	keep_wheel_cancel(&c->wheel, row);
	c->rows[row].state &= ~KEEP_OVERDUE;
	keep_wheel_insert(&c->wheel, row, expires_ms);
	return 0;
}

/* Notes that a block was moved to another generation and start; returns how many of its guards remain to be
 * released. */
int keep_core_moved(keep_core *c, uint64_t generation, uint64_t to, uint64_t start)
{
	uint32_t row = keep_row_of(c, generation);
	int guards = 0;

	if (row == KEEP_NO_ID || keep_row_of(c, to) != KEEP_NO_ID ||
	    (start != 0 && keep_map_find(&c->by_start, start) != KEEP_NO_ID))
		return -EINVAL;
	keep_map_remove(&c->by_generation, generation);
	if (c->rows[row].start != 0)
		keep_map_remove(&c->by_start, c->rows[row].start);
	c->rows[row].generation = to;
	c->rows[row].start = start;
	keep_map_add(&c->by_generation, row);
	if (start != 0)
		keep_map_add(&c->by_start, row);
	for (unsigned guard = 0; guard < KEEP_PROTECTED; guard++)
		guards += (int)(c->rows[row].guards >> guard * KEEP_GUARD_BITS & UINT16_MAX);
	return guards;
}

int keep_core_knows(const keep_core *c, uint64_t generation)
{
	return keep_row_of(c, generation) != KEEP_NO_ID;
}

/* The length in pages of the block that begins at a page, and its generation; 0 if none begins there. */
uint64_t keep_core_at(const keep_core *c, uint64_t start, uint64_t *generation)
{
	uint32_t row = start == 0 ? KEEP_NO_ID : keep_map_find(&c->by_start, start);

	if (row == KEEP_NO_ID)
		return 0;
	*generation = c->rows[row].generation;
	return c->rows[row].pages;
}

uint64_t keep_core_blocks(const keep_core *c)
{
	return c->by_generation.count;
}

uint64_t keep_core_expiring(const keep_core *c)
{
	return c->wheel.count;
}

uint64_t keep_core_protected_pages(const keep_core *c)
{
	return c->protected_pages;
}

void keep_core_say(const keep_core *c, struct keep_core_said *out)
{
	*out = (struct keep_core_said){
		.pages = c->total_pages,
		.sessions = c->chains.open,
		.links = c->chains.linked,
		.protected_sessions = c->by_protected.count,
		.lags = c->wheel.lags,
		.space_idle_ms = c->space_idle_ms,
		.rows = c->rows_made,
	};
	memcpy(out->guarded, &c->by_longest[1], sizeof out->guarded);
	memcpy(out->gone_blocks, c->gone_blocks, sizeof out->gone_blocks);
	memcpy(out->gone_pages, c->gone_pages, sizeof out->gone_pages);
}
