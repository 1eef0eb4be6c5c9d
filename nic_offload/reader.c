/*
 * The reader: sends blocks from a drive to peers without the application.
 *
 * For each block the application gives the location of its record, what its header must contain, the pages to read it
 * into and the destination of its payload; it has already decided on the order and on how much may be under way. From
 * there on the block is an operation like any other (`tk_operation`) whose bytes have not arrived yet. The progress
 * thread reads header and payload through the reader's own io_uring, in pieces, to their final place. As pieces arrive
 * it compares the header, and computes the payload's CRC; then it fires the operation, which sends the bytes followed
 * by the flag. So one block is read while others are checked and sent. With encryption, pieces are read into the
 * reader's own memory and decrypted from there, and a record's tag is compared instead of the CRC.
 *
 * What always holds: nothing of a record is sent unless its header is the expected one, bit by bit, including its tag
 * for this place on this drive (except its expiry, which may have been extended), and its payload has the expected CRC,
 * or, if it is encrypted, its tag. An operation that is cancelled or late, or whose endpoint is closed, ends at once,
 * as it would without a reader, while the drive may still be reading into its pages. So records are read in batches,
 * and the pages and extents of a batch may be reused after its TK_READ, which is reported once, whatever the outcome of
 * the operations. A desk keeps the rooms of its calls for that long (desk_cold.c). The pieces of one record are checked
 * in order; those of different records as they arrive.
 *
 * What it doesn't do: read anything twice. If a read failed or found another record, the operation fails with
 * -ENODATA, and the application finds out why. It doesn't keep extents from being freed: the application does, from
 * before the call until TK_READ.
 */
#define _GNU_SOURCE
#include "reader_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define APART_NS 50000u /* the end of a batch's reads is reported with that of its puts, or after this time */
#define CHECKED_A_ROUND (256u << 10) /* small, so that the network doesn't wait */

static void free_reader(struct tk_reader *reader)
{
	drive_ring_close(&reader->ring, reader->event_fd);
	staged_close(&reader->staged);
	free(reader->pieces);
	free(reader->scratch);
	free(reader);
}

static int add_reader(struct tk_fabric *fabric, void *argument)
{
	struct tk_reader *reader = *(struct tk_reader **)argument;
	int status = rest_listen_writes(fabric, reader->event_fd);
	if (status)
		return status;
	reader->next = fabric->readers;
	fabric->readers = reader;
	return 0;
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
	reader->scratch = malloc(PAGE);
	reader->pieces = calloc(setup->depth, sizeof *reader->pieces);
	status = drive_ring_open(&reader->ring, &reader->event_fd, setup->fd, setup->depth);
	if (!status && (!reader->scratch || !reader->pieces))
		status = -ENOMEM;
	if (!status && setup->encryption.vault)
		status = staged_open(&reader->staged, STAGED_BYTES);
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

void reading_fill_in(struct reading *reading, struct batch *batch, struct tk_reader *reader, uint32_t length,
		     const uint8_t *key, const uint8_t *owner, const uint8_t *fingerprint)
{
	const struct tk_reader_setup *setup = &reader->setup;
	*reading = (struct reading){
		.batch = batch,
		.reader = reader,
		.size = record_bytes(length),
		.header = {.version = setup->version, .kind = setup->kind, .length = length},
	};
	memcpy(reading->header.magic, setup->magic, sizeof setup->magic);
	memcpy(reading->header.key, key, TK_KEY_BYTES);
	memcpy(reading->header.owner, owner, TK_OWNER_BYTES);
	memcpy(reading->header.fingerprint, fingerprint, TK_FINGERPRINT_BYTES);
}

static void fill_in(struct reading *reading, struct batch *batch, struct tk_reader *reader, const struct tk_reading *record)
{
	reading_fill_in(reading, batch, reader, record->length, record->key, record->owner, record->fingerprint);
	reading->offset = record->offset;
	reading->header.generation = record->generation;
	reading->header.crc32c = record->crc32c;
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
	*batch = (struct batch){.region = region, .tag = tag, .unread = (uint32_t)count, .not_over = (uint32_t)count};
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++) {
		struct tk_operation op = operation_of(&records[i], region);
		struct work *work = enqueue_operation(fabric, &op);
		work->reading = &batch->readings[i];
		work->batch = batch;
		fill_in(work->reading, batch, reader, &records[i]);
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

/* --- the progress thread */

void reader_begin(struct work *work)
{
	struct reading *reading = work->reading;
	struct tk_reader *reader = reading->reader;
	work->state = WORK_READING;
	reader->fabric->reading++;
	if (reader->last)
		reader->last->next = reading;
	else
		reader->first = reading;
	reader->last = reading;
}

void reader_withdraw(struct work *work)
{
	if (work->batch->shelf)
		cold_room_stays(work);
	reader_release(work);
}

void reader_release(struct work *work)
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

static void report_read(struct tk_reader *reader, struct batch *batch)
{
	report(reader->fabric, TK_READ, batch->tag, 0, 0, batch->read_ns);
	batch->read_is_reported = 1;
}

static void free_if_over(struct batch *batch)
{
	if (batch->read_is_reported && !batch->not_over)
		free(batch);
}

void reading_over(struct tk_reader *reader, struct reading *reading)
{
	struct batch *batch = reading->batch;
	reader->fabric->reading--;
	if (--batch->unread)
		return;
	__atomic_sub_fetch(&batch->region->uses, 1, __ATOMIC_RELEASE);
	batch->read_ns = tk_now_ns();
	batch->read_is_reported = batch->shelf != NULL;
	if (batch->shelf) {
		free_if_over(batch);
	} else if (!batch->not_over) {
		report_read(reader, batch);
		free_if_over(batch);
	} else {
		batch->next = reader->read_first;
		reader->read_first = batch;
	}
}

void reader_put_over(struct work *work)
{
	struct batch *batch = work->batch;
	struct tk_reader *reader = batch->readings->reader; /* the same for all of them, unless they are cold */
	if (batch->shelf)
		cold_over(work);
	if (work->posted_ns > batch->posted_ns)
		batch->posted_ns = work->posted_ns;
	if (--batch->not_over)
		return;
	if (batch->shelf) {
		free_if_over(batch);
		return;
	}
	report(reader->fabric, TK_SENT, batch->tag, batch->posted_ns, 0, tk_now_ns());
	if (!batch->unread && !batch->read_is_reported) {
		unlist(reader, batch);
		report_read(reader, batch);
	}
	free_if_over(batch);
}

static void notify_if_due(struct tk_reader *reader)
{
	struct tk_fabric *fabric = reader->fabric;
	for (struct batch *batch = reader->read_first, *next; batch; batch = next) {
		next = batch->next;
		uint64_t at_ns = batch->read_ns + APART_NS;
		if (fabric->now_ns >= at_ns) {
			unlist(reader, batch);
			report_read(reader, batch);
		} else if (at_ns < fabric->next_deadline_ns) {
			fabric->next_deadline_ns = at_ns;
		}
	}
}

int poll_readers(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_reader *reader = fabric->readers; reader; reader = reader->next) {
		busy |= reap_reads(reader);
		busy |= start_readings(reader);
		submit_reads(reader);
		busy |= check_read(reader, CHECKED_A_ROUND);
		notify_if_due(reader);
	}
	return busy;
}

/* The thread ends, and all endpoints are closed: when this returns, the kernel no longer uses the application's
 * memory. */
void readers_end(struct tk_fabric *fabric)
{
	for (struct tk_reader *reader = fabric->readers; reader; reader = reader->next) {
		while (start_readings(reader) || reader->in_ring || reader->read_first_piece) {
			struct io_uring_cqe *cqe;
			submit_reads(reader);
			if (reader->in_ring && !io_uring_wait_cqe(&reader->ring, &cqe))
				reap_reads(reader);
			check_read(reader, UINT32_MAX);
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
