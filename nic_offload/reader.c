/*
 * The reader: sends blocks from a drive to peers without the application.
 *
 * For each block the application says where its record lies, what its header must contain, into which pages to read
 * it and where its payload goes; it has already decided on the order and on how much may be under way. From there on
 * the block is an operation like any other (`tk_operation`) whose bytes have not arrived yet. The progress thread
 * reads header and payload through the reader's own io_uring, in pieces, into memory of the reader's own in huge
 * pages: drives read into these up to half as fast again as into the small pages of shared memory. As pieces arrive
 * it compares the header, and copies the payload to its final place, computing the CRC on the way; then it fires the
 * operation, which sends the bytes followed by the flag. So one block is read while others are copied and sent. What is
 * encrypted is decrypted where it would be copied, and its tag is compared instead of the CRC.
 *
 * What always holds: nothing of a record is sent unless its header is the expected one, bit by bit, including its tag
 * for this place on this drive (except its expiry, which may have been extended), and its payload has the expected
 * CRC, or, if it is encrypted, its tag. An operation that is cancelled, late, or whose endpoint is closed ends at once,
 * as it would without a reader, and nothing more is copied for it; but the drive may still be reading its extent. So
 * records are read in batches, and the pages and extents of a batch may be reused after its TK_READ, which is reported
 * once, whatever became of the operations. The pieces of one record are copied in order; those of different records as
 * they arrive.
 *
 * What it doesn't do: read anything twice. If a read failed or found another record, the operation fails with
 * -ENODATA, and the application finds out why. It doesn't keep extents from being freed: the application does, from
 * before the call until TK_READ.
 */
#define _GNU_SOURCE
#include "header.h"
#include "progress.h"
#include "record_encryption.h"
#include "staged.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PAGE TK_TAGGED_PAGE
#define HEADER_BYTES (TK_TAGGED_FIXED + TK_TAGGED_TAG) /* the rest of its page is not looked at */
#define STUMBLES_MAX 16u /* of one read: EINTR and EAGAIN say nothing of the drive */
#define DIRECT_ALIGN 512u
#define APART_NS 50000u /* that a batch was read is told with the end of its puts, or after so long */
#define PIECE_BYTES (256u << 10) /* of a payload that are read together; the header comes with the first */
#define STAGED_BYTES (8u << 20)	 /* that are being read, or were and wait to be copied */
#define READ_BYTES (STAGED_BYTES / 2) /* at a time: the drive reads on while the others are copied */
#define COPIED_A_ROUND PIECE_BYTES /* so that the wire is not kept waiting */
#define BYTES_A_STEP (16u << 10) /* copied, and summed while they are in the cache */

/* A record that is being read. The progress thread's own once its work was taken in. */
struct reading {
	struct reading *next; /* waits for places */
	struct batch *batch;
	struct work *work; /* NULL: the bytes are no longer wanted */
	uint32_t size, begun, over; /* bytes: in all; of pieces that were begun; of those that are over */
	int failed;
	uint64_t offset;
	struct header_fixed header;
	struct aead *aead; /* NULL: it is not encrypted, or not begun */
	uint8_t payload_tag[TK_AEAD_TAG];
};

/* Of a record. Memory is taken and given back in the order in which pieces are begun. */
struct piece {
	struct piece *next; /* was read, too */
	struct reading *reading;
	uint64_t number;
	char *memory;
	uint32_t at, size, moved, stumbles; /* of the record */
	uint32_t taken; /* of the memory, with what was left out before it */
	enum { PIECE_READING, PIECE_READ, PIECE_OVER } state;
	int is_listed; /* among those that were read: so it is not used again */
};

/* A batch: records that were submitted together. It is freed when both of its ends have been reported. */
struct batch {
	struct batch *next; /* that were read and have not told so */
	struct tk_reader *reader;
	struct tk_region *region; /* in use as long as the drive may write to it */
	uint64_t tag, read_ns, posted_ns;
	uint32_t unread;   /* of which the drive is not done with the pages */
	uint32_t not_over; /* puts */
	int read_is_told;
	struct reading readings[];
};

struct tk_reader {
	struct tk_fabric *fabric;
	struct tk_reader *next;
	struct tk_reader_setup setup;

	/* The progress thread's own. */
	struct io_uring ring;
	int event_fd; /* rings when a read has ended */
	struct reading *first, *last; /* that wait for places */
	struct piece *pieces; /* as many as the ring is deep; by the number of each */
	uint64_t begun, freed; /* the numbers of the next one, and of the oldest whose memory is taken */
	struct staged staged;
	struct piece *read_first_piece, *read_last_piece; /* to be copied */
	uint32_t in_ring, in_ring_bytes;
	int unsubmitted;
	struct batch *read_first; /* whose READ waits for the end of their puts */
	char *scratch; /* a page */
};

static void free_reader(struct tk_reader *reader)
{
	if (reader->ring.ring_fd >= 0) {
		io_uring_unregister_files(&reader->ring);
		io_uring_queue_exit(&reader->ring);
	}
	if (reader->event_fd >= 0)
		close(reader->event_fd);
	staged_close(&reader->staged);
	free(reader->pieces);
	free(reader->scratch);
	free(reader);
}

static int add_reader(struct tk_fabric *fabric, void *argument)
{
	struct tk_reader *reader = *(struct tk_reader **)argument;
	int status = rest_hear_writes(fabric, reader->event_fd);
	if (status)
		return status;
	reader->next = fabric->readers;
	fabric->readers = reader;
	return 0;
}

static int open_ring(struct tk_reader *reader)
{
	int status = io_uring_queue_init(reader->setup.depth, &reader->ring, 0);
	if (status) {
		reader->ring.ring_fd = -1;
		return status;
	}
	if (!(status = io_uring_register_files(&reader->ring, &reader->setup.fd, 1)))
		status = io_uring_register_eventfd(&reader->ring, reader->event_fd);
	return status;
}

int tk_reader_open(struct tk_fabric *fabric, const struct tk_reader_setup *setup, struct tk_reader **out)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (!setup->depth)
		return -EINVAL;
	struct tk_reader *reader = calloc(1, sizeof *reader);
	if (!reader)
		return -ENOMEM;
	reader->fabric = fabric;
	reader->setup = *setup;
	reader->ring.ring_fd = -1;
	reader->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	reader->scratch = malloc(PAGE);
	reader->pieces = calloc(setup->depth, sizeof *reader->pieces);
	if (reader->event_fd < 0 || !reader->scratch || !reader->pieces ||
	    staged_open(&reader->staged, STAGED_BYTES)) {
		free_reader(reader);
		return -ENOMEM;
	}
	status = open_ring(reader);
	if (!status)
		status = on_the_thread(fabric, add_reader, &reader, sizeof reader);
	if (status) {
		if (status != TK_STUCK)
			free_reader(reader);
		return status;
	}
	*out = reader;
	return 0;
}

/* --- the application's side; any thread */

static uint32_t record_bytes(uint32_t length)
{
	return PAGE + (length + PAGE - 1) / PAGE * PAGE;
}

static struct tk_operation operation_of(const struct tk_reading *record, struct tk_region *region)
{
	return (struct tk_operation){
		.tag = record->tag,
		.endpoint = record->endpoint,
		.peer = record->peer,
		.local = record->address + PAGE,
		.remote = record->remote,
		.remote_key = record->remote_key,
		.flag_target = record->flag_target,
		.flag_key = record->flag_key,
		.flag_value = record->flag_value,
		.region = region,
		.length = record->length,
		.crc32c = record->crc32c,
		.flags = TK_FLAG_PUT | TK_VERIFY_CRC | TK_ACKED_PUT | (record->shares & TK_SHARED_PUT),
		.skip = record->skip,
		.part = record->part,
	};
}

static int check_reading(const struct tk_fabric *fabric, const struct tk_reading *record, struct tk_region *region)
{
	struct tk_operation op = operation_of(record, region);
	if (!record->length || record->length > UINT32_MAX - 2 * PAGE || record->address % PAGE || record->offset % PAGE)
		return -EINVAL;
	int status = check_operation(fabric, &op);
	if (status)
		return status;
	int is_inside = record->address >= region->address &&
			record_bytes(record->length) <= region->length - (record->address - region->address);
	return is_inside ? 0 : -ERANGE;
}

static void fill_in(struct reading *reading, struct batch *batch, const struct tk_reading *record)
{
	const struct tk_reader_setup *setup = &batch->reader->setup;
	*reading = (struct reading){
		.batch = batch,
		.size = record_bytes(record->length),
		.offset = record->offset,
		.header = {
			.version = setup->version,
			.kind = setup->kind,
			.length = record->length,
			.generation = record->generation,
			.crc32c = record->crc32c,
		},
	};
	memcpy(reading->header.magic, setup->magic, sizeof setup->magic);
	memcpy(reading->header.key, record->key, TK_KEY_BYTES);
	memcpy(reading->header.owner, record->owner, TK_OWNER_BYTES);
	memcpy(reading->header.fingerprint, record->fingerprint, TK_FINGERPRINT_BYTES);
}

int tk_reader_put(struct tk_reader *reader, struct tk_region *region, uint64_t tag, const struct tk_reading *records,
		  int count)
{
	struct tk_fabric *fabric = reader->fabric;
	int status = fabric_refusal(fabric);
	if (!status && count <= 0)
		status = -EINVAL;
	for (int i = 0; !status && i < count; i++)
		status = check_reading(fabric, &records[i], region);
	if (status)
		return status;
	struct batch *batch = malloc(sizeof *batch + (size_t)count * sizeof *batch->readings);
	if (!batch)
		return -ENOMEM;
	*batch = (struct batch){.reader = reader, .region = region, .tag = tag, .unread = (uint32_t)count,
				.not_over = (uint32_t)count};
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++) {
		struct tk_operation op = operation_of(&records[i], region);
		struct work *work = enqueue_operation(fabric, &op);
		work->reading = &batch->readings[i];
		work->batch = batch;
		fill_in(work->reading, batch, &records[i]);
		work->reading->work = work;
	}
	if (!status)
		__atomic_add_fetch(&region->uses, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (status)
		free(batch);
	else
		fabric_wake(fabric);
	return status;
}

/* --- the progress thread's */

void reader_begin(struct work *work)
{
	struct reading *reading = work->reading;
	struct tk_reader *reader = reading->batch->reader;
	work->state = WORK_READING;
	reader->fabric->reading++;
	if (reader->last)
		reader->last->next = reading;
	else
		reader->first = reading;
	reader->last = reading;
}

void reader_let_go(struct work *work)
{
	work->reading->work = NULL;
	work->reading = NULL;
}

/* Takes a batch off the list of those whose TK_READ is to be reported. */
static void unlist(struct tk_reader *reader, struct batch *batch)
{
	struct batch **link = &reader->read_first;
	while (*link && *link != batch)
		link = &(*link)->next;
	if (*link)
		*link = batch->next;
}

static void tell_read(struct tk_reader *reader, struct batch *batch)
{
	report(reader->fabric, TK_READ, batch->tag, 0, 0, batch->read_ns);
	batch->read_is_told = 1;
}

static void free_if_over(struct batch *batch)
{
	if (batch->read_is_told && !batch->not_over)
		free(batch);
}

/* The drive no longer uses its memory. */
static void over(struct tk_reader *reader, struct reading *reading)
{
	struct batch *batch = reading->batch;
	reader->fabric->reading--;
	if (--batch->unread)
		return;
	__atomic_sub_fetch(&batch->region->uses, 1, __ATOMIC_RELEASE);
	batch->read_ns = tk_now_ns();
	if (!batch->not_over) {
		tell_read(reader, batch);
		free_if_over(batch);
	} else {
		batch->next = reader->read_first;
		reader->read_first = batch;
	}
}

void reader_put_over(struct work *work)
{
	struct batch *batch = work->batch;
	struct tk_reader *reader = batch->reader;
	if (work->posted_ns > batch->posted_ns)
		batch->posted_ns = work->posted_ns;
	if (--batch->not_over)
		return;
	report(reader->fabric, TK_SENT, batch->tag, batch->posted_ns, 0, tk_now_ns());
	if (!batch->unread && !batch->read_is_told) {
		unlist(reader, batch);
		tell_read(reader, batch);
	}
	free_if_over(batch);
}

static void tell_in_time(struct tk_reader *reader)
{
	struct tk_fabric *fabric = reader->fabric;
	for (struct batch *batch = reader->read_first, *next; batch; batch = next) {
		next = batch->next;
		uint64_t at_ns = batch->read_ns + APART_NS;
		if (fabric->now_ns >= at_ns) {
			unlist(reader, batch);
			tell_read(reader, batch);
		} else if (at_ns < fabric->next_deadline_ns) {
			fabric->next_deadline_ns = at_ns;
		}
	}
}

static int opens(struct tk_reader *reader, struct reading *reading, const char *page)
{
	const struct header_fixed *wanted = &reading->header;
	struct header_fixed found;
	reading->aead = aead_open();
	if (!reading->aead || record_open(reading->aead, &reader->setup.encryption, reading->offset, page, &found))
		return 0;
	record_payload_tag(page, reading->payload_tag);
	return found.kind == wanted->kind && found.length == wanted->length && found.generation == wanted->generation &&
	       found.crc32c == wanted->crc32c && !memcmp(found.key, wanted->key, TK_KEY_BYTES) &&
	       !memcmp(found.owner, wanted->owner, TK_OWNER_BYTES) &&
	       !memcmp(found.fingerprint, wanted->fingerprint, TK_FINGERPRINT_BYTES);
}

static int is_the_one(struct tk_reader *reader, struct reading *reading, const char *page)
{
	if (reader->setup.encryption.vault && is_encrypted(page))
		return opens(reader, reading, page);
	const struct header_fixed *found = (const void *)page;
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

/* The drive is done with a record, and so are we. */
static void ended(struct tk_reader *reader, struct reading *reading)
{
	struct work *work = reading->work;
	aead_close(reading->aead);
	if (work) {
		reader_let_go(work);
		if (reading->failed)
			finish(reader->fabric, work, -ENODATA);
		else
			fire(reader->fabric, work, tk_now_ns());
	}
	over(reader, reading);
}

/* Begins to read the next piece of a record; 0: it is not the time for that. */
static int begin_piece(struct tk_reader *reader, struct reading *reading)
{
	uint32_t left = reading->size - reading->begun, most = reading->begun ? PIECE_BYTES : PAGE + PIECE_BYTES, taken;
	uint32_t size = left < most ? left : most;
	if (reader->in_ring && reader->in_ring_bytes + size > READ_BYTES)
		return 0;
	char *memory = staged_take(&reader->staged, size, &taken);
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

static int start_waiting(struct tk_reader *reader)
{
	int busy = 0;
	while (reader->first && reader->begun - reader->freed < reader->setup.depth) {
		struct reading *reading = reader->first;
		if (!reading->work || reading->failed)
			reading->size = reading->begun; /* nobody wants the rest */
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

/* The kernel may not take what there is now; then it is offered again in the next round. */
static void submit(struct tk_reader *reader)
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

static int reap(struct tk_reader *reader)
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

/* Some bytes of a payload go where they stay; 0: they are others than were written. */
static int take_bytes(struct reading *reading, const char *from, uint32_t length)
{
	struct work *work = reading->work;
	char *payload = (char *)(uintptr_t)work->op.local, *to = payload + work->summed;
	if (!reading->aead) {
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
		work->crc = work->op.crc32c; /* its tag, and the header's, say so */
	return !status;
}

/* Takes what a piece has brought: the header is looked at, and of the payload goes where it stays what is wanted still. */
static void copy_out(struct tk_reader *reader, struct piece *piece)
{
	struct reading *reading = piece->reading;
	struct work *work = reading->work;
	const char *from = piece->memory + (piece->at ? 0 : PAGE);
	if (!piece->at && !reading->failed && !is_the_one(reader, reading, piece->memory))
		reading->failed = 1;
	if (!work || reading->failed)
		return;
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

/* The pieces of a record that are due: this one, if it is the next, and those behind it that were read before. Returns how
 * many bytes they had. */
static uint32_t copy_due(struct tk_reader *reader, struct piece *piece)
{
	struct reading *reading = piece->reading;
	uint32_t bytes = 0;
	while (piece->state == PIECE_READ && piece->reading == reading && piece->at == reading->over) {
		copy_out(reader, piece);
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

static int copy_read(struct tk_reader *reader, uint32_t budget)
{
	int busy = reader->read_first_piece != NULL;
	while (budget && reader->read_first_piece) {
		struct piece *piece = reader->read_first_piece;
		reader->read_first_piece = piece->next;
		if (!piece->next)
			reader->read_last_piece = NULL;
		piece->is_listed = 0;
		uint32_t bytes = copy_due(reader, piece);
		free_staged(reader);
		budget -= bytes < budget ? bytes : budget;
	}
	return busy;
}

int poll_readers(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_reader *reader = fabric->readers; reader; reader = reader->next) {
		busy |= reap(reader);
		busy |= start_waiting(reader);
		submit(reader);
		busy |= copy_read(reader, COPIED_A_ROUND);
		tell_in_time(reader);
	}
	return busy;
}

/* The thread ends, and all endpoints are closed: when this returns the kernel no longer uses the application's memory. */
void readers_end(struct tk_fabric *fabric)
{
	for (struct tk_reader *reader = fabric->readers; reader; reader = reader->next) {
		while (start_waiting(reader) || reader->in_ring || reader->read_first_piece) {
			struct io_uring_cqe *cqe;
			submit(reader);
			if (reader->in_ring && !io_uring_wait_cqe(&reader->ring, &cqe))
				reap(reader);
			copy_read(reader, UINT32_MAX);
		}
	}
}

void free_readers(struct tk_fabric *fabric)
{
	for (struct tk_reader *reader = fabric->readers, *next; reader; reader = next) {
		next = reader->next;
		free_reader(reader);
	}
}
