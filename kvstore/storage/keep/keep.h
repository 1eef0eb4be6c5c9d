/* Decisions about room, for one thread of the node: which pages of a drive are free, and which blocks are evicted.
 *
 * Ownership: the caller that makes one of these objects frees it. Arrays are the caller's, and are read or filled only
 * during the call. Thread: nothing here locks; only the thread of the drive's Python calls it.
 *
 * Always holds:
 *
 * - A call takes a whole batch, calls nothing outside, and allocates nothing per block.
 * - A forbidden request (to free a page twice, to unpin what isn't pinned) is -EINVAL, and changes nothing.
 * - Invariants are asserted in every build (`keep_assert`): a broken one ends the process before a drive is harmed.
 * - Without memory a call returns -ENOMEM and has changed nothing, or reports KEEP_FULL for the block concerned; calls
 *   that remove blocks need no memory.
 *
 * It does no I/O and reads no clock.
 */
#ifndef KEEP_H
#define KEEP_H

#include <stdint.h>

/* cdef begin */
enum { KEEP_NONE = -1, KEEP_EXPIRED_AT_ONCE = 1024 }; /* EVICTION_EXPIRED_AT_ONCE of kvstore/limits.py */

/* Free extents, in pages (extents.c). */
typedef struct keep_extents keep_extents;

keep_extents *keep_extents_new(uint64_t first, uint64_t until);
void keep_extents_free(keep_extents *e);
int keep_extents_fill(keep_extents *e, const uint64_t *starts, const uint64_t *lengths, uint64_t count);
int64_t keep_extents_allocate(keep_extents *e, uint64_t length);
int keep_extents_release(keep_extents *e, uint64_t start, uint64_t length);
int keep_extents_release_all(keep_extents *e, const uint64_t *pairs, uint64_t count);
int keep_extents_pin(keep_extents *e, const uint64_t *starts, uint64_t count);
int keep_extents_unpin(keep_extents *e, const uint64_t *starts, uint64_t count);
int keep_extents_is_pinned(keep_extents *e, uint64_t start);
void keep_extents_hold(keep_extents *e, uint64_t start, uint64_t until);
uint64_t keep_extents_pages(const keep_extents *e);
uint64_t keep_extents_count(const keep_extents *e);
uint64_t keep_extents_longest(const keep_extents *e);
uint64_t keep_extents_pinned(const keep_extents *e);
uint64_t keep_extents_bytes(const keep_extents *e);
uint64_t keep_extents_at(const keep_extents *e, uint64_t start);
uint64_t keep_extents_after(const keep_extents *e, uint64_t page, uint64_t *out, uint64_t room);
uint64_t keep_extents_of_length(const keep_extents *e, uint64_t below, uint64_t *out, uint64_t room, uint64_t *length);

/* The order of rows that a policy keeps (policy.c): `lru` (lru.c) and `s3fifo` (s3fifo.c). Rows are small numbers. */
typedef struct keep_policy keep_policy;

keep_policy *keep_policy_lru(void);
keep_policy *keep_policy_s3fifo(uint64_t capacity_pages, uint32_t ghosts_max, uint32_t uses_max);
void keep_policy_free(keep_policy *p);
int keep_policy_admitted(keep_policy *p, uint32_t row, uint32_t pages, uint64_t name);
int keep_policy_readmitted(keep_policy *p, uint32_t row, uint32_t pages);
int keep_policy_restored(keep_policy *p, const uint32_t *pages, uint64_t count);
int keep_policy_inherited(keep_policy *p, uint32_t row, uint32_t pages, uint32_t place);
int keep_policy_touched(keep_policy *p, const uint32_t *rows, uint64_t count);
int keep_policy_removed(keep_policy *p, uint32_t row);
int keep_policy_evicted(keep_policy *p, uint32_t row, uint64_t name);
int64_t keep_policy_candidate(keep_policy *p, int64_t *steps);
uint64_t keep_policy_ghosts(const keep_policy *p);

/* The blocks of one drive, and the order in which they are evicted (core.c). Numbers of guards, reasons and refusals
 * are those of kvstore/storage/eviction/types.py. */
typedef struct keep_core keep_core;

struct keep_limits {
	uint64_t now_ms, tick_ms, session_blocks, links_min, links_per_block, guards_of_a_kind, protected_sessions, owners;
};
struct keep_record {
	uint64_t generation, pages, name, expires_ms, session, position, owner, start;
};
struct keep_gone {
	uint64_t generation, pages, session, position, reason, at_ms, idle_ms;
};
struct keep_planned {
	uint64_t blocks, pages;
	int64_t steps_left;
	uint64_t stuck, lags;
};
struct keep_core_said {
	uint64_t pages, sessions, links, protected_sessions, lags, space_idle_ms, rows;
	uint64_t guarded[4], gone_blocks[16], gone_pages[16];
};

/* The caller keeps the policy, which must live as long as the core. */
keep_core *keep_core_new(keep_policy *policy, int knows_names, const struct keep_limits *limits);
void keep_core_free(keep_core *c);
void keep_core_share_uses(keep_core *c, uint64_t *uses);
void keep_core_say(const keep_core *c, struct keep_core_said *out);
uint64_t keep_core_blocks(const keep_core *c);
uint64_t keep_core_expiring(const keep_core *c);
uint64_t keep_core_protected_pages(const keep_core *c);
int keep_core_restore(keep_core *c, const uint64_t *generations, const uint64_t *starts, const uint32_t *pages,
		      const uint64_t *expiries_ms, uint64_t count);
int keep_core_admitted(keep_core *c, const struct keep_record *records, uint64_t count, uint64_t now_ms, uint8_t *refused);
int keep_core_own(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t owner);
int keep_core_joined(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t session, uint64_t first,
		     uint64_t now_ms, uint8_t *refused);
void keep_core_left(keep_core *c, uint64_t session, uint64_t first, uint64_t now_ms);
void keep_core_touched(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t now_ms);
int keep_core_renewed(keep_core *c, uint64_t generation, uint64_t expires_ms);
int keep_core_moved(keep_core *c, uint64_t generation, uint64_t to, uint64_t start);
int keep_core_gone(keep_core *c, const uint64_t *generations, uint64_t count, uint64_t reason, uint64_t now_ms,
		   struct keep_gone *out);
int keep_core_hold(keep_core *c, const uint64_t *generations, uint64_t count, unsigned guard, uint8_t *refused);
int keep_core_release(keep_core *c, const uint64_t *generations, uint64_t count, unsigned guard, uint64_t now_ms,
		      uint8_t *refused);
int keep_core_protect(keep_core *c, uint64_t session, uint64_t blocks, uint64_t now_ms);
int keep_core_unprotect(keep_core *c, uint64_t session, uint64_t now_ms);
uint64_t keep_core_protected_blocks(const keep_core *c, uint64_t session);
int keep_core_knows(const keep_core *c, uint64_t generation);
int keep_core_is_guarded(const keep_core *c, uint64_t generation);
uint64_t keep_core_places(const keep_core *c, uint64_t generation, uint64_t *sessions, uint64_t room, uint64_t *position);
int keep_core_lacks(const keep_core *c, uint64_t session, uint64_t position);
uint64_t keep_core_at(const keep_core *c, uint64_t start, uint64_t *generation);
void keep_core_plan(keep_core *c, uint64_t wanted_pages, uint64_t blocks_max, uint64_t steps_max, uint64_t now_ms,
		    struct keep_gone *out, struct keep_planned *planned);
uint64_t keep_core_owned_pages(const keep_core *c, uint64_t owner);
int64_t keep_core_oldest_use(keep_core *c, uint64_t owner, int64_t *steps);
uint64_t keep_core_evict_oldest(keep_core *c, uint64_t owner, uint64_t pages, uint64_t blocks_max, uint64_t before,
				int64_t *steps, uint64_t now_ms, struct keep_gone *out);

/* The last removals of blocks, by name: tenant and key, 48 bytes (history.c). All memory is allocated at once. */
typedef struct keep_history keep_history;

keep_history *keep_history_new(uint32_t size, const uint8_t *secret);
void keep_history_free(keep_history *h);
void keep_history_add(keep_history *h, const uint8_t *names, const struct keep_gone *gone, uint64_t count);
int keep_history_of(const keep_history *h, const uint8_t *name, struct keep_gone *out);
uint64_t keep_history_sessions(const keep_history *h, const uint8_t *names, uint64_t count, uint64_t *out);
/* cdef end */

#endif
