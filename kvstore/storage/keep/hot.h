/* The pages of a node's hot memory: pieces into which a drive is read or blocks land, and pieces that hold a record.
 *
 * A piece is a run of pages. It has users, and while it holds a record it is kept under the record's generation, so
 * that later reads find it. Kept pieces without users are evicted for others: those that were found only once first,
 * then the protected ones, each in the order of their last use.
 *
 * Ownership and thread: as in keep.h. A piece is identified by a small number, which is reused after the last user of a
 * piece that isn't kept has released it.
 *
 * Always holds:
 *
 * - The pages of a piece with users, or of one that `uses` still reports in use, are in no other piece.
 * - A record is kept once. Only one piece has a name; it is the last one that was kept under it.
 * - Up to `1 / (2 * tenants)` of all pages stay with their owner as long as anything else can be evicted.
 * - A piece is overwritten before it is free if its record was erased, or if it was in use, and not kept, when a pass
 *   over the free pages (`keep_hot_wipe_free`) began.
 *
 * It doesn't read the memory of pieces, and writes to it only to overwrite it.
 */
#ifndef KEEP_HOT_H
#define KEEP_HOT_H

#include <stdint.h>

/* cdef begin */
typedef struct keep_hot keep_hot;

/* Ends uses of pieces that are not refcounted here, by number; reports for each number whether no use is left. */
struct keep_uses {
	void (*end)(void *self, const uint64_t *numbers, int count, uint8_t *ended);
	void *self;
};
struct keep_room { /* like `tk_room` */
	uint64_t address;
	uint32_t pages, number;
};
struct keep_hot_said {
	uint64_t kept, kept_pages, protected_pages, found, not_found, evicted;
};

/* `memory` may be NULL: then nothing is overwritten. `uses` may be NULL everywhere: then there are no such uses. */
keep_hot *keep_hot_new(uint64_t pages, char *memory, const uint8_t *secret);
void keep_hot_free(keep_hot *h);
/* A piece with one user; KEEP_NONE if all that could be evicted is in use: a later call reports when to try again. */
int64_t keep_hot_take(keep_hot *h, uint64_t pages, uint32_t owner, uint64_t tenants, const struct keep_uses *uses);
/* Takes pieces in advance, for no request: none while a refused caller waits. Returns how many. */
int keep_hot_take_many(keep_hot *h, uint64_t pages, uint32_t most, uint64_t tenants, const struct keep_uses *uses,
		       struct keep_room *out);
/* Keeps pieces as records of an owner, by name if there are `names`. A piece or a record that is kept already is left
 * as it is. */
void keep_hot_keep(keep_hot *h, const uint32_t *pieces, const uint64_t *generations, const uint8_t *names, uint64_t count,
		   uint32_t owner);
int keep_hot_owners(keep_hot *h, uint32_t owners);
uint64_t keep_hot_owned_pages(const keep_hot *h, uint32_t owner);
int64_t keep_hot_find(keep_hot *h, uint64_t generation);
int64_t keep_hot_peek(const keep_hot *h, uint64_t generation);
void keep_hot_touch(keep_hot *h, const uint64_t *generations, uint64_t count);
void keep_hot_use(keep_hot *h, uint32_t piece);
/* These return 1 if a refused caller should try again now. */
int keep_hot_release(keep_hot *h, const uint32_t *pieces, uint64_t count);
int keep_hot_look_again(keep_hot *h, const struct keep_uses *uses);
void keep_hot_forget(keep_hot *h, uint32_t piece, const struct keep_uses *uses);
void keep_hot_drop(keep_hot *h, const uint64_t *generations, uint64_t count, const struct keep_uses *uses);
/* Forgets what is kept under these names, except these records. */
void keep_hot_replace(keep_hot *h, const uint8_t *names, const uint64_t *generations, uint64_t count,
		      const struct keep_uses *uses);
void keep_hot_erase(keep_hot *h, const uint8_t *names, uint64_t count, const struct keep_uses *uses);
void keep_hot_retire(keep_hot *h, uint32_t piece, uint64_t known_as, const struct keep_uses *uses);
/* Overwrites free pages from a page on; returns where to continue, KEEP_NONE at the end. */
int64_t keep_hot_wipe_free(keep_hot *h, uint64_t page, uint64_t pages_max);
uint64_t keep_hot_start(const keep_hot *h, uint32_t piece);
uint64_t keep_hot_pages(const keep_hot *h, uint32_t piece);
uint64_t keep_hot_sum(const keep_hot *h, const uint32_t *pieces, uint64_t count);
uint64_t keep_hot_generation(const keep_hot *h, uint32_t piece);
uint64_t keep_hot_users(const keep_hot *h, uint32_t piece);
int keep_hot_has_refused(const keep_hot *h);
void keep_hot_say(const keep_hot *h, struct keep_hot_said *out);
/* cdef end */

#endif
