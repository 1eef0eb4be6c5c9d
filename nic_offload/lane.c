/*
 * The lane: writes landed blocks to a drive and acknowledges them to their peers, without the application.
 *
 * The application lends it ground: pages of the drive, and a generation for each record that may be written there.
 * Each block that a receiver hands over gets the next pages and the next generation, and is written with a header
 * page made here, through the lane's own io_uring. The progress thread does all of it: it takes some microseconds to
 * start a write, and the kernel does the rest. If records are to be encrypted, they are on the way, a piece at a time,
 * into memory of the lane's own, and written from there; a record of several pieces gets its header page with the last.
 *
 * What always holds: records are reported, to the application and then to their peers, in the order of their
 * generations, and only when all lower generations are on the drive; the application confirms those before the ground
 * (`tk_lane_clear`). After a failed write no record is acknowledged to a peer and no write begins. Bytes in a room
 * beyond the payload don't reach the drive. Nothing touches a room after its record was reported. A block whose key is
 * not in the vault is not taken, so nothing reaches the drive in the clear that should be encrypted.
 *
 * What it doesn't do: decide which blocks may be written this way (the receiver does), or put them into the index
 * (the application does). A crash before that leaves it to recovery, which scans the ground.
 */
#define _GNU_SOURCE
#include "lane.h"

#include "header.h"
#include "progress.h"
#include "record_encryption.h"
#include "staged.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PAGE TK_TAGGED_PAGE
#define STUMBLES_MAX 16u     /* of one write: EINTR and EAGAIN say nothing of the drive */
#define DIRECT_ALIGN 512u
#define UNHURRIED_COUNT 16u  /* writes that are submitted together where no peer waits for one, */
#define UNHURRIED_NS 500000u /* or after so long */
#define TOLD_COUNT 64u	     /* records reported to the application together, */
#define TOLD_NS 1000000u     /* or after so long */
#define PIECE_BYTES (512u << 10) /* of a payload that are encrypted and written together */
#define STAGED_BYTES (8u << 20)	 /* that were encrypted and are being written */
#define ENCRYPTED_A_ROUND (1u << 20) /* while they are in the cache, and so that the wire is not kept waiting */

/* A record on its way. */
struct record {
	struct lane_word word;
	struct tk_written told;
	uint64_t size;
	uint32_t pieces; /* that are not over */
	int is_whole;	 /* no more pieces will begin */
	int has_ended, is_told; /* to the application: its peer is next */
	int has_landed; /* for its peer: what it hears next comes behind that */

	/* Of one that is encrypted, until it is whole. */
	char *payload;
	uint32_t length, encrypted; /* bytes */
	struct header_fixed header;
	struct vault_key key;
};

/* A write. Staged memory is taken and given back in the order in which pieces are begun. */
struct piece {
	struct record *record;
	struct iovec parts[2]; /* as far as they are not written */
	uint64_t offset, moved, size; /* offset: of what is to be written first */
	uint32_t stumbles;
	uint32_t taken; /* of the staged memory, with what was left out before it */
	int is_over;
};

struct tk_lane {
	struct tk_fabric *fabric;
	struct tk_lane *next;
	struct tk_lane_setup setup;

	/* The progress thread's own. */
	struct io_uring ring;
	int event_fd; /* rings when a write has ended */
	struct record *records; /* a ring of `depth` */
	char *headers;		/* a page for each; unless they are encrypted */
	uint32_t first, count;
	uint64_t bytes; /* of these */
	struct piece *pieces; /* a ring of `depth`, by their numbers: */
	uint64_t pieces_begun, pieces_freed; /* of the next one, and of the oldest whose place is taken */

	/* With encryption. */
	struct record_stream stream; /* of the first record that is not whole */
	uint32_t whole;		     /* records before that one */
	struct staged staged;
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
	free(lane->headers);
	staged_close(&lane->staged);
	if (lane->records)
		wipe(lane->records, lane->setup.depth * sizeof *lane->records);
	aead_close(lane->stream.aead);
	pthread_mutex_destroy(&lane->lock);
	free(lane->records);
	free(lane->pieces);
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

/* Memory for header pages, or for encrypted records. */
static int open_memory(struct tk_lane *lane)
{
	lane->records = calloc(lane->setup.depth, sizeof *lane->records);
	lane->pieces = calloc(lane->setup.depth, sizeof *lane->pieces);
	if (!lane->records || !lane->pieces)
		return -ENOMEM;
	if (!lane->setup.encryption.vault)
		return posix_memalign((void **)&lane->headers, PAGE, (size_t)lane->setup.depth * PAGE) ? -ENOMEM : 0;
	lane->stream.aead = aead_open();
	return lane->stream.aead ? staged_open(&lane->staged, STAGED_BYTES) : -ENOMEM;
}

int tk_lane_open(struct tk_fabric *fabric, const struct tk_lane_setup *setup, struct tk_lane **out)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (setup->depth < 2) /* the last piece of a large record is two */
		return -EINVAL;
	struct tk_lane *lane = calloc(1, sizeof *lane);
	if (!lane)
		return -ENOMEM;
	pthread_mutex_init(&lane->lock, NULL);
	lane->fabric = fabric;
	lane->setup = *setup;
	lane->ring.ring_fd = -1;
	lane->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (open_memory(lane) || lane->event_fd < 0) {
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

/* Begins to write a piece; there is a place for it. */
static void begin_piece(struct tk_lane *lane, const struct piece *piece)
{
	struct piece *placed = piece_of(lane, lane->pieces_begun++);
	*placed = *piece;
	placed->size = placed->parts[0].iov_len + placed->parts[1].iov_len;
	placed->record->pieces++;
	prepare(lane, placed);
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

/* Its header page is made, and all of it begins to be written. */
static void write_plain(struct tk_lane *lane, struct record *record, uint32_t padded)
{
	char *header = lane->headers + (size_t)(record - lane->records) * PAGE;
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)header, .number = record->told.offset};
	memcpy(row.fixed, &record->header, sizeof record->header);
	tk_write_tagged(lane->setup.secret, lane->setup.name, &row, 1);
	memset(record->payload + record->length, 0, padded - record->length);
	struct piece piece = {
		.record = record,
		.parts = {{.iov_base = header, .iov_len = PAGE}, {.iov_base = record->payload, .iov_len = padded}},
		.offset = record->told.offset,
	};
	begin_piece(lane, &piece);
	record->is_whole = 1;
	lane->whole++;
}

struct record *lane_begin(struct tk_lane *lane, const struct tk_came *came, const uint8_t *owner,
			  const struct lane_word *word)
{
	const struct tk_encryption *encryption = &lane->setup.encryption;
	uint32_t padded = (came->length + PAGE - 1) / PAGE * PAGE;
	int is_full = lane->count == lane->setup.depth || (lane->count && lane->bytes + padded > lane->setup.bytes_max);
	struct record *record = &lane->records[(lane->first + lane->count) % lane->setup.depth];
	struct tk_written told = {.id = came->id, .tag = word->tag};
	struct vault_key key = {0};
	if (is_full || (encryption->vault && vault_by_name(encryption->vault, owner, came->domain, &key)) ||
	    !take_ground(lane, 1 + padded / PAGE, &told)) {
		wipe(&key, sizeof key);
		return NULL;
	}
	*record = (struct record){
		.word = *word,
		.told = told,
		.size = PAGE + (uint64_t)padded,
		.payload = (char *)(uintptr_t)came->address + PAGE,
		.length = came->length,
		.header = {
			.version = lane->setup.version,
			.kind = lane->setup.kind,
			.length = came->length,
			.generation = told.generation,
			.expires_ms = came->expires_unix_ms,
			.crc32c = came->crc32c,
		},
		.key = key,
	};
	wipe(&key, sizeof key);
	memcpy(record->header.magic, lane->setup.magic, sizeof record->header.magic);
	memcpy(record->header.key, came->key, sizeof record->header.key);
	memcpy(record->header.owner, owner, sizeof record->header.owner);
	memcpy(record->header.fingerprint, came->fingerprint, sizeof record->header.fingerprint);
	lane->count++;
	lane->bytes += record->size;
	if (!encryption->vault)
		write_plain(lane, record, padded);
	return record;
}

void lane_landed(struct record *record)
{
	record->has_landed = 1;
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

/* Encrypts the next bytes of a record, and begins to write them; of a large one the header page comes with the last of them.
 * 0: there is no room for them now. */
static int encrypt_piece(struct tk_lane *lane, struct record *record)
{
	const struct tk_encryption *with = &lane->setup.encryption;
	uint32_t left = (uint32_t)(record->size - PAGE) - record->encrypted, size = left < PIECE_BYTES ? left : PIECE_BYTES;
	int is_first = !record->encrypted, is_last = size == left, status = 0;
	uint32_t taken, payload = record->length - record->encrypted < size ? record->length - record->encrypted : size;
	if (lane->pieces_begun - lane->pieces_freed + 2 > lane->setup.depth)
		return 0;
	char *memory = staged_take(&lane->staged, size + (is_last ? PAGE : 0), &taken);
	if (!memory)
		return 0;
	char *page = memory, *bytes = memory + (is_last ? PAGE : 0);
	if (is_first) {
		status = record_begin(&lane->stream, with, &record->key, &record->header, record->told.offset);
		wipe(&record->key, sizeof record->key);
	}
	if (!status)
		status = aead_step(lane->stream.aead, bytes, record->payload + record->encrypted, payload);
	memset(bytes + payload, 0, size - payload);
	if (!status && is_last)
		status = record_end(&lane->stream, with, page);
	uint64_t offset = record->told.offset + PAGE + record->encrypted;
	record->encrypted += size;
	record->is_whole = is_last || status;
	struct piece piece = {.record = record, .taken = taken, .offset = offset,
			      .parts = {{.iov_len = 0}, {.iov_base = bytes, .iov_len = size}}};
	if (status) { /* the library failed: nothing of it is written any more, and the drive takes no more */
		record->told.result = status;
		piece.is_over = 1;
		*piece_of(lane, lane->pieces_begun++) = piece;
		free_pieces(lane);
	} else if (is_first && is_last) {
		piece.parts[0] = (struct iovec){.iov_base = page, .iov_len = PAGE};
		piece.offset -= PAGE;
		begin_piece(lane, &piece);
	} else if (is_last) { /* the memory of both is given back with the later one */
		piece.taken = 0;
		begin_piece(lane, &piece);
		piece.parts[1] = (struct iovec){.iov_base = page, .iov_len = PAGE};
		piece.offset = record->told.offset;
		piece.taken = taken;
		begin_piece(lane, &piece);
	} else {
		begin_piece(lane, &piece);
	}
	end_if_over(record);
	return 1;
}

static int encrypt(struct tk_lane *lane, uint32_t budget)
{
	uint32_t done = 0;
	while (lane->whole < lane->count && done < budget) {
		struct record *record = &lane->records[(lane->first + lane->whole) % lane->setup.depth];
		uint32_t before = record->encrypted;
		if (!encrypt_piece(lane, record))
			break;
		done += record->encrypted - before;
		lane->whole += (uint32_t)record->is_whole;
	}
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
		if (!piece->record->told.result)
			piece->record->told.result = moved < 0 ? moved : -EIO;
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

static int reap(struct tk_lane *lane)
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
		lane->whole--;
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
			busy |= reap(lane) | retire(lane) | encrypt(lane, ENCRYPTED_A_ROUND);
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
			for (encrypt(lane, UINT32_MAX); !record->has_ended; encrypt(lane, UINT32_MAX)) {
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
