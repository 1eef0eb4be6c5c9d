/*
 * A reader's pieces: read from the drive through its io_uring to where they stay, or decrypted to there, and checked.
 *
 * What always holds: pieces release their staged memory in the order in which they begin; those of one record are
 * checked in order. Bytes that turn out to be wrong are wiped.
 */
#define _GNU_SOURCE
#include "reader_inside.h"

#include <errno.h>
#include <string.h>

#define HEADER_BYTES (TK_TAGGED_FIXED + TK_TAGGED_TAG) /* the rest of its page is not read */
#define STUMBLES_MAX 16u /* attempts at one read: EINTR and EAGAIN are not errors of the drive */
#define DIRECT_ALIGN 512u
#define PIECE_BYTES (512u << 10) /* of a payload that are read together; the header comes with the first */
#define READ_BYTES (STAGED_BYTES / 2) /* at a time: the drive continues to read while the others are checked */
#define BYTES_A_STEP (8u << 10) /* checked before testing again whether they are still wanted */

/* Only name and place of a cold block are known beforehand: the rest is taken from its header, which has a tag. */
static int learns(struct reading *reading, const struct header_fixed *found)
{
	if (!reading->place)
		return 1;
	uint64_t above = (reading->place >> TK_PLACE_GENERATION_BIT) << TK_PLACE_GENERATION_BIT;
	reading->header.generation = found->generation;
	reading->header.crc32c = found->crc32c;
	return !found->expires_ms && found->generation << TK_PLACE_GENERATION_BIT == above;
}

static int opens(struct tk_reader *reader, struct reading *reading, const char *page)
{
	const struct header_fixed *wanted = &reading->header;
	struct header_fixed found;
	reading->aead = aead_open();
	if (!reading->aead || record_open(reading->aead, &reader->setup.encryption, reading->offset, page, &found))
		return 0;
	record_payload_tag(page, reading->payload_tag);
	return learns(reading, &found) && found.kind == wanted->kind && found.length == wanted->length && found.generation == wanted->generation &&
	       found.crc32c == wanted->crc32c && !memcmp(found.key, wanted->key, TK_KEY_BYTES) &&
	       !memcmp(found.owner, wanted->owner, TK_OWNER_BYTES) &&
	       !memcmp(found.fingerprint, wanted->fingerprint, TK_FINGERPRINT_BYTES);
}

static int is_the_one(struct tk_reader *reader, struct reading *reading, const char *page)
{
	if (reader->setup.encryption.vault && is_encrypted(page))
		return opens(reader, reading, page);
	const struct header_fixed *found = (const void *)page;
	if (!learns(reading, found))
		return 0;
	reading->header.expires_ms = found->expires_ms;
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)reader->scratch, .number = reading->offset};
	memcpy(row.fixed, &reading->header, sizeof reading->header);
	tk_write_tagged(reader->setup.secret, reader->setup.name, &row, 1);
	return !memcmp(reader->scratch, page, HEADER_BYTES);
}

static struct piece *piece_of(struct tk_reader *reader, uint64_t number)
{
	return &reader->pieces[number % reader->setup.depth];
}

static void free_staged(struct tk_reader *reader)
{
	while (reader->freed < reader->begun) {
		const struct piece *piece = piece_of(reader, reader->freed);
		if (piece->state != PIECE_OVER || piece->is_listed)
			break;
		staged_give(&reader->staged, piece->taken);
		reader->freed++;
	}
}

static void prepare(struct tk_reader *reader, struct piece *piece)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&reader->ring); /* there are as many entries as pieces */
	io_uring_prep_read(sqe, 0, piece->memory + piece->moved, piece->size - piece->moved,
			   piece->reading->offset + piece->at + piece->moved);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, piece);
	reader->unsubmitted = 1;
}

static int is_staged(const struct tk_reader *reader)
{
	return reader->setup.encryption.vault != NULL;
}

/* The pages for a record that is still wanted. */
static char *room_of(const struct reading *reading)
{
	return (char *)(uintptr_t)reading->work->op.local - PAGE;
}

/* Neither the drive nor the thread uses the record any more. */
static void ended(struct tk_reader *reader, struct reading *reading)
{
	struct work *work = reading->work;
	aead_close(reading->aead);
	if (work && reading->failed && !is_staged(reader))
		wipe(room_of(reading), reading->size);
	if (work) {
		reader_release(work);
		if (reading->failed || (reading->place && !cold_is_there(work, reading->place, reading->header.generation)))
			finish(reader->fabric, work, -ENODATA);
		else
			fire(reader->fabric, work, tk_now_ns());
	} else if (reading->batch->shelf) {
		cold_room_back(reading->batch->shelf, &reading->room);
	}
	reading_over(reader, reading);
}

/* Begins to read the next piece of a record; 0: not possible now. */
static int begin_piece(struct tk_reader *reader, struct reading *reading)
{
	uint32_t left = reading->size - reading->begun, most = reading->begun ? PIECE_BYTES : PAGE + PIECE_BYTES, taken = 0;
	uint32_t size = left < most ? left : most;
	if (reader->in_ring && reader->in_ring_bytes + size > READ_BYTES)
		return 0;
	char *memory = is_staged(reader) ? staged_take(&reader->staged, size, &taken) : room_of(reading) + reading->begun;
	if (!memory)
		return 0;
	struct piece *piece = piece_of(reader, reader->begun);
	*piece = (struct piece){
		.reading = reading,
		.number = reader->begun++,
		.memory = memory,
		.at = reading->begun,
		.size = size,
		.taken = taken,
	};
	reading->begun += size;
	reader->in_ring++;
	reader->in_ring_bytes += size;
	prepare(reader, piece);
	return 1;
}

int start_readings(struct tk_reader *reader)
{
	int busy = 0;
	while (reader->first && reader->begun - reader->freed < reader->setup.depth) {
		struct reading *reading = reader->first;
		if (!reading->work || reading->failed)
			reading->size = reading->begun; /* the rest is not needed */
		if (reading->begun < reading->size && !begin_piece(reader, reading))
			break;
		busy = 1;
		if (reading->begun < reading->size)
			continue;
		reader->first = reading->next;
		if (!reader->first)
			reader->last = NULL;
		if (reading->over == reading->size)
			ended(reader, reading);
	}
	return busy;
}

/* Entries that the kernel doesn't accept now are submitted again in the next round. */
void submit_reads(struct tk_reader *reader)
{
	if (!reader->unsubmitted)
		return;
	io_uring_submit(&reader->ring);
	reader->unsubmitted = io_uring_sq_ready(&reader->ring) > 0;
}

/* Notes what was read; returns whether the read has ended. */
static int settle(struct tk_reader *reader, struct piece *piece, int moved)
{
	if ((moved == -EINTR || moved == -EAGAIN) && ++piece->stumbles <= STUMBLES_MAX) {
		prepare(reader, piece);
		return 0;
	}
	if (moved <= 0 || moved % DIRECT_ALIGN || (uint32_t)moved > piece->size - piece->moved) {
		piece->reading->failed = 1;
		return 1;
	}
	piece->moved += (uint32_t)moved;
	if (piece->moved < piece->size) {
		prepare(reader, piece);
		return 0;
	}
	return 1;
}

int reap_reads(struct tk_reader *reader)
{
	struct io_uring_cqe *cqe;
	int busy = 0;
	while (reader->in_ring && !io_uring_peek_cqe(&reader->ring, &cqe)) {
		struct piece *piece = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;
		io_uring_cqe_seen(&reader->ring, cqe);
		busy = 1;
		if (!settle(reader, piece, moved))
			continue;
		reader->in_ring--;
		reader->in_ring_bytes -= piece->size;
		piece->state = PIECE_READ;
		piece->is_listed = 1;
		if (reader->read_last_piece)
			reader->read_last_piece->next = piece;
		else
			reader->read_first_piece = piece;
		reader->read_last_piece = piece;
	}
	return busy;
}

/* Moves some bytes of a payload to their destination, unless they are there; 0: they differ from those written. */
static int take_bytes(struct reading *reading, const char *from, uint32_t length)
{
	struct work *work = reading->work;
	char *payload = (char *)(uintptr_t)work->op.local, *to = payload + work->summed;
	if (!reading->aead) {
		if (to != from)
			memcpy(to, from, length);
		work->crc = tk_crc32c(to, length, work->crc);
		work->summed += length;
		return 1;
	}
	int status = aead_step(reading->aead, to, from, length);
	work->summed += length;
	if (!status && work->summed == work->op.length)
		status = aead_end(reading->aead, reading->payload_tag);
	if (status)
		wipe(payload, work->summed);
	else if (work->summed == work->op.length)
		work->crc = work->op.crc32c; /* verified by its tag, and by the header's */
	return !status;
}

/* Processes a piece that was read: checks the header, and the part of the payload that is still needed. */
static void take_in(struct tk_reader *reader, struct piece *piece)
{
	struct reading *reading = piece->reading;
	struct work *work = reading->work;
	const char *from = piece->memory + (piece->at ? 0 : PAGE);
	if (!piece->at && !reading->failed && !is_the_one(reader, reading, piece->memory))
		reading->failed = 1;
	if (!work || reading->failed)
		return;
	work->op.crc32c = reading->header.crc32c;
	const char *end = piece->memory + piece->size;
	for (uint32_t step; from < end && work->summed < work->op.length && !reading->failed; from += step) {
		step = work->op.length - work->summed;
		if (step > BYTES_A_STEP)
			step = BYTES_A_STEP;
		if (step > (size_t)(end - from))
			step = (uint32_t)(end - from);
		reading->failed = !take_bytes(reading, from, step);
	}
}

/* Checks the pieces of a record that are due: this one, if it is the next, and those after it that were read before.
 * Returns how many bytes they had. */
static uint32_t check_due(struct tk_reader *reader, struct piece *piece)
{
	struct reading *reading = piece->reading;
	uint32_t bytes = 0;
	while (piece->state == PIECE_READ && piece->reading == reading && piece->at == reading->over) {
		take_in(reader, piece);
		piece->state = PIECE_OVER;
		reading->over += piece->size;
		bytes += piece->size;
		if (piece->number + 1 == reader->begun)
			break;
		piece = piece_of(reader, piece->number + 1);
	}
	if (bytes && reading->over == reading->size)
		ended(reader, reading);
	return bytes;
}

int check_read(struct tk_reader *reader, uint32_t budget)
{
	int busy = reader->read_first_piece != NULL;
	while (budget && reader->read_first_piece) {
		struct piece *piece = reader->read_first_piece;
		reader->read_first_piece = piece->next;
		if (!piece->next)
			reader->read_last_piece = NULL;
		piece->is_listed = 0;
		uint32_t bytes = check_due(reader, piece);
		free_staged(reader);
		budget -= bytes < budget ? bytes : budget;
	}
	return busy;
}
