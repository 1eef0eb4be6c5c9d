/*
 * A lane's writes: records become pieces, encrypted if required, that go to the drive through its io_uring.
 *
 * What always holds: pieces release their staged memory in the order in which they begin. If a record can't be
 * encrypted, no more of it is written. A short write continues where it stopped; after a failed write its record has
 * failed.
 */
#define _GNU_SOURCE
#include "lane_inside.h"

#include <errno.h>
#include <string.h>

#define STUMBLES_MAX 16u     /* attempts at one write: EINTR and EAGAIN are not errors of the drive */
#define DIRECT_ALIGN 512u
#define UNHURRIED_COUNT 16u  /* writes are submitted when there are so many, if no peer waits for one, */
#define UNHURRIED_NS 500000u /* or after this time */
#define PIECE_BYTES (512u << 10) /* of a payload that are encrypted and written together */

static void prepare(struct tk_lane *lane, struct piece *piece)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&lane->ring); /* there are as many entries as pieces */
	struct iovec *parts = piece->parts + !piece->parts[0].iov_len;
	io_uring_prep_writev(sqe, 0, parts, (unsigned)(piece->parts + 2 - parts), piece->offset + piece->moved);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, piece);
	uint64_t at_ns = piece->record->word.word ? 0 : lane->fabric->now_ns + UNHURRIED_NS;
	if (!lane->unsubmitted++ || at_ns < lane->submit_at_ns)
		lane->submit_at_ns = at_ns;
}

static struct piece *piece_of(struct tk_lane *lane, uint64_t number)
{
	return &lane->pieces[number % lane->setup.depth];
}

/* Begins to write a piece; a place must be free. */
static void begin_piece(struct tk_lane *lane, const struct piece *piece)
{
	struct piece *placed = piece_of(lane, lane->pieces_begun++);
	*placed = *piece;
	placed->size = placed->parts[0].iov_len + placed->parts[1].iov_len;
	placed->record->pieces++;
	prepare(lane, placed);
}

/* Takes the lock: `tk_lane_under_way` copies records that are under way. */
static void note_failure(struct tk_lane *lane, struct record *record, int status)
{
	pthread_mutex_lock(&lane->lock);
	if (!record->row.result)
		record->row.result = status;
	pthread_mutex_unlock(&lane->lock);
}

static int has_pieces(const struct tk_lane *lane, uint32_t count)
{
	return lane->pieces_begun - lane->pieces_freed + count <= lane->setup.depth;
}

/* Makes its header page, and begins to write the whole record. Returns how many bytes were made; 0: there is no room. */
static uint32_t write_plain(struct tk_lane *lane, struct record *record)
{
	if (!has_pieces(lane, 1))
		return 0;
	uint32_t padded = (uint32_t)(record->size - PAGE);
	char *header = lane->headers + (size_t)(record - lane->records) * PAGE;
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)header, .number = record->row.offset};
	memcpy(row.fixed, &record->header, sizeof record->header);
	tk_write_tagged(lane->setup.secret, lane->setup.name, &row, 1);
	memset(record->payload + record->length, 0, padded - record->length);
	struct piece piece = {
		.record = record,
		.parts = {{.iov_base = header, .iov_len = PAGE}, {.iov_base = record->payload, .iov_len = padded}},
		.offset = record->row.offset,
	};
	begin_piece(lane, &piece);
	record->is_whole = 1;
	return PAGE;
}

static void free_pieces(struct tk_lane *lane)
{
	while (lane->pieces_freed < lane->pieces_begun && piece_of(lane, lane->pieces_freed)->is_over)
		staged_give(&lane->staged, piece_of(lane, lane->pieces_freed++)->taken);
}

static void end_if_over(struct record *record)
{
	record->has_ended = record->is_whole && !record->pieces;
}

/* Encrypts the next bytes of a record, and begins to write them; the header page of a large record is written with the
 * last of them. Returns how many; 0: there is no room. */
static uint32_t encrypt_piece(struct tk_lane *lane, struct record *record)
{
	const struct tk_encryption *with = &lane->setup.encryption;
	uint32_t left = (uint32_t)(record->size - PAGE) - record->encrypted, size = left < PIECE_BYTES ? left : PIECE_BYTES;
	int is_first = !record->encrypted, is_last = size == left, status = 0;
	uint32_t taken, payload = record->length - record->encrypted < size ? record->length - record->encrypted : size;
	if (!has_pieces(lane, 2))
		return 0;
	char *memory = staged_take(&lane->staged, size + (is_last ? PAGE : 0), &taken);
	if (!memory)
		return 0;
	char *page = memory, *bytes = memory + (is_last ? PAGE : 0);
	if (is_first) {
		status = record_begin(&lane->stream, with, &record->key, &record->header, record->row.offset);
		wipe(&record->key, sizeof record->key);
	}
	if (!status)
		status = aead_step(lane->stream.aead, bytes, record->payload + record->encrypted, payload);
	memset(bytes + payload, 0, size - payload);
	if (!status && is_last)
		status = record_end(&lane->stream, with, page);
	uint64_t offset = record->row.offset + PAGE + record->encrypted;
	record->encrypted += size;
	record->is_whole = is_last || status;
	struct piece piece = {.record = record, .taken = taken, .offset = offset,
			      .parts = {{.iov_len = 0}, {.iov_base = bytes, .iov_len = size}}};
	if (status) { /* the library failed: the record is abandoned, and the lane stops */
		note_failure(lane, record, status);
		piece.is_over = 1;
		*piece_of(lane, lane->pieces_begun++) = piece;
		free_pieces(lane);
	} else if (is_first && is_last) {
		piece.parts[0] = (struct iovec){.iov_base = page, .iov_len = PAGE};
		piece.offset -= PAGE;
		begin_piece(lane, &piece);
	} else if (is_last) { /* the memory of both is released with the later one */
		piece.taken = 0;
		begin_piece(lane, &piece);
		piece.parts[1] = (struct iovec){.iov_base = page, .iov_len = PAGE};
		piece.offset = record->row.offset;
		piece.taken = taken;
		begin_piece(lane, &piece);
	} else {
		begin_piece(lane, &piece);
	}
	end_if_over(record);
	return size;
}

int write_some(struct tk_lane *lane, uint32_t budget)
{
	int is_encrypted = lane->setup.encryption.vault != NULL;
	uint32_t done = 0;
	while (lane->whole < lane->count && done < budget) {
		struct record *record = &lane->records[(lane->first + lane->whole) % lane->setup.depth];
		uint32_t bytes = is_encrypted ? encrypt_piece(lane, record) : write_plain(lane, record);
		if (!bytes)
			break;
		done += bytes;
		lane->whole += (uint32_t)record->is_whole;
	}
	if (is_encrypted && done && lane->whole == lane->count) /* the key of an erased domain must not stay in memory */
		record_forget(&lane->stream);
	return done > 0;
}

/* Notes what was written; returns whether the piece is over. */
static int settle(struct tk_lane *lane, struct piece *piece, int moved)
{
	if ((moved == -EINTR || moved == -EAGAIN) && ++piece->stumbles <= STUMBLES_MAX) {
		prepare(lane, piece);
		return 0;
	}
	if (moved <= 0 || moved % DIRECT_ALIGN || piece->moved + (uint64_t)moved > piece->size) {
		note_failure(lane, piece->record, moved < 0 ? moved : -EIO);
		return 1;
	}
	piece->moved += (uint64_t)moved;
	for (int i = 0; moved; i++) {
		size_t part = piece->parts[i].iov_len < (size_t)moved ? piece->parts[i].iov_len : (size_t)moved;
		piece->parts[i].iov_base = (char *)piece->parts[i].iov_base + part;
		piece->parts[i].iov_len -= part;
		moved -= (int)part;
	}
	if (piece->moved == piece->size)
		return 1;
	prepare(lane, piece);
	return 0;
}

int reap_writes(struct tk_lane *lane)
{
	struct io_uring_cqe *cqe;
	int busy = 0;
	while (!io_uring_peek_cqe(&lane->ring, &cqe)) {
		struct piece *piece = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;
		io_uring_cqe_seen(&lane->ring, cqe);
		busy = 1;
		if (!settle(lane, piece, moved))
			continue;
		piece->is_over = 1;
		piece->record->pieces--;
		end_if_over(piece->record);
	}
	free_pieces(lane);
	return busy;
}

/* Writes that no peer waits for are submitted together, and not between a peer's `landed` and its next put. Entries
 * that the kernel doesn't accept now are submitted again in the next round. */
void submit_writes(struct tk_lane *lane)
{
	if (!lane->unsubmitted)
		return;
	if (lane->unsubmitted < UNHURRIED_COUNT && lane->submit_at_ns > lane->fabric->now_ns) {
		if (lane->submit_at_ns < lane->fabric->next_deadline_ns)
			lane->fabric->next_deadline_ns = lane->submit_at_ns;
		return;
	}
	io_uring_submit(&lane->ring);
	lane->unsubmitted = io_uring_sq_ready(&lane->ring);
	lane->submit_at_ns = 0;
}
