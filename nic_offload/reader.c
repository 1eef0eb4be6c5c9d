/*
 * The reader: sends blocks from a drive to peers without the application.
 *
 * For each block the application says where its record lies, what its header must contain, into which pages to read
 * it and where its payload goes; it has already decided on the order and on how much may be under way. From there on
 * the block is an operation like any other (`tk_operation`) whose bytes have not arrived yet: the progress thread
 * reads header and payload through the reader's own io_uring, compares the header, and fires the operation, which
 * computes the CRC while the bytes are in the cache and sends them, followed by the flag.
 *
 * What always holds: nothing of a record is sent unless its header is the expected one, bit by bit, including its tag
 * for this place on this drive (except its expiry, which may have been extended), and its payload has the expected
 * CRC. An operation that is cancelled, late, or whose endpoint is closed ends at once, as it would without a reader;
 * but the drive may still be writing to its pages. So records are read in batches, and the pages of a batch may be
 * reused after its TK_READ, which is reported once, whatever became of the operations.
 *
 * What it doesn't do: read anything twice. If a read failed or found another record, the operation fails with
 * -ENODATA, and the application finds out why. It doesn't keep extents from being freed: the application does, from
 * before the call until TK_READ.
 */
#define _GNU_SOURCE
#include "header.h"
#include "progress.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE TK_TAGGED_PAGE
#define HEADER_BYTES (TK_TAGGED_FIXED + TK_TAGGED_TAG) /* the rest of its page is not looked at */
#define STUMBLES_MAX 16u /* of one read: EINTR and EAGAIN say nothing of the drive */
#define DIRECT_ALIGN 512u
#define APART_NS 50000u /* that a batch was read is told with the end of its puts, or after so long */

/* A record that is being read. The progress thread's own once its work was taken in. */
struct reading {
	struct reading *next; /* waits for a place in the ring */
	struct batch *batch;
	struct work *work; /* NULL: the bytes are no longer wanted */
	char *pages;
	uint32_t size, moved, stumbles;
	uint64_t offset;
	struct header_fixed header;
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
	struct reading *first, *last; /* that wait for a place */
	uint32_t in_ring;
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
	if (reader->event_fd < 0 || !reader->scratch) {
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
		.pages = (char *)(uintptr_t)record->address,
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

/* The drive no longer uses its pages. */
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

static int is_the_one(struct tk_reader *reader, struct reading *reading)
{
	const struct header_fixed *found = (const void *)reading->pages;
	reading->header.expires_ms = found->expires_ms;
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)reader->scratch, .number = reading->offset};
	memcpy(row.fixed, &reading->header, sizeof reading->header);
	tk_write_tagged(reader->setup.secret, reader->setup.name, &row, 1);
	return !memcmp(reader->scratch, reading->pages, HEADER_BYTES);
}

static void prepare(struct tk_reader *reader, struct reading *reading)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&reader->ring); /* there are as many entries as reads in the ring */
	io_uring_prep_read(sqe, 0, reading->pages + reading->moved, reading->size - reading->moved,
			   reading->offset + reading->moved);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, reading);
	reader->unsubmitted = 1;
}

static int start_waiting(struct tk_reader *reader)
{
	int busy = 0;
	while (reader->first && reader->in_ring < reader->setup.depth) {
		struct reading *reading = reader->first;
		reader->first = reading->next;
		if (!reader->first)
			reader->last = NULL;
		busy = 1;
		if (!reading->work) {
			over(reader, reading);
			continue;
		}
		reader->in_ring++;
		prepare(reader, reading);
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

/* Notes what was read; returns whether the read has ended, and how. */
static int settle(struct tk_reader *reader, struct reading *reading, int moved, int *status)
{
	*status = 0;
	if ((moved == -EINTR || moved == -EAGAIN) && ++reading->stumbles <= STUMBLES_MAX) {
		prepare(reader, reading);
		return 0;
	}
	if (moved <= 0 || moved % DIRECT_ALIGN || (uint32_t)moved > reading->size - reading->moved) {
		*status = -ENODATA;
		return 1;
	}
	reading->moved += (uint32_t)moved;
	if (reading->moved < reading->size) {
		prepare(reader, reading);
		return 0;
	}
	return 1;
}

static void ended(struct tk_reader *reader, struct reading *reading, int status)
{
	struct work *work = reading->work;
	reader->in_ring--;
	if (work) {
		reader_let_go(work);
		if (!status && is_the_one(reader, reading))
			fire(reader->fabric, work, tk_now_ns());
		else
			finish(reader->fabric, work, -ENODATA);
	}
	over(reader, reading);
}

static int reap(struct tk_reader *reader)
{
	struct io_uring_cqe *cqe;
	int busy = 0, status;
	while (reader->in_ring && !io_uring_peek_cqe(&reader->ring, &cqe)) {
		struct reading *reading = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;
		io_uring_cqe_seen(&reader->ring, cqe);
		if (settle(reader, reading, moved, &status))
			ended(reader, reading, status);
		busy = 1;
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
		tell_in_time(reader);
	}
	return busy;
}

/* The thread ends, and all endpoints are closed: when this returns the kernel no longer uses the application's memory. */
void readers_end(struct tk_fabric *fabric)
{
	for (struct tk_reader *reader = fabric->readers; reader; reader = reader->next) {
		start_waiting(reader);
		while (reader->in_ring) {
			struct io_uring_cqe *cqe;
			submit(reader);
			if (!io_uring_wait_cqe(&reader->ring, &cqe))
				reap(reader);
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
