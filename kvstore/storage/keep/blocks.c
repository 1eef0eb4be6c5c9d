/* The table of a drive's blocks in memory: names as hashes, in many small sorted arrays, and generations.
 *
 * A hash gives the part, 32 bits within it, and nothing else: what has the same 48 bits is told apart by its row. The
 * order of all hashes is that of parts and words, so a scan that goes on behind a hash misses no block that was there
 * all the time, wherever the block was moved meanwhile.
 */
#include "blocks_inside.h"
#include "siphash.h"

static uint64_t hash_of(const keep_blocks *b, const uint8_t *name)
{
	return tk_siphash(b->head.secret, name, KEEP_NAME_BYTES);
}

static struct keep_part *part_of(const keep_blocks *b, uint64_t hash)
{
	return &b->parts[hash >> 48];
}

static uint64_t word_of(uint64_t hash, uint32_t slot)
{
	return hash << 16 >> 32 << 32 | slot;
}

/* The first of a part's words that is not below this one. */
static uint32_t place_of(const struct keep_part *part, uint64_t word)
{
	/* Words are spread evenly, so it is near where it would be if all were at equal distances. */
	uint32_t at = (uint32_t)((word >> 32) * part->count >> 32);

	while (at > 0 && part->words[at - 1] >= word)
		at--;
	while (at < part->count && part->words[at] < word)
		at++;
	return at;
}

static int add_name(keep_blocks *b, uint64_t hash, uint32_t slot)
{
	struct keep_part *part = part_of(b, hash);
	uint64_t word = word_of(hash, slot);
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
	struct keep_part *part = part_of(b, hash);
	uint64_t word = word_of(hash, slot);
	uint32_t at = place_of(part, word);

	keep_assert(at < part->count && part->words[at] == word);
	part->count--;
	memmove(&part->words[at], &part->words[at + 1], (part->count - at) * sizeof *part->words);
}

/* The row of a slot: of the batch that is being put, or from the file. */
static int row_of(const keep_blocks *b, uint32_t slot, struct keep_block *out)
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
	return keep_blocks_read(b, slot, out);
}

/* Finds the row of a name: 1, 0 if there is none, or an error. */
static int find(const keep_blocks *b, uint64_t hash, const uint8_t *name, struct keep_block *out)
{
	const struct keep_part *part = part_of(b, hash);
	uint64_t word = word_of(hash, 0);

	for (uint32_t at = place_of(part, word); at < part->count && part->words[at] >> 32 == word >> 32; at++) {
		int error = row_of(b, (uint32_t)part->words[at], out);

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
	free(b->old);
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

static int reserve(keep_blocks *b, uint64_t slots)
{
	int error = keep_grow((void **)&b->generations, &b->generations_room, slots, sizeof *b->generations);

	if (error == 0)
		error = keep_grow((void **)&b->marks, &b->marks_room, slots, sizeof *b->marks);
	return error < 0 ? error : keep_map_reserve(&b->by_generation, slots, b->generations, sizeof *b->generations);
}

/* Adds a row to the memory; its slot must be reserved. */
static int add(keep_blocks *b, uint64_t hash, const struct keep_block *row)
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

static void take_out(keep_blocks *b, uint64_t hash, const struct keep_block *row)
{
	remove_name(b, hash, row->slot);
	keep_assert(keep_map_remove(&b->by_generation, row->generation) == row->slot);
	b->generations[row->slot] = 0;
}

static int ascend(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;

	return (a > b) - (a < b);
}

/* Chooses slots for a batch: free ones first. */
static int take_slots(keep_blocks *b, uint64_t count)
{
	uint64_t reused = count < b->free_count ? count : b->free_count, slots = b->head.slots + count - reused;
	int error = slots < KEEP_NO_ID ? reserve(b, slots) : -ENOSPC;

	if (error == 0)
		error = keep_grow((void **)&b->taken, &b->taken_room, count, sizeof *b->taken);
	if (error == 0)
		error = keep_grow((void **)&b->pending, &b->pending_room, count, sizeof *b->pending);
	if (error == 0)
		error = keep_grow((void **)&b->old, &b->old_room, count, sizeof *b->old);
	if (error == 0) /* all of these may be free afterwards: those it replaces, and its own that it doesn't need */
		error = keep_grow((void **)&b->free, &b->free_room, b->free_count + 2 * count, sizeof *b->free);
	if (error < 0)
		return error;
	b->free_count -= reused;
	memcpy(b->taken, b->free + b->free_count, reused * sizeof *b->taken);
	qsort(b->taken, reused, sizeof *b->taken, ascend);
	for (uint64_t i = reused; i < count; i++)
		b->taken[i] = (uint32_t)(b->head.slots + i - reused);
	memset(b->pending, 0, count * sizeof *b->pending);
	return 0;
}

static int is_same(const struct keep_block *row, const struct keep_block *other)
{
	return memcmp(row, other, offsetof(struct keep_block, slot)) == 0 && row->expires_ms == other->expires_ms;
}

/* Adds a row of a batch to the memory, in place of one with its name, whose slot becomes `old`. */
static int put_one(keep_blocks *b, const struct keep_block *row, uint64_t at, struct keep_head *head)
{
	struct keep_block before, *after = &b->pending[at];
	uint64_t hash = hash_of(b, row->name), identity;
	int found = find(b, hash, row->name, &before), error;

	b->old[at] = KEEP_NO_ID;
	if (found < 0)
		return found;
	b->taken_count = (uint32_t)at + 1;
	if (found && is_same(row, &before))
		return 0; /* the slot stays free */
	*after = *row;
	after->slot = b->taken[at];
	after->born = head->commit;
	after->gone = 0;
	identity = keep_block_identity(b, after);
	after->check = keep_block_check(b, identity, after->expires_ms);
	if (found)
		take_out(b, hash, &before);
	error = add(b, hash, after);
	if (error < 0) {
		if (found)
			keep_assert(add(b, hash, &before) == 0); /* its part has room for what was just taken out */
		*after = (struct keep_block){0};
		return error;
	}
	head->count += !found;
	head->sum += identity - (found ? keep_block_identity(b, &before) : 0);
	if (found)
		b->old[at] = before.slot;
	return 0;
}

static void undo_put(keep_blocks *b, uint64_t count)
{
	struct keep_block before;

	for (uint64_t at = count; at-- > 0;) {
		if (b->pending[at].born == 0)
			continue;
		take_out(b, hash_of(b, b->pending[at].name), &b->pending[at]);
		if (b->old[at] != KEEP_NO_ID && row_of(b, b->old[at], &before) == 0)
			keep_assert(add(b, hash_of(b, before.name), &before) == 0);
	}
}

static void free_slot(keep_blocks *b, uint32_t slot)
{
	b->free[b->free_count++] = slot;
}

static int write_put(keep_blocks *b, uint64_t count, const struct keep_head *head)
{
	int error;

	/* A row that another of its batch replaces is written as one that is gone. */
	for (uint64_t i = 0, first; i < count; i++)
		if (b->old[i] != KEEP_NO_ID) {
			const uint32_t *own = bsearch(&b->old[i], b->taken, count, sizeof *b->taken, ascend);

			if (own != NULL) {
				first = (uint64_t)(own - b->taken);
				b->pending[first].gone = head->commit;
			}
		}
	error = keep_blocks_write_rows(b, b->pending, count);
	for (uint64_t i = 0; i < count && error == 0; i++)
		if (b->old[i] != KEEP_NO_ID && bsearch(&b->old[i], b->taken, count, sizeof *b->taken, ascend) == NULL)
			error = keep_blocks_mark_gone(b, b->old[i], head->commit);
	return error < 0 ? error : keep_blocks_write_head(b, head);
}

/* Puts blocks in this order, each in place of one with its name. */
int keep_blocks_put(keep_blocks *b, const struct keep_block *rows, uint64_t count)
{
	struct keep_head head = b->head;
	uint64_t done = 0;
	int error;

	if (b->has_failed)
		return -EIO;
	error = take_slots(b, count);
	if (error < 0)
		return error;
	head.commit++;
	if (count > 0 && b->taken[count - 1] >= head.slots)
		head.slots = (uint64_t)b->taken[count - 1] + 1;
	while (done < count && error == 0) {
		error = put_one(b, &rows[done], done, &head);
		done += error == 0;
	}
	b->taken_count = (uint32_t)count;
	if (error == 0)
		error = write_put(b, count, &head);
	if (error < 0)
		undo_put(b, done);
	for (uint64_t i = 0; i < count; i++)
		if (error < 0 ? b->taken[i] < b->head.slots : b->pending[i].born == 0)
			free_slot(b, b->taken[i]);
	for (uint64_t i = 0; i < count && error == 0; i++)
		if (b->old[i] != KEEP_NO_ID)
			free_slot(b, b->old[i]);
	b->taken_count = 0;
	return error;
}

/* Removes blocks; the row of each is returned, one without a generation for each that there is not. */
int keep_blocks_remove(keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out)
{
	struct keep_head head = b->head;
	uint64_t done = 0;
	int error = keep_grow((void **)&b->free, &b->free_room, b->free_count + count, sizeof *b->free);

	if (b->has_failed)
		return -EIO;
	head.commit++;
	for (; done < count && error >= 0; done += error >= 0) {
		uint64_t hash = hash_of(b, names + done * KEEP_NAME_BYTES);

		error = find(b, hash, names + done * KEEP_NAME_BYTES, &out[done]);
		if (error == 1) {
			take_out(b, hash, &out[done]);
			head.count--;
			head.sum -= keep_block_identity(b, &out[done]);
		} else if (error == 0) {
			out[done].generation = 0;
		}
	}
	for (uint64_t i = 0; i < done && error >= 0; i++)
		if (out[i].generation != 0)
			error = keep_blocks_mark_gone(b, out[i].slot, head.commit);
	if (error >= 0)
		error = keep_blocks_write_head(b, &head);
	for (uint64_t i = done; i-- > 0;) {
		if (out[i].generation == 0)
			continue;
		if (error >= 0)
			free_slot(b, out[i].slot);
		else
			keep_assert(add(b, hash_of(b, out[i].name), &out[i]) == 0);
	}
	return error < 0 ? error : 0;
}

/* Changes when blocks expire; those that there are not are left out. Each change is one write, and no commit. */
int keep_blocks_renew(keep_blocks *b, const uint8_t *names, const uint64_t *expiries_ms, uint64_t count)
{
	struct keep_block row;

	for (uint64_t i = 0; i < count; i++) {
		int found = b->has_failed ? -EIO : find(b, hash_of(b, names + i * KEEP_NAME_BYTES), names + i * KEEP_NAME_BYTES, &row);

		if (found == 1) {
			row.expires_ms = expiries_ms[i];
			row.check = keep_block_check(b, keep_block_identity(b, &row), row.expires_ms);
			found = keep_blocks_write_expiry(b, &row);
		}
		if (found < 0)
			return found;
	}
	return 0;
}

/* The row of each name; one without a generation for each that there is not. */
int keep_blocks_find(const keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out)
{
	for (uint64_t i = 0; i < count; i++) {
		const uint8_t *name = names + i * KEEP_NAME_BYTES;
		int found = find(b, hash_of(b, name), name, &out[i]);

		if (found < 0)
			return found;
		if (found == 0)
			out[i].generation = 0;
	}
	return 0;
}

/* How many of these keys of a tenant are there and have not expired, from the first on. */
int64_t keep_blocks_find_until(const keep_blocks *b, const uint8_t *tenant, const uint8_t *keys, uint64_t count,
			       uint64_t now_ms)
{
	uint8_t name[KEEP_NAME_BYTES];
	struct keep_block row;

	memcpy(name, tenant, KEEP_TENANT_BYTES);
	for (uint64_t i = 0; i < count; i++) {
		int found;

		memcpy(name + KEEP_TENANT_BYTES, keys + i * KEEP_KEY_BYTES, KEEP_KEY_BYTES);
		found = find(b, hash_of(b, name), name, &row);
		if (found < 0)
			return found;
		if (found == 0 || (row.expires_ms > 0 && row.expires_ms <= now_ms))
			return (int64_t)i;
	}
	return (int64_t)count;
}

/* The row of each generation; one without a generation for each that there is not. */
int keep_blocks_of_generations(const keep_blocks *b, const uint64_t *generations, uint64_t count, struct keep_block *out)
{
	for (uint64_t i = 0; i < count; i++) {
		uint32_t slot = keep_map_find(&b->by_generation, generations[i]);
		int error = slot == KEEP_NO_ID ? 0 : keep_blocks_read(b, slot, &out[i]);

		if (error < 0)
			return error;
		if (slot == KEEP_NO_ID)
			out[i].generation = 0;
	}
	return 0;
}

/* The rows from a place on in the order of hashes, those of one tenant's mark or, with 0, all. `at` becomes the place to
 * go on at; 0: there are no more. At most `look_max` names are looked at, and KEEP_ALIKE_MAX more, because those with
 * equal hashes are returned together. `out` has room for all of them. */
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

/* Loading. */

int keep_blocks_begin_loading(keep_blocks *b)
{
	int error = reserve(b, b->head.slots);

	if (error == 0)
		error = keep_grow((void **)&b->free, &b->free_room, b->head.slots - b->head.count, sizeof *b->free);
	if (error == 0)
		keep_map_expect(&b->by_generation, b->head.count);
	return error;
}

/* Takes a live row, or NULL: the next slot is free. */
int keep_blocks_load_slot(keep_blocks *b, uint32_t slot, const struct keep_block *row)
{
	uint64_t hash;
	struct keep_part *part;
	int error;

	if (row == NULL) {
		if (b->free_count == b->head.slots - b->head.count)
			return -EBADMSG;
		free_slot(b, slot);
		return 0;
	}
	if (row->generation == 0 || keep_map_find(&b->by_generation, row->generation) != KEEP_NO_ID)
		return -EBADMSG;
	hash = hash_of(b, row->name);
	part = part_of(b, hash);
	error = keep_grow_tightly((void **)&part->words, &part->room, (uint64_t)part->count + 1, sizeof *part->words);
	if (error < 0)
		return error;
	part->words[part->count++] = word_of(hash, slot);
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
