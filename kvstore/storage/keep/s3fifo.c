/* S3-FIFO: three first-in-first-out queues, counted in pages, since blocks vary in size.
 *
 * New blocks enter the small queue. At its end, blocks that were used since they arrived move to the main queue; the
 * others are evicted, and their names are remembered as ghosts. A new block whose name is a ghost enters the main
 * queue at once. At the end of the main queue, a block used since its last turn gets another turn, at most `uses_max`
 * in all; the others are evicted. So a scan passes through the small queue and leaves the main one alone.
 *
 * The small queue is a tenth of the drive; while it has more, blocks are evicted from it first. Ghosts stand for as
 * many pages as the rest of the drive has.
 *
 * Always holds: touching a row changes one number, and later causes at most about three moves, during the search for a
 * candidate. A ghost is a hint: without memory for one, it is not remembered.
 */
#include "inside.h"

enum { SMALL = 0, MAIN = 1, HEADS = 2, SMALL_FRACTION = 10, PAGES_BITS = 26 };

struct row {
	uint32_t pages : PAGES_BITS, queue : 1, uses : 5;
};

/* In order of age. A ghost whose name was used again has no pages. */
struct ghost {
	uint64_t name;
	uint32_t pages, after; /* after: plus one: the next younger one, or the next free one */
};

struct s3fifo {
	keep_policy policy;
	uint32_t uses_max;
	uint64_t small_pages_max, queue_pages[2];
	struct keep_rings rings;
	struct row *rows;
	uint32_t rows_room;
	struct ghost *ghosts;
	struct keep_map by_name;
	uint32_t ghosts_room, ghosts_made, ghosts_in, ghosts_max, oldest, youngest, free_ghost;
	uint64_t ghost_pages, ghost_pages_max;
};

static struct s3fifo *of(keep_policy *p)
{
	return (struct s3fifo *)p;
}

static void s3_free(keep_policy *p)
{
	struct s3fifo *s = of(p);

	free(s->rings.links);
	free(s->rows);
	free(s->ghosts);
	keep_map_free(&s->by_name);
	free(s);
}

static int s3_reserve(keep_policy *p, uint64_t rows)
{
	int error = keep_rings_reach(&of(p)->rings, HEADS + rows);

	return error < 0 ? error : keep_grow((void **)&of(p)->rows, &of(p)->rows_room, rows, sizeof *of(p)->rows);
}

/* Returns whether a name is remembered, and forgets it. */
static int take_ghost(struct s3fifo *s, uint64_t name)
{
	uint32_t id = keep_map_remove(&s->by_name, name);

	if (id == KEEP_NO_ID)
		return 0;
	s->ghost_pages -= s->ghosts[id].pages;
	s->ghosts[id].pages = 0;
	return 1;
}

static void forget_oldest_ghost(struct s3fifo *s)
{
	uint32_t id = s->oldest - 1;
	struct ghost *ghost = &s->ghosts[id];

	keep_assert(s->oldest != 0);
	if (ghost->pages > 0) {
		s->ghost_pages -= ghost->pages;
		keep_assert(keep_map_remove(&s->by_name, ghost->name) == id);
	}
	s->oldest = ghost->after;
	if (s->oldest == 0)
		s->youngest = 0;
	ghost->after = s->free_ghost;
	s->free_ghost = id + 1;
	s->ghosts_in--;
}

static uint32_t make_ghost(struct s3fifo *s)
{
	uint32_t id = s->free_ghost;

	if (id != 0) {
		s->free_ghost = s->ghosts[id - 1].after;
		return id;
	}
	if (keep_grow((void **)&s->ghosts, &s->ghosts_room, (uint64_t)s->ghosts_made + 1, sizeof *s->ghosts) < 0 ||
	    keep_map_reserve(&s->by_name, (uint64_t)s->ghosts_made + 1, s->ghosts, sizeof *s->ghosts) < 0)
		return 0;
	return ++s->ghosts_made;
}

static void add_ghost(struct s3fifo *s, uint64_t name, uint32_t pages)
{
	uint32_t id;

	take_ghost(s, name);
	id = make_ghost(s);
	if (id == 0)
		return;
	s->ghosts[id - 1] = (struct ghost){name, pages, 0};
	if (s->youngest != 0)
		s->ghosts[s->youngest - 1].after = id;
	else
		s->oldest = id;
	s->youngest = id;
	s->ghosts_in++;
	keep_map_add(&s->by_name, id - 1);
	s->ghost_pages += pages;
	while (s->ghost_pages > s->ghost_pages_max || s->ghosts_in > s->ghosts_max)
		forget_oldest_ghost(s);
}

static void enter(struct s3fifo *s, unsigned queue, uint32_t row, unsigned uses)
{
	s->rows[row].queue = queue;
	s->rows[row].uses = uses;
	s->queue_pages[queue] += s->rows[row].pages;
	keep_rings_push(&s->rings, queue, HEADS + row);
}

static void note_pages(struct s3fifo *s, uint32_t row, uint32_t pages)
{
	keep_assert(pages < 1u << PAGES_BITS);
	s->rows[row].pages = pages;
}

static void s3_admitted(keep_policy *p, uint32_t row, uint32_t pages, uint64_t name)
{
	note_pages(of(p), row, pages);
	enter(of(p), take_ghost(of(p), name) ? MAIN : SMALL, row, 0);
}

static void s3_readmitted(keep_policy *p, uint32_t row, uint32_t pages)
{
	note_pages(of(p), row, pages);
	enter(of(p), MAIN, row, 0);
}

/* A block takes over another one's place, queue and uses; a block that is already in a queue stays. */
static void s3_inherited(keep_policy *p, uint32_t row, uint32_t pages, uint32_t place)
{
	struct s3fifo *s = of(p);

	if (keep_rings_is_linked(&s->rings, HEADS + row))
		return;
	note_pages(s, row, pages);
	s->rows[row].queue = s->rows[place].queue;
	s->rows[row].uses = s->rows[place].uses;
	s->queue_pages[s->rows[row].queue] += pages;
	keep_rings_push(&s->rings, s->rings.links[HEADS + place].after, HEADS + row);
}

static void s3_touched(keep_policy *p, uint32_t row)
{
	if (of(p)->rows[row].uses < of(p)->uses_max)
		of(p)->rows[row].uses++;
}

static void s3_removed(keep_policy *p, uint32_t row)
{
	struct s3fifo *s = of(p);

	keep_rings_unlink(&s->rings, HEADS + row);
	s->queue_pages[s->rows[row].queue] -= s->rows[row].pages;
}

static void s3_evicted(keep_policy *p, uint32_t row, uint64_t name)
{
	s3_removed(p, row);
	if (of(p)->rows[row].queue == SMALL)
		add_ghost(of(p), name, of(p)->rows[row].pages);
}

static int64_t s3_candidate(keep_policy *p, int64_t *steps)
{
	struct s3fifo *s = of(p);

	while (*steps > 0) {
		int small = s->queue_pages[SMALL] > s->small_pages_max || s->queue_pages[MAIN] == 0;
		uint32_t node = s->rings.links[small ? SMALL : MAIN].after, row = node - HEADS, uses;

		if (node < HEADS)
			return KEEP_NONE; /* both are empty */
		uses = s->rows[row].uses;
		if (uses == 0)
			return row;
		--*steps;
		s3_removed(p, row);
		enter(s, MAIN, row, small ? 0 : uses - 1);
	}
	return KEEP_NONE;
}

static uint64_t s3_ghosts(const keep_policy *p)
{
	return ((const struct s3fifo *)p)->by_name.count;
}

static const struct keep_policy_kind KIND = {
	s3_free,    s3_reserve, s3_admitted, s3_readmitted, s3_readmitted, s3_inherited,
	s3_touched, s3_removed, s3_evicted,  s3_candidate,  s3_ghosts,
};

keep_policy *keep_policy_s3fifo(uint64_t capacity_pages, uint32_t ghosts_max, uint32_t uses_max)
{
	struct s3fifo *s = calloc(1, sizeof *s);

	if (s == NULL)
		return NULL;
	s->policy.kind = &KIND;
	s->uses_max = uses_max;
	s->ghosts_max = ghosts_max;
	s->small_pages_max = capacity_pages < SMALL_FRACTION ? 1 : capacity_pages / SMALL_FRACTION;
	s->ghost_pages_max = capacity_pages < s->small_pages_max ? 0 : capacity_pages - s->small_pages_max;
	if (s3_reserve(&s->policy, 0) < 0) {
		s3_free(&s->policy);
		return NULL;
	}
	return &s->policy;
}
