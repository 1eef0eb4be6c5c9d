/* Removes blocks: by a plan, on request, or because they expired.
 *
 * Always holds: a block forgotten here is forgotten everywhere in the core; it passes its rank on to the blocks that
 * become tails. A plan takes a bounded number of steps, everything else time in proportion to its arguments; nothing
 * here allocates memory.
 */
#include "inside.h"

enum { STUCK_EMPTY = 1, STUCK_PINNED = 2 };

/* Passes the rank of `place` to a block that has become a tail because `place` no longer follows it. */
void keep_pass_on(keep_core *c, uint32_t tail, uint32_t place, uint64_t now_ms, int was_free)
{
	if (c->rows[tail].guards != 0)
		return;
	if (was_free) {
		c->rows[tail].state &= ~KEEP_ASIDE;
		c->policy->kind->inherited(c->policy, tail, c->rows[tail].pages, place);
		keep_owners_inherit(c, tail, place);
	} else { /* it had no rank to pass on */
		keep_use(c, tail, now_ms);
	}
}

static void describe(const keep_core *c, uint32_t row, uint64_t reason, uint64_t now_ms, struct keep_gone *out)
{
	const struct keep_row *gone = &c->rows[row];
	uint32_t tick = keep_tick(c, now_ms), link = gone->first_link;

	*out = (struct keep_gone){
		.generation = gone->generation,
		.pages = gone->pages,
		.session = link == 0 ? 0 : c->chains.chains[c->chains.links[link - 1].chain].session,
		.position = link == 0 ? 0 : gone->position,
		.reason = reason,
		.at_ms = now_ms,
		.idle_ms = tick > gone->used ? (tick - gone->used) * c->limits.tick_ms : 0,
	};
}

void keep_forget(keep_core *c, uint32_t row, uint64_t reason, uint64_t now_ms, struct keep_gone *out)
{
	struct keep_row *gone = &c->rows[row];
	int aside = gone->state & KEEP_ASIDE;

	keep_assert(gone->pages > 0 && reason < KEEP_REASONS);
	describe(c, row, reason, now_ms, out);
	if (gone->first_link != 0)
		keep_chain_leave(c, row, KEEP_NO_ID, keep_pass_on, now_ms, keep_may_go(c, row));
	keep_assert(gone->followed == 0);
	if (reason == KEEP_SPACE || reason == KEEP_STRANDED || reason == KEEP_QUOTA)
		c->policy->kind->evicted(c->policy, row, c->knows_names ? c->names[row] : 0);
	else if (!aside)
		c->policy->kind->removed(c->policy, row);
	keep_wheel_cancel(&c->wheel, row);
	if (gone->guards != 0)
		keep_guards_change(c, row, 0);
	keep_assert(keep_map_remove(&c->by_generation, gone->generation) == row);
	if (gone->start != 0)
		keep_assert(keep_map_remove(&c->by_start, gone->start) == row);
	keep_owners_leave(c, row);
	c->total_pages -= gone->pages;
	c->gone_blocks[reason]++;
	c->gone_pages[reason] += gone->pages;
	if (reason == KEEP_SPACE)
		c->space_idle_ms = out->idle_ms;
	gone->pages = 0;
	gone->first_link = c->free_row;
	c->free_row = row + 1;
	c->free_rows++;
}

/* Notes that blocks were removed for a reason that was not decided here; lists those that the core knew, and returns
 * their number. */
int keep_core_gone(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t reason, uint64_t now_ms,
		   struct keep_gone *out)
{
	int gone = 0;

	if (reason >= KEEP_REASONS)
		return -EINVAL;
	keep_map_warm(&c->by_generation, generations, sizeof *generations, count);
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);
		if (row != KEEP_NO_ID)
			keep_forget(c, row, reason, now_ms, &out[gone++]);
	}
	return gone;
}

static uint64_t forget_expired(keep_core *c, uint64_t blocks_max, uint64_t steps_max, uint64_t now_ms,
			       struct keep_gone *out)
{
	uint32_t rows[KEEP_EXPIRED_AT_ONCE];
	uint32_t rows_max = blocks_max < KEEP_EXPIRED_AT_ONCE ? (uint32_t)blocks_max : KEEP_EXPIRED_AT_ONCE;
	uint32_t count = keep_wheel_advance(&c->wheel, now_ms, rows_max, steps_max, rows);
	uint64_t gone = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (c->rows[rows[i]].guards != 0)
			c->rows[rows[i]].state |= KEEP_OVERDUE;
		else
			keep_forget(c, rows[i], KEEP_EXPIRED, now_ms, &out[gone++]);
	}
	return gone;
}

/* An evictable block after a gap, or KEEP_NO_ID. If the last one is not evictable, the policy decides. */
static uint32_t stranded(keep_core *c)
{
	uint32_t row;

	while ((row = keep_chain_stranded(c)) != KEEP_NO_ID && c->rows[row].guards != 0)
		keep_chain_leave_stranded(c);
	return row;
}

/* The policy's choice among the evictable blocks; sets the others aside. */
static uint32_t candidate(keep_core *c, int64_t *steps)
{
	int64_t row;

	while ((row = c->policy->kind->candidate(c->policy, steps)) != KEEP_NONE) {
		if (keep_may_go(c, (uint32_t)row))
			return (uint32_t)row;
		c->policy->kind->removed(c->policy, (uint32_t)row);
		c->rows[row].state |= KEEP_ASIDE;
		if (--*steps <= 0)
			break;
	}
	return KEEP_NO_ID;
}

/* The guard to wait for if every row has one, or precedes a row that has one. */
static uint64_t over_soonest(const keep_core *c)
{
	for (unsigned guard = 0; guard < KEEP_GUARDS; guard++)
		if (c->by_longest[guard + 1] > 0)
			return STUCK_PINNED + guard;
	return STUCK_EMPTY;
}

/* Chooses blocks to evict now and forgets them: expired ones first, then, if more pages are wanted, others. `out` has
 * room for `blocks_max`. */
void keep_core_plan(keep_core *c, uint64_t wanted_pages, uint64_t blocks_max, uint64_t steps_max, uint64_t now_ms,
		    struct keep_gone *out, struct keep_planned *planned)
{
	int64_t steps = (int64_t)steps_max;
	uint64_t count = forget_expired(c, blocks_max, steps_max, now_ms, out), pages = 0, stuck = 0;

	for (uint64_t i = 0; i < count; i++)
		pages += out[i].pages;
	while (pages < wanted_pages && count < blocks_max) {
		uint64_t reason = KEEP_STRANDED;
		uint32_t row = stranded(c);

		if (row == KEEP_NO_ID) {
			reason = KEEP_SPACE;
			row = candidate(c, &steps);
		}
		if (row == KEEP_NO_ID) {
			stuck = steps > 0 ? over_soonest(c) : 0;
			break;
		}
		keep_forget(c, row, reason, now_ms, &out[count]);
		pages += out[count++].pages;
	}
	*planned = (struct keep_planned){count, pages, steps, stuck, c->wheel.lags};
}
