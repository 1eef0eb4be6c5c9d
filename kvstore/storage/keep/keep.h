/* What one thread of the node decides about room: which pages of a drive are free, and which blocks go.
 *
 * Ownership: whoever makes one of these objects frees it. Arrays are the caller's, and are read or filled only during
 * the call. Thread: none of this locks; one thread calls it, that of the drive's Python.
 *
 * Always holds:
 *
 * - A call takes a whole batch; nothing outside is called meanwhile, and nothing is allocated a block.
 * - What a caller may not do (free a page twice, release what isn't pinned) is -EINVAL, and changes nothing.
 * - What can't be, if the code is right, is asserted in every build (`keep_assert`): the process ends, before a drive
 *   is harmed.
 * - Out of memory is -ENOMEM of a call, which has then changed nothing, or KEEP_FULL for the block concerned; what
 *   frees memory or lets blocks go needs none.
 *
 * It does no I/O and reads no clock.
 */
#ifndef KEEP_H
#define KEEP_H

#include <stdint.h>

/* cdef begin */
enum { KEEP_NONE = -1 };

/* Free extents, in pages (extents.c). */
typedef struct keep_extents keep_extents;
struct keep_extents_said {
	uint64_t free_pages, extents, longest, pinned;
};

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
void keep_extents_say(const keep_extents *e, struct keep_extents_said *out);
uint64_t keep_extents_at(const keep_extents *e, uint64_t start);
uint64_t keep_extents_after(const keep_extents *e, uint64_t page, uint64_t *out, uint64_t room);
uint64_t keep_extents_of_length(const keep_extents *e, uint64_t below, uint64_t *out, uint64_t room, uint64_t *length);
/* cdef end */

#endif
