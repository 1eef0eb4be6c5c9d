/* The file of a drive's blocks: a head, then rows of 128 bytes, none across a page boundary.
 *
 * The kernel's page cache survives a killed process, and a write within one page is complete or absent. So a row or the
 * head is never written in part, and rows of a commit whose head was not written are undone when the file is loaded.
 */
#include "blocks_inside.h"
#include "siphash.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MAGIC[8] = "TKVROWS1";

enum { ROW_BYTES = 128, LOADED_AT_ONCE = 8192 };

_Static_assert(sizeof(struct keep_block) == ROW_BYTES && KEEP_HEAD_BYTES % ROW_BYTES == 0, "rows stay within pages");

static off_t offset_of(uint32_t slot)
{
	return KEEP_HEAD_BYTES + (off_t)slot * ROW_BYTES;
}

static int write_all(keep_blocks *b, const void *data, size_t size, off_t at)
{
	const char *from = data;

	while (size > 0) {
		ssize_t written = pwrite(b->file, from, size, at);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0) {
			b->has_failed = 1;
			return written < 0 ? -errno : -EIO;
		}
		from += written;
		at += written;
		size -= (size_t)written;
	}
	return 0;
}

/* Reads up to `size` bytes, less at the end of the file; returns how many, or an error. */
static ssize_t read_all(const keep_blocks *b, void *data, size_t size, off_t at)
{
	size_t done = 0;

	while (done < size) {
		ssize_t got = pread(b->file, (char *)data + done, size - done, at + (off_t)done);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			break;
		done += (size_t)got;
	}
	return (ssize_t)done;
}

/* A digest of a row's contents and its position, without its expiry. */
uint64_t keep_block_identity(const struct keep_blocks *b, const struct keep_block *row)
{
	return tk_siphash(b->head.secret, row, offsetof(struct keep_block, check));
}

uint64_t keep_block_check(const struct keep_blocks *b, uint64_t identity, uint64_t expires_ms)
{
	uint64_t said[2] = {identity, expires_ms};

	return tk_siphash(b->head.secret, said, sizeof said);
}

static int is_as_written(const keep_blocks *b, uint32_t slot, const struct keep_block *row)
{
	return row->slot == slot && row->generation == b->generations[slot] &&
	       row->check == keep_block_check(b, keep_block_identity(b, row), row->expires_ms);
}

/* Reads a row that is live in memory; -EBADMSG if it is not as it was written. */
int keep_blocks_read(const keep_blocks *b, uint32_t slot, struct keep_block *out)
{
	ssize_t got = read_all(b, out, sizeof *out, offset_of(slot));

	if (got < 0)
		return (int)got;
	return got == ROW_BYTES && is_as_written(b, slot, out) ? 0 : -EBADMSG;
}

void keep_window_open(struct keep_window *w)
{
	w->first = w->count = 0;
	w->next = KEEP_NO_ID;
}

/* As `keep_blocks_read`. A row that follows the last one is read with those behind it. */
int keep_window_read(struct keep_window *w, const keep_blocks *b, uint32_t slot, struct keep_block *out)
{
	if (slot - w->first >= w->count) {
		size_t rows = slot == w->next ? KEEP_WINDOW_ROWS : 1;
		ssize_t got = read_all(b, w->rows, rows * ROW_BYTES, offset_of(slot));

		w->first = slot;
		w->count = got < 0 ? 0 : (uint32_t)(got / ROW_BYTES);
		if (w->count == 0)
			return got < 0 ? (int)got : -EBADMSG;
	}
	w->next = slot + 1;
	*out = w->rows[slot - w->first];
	return is_as_written(b, slot, out) ? 0 : -EBADMSG;
}

/* Writes the rows of a batch to the slots chosen for it. */
int keep_blocks_write_rows(keep_blocks *b, const struct keep_block *rows, uint64_t count)
{
	for (uint64_t first = 0, until; first < count; first = until) {
		int error;

		for (until = first + 1; until < count && b->taken[until] == b->taken[until - 1] + 1;)
			until++;
		error = write_all(b, &rows[first], (until - first) * sizeof *rows, offset_of(b->taken[first]));
		if (error < 0)
			return error;
	}
	return 0;
}

int keep_blocks_mark_gone(keep_blocks *b, uint32_t slot, uint64_t commit)
{
	return write_all(b, &commit, sizeof commit, offset_of(slot) + (off_t)offsetof(struct keep_block, gone));
}

/* One write: check and expiry are adjacent. */
int keep_blocks_write_expiry(keep_blocks *b, const struct keep_block *row)
{
	return write_all(b, &row->check, sizeof row->check + sizeof row->expires_ms,
			 offset_of(row->slot) + (off_t)offsetof(struct keep_block, check));
}

/* Writes the head and makes it the current one. */
int keep_blocks_write_head(keep_blocks *b, const struct keep_head *head)
{
	struct keep_head checked = *head;
	int error;

	checked.check = tk_siphash(checked.secret, &checked, offsetof(struct keep_head, check));
	error = write_all(b, &checked, sizeof checked, 0);
	if (error == 0)
		b->head = checked;
	return error;
}

/* Makes a new table; the file is empty. */
int keep_blocks_create(keep_blocks *b)
{
	struct keep_head head = {.commit = 1};

	memcpy(head.magic, MAGIC, sizeof head.magic);
	if (getrandom(head.secret, sizeof head.secret, 0) != sizeof head.secret)
		return -EIO;
	return keep_blocks_write_head(b, &head);
}

/* Sets the drive and the epoch of the table. */
int keep_blocks_begin_epoch(keep_blocks *b, const uint8_t *drive, uint64_t epoch)
{
	struct keep_head head = b->head;

	memcpy(head.drive, drive, sizeof head.drive);
	head.epoch = epoch;
	return keep_blocks_write_head(b, &head);
}

int keep_blocks_is_of(const keep_blocks *b, const uint8_t *drive, uint64_t epoch)
{
	return memcmp(b->head.drive, drive, sizeof b->head.drive) == 0 && b->head.epoch == epoch;
}

static int read_head(keep_blocks *b)
{
	ssize_t got = read_all(b, &b->head, sizeof b->head, 0);
	struct stat file;

	if (got < 0)
		return (int)got;
	if (fstat(b->file, &file) < 0)
		return -errno;
	if (got < (ssize_t)sizeof b->head || memcmp(b->head.magic, MAGIC, sizeof MAGIC) != 0 ||
	    b->head.check != tk_siphash(b->head.secret, &b->head, offsetof(struct keep_head, check)) ||
	    b->head.slots >= KEEP_NO_ID || b->head.count > b->head.slots ||
	    (b->head.slots > 0 && file.st_size < offset_of((uint32_t)b->head.slots)))
		return -EBADMSG;
	return 0;
}

/* Loads one row of the file. An incomplete commit's changes are undone, in the file only if it is writable. */
static int load_one(keep_blocks *b, uint32_t slot, struct keep_block *row, uint64_t hash, int is_writable, uint64_t *sum)
{
	int is_ours = row->born != 0 && row->born <= b->head.commit, error;
	uint64_t identity;

	if (!is_ours || (row->gone != 0 && row->gone <= b->head.commit)) {
		if (is_writable && row->born > b->head.commit) {
			*row = (struct keep_block){0};
			error = write_all(b, row, sizeof *row, offset_of(slot));
			if (error < 0)
				return error;
		}
		return keep_blocks_load_slot(b, slot, NULL, hash);
	}
	identity = keep_block_identity(b, row);
	if (row->slot != slot || row->check != keep_block_check(b, identity, row->expires_ms))
		return -EBADMSG;
	if (is_writable && row->gone != 0) {
		error = keep_blocks_mark_gone(b, slot, 0);
		if (error < 0)
			return error;
	}
	*sum += identity;
	return keep_blocks_load_slot(b, slot, row, hash);
}

/* Reads rows from slot `first` on, as many as fit; returns how many, or an error. */
static int64_t read_rows(const keep_blocks *b, uint64_t first, struct keep_block *rows)
{
	uint64_t count = b->head.slots - first < LOADED_AT_ONCE ? b->head.slots - first : LOADED_AT_ONCE;
	ssize_t got = read_all(b, rows, count * sizeof *rows, offset_of((uint32_t)first));

	if (got < 0)
		return got;
	return (uint64_t)got < count * sizeof *rows ? -EBADMSG : (int64_t)count;
}

static int load_rows(keep_blocks *b, struct keep_block *rows, int is_writable)
{
	uint64_t sum = 0, live = 0, hashes[KEEP_WARMED_AT_ONCE];

	for (uint64_t first = 0; first < b->head.slots; first += LOADED_AT_ONCE) {
		int64_t count = read_rows(b, first, rows);

		if (count < 0)
			return (int)count;
		for (int64_t i = 0; i < count; i++) {
			int error;

			if (i % KEEP_WARMED_AT_ONCE == 0)
				keep_blocks_warm(b, &rows[i], keep_warmed_at_once((uint64_t)(count - i)), hashes);
			error = load_one(b, (uint32_t)(first + i), &rows[i], hashes[i % KEEP_WARMED_AT_ONCE], is_writable, &sum);
			if (error < 0)
				return error;
		}
	}
	live = b->head.slots - b->free_count;
	return live == b->head.count && sum == b->head.sum ? 0 : -EBADMSG;
}

/* Loads the table of an existing file; -EBADMSG if it is damaged. */
int keep_blocks_load(keep_blocks *b, int is_writable)
{
	struct keep_block *rows;
	int error = read_head(b);

	if (error == 0)
		error = keep_blocks_begin_loading(b);
	if (error < 0)
		return error;
	rows = malloc(LOADED_AT_ONCE * sizeof *rows);
	error = rows == NULL ? -ENOMEM : load_rows(b, rows, is_writable);
	free(rows);
	return error < 0 ? error : keep_blocks_end_loading(b);
}

static int read_lives(const keep_blocks *b, struct keep_block *rows, struct keep_life *out)
{
	for (uint64_t first = 0; first < b->head.slots; first += LOADED_AT_ONCE) {
		int64_t count = read_rows(b, first, rows);

		if (count < 0)
			return (int)count;
		for (int64_t i = 0; i < count; i++) {
			const struct keep_block *row = &rows[i];

			if (b->generations[first + (uint64_t)i] == 0)
				continue;
			if (row->generation != b->generations[first + (uint64_t)i])
				return -EBADMSG;
			*out++ = (struct keep_life){row->offset, row->length, row->generation, row->expires_ms};
		}
	}
	return 0;
}

/* The location, length and expiry of each block, in no order; `out` has room for all blocks. Rows were checked when
 * they were loaded. */
int keep_blocks_lives(const keep_blocks *b, struct keep_life *out)
{
	struct keep_block *rows = malloc(LOADED_AT_ONCE * sizeof *rows);
	int error = rows == NULL ? -ENOMEM : read_lives(b, rows, out);

	free(rows);
	return error;
}
