/* Shared by blocks.c, blocks_change.c, blocks_file.c and blocks_load.c. */
#ifndef KEEP_BLOCKS_INSIDE_H
#define KEEP_BLOCKS_INSIDE_H

#include "blocks.h"
#include "inside.h"

enum { KEEP_PARTS = 1 << 16, KEEP_NAME_BYTES = 48, KEEP_TENANT_BYTES = 16, KEEP_KEY_BYTES = 32, KEEP_WINDOW_ROWS = 32 };

/* The first bytes of the file. Written whole, and within a page: a killed process leaves the old one or the new one. */
struct keep_head {
	char magic[8];
	uint8_t drive[16];
	uint64_t epoch;
	uint64_t secret[2]; /* of hashes and checks */
	uint64_t commit;
	uint64_t slots; /* that were ever used */
	uint64_t count; /* of live rows */
	uint64_t sum;	/* of their identities */
	uint64_t check;
};

/* Names with the same first bits of their hashes: 32 further bits and a slot in each word, in ascending order. */
struct keep_part {
	uint64_t *words;
	uint32_t count, room;
};

struct keep_blocks {
	int file, has_failed;
	struct keep_head head;
	struct keep_part *parts;
	uint64_t *generations; /* of each slot; 0: it is free */
	uint32_t generations_room;
	uint32_t *marks, marks_room; /* of the tenant of each slot */
	uint8_t last_tenant[KEEP_TENANT_BYTES];
	uint32_t last_mark; /* 0: not known */
	struct keep_map by_generation;
	uint32_t *free, free_room, free_count;
	/* Of the batch that is being put: its slots in ascending order, its rows as they will be written, and the row
	 * that each replaces, without a generation if there is none. */
	uint32_t *taken, taken_room, taken_count;
	struct keep_block *pending, *before;
	uint32_t pending_room, before_room;
};

/* Rows read ahead by one call, while nothing is written: those of blocks that were put together are neighbours. */
struct keep_window {
	uint32_t first, count;
	uint32_t next; /* the slot after the last one that was requested */
	struct keep_block rows[KEEP_WINDOW_ROWS];
};

/* blocks_file.c */

uint64_t keep_block_identity(const struct keep_blocks *b, const struct keep_block *row);
uint64_t keep_block_check(const struct keep_blocks *b, uint64_t identity, uint64_t expires_ms);
int keep_blocks_read(const keep_blocks *b, uint32_t slot, struct keep_block *out);
void keep_window_open(struct keep_window *w);
int keep_window_read(struct keep_window *w, const keep_blocks *b, uint32_t slot, struct keep_block *out);
int keep_blocks_write_rows(keep_blocks *b, const struct keep_block *rows, uint64_t count);
int keep_blocks_mark_gone(keep_blocks *b, uint32_t slot, uint64_t commit);
int keep_blocks_write_expiry(keep_blocks *b, const struct keep_block *row);
int keep_blocks_write_head(keep_blocks *b, const struct keep_head *head);

/* blocks.c */

uint64_t keep_blocks_hash(const keep_blocks *b, const uint8_t *name);
struct keep_part *keep_blocks_part(const keep_blocks *b, uint64_t hash);
uint64_t keep_blocks_word(uint64_t hash, uint32_t slot);
int keep_blocks_row(const keep_blocks *b, struct keep_window *w, uint32_t slot, struct keep_block *out);
int keep_blocks_find_one(const keep_blocks *b, struct keep_window *w, uint64_t hash, const uint8_t *name,
			 struct keep_block *out);
/* Finds one of the requested blocks: 1, 0 if there is none, or an error. */
typedef int keep_finder(const keep_blocks *b, struct keep_window *w, const void *asked, uint64_t at,
			struct keep_block *out);
keep_finder keep_blocks_find_named, keep_blocks_find_generation;
int keep_blocks_reserve(keep_blocks *b, uint64_t slots);
int keep_blocks_add(keep_blocks *b, uint64_t hash, const struct keep_block *row);
void keep_blocks_take_out(keep_blocks *b, uint64_t hash, const struct keep_block *row);

/* blocks_change.c */

void keep_blocks_free_slot(keep_blocks *b, uint32_t slot);

/* blocks_load.c */

int keep_blocks_begin_loading(keep_blocks *b);
void keep_blocks_warm(const keep_blocks *b, const struct keep_block *rows, uint64_t count, uint64_t *hashes);
int keep_blocks_load_slot(keep_blocks *b, uint32_t slot, const struct keep_block *row, uint64_t hash);
int keep_blocks_end_loading(keep_blocks *b);

#endif
