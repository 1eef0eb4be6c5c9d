/* The blocks of one drive: the location of each, by name and by generation, in memory and in a file of rows (blocks.c,
 * blocks_file.c).
 *
 * Ownership: the caller makes and frees the table, and owns the file's descriptor, which must stay open as long as the
 * table exists. Arrays are the caller's, and are read or filled only during the call. Thread: nothing here locks; only
 * the thread of the drive's Python calls it.
 *
 * Always holds:
 *
 * - A change of many blocks is one commit: after SIGKILL the file has all of it or none. Rows are written first, then
 *   the head, which has the number of live rows and their sum. A row of a later commit than the head's counts as not
 *   written, and a mark of a later commit as not made.
 * - A call that fails has changed nothing in memory. After an error of the file no further commit is made.
 * - A row is used only if it is unchanged since it was written: each has a keyed check, which also covers its position
 *   in the file. Loading checks all of them.
 * - Memory: 29 bytes per block, for hash, generation and tenant's mark. The rest is read from the file on demand.
 *
 * It doesn't sync (the index does, when it is closed), so after power loss nothing in the file is trusted.
 */
#ifndef KEEP_BLOCKS_H
#define KEEP_BLOCKS_H

#include <stdint.h>

/* cdef begin */
enum { KEEP_HEAD_BYTES = 4096, KEEP_ALIKE_MAX = 16 };

/* A row of the file. The caller sets the fields before `slot`, and `expires_ms`; `domain` is a number from 1, or 0. */
struct keep_block {
	uint8_t name[48]; /* tenant and key */
	uint64_t offset;
	uint32_t length, crc32c;
	uint64_t generation;
	uint8_t fingerprint[16];
	uint32_t domain;
	uint32_t slot; /* its position */
	uint64_t born; /* the commit that added it; 0: the slot is free */
	uint64_t check;
	uint64_t expires_ms; /* 0: never */
	uint64_t gone;	     /* the commit that removed it; 0: none */
};

/* The part of a row that is needed to open a store. */
struct keep_life {
	uint64_t offset, length, generation, expires_ms;
};

typedef struct keep_blocks keep_blocks;

keep_blocks *keep_blocks_new(int file);
void keep_blocks_free(keep_blocks *b);
int keep_blocks_create(keep_blocks *b);
int keep_blocks_load(keep_blocks *b, int is_writable);
int keep_blocks_begin_epoch(keep_blocks *b, const uint8_t *drive, uint64_t epoch);
int keep_blocks_is_of(const keep_blocks *b, const uint8_t *drive, uint64_t epoch);
uint64_t keep_blocks_commit(const keep_blocks *b);
uint64_t keep_blocks_count(const keep_blocks *b);
uint64_t keep_blocks_slots(const keep_blocks *b);
const uint64_t *keep_blocks_generations(const keep_blocks *b);
const uint32_t *keep_blocks_marks(const keep_blocks *b);
uint32_t keep_blocks_mark(keep_blocks *b, const uint8_t *tenant);
int keep_blocks_put(keep_blocks *b, const struct keep_block *rows, uint64_t count);
int keep_blocks_remove(keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out);
int keep_blocks_remove_generations(keep_blocks *b, const uint64_t *generations, uint64_t count, struct keep_block *out);
int keep_blocks_renew(keep_blocks *b, const uint8_t *names, const uint64_t *expiries_ms, uint64_t count);
int keep_blocks_find(const keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out);
int64_t keep_blocks_find_until(const keep_blocks *b, const uint8_t *tenant, const uint8_t *keys, uint64_t count,
			       uint64_t now_ms);
int keep_blocks_of_generations(const keep_blocks *b, const uint64_t *generations, uint64_t count, struct keep_block *out);
int keep_blocks_lives(const keep_blocks *b, struct keep_life *out);
int64_t keep_blocks_after(const keep_blocks *b, uint64_t *at, uint32_t mark, uint64_t look_max, struct keep_block *out);
/* cdef end */

#endif
