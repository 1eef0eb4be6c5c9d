/* Fills the in-memory table while its file is read. */
#include "blocks_inside.h"

int keep_blocks_begin_loading(keep_blocks *b)
{
	int error = keep_blocks_reserve(b, b->head.slots);

	if (error == 0)
		error = keep_grow((void **)&b->free, &b->free_room, b->head.slots - b->head.count, sizeof *b->free);
	for (uint32_t i = 0; i < KEEP_PARTS && error == 0; i++)
		error = keep_grow_tightly((void **)&b->parts[i].words, &b->parts[i].room, b->head.count / KEEP_PARTS,
					  sizeof *b->parts[i].words);
	if (error == 0)
		keep_map_expect(&b->by_generation, b->head.count);
	return error;
}

/* Hashes the names of rows that are about to be loaded, and prefetches the memory that this will change. */
void keep_blocks_warm(const keep_blocks *b, const struct keep_block *rows, uint64_t count, uint64_t *hashes)
{
	for (uint64_t i = 0; i < count; i++) {
		hashes[i] = keep_blocks_hash(b, rows[i].name);
		__builtin_prefetch(keep_blocks_part(b, hashes[i]));
	}
	keep_map_warm(&b->by_generation, &rows->generation, sizeof *rows, count);
	for (uint64_t i = 0; i < count; i++) {
		const struct keep_part *part = keep_blocks_part(b, hashes[i]);

		__builtin_prefetch(&part->words[part->count], 1);
	}
}

/* Loads a live row, whose name has this hash; NULL: the next slot is free. */
int keep_blocks_load_slot(keep_blocks *b, uint32_t slot, const struct keep_block *row, uint64_t hash)
{
	struct keep_part *part;
	int error;

	if (row == NULL) {
		if (b->free_count == b->head.slots - b->head.count)
			return -EBADMSG;
		keep_blocks_free_slot(b, slot);
		return 0;
	}
	if (row->generation == 0 || keep_map_find(&b->by_generation, row->generation) != KEEP_NO_ID)
		return -EBADMSG;
	part = keep_blocks_part(b, hash);
	error = keep_grow_tightly((void **)&part->words, &part->room, (uint64_t)part->count + 1, sizeof *part->words);
	if (error < 0)
		return error;
	part->words[part->count++] = keep_blocks_word(hash, slot);
	b->generations[slot] = row->generation;
	b->marks[slot] = keep_blocks_mark(b, row->name);
	keep_map_add(&b->by_generation, slot);
	return 0;
}

static int words_ascend(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

/* Sorts all names; two rows of one name are an error. */
int keep_blocks_end_loading(keep_blocks *b)
{
	struct keep_block row, other;

	for (uint32_t i = 0; i < KEEP_PARTS; i++) {
		struct keep_part *part = &b->parts[i];

		if (part->count > 1)
			qsort(part->words, part->count, sizeof *part->words, words_ascend);
		for (uint32_t at = 0; at < part->count; at++)
			for (uint32_t next = at + 1;
			     next < part->count && part->words[next] >> 32 == part->words[at] >> 32; next++) {
				int error = keep_blocks_read(b, (uint32_t)part->words[at], &row);

				if (error == 0)
					error = keep_blocks_read(b, (uint32_t)part->words[next], &other);
				if (error < 0 || memcmp(row.name, other.name, KEEP_NAME_BYTES) == 0)
					return error < 0 ? error : -EBADMSG;
			}
	}
	return 0;
}
