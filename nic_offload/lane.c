/*
 * The lane: writes landed blocks to a drive and acknowledges them to their peers, without the application.
 *
 * The application lends it ground: pages of the drive, and a generation for each record that may be written there.
 * Each block that a receiver hands over gets the next pages and the next generation, and is written with a header
 * page made here, through the lane's own io_uring. The progress thread does all of it: it takes some microseconds to
 * start a write, and the kernel does the rest.
 *
 * What always holds: records are reported, to the application and then to their peers, in the order of their
 * generations, and only when all lower generations are on the drive; the application confirms those before the ground
 * (`tk_lane_clear`). After a failed write no record is acknowledged to a peer and no write begins. Bytes in a room
 * beyond the payload don't reach the drive. No write touches a room after its record was reported.
 *
 * What it doesn't do: decide which blocks may be written this way (the receiver does), or put them into the index
 * (the application does). A crash before that leaves it to recovery, which scans the ground.
 */
#define _GNU_SOURCE
#include "lane.h"

#include "header.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE TK_TAGGED_PAGE
#define STUMBLES_MAX 16u     /* of one write: EINTR and EAGAIN say nothing of the drive */
#define DIRECT_ALIGN 512u
#define UNHURRIED_COUNT 16u  /* writes that are submitted together where no peer waits for one, */
#define UNHURRIED_NS 500000u /* or after so long */
#define TOLD_COUNT 64u	     /* records reported to the application together, */
#define TOLD_NS 1000000u     /* or after so long */

/* A record on its way. */
struct record {
	struct lane_word word;
	struct tk_written told;
	struct iovec parts[2]; /* header page and payload, as far as they are not written */
	uint64_t moved, size;
	uint32_t stumbles;
	int has_ended, is_told; /* to the application: its peer is next */
	int has_landed; /* for its peer: what it hears next comes behind that */
};

struct tk_lane {
	struct tk_fabric *fabric;
	struct tk_lane *next;
	struct tk_lane_setup setup;

	/* The progress thread's own. */
	struct io_uring ring;
	int event_fd; /* rings when a write has ended */
	struct record *records; /* a ring of `depth` */
	char *headers;		/* a page for each */
	uint32_t first, count;
	uint64_t bytes; /* of these */
	uint32_t unsubmitted;
	uint64_t submit_at_ns; /* at the latest */

	pthread_mutex_t lock; /* for all that follows */
	struct tk_ground ground; /* what is left of it */
	uint32_t used;	       /* records that stand on it */
	uint64_t begun;	       /* since the lane was opened, atomic */
	uint64_t clear_until;  /* records of lower generations may be told of */
	int failed; /* an errno: a write did */
	struct tk_written *written;
	uint32_t written_count, written_capacity;
	int told;
	uint64_t tell_at_ns;
};

static void free_lane(struct tk_lane *lane)
{
	if (lane->ring.ring_fd >= 0) {
		io_uring_unregister_files(&lane->ring);
		io_uring_queue_exit(&lane->ring);
	}
	if (lane->event_fd >= 0)
		close(lane->event_fd);
	if (lane->headers)
		munmap(lane->headers, (size_t)lane->setup.depth * PAGE);
	pthread_mutex_destroy(&lane->lock);
	free(lane->records);
	free(lane->written);
	free(lane);
}

static int add_lane(struct tk_fabric *fabric, void *argument)
{
	struct tk_lane *lane = *(struct tk_lane **)argument;
	int status = rest_hear_writes(fabric, lane->event_fd);
	if (status)
		return status;
	lane->next = fabric->lanes;
	fabric->lanes = lane;
	return 0;
}

static int open_ring(struct tk_lane *lane)
{
	int status = io_uring_queue_init(lane->setup.depth, &lane->ring, 0);
	if (status) {
		lane->ring.ring_fd = -1;
		return status;
	}
	if (!(status = io_uring_register_files(&lane->ring, &lane->setup.fd, 1)))
		status = io_uring_register_eventfd(&lane->ring, lane->event_fd);
	return status;
}

int tk_lane_open(struct tk_fabric *fabric, const struct tk_lane_setup *setup, struct tk_lane **out)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (!setup->depth)
		return -EINVAL;
	struct tk_lane *lane = calloc(1, sizeof *lane);
	if (!lane)
		return -ENOMEM;
	pthread_mutex_init(&lane->lock, NULL);
	lane->fabric = fabric;
	lane->setup = *setup;
	lane->ring.ring_fd = -1;
	lane->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	lane->records = calloc(setup->depth, sizeof *lane->records);
	void *headers = mmap(NULL, (size_t)setup->depth * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	lane->headers = headers == MAP_FAILED ? NULL : headers;
	if (lane->event_fd < 0 || !lane->records || !lane->headers) {
		free_lane(lane);
		return -ENOMEM;
	}
	status = open_ring(lane);
	if (!status)
		status = on_the_thread(fabric, add_lane, &lane, sizeof lane);
	if (status) {
		if (status != TK_STUCK)
			free_lane(lane);
		return status;
	}
	*out = lane;
	return 0;
}

/* --- the application's side; any thread */

int tk_lane_lend(struct tk_lane *lane, const struct tk_ground *ground)
{
	pthread_mutex_lock(&lane->lock);
	int status = lane->failed ? lane->failed : lane->ground.records ? -EBUSY : 0;
	if (!status) {
		lane->ground = *ground;
		lane->used = 0;
	}
	pthread_mutex_unlock(&lane->lock);
	return status;
}

uint32_t tk_lane_seal(struct tk_lane *lane, struct tk_ground *left)
{
	pthread_mutex_lock(&lane->lock);
	uint32_t used = lane->used;
	*left = lane->ground;
	lane->ground = (struct tk_ground){0};
	lane->used = 0;
	pthread_mutex_unlock(&lane->lock);
	return used;
}

void tk_lane_clear(struct tk_lane *lane, uint64_t until)
{
	pthread_mutex_lock(&lane->lock);
	lane->clear_until = until;
	pthread_mutex_unlock(&lane->lock);
	fabric_wake(lane->fabric);
}

void tk_lane_fail(struct tk_lane *lane)
{
	pthread_mutex_lock(&lane->lock);
	lane->failed = lane->failed ? lane->failed : -EROFS;
	lane->clear_until = UINT64_MAX;
	pthread_mutex_unlock(&lane->lock);
	fabric_wake(lane->fabric);
}

uint64_t tk_lane_begun(struct tk_lane *lane)
{
	return __atomic_load_n(&lane->begun, __ATOMIC_ACQUIRE);
}

int tk_lane_take(struct tk_lane *lane, struct tk_written *out, int out_max)
{
	pthread_mutex_lock(&lane->lock);
	uint32_t count = lane->written_count < (uint32_t)out_max ? lane->written_count : (uint32_t)out_max;
	if (count) {
		memcpy(out, lane->written, count * sizeof *out);
		lane->written_count -= count;
		memmove(lane->written, lane->written + count, lane->written_count * sizeof *out);
	}
	lane->told = !!lane->written_count;
	lane->tell_at_ns = 0;
	pthread_mutex_unlock(&lane->lock);
	return (int)count;
}

/* --- the progress thread's */

uint32_t lanes_home(const struct tk_lanes *lanes, const uint8_t *name)
{
	uint32_t crc = UINT32_MAX;
	for (int i = 0; i < TK_OWNER_BYTES + TK_KEY_BYTES; i++) {
		crc ^= name[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
	}
	return lanes->homes[~crc / (uint32_t)((UINT64_C(1) << 32) / TK_LOTS)];
}

static void prepare(struct tk_lane *lane, struct record *record)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&lane->ring); /* there are as many entries as records */
	struct iovec *parts = record->parts + !record->parts[0].iov_len;
	io_uring_prep_writev(sqe, 0, parts, (unsigned)(record->parts + 2 - parts), record->told.offset + record->moved);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, record);
	uint64_t at_ns = record->word.word ? 0 : lane->fabric->now_ns + UNHURRIED_NS;
	if (!lane->unsubmitted++ || at_ns < lane->submit_at_ns)
		lane->submit_at_ns = at_ns;
}

/* The next pages and the next generation; 0: there is no room. */
static int take_ground(struct tk_lane *lane, uint32_t pages, struct tk_written *told)
{
	pthread_mutex_lock(&lane->lock);
	struct tk_ground *ground = &lane->ground;
	int fits = !lane->failed && ground->records && ground->pages >= pages;
	if (fits) {
		told->offset = ground->page * PAGE;
		told->generation = ground->generation++;
		ground->page += pages;
		ground->pages -= pages;
		ground->records--;
		lane->used++;
		__atomic_add_fetch(&lane->begun, 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lane->lock);
	return fits;
}

struct record *lane_begin(struct tk_lane *lane, const struct tk_came *came, const uint8_t *owner,
			  const struct lane_word *word)
{
	uint32_t padded = (came->length + PAGE - 1) / PAGE * PAGE;
	int is_full = lane->count == lane->setup.depth || (lane->count && lane->bytes + padded > lane->setup.bytes_max);
	struct record *record = &lane->records[(lane->first + lane->count) % lane->setup.depth];
	char *header = lane->headers + (size_t)(record - lane->records) * PAGE;
	struct tk_written told = {.id = came->id, .tag = word->tag};
	if (is_full || !take_ground(lane, 1 + padded / PAGE, &told))
		return NULL;
	struct header_fixed fixed = {
		.version = lane->setup.version,
		.kind = lane->setup.kind,
		.length = came->length,
		.generation = told.generation,
		.expires_ms = came->expires_unix_ms,
		.crc32c = came->crc32c,
	};
	memcpy(fixed.magic, lane->setup.magic, sizeof fixed.magic);
	memcpy(fixed.key, came->key, sizeof fixed.key);
	memcpy(fixed.owner, owner, sizeof fixed.owner);
	memcpy(fixed.fingerprint, came->fingerprint, sizeof fixed.fingerprint);
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)header, .number = told.offset};
	memcpy(row.fixed, &fixed, sizeof fixed);
	tk_write_tagged(lane->setup.secret, lane->setup.name, &row, 1);
	char *payload = (char *)(uintptr_t)came->address + PAGE;
	memset(payload + came->length, 0, padded - came->length);
	*record = (struct record){
		.word = *word,
		.told = told,
		.parts = {{.iov_base = header, .iov_len = PAGE}, {.iov_base = payload, .iov_len = padded}},
		.size = PAGE + (uint64_t)padded,
	};
	lane->count++;
	lane->bytes += record->size;
	prepare(lane, record);
	return record;
}

void lane_landed(struct record *record)
{
	record->has_landed = 1;
}

/* Notes what was written; returns whether the record has ended. */
static int settle(struct tk_lane *lane, struct record *record, int moved)
{
	if ((moved == -EINTR || moved == -EAGAIN) && ++record->stumbles <= STUMBLES_MAX) {
		prepare(lane, record);
		return 0;
	}
	if (moved <= 0 || moved % DIRECT_ALIGN || record->moved + (uint64_t)moved > record->size) {
		record->told.result = moved < 0 ? moved : -EIO;
		return 1;
	}
	record->moved += (uint64_t)moved;
	for (int i = 0; moved; i++) {
		size_t part = record->parts[i].iov_len < (size_t)moved ? record->parts[i].iov_len : (size_t)moved;
		record->parts[i].iov_base = (char *)record->parts[i].iov_base + part;
		record->parts[i].iov_len -= part;
		moved -= (int)part;
	}
	if (record->moved == record->size)
		return 1;
	prepare(lane, record);
	return 0;
}

static int reap(struct tk_lane *lane)
{
	struct io_uring_cqe *cqe;
	int busy = 0;
	while (!io_uring_peek_cqe(&lane->ring, &cqe)) {
		struct record *record = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;
		io_uring_cqe_seen(&lane->ring, cqe);
		record->has_ended = settle(lane, record, moved);
		busy = 1;
	}
	return busy;
}

/* Writes that no peer waits for are submitted together, and not between a peer's `landed` and its next put. The kernel may not
 * take what there is now; then it is offered again in the next round. */
static void submit(struct tk_lane *lane)
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

/* Whether the peer has had every acknowledgement that it is to have. */
static int tell_peer(struct tk_lane *lane, struct record *record)
{
	const struct lane_word *word = &record->word;
	if (!word->endpoint || !word->word || !record->told.is_answered)
		return 1;
	int status = post_word(lane->fabric, word->endpoint, word->word, word->peer, word->target, word->key);
	lane->fabric->statistics.acks_sent += status != -FI_EAGAIN;
	return status != -FI_EAGAIN;
}

/* Under the lock. */
static void tell(struct tk_lane *lane)
{
	lane->tell_at_ns = 0;
	if (lane->told)
		return;
	lane->told = 1;
	report(lane->fabric, TK_CAME, lane->setup.tag, 0, 0, tk_now_ns());
}

static int tell_application(struct tk_lane *lane, struct record *record)
{
	pthread_mutex_lock(&lane->lock);
	record->is_told = record->told.generation < lane->clear_until &&
			  !grow((void **)&lane->written, &lane->written_capacity, lane->written_count, sizeof *lane->written);
	if (record->is_told) {
		record->told.ended_ns = tk_now_ns();
		if (record->told.result && !lane->failed)
			lane->failed = record->told.result;
		record->told.is_answered = !lane->failed;
		lane->written[lane->written_count++] = record->told;
		if (lane->failed || lane->written_count >= TOLD_COUNT)
			tell(lane);
		else if (!lane->told && !lane->tell_at_ns)
			lane->tell_at_ns = record->told.ended_ns + TOLD_NS;
	}
	pthread_mutex_unlock(&lane->lock);
	return record->is_told;
}

static int retire(struct tk_lane *lane)
{
	int busy = 0;
	while (lane->count && lane->records[lane->first].has_ended && lane->records[lane->first].has_landed) {
		struct record *record = &lane->records[lane->first];
		if (!record->is_told && !tell_application(lane, record))
			break;
		if (!tell_peer(lane, record))
			break;
		lane->first = (lane->first + 1) % lane->setup.depth;
		lane->count--;
		lane->bytes -= record->size;
		busy = 1;
	}
	return busy;
}

static void tell_in_time(struct tk_lane *lane)
{
	pthread_mutex_lock(&lane->lock);
	uint64_t at_ns = lane->tell_at_ns;
	if (at_ns && lane->fabric->now_ns >= at_ns)
		tell(lane);
	else if (at_ns && at_ns < lane->fabric->next_deadline_ns)
		lane->fabric->next_deadline_ns = at_ns;
	pthread_mutex_unlock(&lane->lock);
}

int poll_lanes(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_lane *lane = fabric->lanes; lane; lane = lane->next) {
		submit(lane);
		if (lane->count) {
			busy |= reap(lane) | retire(lane);
			submit(lane);
		}
		tell_in_time(lane);
	}
	return busy;
}

/* The endpoint is about to be closed: no more acknowledgements go there. */
void lanes_forget(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	for (struct tk_lane *lane = fabric->lanes; lane; lane = lane->next)
		for (uint32_t i = 0; i < lane->setup.depth; i++)
			if (lane->records[i].word.endpoint == endpoint)
				lane->records[i].word.endpoint = NULL;
}

/* The thread ends: when this returns the kernel no longer uses the application's memory. */
void lanes_end(struct tk_fabric *fabric)
{
	for (struct tk_lane *lane = fabric->lanes; lane; lane = lane->next)
		for (uint32_t i = 0; i < lane->count; i++) {
			struct record *record = &lane->records[(lane->first + i) % lane->setup.depth];
			while (!record->has_ended) {
				struct io_uring_cqe *cqe;
				lane->submit_at_ns = 0;
				submit(lane);
				if (io_uring_wait_cqe(&lane->ring, &cqe))
					continue;
				reap(lane);
			}
		}
}

void free_lanes(struct tk_fabric *fabric)
{
	for (struct tk_lane *lane = fabric->lanes, *next; lane; lane = next) {
		next = lane->next;
		free_lane(lane);
	}
}
