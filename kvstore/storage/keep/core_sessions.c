/* Handles sessions that get blocks, continue differently, or end. Without memory for a block's place the result is
 * KEEP_FULL: the block is stored, but outside the session. */
#include "inside.h"

/* Puts a row at a position of a session, replacing any other row there; returns a refusal, or 0. */
uint32_t keep_settle(keep_core *c, uint32_t row, uint64_t session, uint64_t position, uint64_t now_ms)
{
	const struct keep_limits *limits = &c->limits;
	uint32_t before = keep_chain_at(c, session, position);
	uint64_t links_max = limits->links_per_block * c->by_generation.count;

	if (before == row)
		return 0;
	if (position >= limits->session_blocks)
		return KEEP_FULL;
	if (c->rows[row].first_link != 0 && c->rows[row].position != position)
		return KEEP_MOVED;
	if (links_max < limits->links_min)
		links_max = limits->links_min;
	if (c->chains.linked >= links_max || keep_chain_reserve(c, session, 1) < 0)
		return KEEP_FULL;
	if (before != KEEP_NO_ID) {
		/* The block before it is a tail only for a moment: the new row will follow it. */
		keep_unprotect_row(c, session, before);
		keep_chain_leave(c, before, keep_chain_of(c, session), NULL, now_ms, 0);
		keep_lift(c, before, now_ms);
	}
	keep_chain_join(c, row, session, (uint32_t)position);
	if (position < keep_core_protected_blocks(c, session))
		keep_protect_row(c, row);
	return 0;
}

/* Whether a new session can begin with these blocks, each of which is kept and in no session. */
static int can_open(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t session)
{
	uint64_t fresh = 0;

	if (count == 0 || count > c->limits.session_blocks || keep_chain_of(c, session) != KEEP_NO_ID ||
	    keep_core_protected_blocks(c, session) != 0)
		return 0;
	for (; fresh < count; fresh++) {
		uint32_t row = keep_row_of(c, generations[fresh]);
		if (row == KEEP_NO_ID || c->rows[row].first_link != 0 || c->rows[row].state & KEEP_MARKED)
			break;
		c->rows[row].state |= KEEP_MARKED; /* to detect a block that is listed twice */
	}
	for (uint64_t i = 0; i < fresh; i++)
		c->rows[keep_row_of(c, generations[i])].state &= ~KEEP_MARKED;
	return fresh == count;
}

/* Notes that kept blocks are in a session, one after the other; sets `refused`, and returns the number of refusals.
 * Blocks that were at these positions leave the session, which has continued differently. */
int keep_core_joined(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t session, uint64_t first,
		     uint64_t now_ms, uint8_t *refused)
{
	int refusals = 0;

	if (session == 0)
		return -EINVAL;
	if (first == 0 && can_open(c, generations, count, session)) { /* in no session yet: no limit on links */
		for (uint64_t i = 0; i < count; i++) {
			refused[i] = keep_chain_reserve(c, session, i == 0 ? 1 : count - i) < 0 ? KEEP_FULL : 0;
			if (refused[i] == 0)
				keep_chain_join(c, keep_row_of(c, generations[i]), session, (uint32_t)i);
			refusals += refused[i] != 0;
		}
		return refusals;
	}
	for (uint64_t i = 0; i < count; i++) {
		uint32_t row = keep_row_of(c, generations[i]);

		refused[i] = row == KEEP_NO_ID ? KEEP_UNKNOWN : (uint8_t)keep_settle(c, row, session, first + i, now_ms);
		refusals += refused[i] != 0;
	}
	return refusals;
}

/* Notes that a session ends before a position: blocks from there on are as old as its tail was. */
void keep_core_left(keep_core *c, uint64_t session, uint64_t first, uint64_t now_ms)
{
	uint32_t chain = keep_chain_of(c, session), at, left;

	if (chain == KEEP_NO_ID)
		return;
	at = keep_chain_find(c, chain, first);
	left = c->chains.chains[chain].count - at;
	for (uint32_t i = at; i < at + left; i++) {
		uint32_t row = c->chains.chains[chain].rows[i];
		if (keep_unprotect_row(c, session, row))
			keep_lift(c, row, now_ms);
	}
	while (left-- > 0) {
		uint32_t row = c->chains.chains[chain].rows[at + left];
		keep_chain_leave(c, row, chain, keep_pass_on, now_ms, keep_may_go(c, row));
	}
}

/* The sessions that have a block, up to `room` of them, and its position, which is the same in all; returns how many
 * there are. */
uint64_t keep_core_places(const keep_core *c, uint64_t generation, uint64_t *sessions, uint64_t room, uint64_t *position)
{
	uint32_t row = keep_row_of(c, generation);
	uint64_t count = 0;

	*position = 0;
	if (row == KEEP_NO_ID)
		return 0;
	for (uint32_t link = c->rows[row].first_link; link != 0; link = c->chains.links[link - 1].next) {
		if (count < room)
			sessions[count] = c->chains.chains[c->chains.links[link - 1].chain].session;
		count++;
	}
	*position = count > 0 ? c->rows[row].position : 0;
	return count;
}

/* Whether a block at this position would extend the session, or fill a gap in it. */
int keep_core_lacks(const keep_core *c, uint64_t session, uint64_t position)
{
	if (keep_chain_at(c, session, position) != KEEP_NO_ID)
		return 0;
	return position == 0 || keep_chain_at(c, session, position - 1) != KEEP_NO_ID;
}
