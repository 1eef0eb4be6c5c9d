/*
 * A lane's writes: records become pieces, encrypted if required, that go to the drive through its io_uring.
 *
 * Pieces that are adjacent on the drive, and begin one after another, are one write: a write of sixteen small records
 * costs the thread a third of what sixteen writes cost, and the drive less, too.
 *
 * What always holds: pieces release their staged memory in the order in which they begin. If a record can't be
 * encrypted, no more of it is written. A short write continues where it stopped; after a failed write the records of
 * all its pieces have failed.
 */
#define _GNU_SOURCE
#include "lane_inside.h"

#include <errno.h>
#include <string.h>

#define STUMBLES_MAX 16u     /* attempts at one write: EINTR and EAGAIN are not errors of the drive */
#define DIRECT_ALIGN 512u
#define UNHURRIED_COUNT 16u  /* pieces are submitted when there are so many, if no peer waits for one, */
#define UNHURRIED_NS 500000u /* or after this time */
#define BUSY_COUNT 3u	     /* while so many writes are in flight, even those that a peer waits for are collected */
#define BUSY_BYTES (256u << 10) /* up to here */
#define WRITE_BYTES (1u << 20)	/* pieces in one write, unless one is larger */
#define PIECE_BYTES (512u << 10) /* of a payload that are encrypted and written together */

static struct piece *piece_of(struct tk_lane *lane, uint64_t number)
{
	return &lane->pieces[number % lane->setup.depth];
}

static struct iovec *parts_of(const struct tk_lane *lane, const struct piece *piece)
{
	return lane->parts[piece - lane->pieces];
}

/* Prepares the rest of the write that begins with this piece. */
static void prepare(struct tk_lane *lane, struct piece *first)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&lane->ring); /* there are as many entries as pieces */
	struct iovec *parts = parts_of(lane, first), *end = parts + (size_t)2 * first->count;
	while (!parts->iov_len)
		parts++;
	io_uring_prep_writev(sqe, 0, parts, (unsigned)(end - parts), first->offset + first->moved);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, first);
	lane->unsubmitted++;
	lane->last_write = first->moved ? NULL : sqe;
	lane->last_first = first;
}

/* Adds a piece to the last write, if it is adjacent, on the drive and in the ring; returns whether it was. */
static int extend_last(struct tk_lane *lane, struct piece *placed)
{
	struct piece *first = lane->last_first;
	if (!lane->last_write || first + first->count != placed || first->offset + first->size != placed->offset ||
	    first->size + placed->size > WRITE_BYTES || !parts_of(lane, placed)[0].iov_len)
		return 0;
	first->count++;
	first->size += placed->size;
	lane->last_write->len += 2;
	return 1;
}

/* Begins to write a piece of a record, of one part or two; a place must be free. */
static void begin_piece(struct tk_lane *lane, struct record *record, uint64_t offset, uint32_t taken,
			const struct iovec parts[2])
{
	struct piece *placed = piece_of(lane, lane->pieces_begun++);
	uint64_t size = parts[0].iov_len + parts[1].iov_len;
	*placed = (struct piece){.record = record, .taken = taken, .count = 1, .offset = offset, .size = size};
	memcpy(parts_of(lane, placed), parts, 2 * sizeof *parts);
	record->pieces++;
	uint64_t at_ns = record->word.word ? 0 : lane->fabric->now_ns + UNHURRIED_NS;
	if (!lane->unsubmitted || at_ns < lane->submit_at_ns)
		lane->submit_at_ns = at_ns;
	if (!extend_last(lane, placed))
		prepare(lane, placed);
	lane->unsubmitted_pieces++;
	lane->unsubmitted_bytes += size;
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
	begin_piece(lane, record, record->row.offset, 0,
		    (struct iovec[]){{.iov_base = header, .iov_len = PAGE}, {.iov_base = record->payload, .iov_len = padded}});
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
	const struct iovec none = {0}, data = {.iov_base = bytes, .iov_len = size}, header = {.iov_base = page, .iov_len = PAGE};
	if (status) { /* the library failed: the record is abandoned, and the lane stops */
		note_failure(lane, record, status);
		*piece_of(lane, lane->pieces_begun++) = (struct piece){.record = record, .taken = taken, .is_over = 1};
		free_pieces(lane);
	} else if (is_first && is_last) {
		begin_piece(lane, record, offset - PAGE, taken, (struct iovec[]){header, data});
	} else {
		/* If it is the last, the memory of both pieces is released with the header's, which is the later one. */
		begin_piece(lane, record, offset, is_last ? 0 : taken, (struct iovec[]){none, data});
		if (is_last)
			begin_piece(lane, record, record->row.offset, taken, (struct iovec[]){none, header});
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

static void write_failed(struct tk_lane *lane, const struct piece *first, int status)
{
	for (uint32_t i = 0; i < first->count; i++)
		note_failure(lane, first[i].record, status);
}

/* Notes how much of a write was written; returns whether it is over. */
static int settle(struct tk_lane *lane, struct piece *first, int moved)
{
	if ((moved == -EINTR || moved == -EAGAIN) && ++first->stumbles <= STUMBLES_MAX) {
		prepare(lane, first);
		return 0;
	}
	if (moved <= 0 || moved % DIRECT_ALIGN || first->moved + (uint64_t)moved > first->size) {
		write_failed(lane, first, moved < 0 ? moved : -EIO);
		return 1;
	}
	first->moved += (uint64_t)moved;
	for (struct iovec *part = parts_of(lane, first); moved; part++) {
		size_t bytes = part->iov_len < (size_t)moved ? part->iov_len : (size_t)moved;
		part->iov_base = (char *)part->iov_base + bytes;
		part->iov_len -= bytes;
		moved -= (int)bytes;
	}
	if (first->moved == first->size)
		return 1;
	prepare(lane, first);
	return 0;
}

int reap_writes(struct tk_lane *lane)
{
	struct io_uring_cqe *cqe;
	int busy = 0;
	while (!io_uring_peek_cqe(&lane->ring, &cqe)) {
		struct piece *first = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;
		io_uring_cqe_seen(&lane->ring, cqe);
		lane->in_flight--;
		busy = 1;
		if (!settle(lane, first, moved)) {
			lane->submit_at_ns = 0;
			continue;
		}
		for (struct piece *piece = first; piece < first + first->count; piece++) {
			piece->is_over = 1;
			piece->record->pieces--;
			end_if_over(piece->record);
		}
	}
	free_pieces(lane);
	return busy;
}

/* Whether what was prepared is to be collected further: if no peer waits for it, so that it isn't submitted between a
 * peer's `landed` and its next put, and otherwise while the drive has enough to do. */
static int may_wait(struct tk_lane *lane)
{
	if (lane->unsubmitted_pieces >= UNHURRIED_COUNT)
		return 0;
	if (lane->submit_at_ns <= lane->fabric->now_ns)
		return lane->in_flight >= BUSY_COUNT && lane->unsubmitted_bytes < BUSY_BYTES;
	if (lane->submit_at_ns < lane->fabric->next_deadline_ns)
		lane->fabric->next_deadline_ns = lane->submit_at_ns;
	return 1;
}

/* Entries that the kernel doesn't accept now are submitted again in the next round. */
void submit_writes(struct tk_lane *lane)
{
	if (!lane->unsubmitted || may_wait(lane))
		return;
	int accepted = io_uring_submit(&lane->ring);
	lane->in_flight += accepted > 0 ? (uint32_t)accepted : 0;
	lane->unsubmitted = io_uring_sq_ready(&lane->ring);
	lane->unsubmitted_pieces = 0;
	lane->unsubmitted_bytes = 0;
	lane->submit_at_ns = 0;
	lane->last_write = NULL;
}
