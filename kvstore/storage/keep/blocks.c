/* The in-memory table of a drive's blocks: hashes of names, in many small sorted arrays, and generations.
 *
 * A hash selects a part, and 32 bits within it; names with the same 48 bits are told apart by their rows. Hashes are
 * ordered by part, then by word, so a scan that continues after a hash misses no block that was stored the whole time,
 * even if the block was moved meanwhile.
 */
#include "blocks_inside.h"
#include "siphash.h"

uint64_t keep_blocks_hash(const keep_blocks *b, const uint8_t *name)
{
	return tk_siphash(b->head.secret, name, KEEP_NAME_BYTES);
}

struct keep_part *keep_blocks_part(const keep_blocks *b, uint64_t hash)
{
	return &b->parts[hash >> 48];
}

uint64_t keep_blocks_word(uint64_t hash, uint32_t slot)
{
	return hash << 16 >> 32 << 32 | slot;
}

/* The position of the first word of a part that is not less than `word`. */
static uint32_t place_of(const struct keep_part *part, uint64_t word)
{
	/* Words are distributed evenly, so this estimate is close to the position. */
	uint32_t at = (uint32_t)((word >> 32) * part->count >> 32);

	while (at > 0 && part->words[at - 1] >= word)
		at--;
	while (at < part->count && part->words[at] < word)
		at++;
	return at;
}

static int add_name(keep_blocks *b, uint64_t hash, uint32_t slot)
{
	struct keep_part *part = keep_blocks_part(b, hash);
	uint64_t word = keep_blocks_word(hash, slot);
	uint32_t at;
	int error = keep_grow_tightly((void **)&part->words, &part->room, (uint64_t)part->count + 1, sizeof *part->words);

	if (error < 0)
		return error;
	at = place_of(part, word);
	memmove(&part->words[at + 1], &part->words[at], (part->count - at) * sizeof *part->words);
	part->words[at] = word;
	part->count++;
	return 0;
}

static void remove_name(keep_blocks *b, uint64_t hash, uint32_t slot)
{
	struct keep_part *part = keep_blocks_part(b, hash);
	uint64_t word = keep_blocks_word(hash, slot);
	uint32_t at = place_of(part, word);

	keep_assert(at < part->count && part->words[at] == word);
	part->count--;
	memmove(&part->words[at], &part->words[at + 1], (part->count - at) * sizeof *part->words);
}

/* Reads the row of a slot: from the batch that is being put, or from the file. */
int keep_blocks_row(const keep_blocks *b, struct keep_window *w, uint32_t slot, struct keep_block *out)
{
	uint32_t first = 0, until = b->taken_count;

	while (first < until) {
		uint32_t middle = first + (until - first) / 2;

		if (b->taken[middle] < slot)
			first = middle + 1;
		else
			until = middle;
	}
	if (first < b->taken_count && b->taken[first] == slot) {
		*out = b->pending[first];
		return 0;
	}
	return keep_window_read(w, b, slot, out);
}

/* Finds the row of a name: 1, 0 if there is none, or an error. */
int keep_blocks_find_one(const keep_blocks *b, struct keep_window *w, uint64_t hash, const uint8_t *name,
			 struct keep_block *out)
{
	const struct keep_part *part = keep_blocks_part(b, hash);
	uint64_t word = keep_blocks_word(hash, 0);

	for (uint32_t at = place_of(part, word); at < part->count && part->words[at] >> 32 == word >> 32; at++) {
		int error = keep_blocks_row(b, w, (uint32_t)part->words[at], out);

		if (error < 0)
			return error;
		if (memcmp(out->name, name, KEEP_NAME_BYTES) == 0)
			return 1;
	}
	return 0;
}

keep_blocks *keep_blocks_new(int file)
{
	keep_blocks *b = calloc(1, sizeof *b);

	if (b == NULL)
		return NULL;
	b->file = file;
	b->parts = calloc(KEEP_PARTS, sizeof *b->parts);
	if (b->parts == NULL) {
		free(b);
		return NULL;
	}
	return b;
}

void keep_blocks_free(keep_blocks *b)
{
	if (b == NULL)
		return;
	for (uint32_t i = 0; i < KEEP_PARTS; i++)
		free(b->parts[i].words);
	free(b->parts);
	free(b->generations);
	free(b->marks);
	keep_map_free(&b->by_generation);
	free(b->free);
	free(b->taken);
	free(b->pending);
	free(b->before);
	free(b);
}

uint64_t keep_blocks_commit(const keep_blocks *b)
{
	return b->head.commit;
}

uint64_t keep_blocks_count(const keep_blocks *b)
{
	return b->head.count;
}

uint64_t keep_blocks_slots(const keep_blocks *b)
{
	return b->head.slots;
}

const uint64_t *keep_blocks_generations(const keep_blocks *b)
{
	return b->generations;
}

const uint32_t *keep_blocks_marks(const keep_blocks *b)
{
	return b->marks;
}

uint32_t keep_blocks_mark(keep_blocks *b, const uint8_t *tenant)
{
	if (b->last_mark == 0 || memcmp(b->last_tenant, tenant, KEEP_TENANT_BYTES) != 0) {
		uint32_t mark = (uint32_t)tk_siphash(b->head.secret, tenant, KEEP_TENANT_BYTES);

		b->last_mark = mark ? mark : 1;
		memcpy(b->last_tenant, tenant, KEEP_TENANT_BYTES);
	}
	return b->last_mark;
}

int keep_blocks_reserve(keep_blocks *b, uint64_t slots)
{
	int error = keep_grow((void **)&b->marks, &b->marks_room, slots, sizeof *b->marks);

	if (error == 0)
		error = keep_grow((void **)&b->generations, &b->generations_room, slots, sizeof *b->generations);
	/* The map is called last: it reads the generations at their current address, and nothing may fail after it. */
	return error < 0 ? error : keep_map_reserve(&b->by_generation, slots, b->generations, sizeof *b->generations);
}

/* Adds a row to memory; its slot must be reserved. */
int keep_blocks_add(keep_blocks *b, uint64_t hash, const struct keep_block *row)
{
	int error;

	if (row->generation == 0)
		return -EINVAL;
	if (keep_map_find(&b->by_generation, row->generation) != KEEP_NO_ID)
		return -EEXIST;
	error = add_name(b, hash, row->slot);
	if (error < 0)
		return error;
	b->generations[row->slot] = row->generation;
	b->marks[row->slot] = keep_blocks_mark(b, row->name);
	keep_map_add(&b->by_generation, row->slot);
	return 0;
}

void keep_blocks_take_out(keep_blocks *b, uint64_t hash, const struct keep_block *row)
{
	remove_name(b, hash, row->slot);
	keep_assert(keep_map_remove(&b->by_generation, row->generation) == row->slot);
	b->generations[row->slot] = 0;
}

int keep_blocks_find_named(const keep_blocks *b, struct keep_window *w, const void *names, uint64_t at,
			   struct keep_block *out)
{
	const uint8_t *name = (const uint8_t *)names + at * KEEP_NAME_BYTES;

	return keep_blocks_find_one(b, w, keep_blocks_hash(b, name), name, out);
}

int keep_blocks_find_generation(const keep_blocks *b, struct keep_window *w, const void *generations, uint64_t at,
				struct keep_block *out)
{
	uint32_t slot = keep_map_find(&b->by_generation, ((const uint64_t *)generations)[at]);
	int error = slot == KEEP_NO_ID ? 0 : keep_window_read(w, b, slot, out);

	return error < 0 ? error : slot != KEEP_NO_ID;
}

static int find_each(const keep_blocks *b, keep_finder *find_it, const void *asked, uint64_t count, struct keep_block *out)
{
	struct keep_window window;

	keep_window_open(&window);
	for (uint64_t i = 0; i < count; i++) {
		int found = find_it(b, &window, asked, i, &out[i]);

		if (found < 0)
			return found;
		if (found == 0)
			out[i].generation = 0;
	}
	return 0;
}

/* Finds the row of each name; the row of a name that is not stored has no generation. */
int keep_blocks_find(const keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out)
{
	return find_each(b, keep_blocks_find_named, names, count, out);
}

/* How many of a tenant's keys, from the first on, are stored and have not expired. */
int64_t keep_blocks_find_until(const keep_blocks *b, const uint8_t *tenant, const uint8_t *keys, uint64_t count,
			       uint64_t now_ms)
{
	uint8_t name[KEEP_NAME_BYTES];
	struct keep_window window;
	struct keep_block row;

	keep_window_open(&window);
	memcpy(name, tenant, KEEP_TENANT_BYTES);
	for (uint64_t i = 0; i < count; i++) {
		int found;

		memcpy(name + KEEP_TENANT_BYTES, keys + i * KEEP_KEY_BYTES, KEEP_KEY_BYTES);
		found = keep_blocks_find_one(b, &window, keep_blocks_hash(b, name), name, &row);
		if (found < 0)
			return found;
		if (found == 0 || (row.expires_ms > 0 && row.expires_ms <= now_ms))
			return (int64_t)i;
	}
	return (int64_t)count;
}

/* Finds the row of each generation; if there is none, the row has no generation. */
int keep_blocks_of_generations(const keep_blocks *b, const uint64_t *generations, uint64_t count, struct keep_block *out)
{
	return find_each(b, keep_blocks_find_generation, generations, count, out);
}

/* Returns rows in the order of hashes, from position `at` on: those with one tenant's mark, or all if it is 0. Sets
 * `at` to the position to continue at, or to 0 at the end. Examines at most `look_max` names, and KEEP_ALIKE_MAX more,
 * because names with equal hashes are returned together. `out` has room for all of them. */
int64_t keep_blocks_after(const keep_blocks *b, uint64_t *at, uint32_t mark, uint64_t look_max, struct keep_block *out)
{
	uint64_t looked = 0, found = 0, part = *at >> 32, tag = *at & UINT32_MAX;

	for (; part < KEEP_PARTS; part++, tag = 0) {
		const struct keep_part *in = &b->parts[part];

		for (uint32_t i = place_of(in, tag << 32); i < in->count; i++) {
			uint32_t slot = (uint32_t)in->words[i];
			int error;

			if (looked >= look_max && in->words[i] >> 32 != in->words[i - 1] >> 32) {
				*at = part << 32 | in->words[i] >> 32;
				return (int64_t)found;
			}
			keep_assert(++looked <= look_max + KEEP_ALIKE_MAX);
			if (mark != 0 && b->marks[slot] != mark)
				continue;
			error = keep_blocks_read(b, slot, &out[found++]);
			if (error < 0)
				return error;
		}
		if (looked >= look_max && part + 1 < KEEP_PARTS) {
			*at = (part + 1) << 32;
			return (int64_t)found;
		}
	}
	*at = 0;
	return (int64_t)found;
}
