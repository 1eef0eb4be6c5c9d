/* Changes to the table of a drive's blocks: each is one commit of many blocks. Memory is changed first, because a block
 * may be in a batch twice, and is restored if the file can't be written.
 */
#include "blocks_inside.h"

static int ascend(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;

	return (a > b) - (a < b);
}

/* Chooses slots for a batch: free ones first. */
static int take_slots(keep_blocks *b, uint64_t count)
{
	uint64_t reused = count < b->free_count ? count : b->free_count, slots = b->head.slots + count - reused;
	int error = slots < KEEP_NO_ID ? keep_blocks_reserve(b, slots) : -ENOSPC;

	if (error == 0)
		error = keep_grow((void **)&b->taken, &b->taken_room, count, sizeof *b->taken);
	if (error == 0)
		error = keep_grow((void **)&b->pending, &b->pending_room, count, sizeof *b->pending);
	if (error == 0)
		error = keep_grow((void **)&b->before, &b->before_room, count, sizeof *b->before);
	if (error == 0) /* room to free all of them later: the slots of replaced rows, and unused slots of the batch */
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

static struct keep_block *pending_at(keep_blocks *b, uint32_t slot)
{
	const uint32_t *its = bsearch(&slot, b->taken, b->taken_count, sizeof *b->taken, ascend);

	keep_assert(its != NULL);
	return &b->pending[its - b->taken];
}

static int is_same(const struct keep_block *row, const struct keep_block *other)
{
	return memcmp(row, other, offsetof(struct keep_block, slot)) == 0 && row->expires_ms == other->expires_ms;
}

/* Adds a row of a batch to memory. It replaces the row with its name, which is copied to `before`. */
static int put_one(keep_blocks *b, struct keep_window *w, const struct keep_block *row, uint64_t hash, uint64_t at,
		   struct keep_head *head)
{
	struct keep_block *before = &b->before[at], *after = &b->pending[at];
	uint64_t identity;
	int found = keep_blocks_find_one(b, w, hash, row->name, before), error;

	if (found < 0)
		return found;
	b->taken_count = (uint32_t)at + 1;
	if (!found || is_same(row, before))
		before->generation = 0;
	if (found && before->generation == 0)
		return 0; /* nothing changes, and the slot stays free */
	*after = *row;
	after->slot = b->taken[at];
	after->born = head->commit;
	after->gone = 0;
	identity = keep_block_identity(b, after);
	after->check = keep_block_check(b, identity, after->expires_ms);
	if (found)
		keep_blocks_take_out(b, hash, before);
	error = keep_blocks_add(b, hash, after);
	if (error < 0) {
		if (found)
			keep_assert(keep_blocks_add(b, hash, before) == 0); /* its part has room for it */
		*after = (struct keep_block){0};
		return error;
	}
	head->count += !found;
	head->sum += identity - (found ? keep_block_identity(b, before) : 0);
	return 0;
}

static void undo_put(keep_blocks *b, uint64_t count)
{
	for (uint64_t at = count; at-- > 0;) {
		const struct keep_block *before = &b->before[at];

		if (b->pending[at].born == 0)
			continue;
		keep_blocks_take_out(b, keep_blocks_hash(b, b->pending[at].name), &b->pending[at]);
		if (before->generation != 0)
			keep_assert(keep_blocks_add(b, keep_blocks_hash(b, before->name), before) == 0);
	}
}

void keep_blocks_free_slot(keep_blocks *b, uint32_t slot)
{
	b->free[b->free_count++] = slot;
}

static int write_put(keep_blocks *b, uint64_t count, const struct keep_head *head)
{
	int error;

	/* A row that is replaced within its own batch is written as removed. */
	for (uint64_t i = 0; i < count; i++)
		if (b->before[i].generation != 0 && b->before[i].born == head->commit)
			pending_at(b, b->before[i].slot)->gone = head->commit;
	error = keep_blocks_write_rows(b, b->pending, count);
	for (uint64_t i = 0; i < count && error == 0; i++)
		if (b->before[i].generation != 0 && b->before[i].born != head->commit)
			error = keep_blocks_mark_gone(b, b->before[i].slot, head->commit);
	return error < 0 ? error : keep_blocks_write_head(b, head);
}

/* Puts blocks in this order; each replaces the block with its name. */
int keep_blocks_put(keep_blocks *b, const struct keep_block *rows, uint64_t count)
{
	struct keep_head head = b->head;
	uint64_t done = 0, hashes[KEEP_WARMED_AT_ONCE];
	struct keep_window window;
	int error;

	if (b->has_failed)
		return -EIO;
	if (count == 0)
		return 0;
	error = take_slots(b, count);
	if (error < 0)
		return error;
	head.commit++;
	if (b->taken[count - 1] >= head.slots)
		head.slots = (uint64_t)b->taken[count - 1] + 1;
	keep_window_open(&window);
	while (done < count && error == 0) {
		if (done % KEEP_WARMED_AT_ONCE == 0)
			keep_blocks_warm(b, &rows[done], keep_warmed_at_once(count - done), hashes);
		error = put_one(b, &window, &rows[done], hashes[done % KEEP_WARMED_AT_ONCE], done, &head);
		done += error == 0;
	}
	b->taken_count = (uint32_t)count;
	if (error == 0)
		error = write_put(b, count, &head);
	if (error < 0)
		undo_put(b, done);
	for (uint64_t i = 0; i < count; i++)
		if (error < 0 ? b->taken[i] < b->head.slots : b->pending[i].born == 0)
			keep_blocks_free_slot(b, b->taken[i]);
	for (uint64_t i = 0; i < count && error == 0; i++)
		if (b->before[i].generation != 0)
			keep_blocks_free_slot(b, b->before[i].slot);
	b->taken_count = 0;
	return error;
}

static int slots_ascend(const void *one, const void *other)
{
	return ascend(&((const struct keep_block *)one)->slot, &((const struct keep_block *)other)->slot);
}

/* Marks rows as removed by this commit: those of neighbouring slots, as blocks that were put together are, by one write.
 * Between puts nothing else uses `pending` and `taken`. */
static int mark_all_gone(keep_blocks *b, const struct keep_block *rows, uint64_t count, uint64_t commit)
{
	uint64_t marked = 0;
	int are_ascending = 1;

	for (uint64_t i = 0; i < count; i++) {
		if (rows[i].generation == 0)
			continue;
		b->pending[marked] = rows[i];
		b->pending[marked].gone = commit;
		are_ascending &= marked == 0 || b->pending[marked - 1].slot < rows[i].slot;
		marked++;
	}
	if (!are_ascending)
		qsort(b->pending, marked, sizeof *b->pending, slots_ascend);
	for (uint64_t i = 0; i < marked; i++)
		b->taken[i] = b->pending[i].slot;
	return keep_blocks_write_rows(b, b->pending, marked);
}

/* Removes the blocks that `find_it` finds, and returns their rows; if there is no block, the row has no generation. */
static int remove_found(keep_blocks *b, keep_finder *find_it, const void *asked, uint64_t count, struct keep_block *out)
{
	struct keep_head head = b->head;
	struct keep_window window;
	uint64_t done = 0;
	int error = keep_grow((void **)&b->free, &b->free_room, b->free_count + count, sizeof *b->free);

	if (b->has_failed)
		return -EIO;
	if (error == 0)
		error = keep_grow((void **)&b->taken, &b->taken_room, count, sizeof *b->taken);
	if (error == 0)
		error = keep_grow((void **)&b->pending, &b->pending_room, count, sizeof *b->pending);
	head.commit++;
	keep_window_open(&window);
	for (; done < count && error >= 0; done += error >= 0) {
		error = find_it(b, &window, asked, done, &out[done]);
		if (error == 1) {
			keep_blocks_take_out(b, keep_blocks_hash(b, out[done].name), &out[done]);
			head.count--;
			head.sum -= keep_block_identity(b, &out[done]);
		} else if (error == 0) {
			out[done].generation = 0;
		}
	}
	if (error >= 0)
		error = mark_all_gone(b, out, done, head.commit);
	if (error >= 0)
		error = keep_blocks_write_head(b, &head);
	for (uint64_t i = done; i-- > 0;) {
		if (out[i].generation == 0)
			continue;
		if (error >= 0)
			keep_blocks_free_slot(b, out[i].slot);
		else
			keep_assert(keep_blocks_add(b, keep_blocks_hash(b, out[i].name), &out[i]) == 0);
	}
	return error < 0 ? error : 0;
}

int keep_blocks_remove(keep_blocks *b, const uint8_t *names, uint64_t count, struct keep_block *out)
{
	return remove_found(b, keep_blocks_find_named, names, count, out);
}

int keep_blocks_remove_generations(keep_blocks *b, const uint64_t *generations, uint64_t count, struct keep_block *out)
{
	return remove_found(b, keep_blocks_find_generation, generations, count, out);
}

/* Changes when blocks expire; names that are not stored are skipped. Each change is one write, not a commit. */
int keep_blocks_renew(keep_blocks *b, const uint8_t *names, const uint64_t *expiries_ms, uint64_t count)
{
	struct keep_window window;
	struct keep_block row;

	keep_window_open(&window); /* of a name that is there twice it has the first expiry still, which nothing uses */
	for (uint64_t i = 0; i < count; i++) {
		int found = b->has_failed ? -EIO : keep_blocks_find_named(b, &window, names, i, &row);

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
