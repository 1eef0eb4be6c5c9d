/*
 * The lane: writes landed blocks to a drive and acknowledges them to their peers, without the application.
 *
 * The application lends it ground: pages of the drive, and a generation for each record that may be written there. Each
 * block that a receiver hands over gets the next pages and the next generation, and is written with a header page made
 * here, through the lane's own io_uring. The progress thread does all of it: it takes some microseconds to start a
 * write, and the kernel does the rest. Records that are to be encrypted are encrypted a piece at a time, into the
 * lane's own memory, and written from there; a record of several pieces gets its header page with the last.
 *
 * What always holds: the application gets each record once, with its block, when the record has ended, and earlier only
 * through `tk_lane_under_way`; a record that `tk_lane_under_way` reports is already counted by `tk_lane_begun`. Records are
 * reported, to it and then to their peers, in the order of their generations, and only when all lower generations are
 * on the drive; the application confirms those that the lane did not write (`tk_lane_clear`). After a failed write no
 * record is acknowledged to a peer and no write begins. Bytes in a room beyond the payload don't reach the drive.
 * Nothing touches a room after its record was reported. A block whose key is not in the vault is not taken, so nothing
 * that should be encrypted reaches the drive in the clear. A block waits for ground only while the application expects
 * to lend more, and has been notified.
 *
 * What it doesn't do: decide which blocks may be written this way (the receiver does), or put them into the index
 * (the application does). A crash before that leaves it to recovery, which scans the ground.
 */
#define _GNU_SOURCE
#include "lane_inside.h"

#include <errno.h>
#include <string.h>

#define REPORT_COUNT 1024u	     /* records are reported to the application when there are so many, */
#define REPORT_NS 30000000u     /* or after this time: no caller waits for the report */
#define MADE_A_ROUND (1u << 20) /* small, to stay in the cache, and so that the network doesn't wait */

static const uint8_t no_domain[TK_DOMAIN_BYTES];

/* --- the application's side; any thread */

/* Under the lock. */
static void fill_in(const struct tk_lane *lane, struct tk_lane_state *state)
{
	*state = (struct tk_lane_state){
		.left = lane->ground,
		.next = lane->next_ground,
		.before = lane->ground_before,
		.used = lane->used,
		.used_before = lane->used_before,
		.wanted_pages = lane->wanted_pages,
	};
}

void tk_lane_state(struct tk_lane *lane, struct tk_lane_state *state)
{
	pthread_mutex_lock(&lane->lock);
	fill_in(lane, state);
	pthread_mutex_unlock(&lane->lock);
}

int tk_lane_lend(struct tk_lane *lane, const struct tk_ground *ground, struct tk_lane_state *before)
{
	pthread_mutex_lock(&lane->lock);
	int status = lane->failed;
	if (!status) {
		fill_in(lane, before);
		lane->next_ground = *ground;
		lane->wanted_pages = 0; /* blocks for which it is too small notify again */
	}
	pthread_mutex_unlock(&lane->lock);
	fabric_wake(lane->fabric); /* blocks may be waiting for ground */
	return status;
}

void tk_lane_seal(struct tk_lane *lane, struct tk_lane_state *before)
{
	pthread_mutex_lock(&lane->lock);
	fill_in(lane, before);
	lane->ground = lane->next_ground = lane->ground_before = (struct tk_ground){0};
	lane->used = lane->used_before = 0;
	pthread_mutex_unlock(&lane->lock);
}

void tk_lane_expect(struct tk_lane *lane, int expects)
{
	pthread_mutex_lock(&lane->lock);
	int no_longer = lane->expects && !expects;
	lane->expects = expects;
	if (no_longer)
		lane->wanted_pages = 0;
	pthread_mutex_unlock(&lane->lock);
	if (no_longer)
		fabric_wake(lane->fabric); /* waiting blocks go to the application */
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

int tk_lane_under_way(struct tk_lane *lane, struct tk_written *out, int out_max)
{
	int count = 0;
	pthread_mutex_lock(&lane->lock);
	for (uint32_t i = 0; i < lane->count && count < out_max; i++) {
		struct record *record = &lane->records[(lane->first + i) % lane->setup.depth];
		if (record->is_reported || record->row.was_reported)
			continue;
		out[count++] = record->row;
		record->row.was_reported = 1;
	}
	pthread_mutex_unlock(&lane->lock);
	return count;
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
	lane->is_notified = !!lane->written_count;
	lane->notify_at_ns = 0;
	pthread_mutex_unlock(&lane->lock);
	return (int)count;
}

/* --- the progress thread */

uint32_t lanes_home(const struct tk_lanes *lanes, const uint8_t *name)
{
	static const uint32_t by_nibble[16] = {
		0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
		0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
	};
	uint32_t crc = UINT32_MAX;
	for (int i = 0; i < TK_OWNER_BYTES + TK_KEY_BYTES; i++) {
		crc ^= name[i];
		crc = crc >> 4 ^ by_nibble[crc & 15];
		crc = crc >> 4 ^ by_nibble[crc & 15];
	}
	return lanes->homes[~crc / (uint32_t)((UINT64_C(1) << 32) / TK_LOTS)];
}

/* Under the lock. */
static void notify(struct tk_lane *lane)
{
	lane->notify_at_ns = 0;
	if (lane->is_notified)
		return;
	lane->is_notified = 1;
	report(lane->fabric, TK_CAME, lane->setup.tag, 0, 0, tk_now_ns());
}

static int fits(const struct tk_ground *ground, uint32_t pages)
{
	return ground->records && ground->pages >= pages;
}

/* Under the lock. Takes the next pages and the next generation; 0: there is no room. */
static int take_ground(struct tk_lane *lane, uint32_t pages, struct tk_written *row)
{
	struct tk_ground *ground = &lane->ground;
	int is_next = !fits(ground, pages) && fits(&lane->next_ground, pages), has_room = is_next || fits(ground, pages);
	if (lane->failed)
		has_room = 0;
	if (has_room && is_next) {
		lane->ground_before = *ground;
		lane->used_before = lane->used;
		*ground = lane->next_ground;
		lane->next_ground = (struct tk_ground){0};
		lane->used = 0;
		notify(lane); /* there is no next ground now */
	}
	if (has_room) {
		row->offset = ground->page * PAGE;
		row->generation = ground->generation++;
		ground->page += pages;
		ground->pages -= pages;
		ground->records--;
		lane->used++;
	}
	return has_room;
}

static uint32_t padded_of(uint32_t length)
{
	return (length + PAGE - 1) / PAGE * PAGE;
}

static int is_full(const struct tk_lane *lane, uint32_t length)
{
	return lane->count == lane->setup.depth || (lane->count && lane->bytes + padded_of(length) > lane->setup.bytes_max);
}

int lane_is_full_of(const struct tk_lane *lane, uint32_t length, const uint8_t *owner)
{
	return is_full(lane, length) && !lane->owner_changes &&
	       !memcmp(lane->records[lane->first].header.owner, owner, TK_OWNER_BYTES);
}

struct record *lane_begin(struct tk_lane *lane, const struct tk_came *came, const uint8_t *owner,
			  const struct lane_word *word)
{
	const struct tk_encryption *encryption = &lane->setup.encryption;
	uint32_t padded = padded_of(came->length);
	struct record *record = &lane->records[(lane->first + lane->count) % lane->setup.depth];
	const struct record *before = &lane->records[(lane->first + lane->count - 1 + lane->setup.depth) % lane->setup.depth];
	struct tk_written row = {.came = *came, .tag = word->tag};
	struct vault_key key = {0};
	int has_key = encryption->vault ? !vault_by_name(encryption->vault, owner, came->domain, &key)
					: !memcmp(came->domain, no_domain, sizeof no_domain);
	pthread_mutex_lock(&lane->lock);
	if (is_full(lane, came->length) || !has_key || !take_ground(lane, 1 + padded / PAGE, &row)) {
		pthread_mutex_unlock(&lane->lock);
		wipe(&key, sizeof key);
		return NULL;
	}
	row.key_id = key.id;
	row.key_number = encryption->vault ? key.number + 1 : 0;
	*record = (struct record){
		.word = *word,
		.row = row,
		.size = PAGE + (uint64_t)padded,
		.payload = (char *)(uintptr_t)came->address + PAGE,
		.length = came->length,
		.header = {
			.version = lane->setup.version,
			.kind = lane->setup.kind,
			.length = came->length,
			.generation = row.generation,
			.expires_ms = came->expires_unix_ms,
			.crc32c = came->crc32c,
		},
		.key = key,
	};
	wipe(&key, sizeof key);
	memcpy(record->header.magic, lane->setup.magic, sizeof record->header.magic);
	memcpy(record->header.key, came->key, sizeof record->header.key);
	memcpy(record->header.owner, owner, sizeof record->header.owner);
	record->changes_owner = lane->count && memcmp(before->header.owner, owner, sizeof before->header.owner);
	lane->owner_changes += (uint32_t)record->changes_owner;
	memcpy(record->header.fingerprint, came->fingerprint, sizeof record->header.fingerprint);
	lane->count++;
	lane->bytes += record->size;
	__atomic_add_fetch(&lane->begun, 1, __ATOMIC_RELEASE); /* `tk_lane_under_way` reports it from the same moment on */
	pthread_mutex_unlock(&lane->lock);
	return record;
}

void lane_landed(struct record *record)
{
	record->has_landed = 1;
}

/* Whether the record's acknowledgement, if any, was sent or queued: a peer that accepts nothing doesn't delay
 * others. */
static int acknowledge(struct tk_lane *lane, struct record *record)
{
	const struct lane_word *word = &record->word;
	if (!word->endpoint || !word->word || !record->row.is_answered)
		return 1;
	int status = post_or_queue_word(lane->fabric, word->endpoint, word->word, word->peer, word->target, word->key);
	lane->fabric->statistics.acks_sent += status != -FI_EAGAIN;
	return status != -FI_EAGAIN;
}

int lane_awaits_ground(struct tk_lane *lane, uint32_t length)
{
	uint32_t pages = 1 + padded_of(length) / PAGE;
	pthread_mutex_lock(&lane->lock);
	int awaits = lane->expects && !lane->failed && !fits(&lane->ground, pages) && !fits(&lane->next_ground, pages);
	if (awaits && pages > lane->wanted_pages) {
		lane->wanted_pages = pages;
		notify(lane);
	}
	pthread_mutex_unlock(&lane->lock);
	return awaits;
}

static int report_in_order(struct tk_lane *lane, struct record *record)
{
	pthread_mutex_lock(&lane->lock);
	record->is_reported = record->row.generation < lane->clear_until &&
			  !grow((void **)&lane->written, &lane->written_capacity, lane->written_count, sizeof *lane->written);
	if (record->is_reported) {
		record->row.ended_ns = tk_now_ns();
		if (record->row.result && !lane->failed)
			lane->failed = record->row.result;
		record->row.is_answered = !lane->failed;
		lane->written[lane->written_count++] = record->row;
		if (lane->failed || lane->written_count >= REPORT_COUNT)
			notify(lane);
		else if (!lane->is_notified && !lane->notify_at_ns)
			lane->notify_at_ns = record->row.ended_ns + REPORT_NS;
	}
	pthread_mutex_unlock(&lane->lock);
	return record->is_reported;
}

static int retire(struct tk_lane *lane)
{
	int busy = 0;
	while (lane->count && lane->records[lane->first].has_ended && lane->records[lane->first].has_landed) {
		struct record *record = &lane->records[lane->first];
		if (!record->is_reported && !report_in_order(lane, record))
			break;
		if (!acknowledge(lane, record))
			break;
		pthread_mutex_lock(&lane->lock);
		lane->first = (lane->first + 1) % lane->setup.depth;
		lane->count--;
		pthread_mutex_unlock(&lane->lock);
		lane->owner_changes -= lane->count && lane->records[lane->first].changes_owner;
		lane->whole--;
		lane->bytes -= record->size;
		busy = 1;
	}
	return busy;
}

static void notify_if_due(struct tk_lane *lane)
{
	pthread_mutex_lock(&lane->lock);
	uint64_t at_ns = lane->notify_at_ns;
	if (at_ns && lane->fabric->now_ns >= at_ns)
		notify(lane);
	else if (at_ns && at_ns < lane->fabric->next_deadline_ns)
		lane->fabric->next_deadline_ns = at_ns;
	pthread_mutex_unlock(&lane->lock);
}

int poll_lanes(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_lane *lane = fabric->lanes; lane; lane = lane->next) {
		submit_writes(lane);
		if (lane->count) {
			busy |= reap_writes(lane) | retire(lane) | write_some(lane, MADE_A_ROUND);
			submit_writes(lane);
		}
		notify_if_due(lane);
	}
	return busy;
}

/* The endpoint is about to be closed: no more acknowledgements are sent through it. */
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
			for (write_some(lane, UINT32_MAX); !record->has_ended; write_some(lane, UINT32_MAX)) {
				struct io_uring_cqe *cqe;
				lane->submit_at_ns = 0;
				submit_writes(lane);
				if (io_uring_wait_cqe(&lane->ring, &cqe))
					continue;
				reap_writes(lane);
			}
		}
}
