/* Shared by the C files of this folder. */
#ifndef KEEP_INSIDE_H
#define KEEP_INSIDE_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "keep.h"

/* Active in every build: a bug ends the process before it can harm a drive. */
#define keep_assert(condition) ((condition) ? (void)0 : keep_broken(__FILE__, __LINE__, #condition))

__attribute__((noreturn, cold)) void keep_broken(const char *file, int line, const char *condition);
int keep_grow(void **array, uint32_t *room, uint64_t wanted, size_t size);
int keep_grow_tightly(void **array, uint32_t *room, uint64_t wanted, size_t size);

/* runs.c */

enum { KEEP_RUN_ITEMS = 256, KEEP_SPARES_MAX = 2 };

struct keep_item {
	uint64_t a, b, c; /* ordered by a, then by b */
};

struct keep_run {
	uint32_t count;
	struct keep_item items[KEEP_RUN_ITEMS];
};

struct keep_top {
	uint64_t a, b; /* of the run's first item */
	struct keep_run *run;
};

struct keep_runs {
	struct keep_top *tops;
	uint32_t count, room;
	uint64_t items;
	struct keep_run *spares[KEEP_SPARES_MAX];
	uint32_t spare_count;
};

struct keep_place {
	uint32_t run, at;
};

void keep_runs_free(struct keep_runs *runs);
uint64_t keep_runs_bytes(const struct keep_runs *runs);
int keep_runs_reserve(struct keep_runs *runs, unsigned insertions);
struct keep_place keep_runs_find(const struct keep_runs *runs, uint64_t a, uint64_t b);
struct keep_item *keep_runs_at(const struct keep_runs *runs, struct keep_place place);
struct keep_place keep_runs_next(const struct keep_runs *runs, struct keep_place place);
int keep_runs_before(const struct keep_runs *runs, struct keep_place *place);
void keep_runs_changed(struct keep_runs *runs, struct keep_place place);
void keep_runs_insert(struct keep_runs *runs, struct keep_item item);
void keep_runs_remove(struct keep_runs *runs, struct keep_place place);

/* map.c */

#define KEEP_NO_ID UINT32_MAX

enum { KEEP_WARMED_AT_ONCE = 32 }; /* of a batch, prefetched into the cache together */

static inline uint64_t keep_warmed_at_once(uint64_t left)
{
	return left < KEEP_WARMED_AT_ONCE ? left : KEEP_WARMED_AT_ONCE;
}

/* Ids by the 64-bit key that each has in its owner's table. */
struct keep_map {
	const char *keys; /* of id 0; the owner sets it again when its table has moved */
	uint32_t stride;
	uint32_t *heads, heads_room, buckets;
	uint32_t *next, next_room;
	uint32_t count;
};

void keep_map_free(struct keep_map *map);
int keep_map_reserve(struct keep_map *map, uint64_t ids, const void *keys, size_t stride);
void keep_map_expect(struct keep_map *map, uint64_t count);
void keep_map_warm(const struct keep_map *map, const uint64_t *keys, size_t stride, uint64_t count);
uint32_t keep_map_find(const struct keep_map *map, uint64_t key);
void keep_map_add(struct keep_map *map, uint32_t id);
uint32_t keep_map_remove(struct keep_map *map, uint64_t key);

/* rings.c */

struct keep_link {
	uint32_t after, before;
};

/* Doubly linked rings over numbered nodes; a node that is in no ring is its own neighbour. */
struct keep_rings {
	struct keep_link *links;
	uint32_t room;
};

int keep_rings_reach(struct keep_rings *rings, uint64_t nodes);
int keep_rings_is_linked(const struct keep_rings *rings, uint32_t node);
void keep_rings_push(struct keep_rings *rings, uint32_t head, uint32_t node);
void keep_rings_unlink(struct keep_rings *rings, uint32_t node);
void keep_rings_move_all(struct keep_rings *rings, uint32_t source, uint32_t target);

/* policy.c */

struct keep_policy_kind {
	void (*free)(keep_policy *p);
	int (*reserve)(keep_policy *p, uint64_t rows);
	void (*admitted)(keep_policy *p, uint32_t row, uint32_t pages, uint64_t name);
	void (*readmitted)(keep_policy *p, uint32_t row, uint32_t pages);
	void (*restored)(keep_policy *p, uint32_t row, uint32_t pages);
	void (*inherited)(keep_policy *p, uint32_t row, uint32_t pages, uint32_t place);
	void (*touched)(keep_policy *p, uint32_t row);
	void (*removed)(keep_policy *p, uint32_t row);
	void (*evicted)(keep_policy *p, uint32_t row, uint64_t name);
	int64_t (*candidate)(keep_policy *p, int64_t *steps);
	uint64_t (*ghosts)(const keep_policy *p);
};

/* The first member of each policy. Only rows that `reserve` made room for may be used. */
struct keep_policy {
	const struct keep_policy_kind *kind;
	uint64_t rows;
};

int keep_policy_reserve(keep_policy *p, uint64_t rows);

/* wheel.c */

enum { KEEP_WHEEL_LEVELS = 8, KEEP_WHEEL_BUCKETS = 64, KEEP_WHEEL_PENDING = KEEP_WHEEL_LEVELS * KEEP_WHEEL_BUCKETS };

/* Rows by the tick at which they expire. */
struct keep_wheel {
	struct keep_rings rings; /* the heads come first: the buckets of all levels, and the ring of pending rows */
	uint64_t *due;
	uint32_t due_room, count, lags;
	uint64_t occupied[KEEP_WHEEL_LEVELS]; /* a bit for each bucket that is not empty */
	uint64_t tick, tick_ms;
};

int keep_wheel_init(struct keep_wheel *wheel, uint64_t now_ms, uint64_t tick_ms);
void keep_wheel_free(struct keep_wheel *wheel);
int keep_wheel_reserve(struct keep_wheel *wheel, uint64_t rows);
void keep_wheel_insert(struct keep_wheel *wheel, uint32_t row, uint64_t expires_ms);
void keep_wheel_insert_again(struct keep_wheel *wheel, uint32_t row);
void keep_wheel_cancel(struct keep_wheel *wheel, uint32_t row);
uint32_t keep_wheel_advance(struct keep_wheel *wheel, uint64_t now_ms, uint32_t rows_max, uint64_t steps_max, uint32_t *out);

/* core.c */

enum { KEEP_ASIDE = 1, KEEP_OVERDUE = 2, KEEP_MARKED = 4 };
enum { KEEP_PIN = 0, KEEP_PROTECTED = 3, KEEP_GUARDS = 4, KEEP_GUARD_BITS = 16 };
enum { KEEP_UNKNOWN = 1, KEEP_EXISTS = 2, KEEP_NOT_HELD = 3, KEEP_MOVED = 4, KEEP_FULL = 5 };
enum { KEEP_SPACE = 1, KEEP_STRANDED = 2, KEEP_EXPIRED = 3, KEEP_QUOTA = 8, KEEP_REASONS = 16 };

/* A block. A row that is free has no pages; `first_link` leads to the next free one. */
struct keep_row {
	uint64_t generation;
	uint64_t start;  /* its first page on the drive; 0: unknown */
	uint64_t guards; /* a count per kind; the kind that lasts longest is in the highest bits */
	uint32_t pages;
	uint32_t used;       /* ticks from the start to its last use */
	uint32_t first_link; /* plus one: to the sessions it is in, last joined first */
	uint32_t position;   /* in all of its sessions */
	uint32_t followed;   /* the number of its sessions in which a block follows it */
	uint16_t owner;
	uint8_t state;
};

/* chains.c */

struct keep_session_link {
	uint32_t chain, next; /* plus one: the next of the same row, or the next free one */
};

#define KEEP_NO_GAP UINT32_MAX

struct keep_chain {
	uint64_t session;
	uint32_t *rows; /* by their positions */
	uint32_t count, room;
	uint32_t gap; /* the lowest position that a block left while others followed it */
	uint32_t next_free;
	uint8_t is_open, is_queued; /* queued: is in the queue of broken sessions */
};

struct keep_chains {
	struct keep_chain *chains;
	uint32_t chains_room, chains_made, free_chain, open, unqueued;
	struct keep_map by_session;
	struct keep_session_link *links;
	uint32_t links_room, links_made, free_link, linked;
	uint32_t *broken, broken_room, broken_first, broken_count; /* a circular queue */
	uint32_t *spare; /* for the rows of the next session to be opened */
};

typedef void (*keep_tail)(keep_core *c, uint32_t tail, uint32_t place, uint64_t now_ms, int was_free);

void keep_chains_free(struct keep_chains *chains);
uint32_t keep_chain_of(const keep_core *c, uint64_t session);
uint32_t keep_chain_find(const keep_core *c, uint32_t chain, uint64_t position);
uint32_t keep_chain_at(const keep_core *c, uint64_t session, uint64_t position);
int keep_chain_reserve(keep_core *c, uint64_t session, uint64_t rows);
void keep_chain_join(keep_core *c, uint32_t row, uint64_t session, uint32_t position);
void keep_chain_leave(keep_core *c, uint32_t row, uint32_t chain, keep_tail on_tail, uint64_t now_ms, int was_free);
uint32_t keep_chain_stranded(keep_core *c);
void keep_chain_leave_stranded(keep_core *c);

/* owners.c */

struct keep_owners {
	uint32_t heads; /* a ring for each owner; that of owner 0 stays empty */
	uint64_t *pages;
	struct keep_rings rings;
	uint64_t *stamps; /* of each row: the number of its last use */
	uint32_t stamps_room;
	uint64_t *uses, own_uses;
};

int keep_owners_init(struct keep_owners *owners, uint64_t owners_max);
void keep_owners_free(struct keep_owners *owners);
int keep_owners_reserve(struct keep_owners *owners, uint64_t rows);
void keep_owners_take(keep_core *c, uint32_t row, uint32_t owner);
void keep_owners_touch(keep_core *c, uint32_t row);
void keep_owners_inherit(keep_core *c, uint32_t row, uint32_t place);
void keep_owners_leave(keep_core *c, uint32_t row);

struct keep_protected {
	uint64_t session;
	uint32_t blocks, next_free;
};

struct keep_core {
	keep_policy *policy;
	struct keep_limits limits;
	struct keep_row *rows;
	uint64_t *names; /* of each row, if the policy wants them */
	uint32_t rows_room, rows_made, free_row, free_rows, names_room;
	int knows_names;
	struct keep_map by_generation, by_start;
	struct keep_wheel wheel;
	struct keep_chains chains;
	struct keep_owners owners;
	struct keep_protected *protected;
	struct keep_map by_protected;
	uint32_t protected_room, protected_made, free_protected;
	uint64_t protected_pages;
	uint64_t by_longest[KEEP_GUARDS + 1]; /* rows by one plus their longest-lasting guard; [0] is not exact */
	uint64_t total_pages, space_idle_ms;
	uint64_t gone_blocks[KEEP_REASONS], gone_pages[KEEP_REASONS];
};

uint32_t keep_row_of(const keep_core *c, uint64_t generation);
uint32_t keep_tick(const keep_core *c, uint64_t now_ms);
int keep_may_go(const keep_core *c, uint32_t row);
void keep_use(keep_core *c, uint32_t row, uint64_t now_ms);
void keep_lift(keep_core *c, uint32_t row, uint64_t now_ms);
void keep_guards_change(keep_core *c, uint32_t row, uint64_t after);
void keep_protect_row(keep_core *c, uint32_t row);
int keep_unprotect_row(keep_core *c, uint64_t session, uint32_t row);
void keep_pass_on(keep_core *c, uint32_t tail, uint32_t place, uint64_t now_ms, int was_free);
void keep_forget(keep_core *c, uint32_t row, uint64_t reason, uint64_t now_ms, struct keep_gone *out);
uint32_t keep_settle(keep_core *c, uint32_t row, uint64_t session, uint64_t position, uint64_t now_ms);

#endif
