/* Sessions as chains: which blocks are in which session, and which of them are tails. 12 bytes per block and session.
 *
 * A session is a chain of blocks at positions; a block may be in many sessions. A block's bytes depend on all blocks
 * before it, so it has the same position in all of them.
 *
 * A *tail* is a block that is the last one in every session that has it; a block in no session is a tail too. If only
 * tails are evicted, what remains of each session is always a prefix. A tail always exists: the block with the highest
 * position is one.
 *
 * A session is *broken* once a block was removed from its middle (expired or deleted): blocks after the gap can't be
 * used, and it is unknown whether the gap will be filled. Positions that never had a block don't break a session: those
 * blocks may be on another drive.
 *
 * Always holds: `followed` of a row is the number of sessions in which a block comes after it. All operations are O(1),
 * except adding a block out of order or removing one from a session's middle (a bisection, and 4 bytes to move for each
 * block after it), and removing a block that is in many sessions (proportional to their number). Only
 * `keep_chain_reserve` needs memory: the queue of broken sessions has room for all that may enter it.
 *
 * It doesn't know guards, sizes or times, and forgets a session when its last block is removed.
 */
#include "inside.h"

enum { FIRST_ROWS = 4 };

void keep_chains_free(struct keep_chains *chains)
{
	for (uint32_t i = 0; i < chains->chains_made; i++)
		free(chains->chains[i].rows);
	free(chains->chains);
	free(chains->links);
	free(chains->broken);
	free(chains->spare);
	keep_map_free(&chains->by_session);
}

/* The chain of a session, or KEEP_NO_ID. */
uint32_t keep_chain_of(const keep_core *c, uint64_t session)
{
	return keep_map_find(&c->chains.by_session, session);
}

/* The index in a chain of a position, or where it would be inserted. */
uint32_t keep_chain_find(const keep_core *c, uint32_t chain, uint64_t position)
{
	const struct keep_chain *found = &c->chains.chains[chain];
	uint32_t low = 0, high = found->count;

	if (high > 0 && c->rows[found->rows[high - 1]].position < position)
		return high;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		if (c->rows[found->rows[middle]].position < position)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* The row at a position of a session; KEEP_NO_ID if there is none. */
uint32_t keep_chain_at(const keep_core *c, uint64_t session, uint64_t position)
{
	uint32_t chain = keep_chain_of(c, session), at, row;

	if (chain == KEEP_NO_ID)
		return KEEP_NO_ID;
	at = keep_chain_find(c, chain, position);
	if (at == c->chains.chains[chain].count)
		return KEEP_NO_ID;
	row = c->chains.chains[chain].rows[at];
	return c->rows[row].position == position ? row : KEEP_NO_ID;
}

static int reserve_broken(struct keep_chains *chains)
{
	uint32_t had = chains->broken_room, end = chains->broken_first + chains->broken_count;
	uint32_t wanted = chains->broken_count + chains->unqueued + 1;
	int error = keep_grow((void **)&chains->broken, &chains->broken_room, wanted, sizeof *chains->broken);

	if (chains->broken_room > had && end > had) { /* entries that wrapped around move to the new end */
		uint32_t tail = had - chains->broken_first;
		memmove(&chains->broken[chains->broken_room - tail], &chains->broken[chains->broken_first],
			tail * sizeof *chains->broken);
		chains->broken_first = chains->broken_room - tail;
	}
	return error;
}

/* Reserves memory for this many more rows of a session, which needn't exist yet. */
int keep_chain_reserve(keep_core *c, uint64_t session, uint64_t rows)
{
	struct keep_chains *chains = &c->chains;
	uint32_t chain = keep_chain_of(c, session);
	int error = keep_grow((void **)&chains->links, &chains->links_room, chains->links_made + rows, sizeof *chains->links);

	if (error == 0)
		error = keep_grow((void **)&chains->chains, &chains->chains_room, (uint64_t)chains->chains_made + 1,
				  sizeof *chains->chains);
	if (error == 0)
		error = keep_map_reserve(&chains->by_session, (uint64_t)chains->chains_made + 1, chains->chains,
					 sizeof *chains->chains);
	if (error == 0)
		error = reserve_broken(chains);
	if (error == 0 && chains->spare == NULL && (chains->spare = malloc(FIRST_ROWS * sizeof *chains->spare)) == NULL)
		error = -ENOMEM;
	if (error == 0 && chain != KEEP_NO_ID && chains->chains[chain].count + rows > chains->chains[chain].room) {
		struct keep_chain *found = &chains->chains[chain];
		uint64_t room = found->count + rows + found->count / 8;
		uint32_t *grown = realloc(found->rows, room * sizeof *grown);

		if (grown == NULL)
			return -ENOMEM;
		found->rows = grown;
		found->room = (uint32_t)room;
	}
	return error;
}

static uint32_t open_chain(struct keep_chains *chains, uint64_t session)
{
	uint32_t chain = chains->free_chain;

	if (chain != 0)
		chains->free_chain = chains->chains[--chain].next_free;
	else
		chain = chains->chains_made++;
	keep_assert(chains->spare != NULL && chain < chains->chains_room);
	chains->chains[chain] = (struct keep_chain){
		.session = session, .rows = chains->spare, .room = FIRST_ROWS, .gap = KEEP_NO_GAP, .is_open = 1};
	chains->spare = NULL;
	chains->open++;
	chains->unqueued++;
	keep_map_add(&chains->by_session, chain);
	return chain;
}

static void close_chain(struct keep_chains *chains, uint32_t chain)
{
	struct keep_chain *closed = &chains->chains[chain];

	keep_assert(keep_map_remove(&chains->by_session, closed->session) == chain);
	chains->unqueued -= !closed->is_queued;
	chains->open--;
	free(closed->rows);
	*closed = (struct keep_chain){.next_free = chains->free_chain};
	chains->free_chain = chain + 1;
}

/* Puts a row at a free position of a session. Memory was reserved. */
void keep_chain_join(keep_core *c, uint32_t row, uint64_t session, uint32_t position)
{
	struct keep_chains *chains = &c->chains;
	uint32_t chain = keep_chain_of(c, session), link = chains->free_link, at;
	struct keep_chain *joined;

	if (chain == KEEP_NO_ID)
		chain = open_chain(chains, session);
	joined = &chains->chains[chain];
	if (link != 0)
		chains->free_link = chains->links[link - 1].next;
	else
		link = ++chains->links_made;
	keep_assert(joined->count < joined->room && link <= chains->links_room);
	chains->links[link - 1] = (struct keep_session_link){chain, c->rows[row].first_link};
	chains->linked++;
	c->rows[row].first_link = link;
	c->rows[row].position = position;
	at = keep_chain_find(c, chain, position);
	if (at == joined->count) {
		if (at > 0)
			c->rows[joined->rows[at - 1]].followed++;
	} else {
		keep_assert(c->rows[joined->rows[at]].position != position);
		memmove(&joined->rows[at + 1], &joined->rows[at], (joined->count - at) * sizeof *joined->rows);
		c->rows[row].followed++;
		if (position == joined->gap)
			joined->gap = KEEP_NO_GAP; /* there may be more; the policy decides about them */
	}
	joined->rows[at] = row;
	joined->count++;
}

static uint32_t last_of(const struct keep_chain *chain)
{
	return chain->rows[chain->count - 1];
}

static int is_broken(const keep_core *c, const struct keep_chain *chain)
{
	return chain->gap != KEEP_NO_GAP && chain->gap < c->rows[last_of(chain)].position;
}

static void queue_broken(struct keep_chains *chains, uint32_t chain)
{
	keep_assert(chains->broken_count < chains->broken_room);
	chains->broken[(chains->broken_first + chains->broken_count) % chains->broken_room] = chain;
	chains->broken_count++;
	chains->chains[chain].is_queued = 1;
	chains->unqueued--;
}

/* Removes a row from a chain; returns the row that becomes a tail, or KEEP_NO_ID. */
static uint32_t cut(keep_core *c, uint32_t row, uint32_t chain)
{
	struct keep_chain *left = &c->chains.chains[chain];
	uint32_t tail = KEEP_NO_ID;

	keep_assert(left->is_open && left->count > 0);
	if (last_of(left) == row) {
		left->count--;
		if (left->count > 0) {
			uint32_t last = last_of(left);

			if (left->gap != KEEP_NO_GAP && left->gap > c->rows[last].position)
				left->gap = KEEP_NO_GAP;
			keep_assert(c->rows[last].followed > 0);
			if (--c->rows[last].followed == 0)
				tail = last;
		}
	} else {
		uint32_t position = c->rows[row].position, at = keep_chain_find(c, chain, position);

		keep_assert(left->rows[at] == row && c->rows[row].followed > 0);
		memmove(&left->rows[at], &left->rows[at + 1], (left->count - at - 1) * sizeof *left->rows);
		left->count--;
		c->rows[row].followed--;
		if (left->gap == KEEP_NO_GAP || position < left->gap)
			left->gap = position;
	}
	if (left->count == 0)
		close_chain(&c->chains, chain);
	else if (!left->is_queued && is_broken(c, left))
		queue_broken(&c->chains, chain);
	return tail;
}

/* Removes a row from one chain, or from all (KEEP_NO_ID); calls `on_tail`, if given, for other rows that become tails. If
 * it was removed from one, the row itself may become a tail too. */
void keep_chain_leave(keep_core *c, uint32_t row, uint32_t chain, keep_tail on_tail, uint64_t now_ms, int was_free)
{
	struct keep_chains *chains = &c->chains;
	uint32_t link = c->rows[row].first_link, kept = 0;

	while (link != 0) {
		struct keep_session_link *here = &chains->links[link - 1];
		uint32_t following = here->next, tail;

		if (chain != KEEP_NO_ID && here->chain != chain) {
			here->next = kept;
			kept = link;
			link = following;
			continue;
		}
		tail = cut(c, row, here->chain);
		here->next = chains->free_link;
		chains->free_link = link;
		chains->linked--;
		if (tail != KEEP_NO_ID && on_tail != NULL)
			on_tail(c, tail, row, now_ms, was_free);
		link = following;
	}
	c->rows[row].first_link = kept;
}

static void pop_broken(struct keep_chains *chains)
{
	chains->broken_first = (chains->broken_first + 1) % chains->broken_room;
	chains->broken_count--;
}

static void unqueue(struct keep_chains *chains, struct keep_chain *chain)
{
	chain->is_queued = 0;
	chains->unqueued++;
}

/* The tail of a broken session, or KEEP_NO_ID. A row that is also in another session does not count. */
uint32_t keep_chain_stranded(keep_core *c)
{
	struct keep_chains *chains = &c->chains;

	while (chains->broken_count > 0) {
		struct keep_chain *first = &chains->chains[chains->broken[chains->broken_first]];

		if (first->is_open && first->is_queued) {
			if (is_broken(c, first)) {
				uint32_t row = last_of(first);
				if (chains->links[c->rows[row].first_link - 1].next == 0)
					return row;
			}
			unqueue(chains, first);
		}
		pop_broken(chains);
	}
	return KEEP_NO_ID;
}

/* Leaves the session of the last `keep_chain_stranded` to the policy, until the session loses another block. */
void keep_chain_leave_stranded(keep_core *c)
{
	unqueue(&c->chains, &c->chains.chains[c->chains.broken[c->chains.broken_first]]);
	pop_broken(&c->chains);
}
