/*
 * A receiver's puts, on the progress thread: from a slot's flag to the block on the shelf, and the word for the peer.
 *
 * What always holds: see receiver.c. This part reads a slot once, and acknowledges no bytes that it doesn't have.
 */
#define _GNU_SOURCE
#include "call.h"
#include "receiver_inside.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#define BYTES_A_STEP (8u << 10)	   /* copied, checksummed and erased while both copies are in a core's first cache */

#define LATER_NS 1000000000u	   /* how long a block waits for a lane that is full, or without ground */

static const uint8_t unsaid[TK_DOMAIN_BYTES];

void scan_flags(struct tk_receiver *receiver)
{
	const uint64_t *flags = (const uint64_t *)receiver->setup.flags;
	for (uint32_t slot = 0; slot < receiver->setup.slots_count; slot++) {
		struct flag *flag = &receiver->awaited[slot];
		uint64_t word = tk_word_load(&flags[slot]);
		if (flag->due && word == flag->due) {
			uint32_t last = receiver->queue_first + receiver->queue_count++;
			receiver->queue[last % receiver->setup.slots_count] = slot;
			flag->due = 0;
		} else if (word != flag->before) {
			receiver->fabric->statistics.stale_words++;
		} else {
			continue;
		}
		flag->before = word;
	}
}

static char *head_end(const struct tk_receiver *receiver, uint32_t slot)
{
	return (char *)receiver->setup.slots + slot * receiver->setup.slot_bytes + TK_HEAD_PAGE;
}

static int is_put(const struct tk_receiver *receiver, const struct tk_put_head *head, uint64_t generation)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	return head->generation == generation && head->length && head->length <= setup->length_max &&
	       head->metadata_bytes <= TK_HEAD_PAGE - sizeof *head && head->metadata_bytes % 8 == 0 &&
	       head->ack_word < setup->ack_words && head->ack_generation && head->ack_generation <= ACK_GENERATION_MAX &&
	       head->durability && !(head->flags & ~TK_PUT_HAS_CRC);
}

/* Takes a room of the right size, or else any that is large enough. */
static int take_room(struct tk_receiver *receiver, uint32_t pages, struct tk_room *out)
{
	uint32_t best = UINT32_MAX;
	pthread_mutex_lock(&receiver->lock);
	for (uint32_t i = receiver->rooms_count; i--;) {
		uint32_t has = receiver->rooms[i].pages;
		if (has >= pages && (best == UINT32_MAX || has < receiver->rooms[best].pages))
			best = i;
		if (has == pages)
			break;
	}
	int is_new = receiver->wanted_pages != pages;
	receiver->wanted_pages = pages;
	if (best != UINT32_MAX) {
		*out = receiver->rooms[best];
		receiver->starved = 0;
		memmove(&receiver->rooms[best], &receiver->rooms[best + 1],
			(--receiver->rooms_count - best) * sizeof *out);
	} else if (!receiver->starved || is_new) { /* reported once: the application feeds it as soon as it can */
		receiver->starved = 1;
		receiver->is_notified = 0;
		notify_puts(receiver);
	}
	pthread_mutex_unlock(&receiver->lock);
	return best != UINT32_MAX;
}

static uint32_t pages_of(uint32_t length)
{
	return 1 + (length + TK_HEAD_PAGE - 1) / TK_HEAD_PAGE;
}

/* Begins the first put in the queue. 0: it has to wait for a room; -1: it is invalid. */
static int begin(struct tk_receiver *receiver)
{
	struct reading *reading = &receiver->reading;
	uint32_t slot = receiver->queue[receiver->queue_first];
	const char *there = head_end(receiver, slot);
	struct tk_put_head head;
	memcpy(&head, there - sizeof head, sizeof head);
	if (!is_put(receiver, &head, receiver->awaited[slot].generation))
		return -1;
	struct tk_room room;
	if (!take_room(receiver, pages_of(head.length), &room))
		return 0;
	*reading = (struct reading){
		.is_open = 1, .slot = slot, .room = room, .head = head, .began_ns = tk_now_ns()};
	char *metadata = (char *)room.address + TK_HEAD_PAGE - sizeof head - head.metadata_bytes;
	memcpy(metadata, there - sizeof head - head.metadata_bytes, head.metadata_bytes);
	struct spot flag = word_spot(receiver->setup.remote_flags, receiver->setup.remote_key, slot);
	if (!believes_head(receiver->endpoint, flag, metadata, &head) || sum_of_head(&head, metadata) != head.head_crc32c)
		return -1;
	receiver->queue_first = (receiver->queue_first + 1) % receiver->setup.slots_count;
	receiver->queue_count--;
	return 1;
}

static void copy(struct tk_receiver *receiver, uint32_t *budget)
{
	struct reading *reading = &receiver->reading;
	char *to = (char *)reading->room.address + TK_HEAD_PAGE;
	char *from = head_end(receiver, reading->slot);
	while (*budget && reading->copied < reading->head.length) {
		uint32_t piece = reading->head.length - reading->copied;
		if (piece > BYTES_A_STEP)
			piece = BYTES_A_STEP;
		memcpy(to + reading->copied, from + reading->copied, piece);
		reading->crc = tk_crc32c(to + reading->copied, piece, reading->crc);
		/* While it is in the cache. An erasure can't wipe the slot: it belongs to the peer. */
		memset(from + reading->copied, 0, piece);
		reading->copied += piece;
		*budget -= piece < *budget ? piece : *budget;
	}
}

/* Lists it, unless another block has or may have the name, or it expires. Returns the code for its peer; 0: none
 * yet. */
static uint32_t list(struct tk_receiver *receiver, struct tk_came *came)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	struct tk_shelf *shelf = receiver->shelf;
	struct tk_shelved block = {
		.address = came->address + TK_HEAD_PAGE,
		.length = came->length,
		.crc32c = came->crc32c,
	};
	memcpy(block.owner, setup->owner, sizeof block.owner);
	memcpy(block.key, came->key, sizeof block.key);
	memcpy(block.fingerprint, came->fingerprint, sizeof block.fingerprint);
	pthread_mutex_lock(&shelf->lock);
	came->id = block.id = LANDED_ID | ++shelf->landed;
	const struct shelved *there = shelf_find(shelf, block.owner, block.key);
	int is_other = there && (there->block.length != block.length || there->block.crc32c != block.crc32c ||
				 memcmp(there->block.fingerprint, block.fingerprint, sizeof block.fingerprint));
	const uint8_t *name = (const uint8_t *)&block; /* starts with owner and key */
	came->is_stored = is_other || (!there && names_have(&shelf->stored, name));
	came->listed = !there && !came->is_stored && !came->expires_unix_ms && !shelf_list(shelf, &block);
	if (!there && !came->listed) /* so that the next put of this name finds it */
		names_change(&shelf->stored, name, 1, 1);
	pthread_mutex_unlock(&shelf->lock);
	if (came->durability > setup->landed_code)
		return setup->landed_code; /* the application sends the other codes */
	return is_other ? setup->taken_code : came->is_stored ? 0 : setup->landed_code;
}

/* A peer that requested only `landed` could not be notified afterwards that it was too late. */
static int is_expired(const struct tk_receiver *receiver, const struct tk_put_head *head)
{
	if (!head->expires_unix_ms || head->durability != receiver->setup.landed_code)
		return 0;
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return head->expires_unix_ms <= (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static uint32_t code_of(struct tk_receiver *receiver, struct tk_came *came)
{
	const struct tk_put_head *head = &receiver->reading.head;
	if (head->flags & TK_PUT_HAS_CRC && receiver->reading.crc != head->crc32c)
		return receiver->setup.differs_code;
	if (is_expired(receiver, head))
		return receiver->setup.expired_code;
	if (!memcmp(head->domain, unsaid, sizeof unsaid) && receiver->setup.unsaid_code)
		return receiver->setup.unsaid_code;
	return list(receiver, came);
}

/* Hands the block to the lane of its drive, if the lane takes it, and notes the lane in `under_way`. Under the lock. An
 * application that will put a name itself first adds the name, under the shelf's lock, and then checks which records
 * lanes have begun. So either the name is seen here, or this record is seen there. */
static struct record *hand_over(struct tk_receiver *receiver, struct tk_came *came)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	struct record *record = NULL;
	uint8_t name[NAME_BYTES];
	came->under_way = 0;
	memcpy(name, setup->owner, TK_OWNER_BYTES);
	memcpy(name + TK_OWNER_BYTES, came->key, TK_KEY_BYTES);
	if (!receiver->lanes || came->durability > setup->written_code)
		return NULL;
	uint32_t home = lanes_home(receiver->lanes, name);
	struct tk_lane *lane = receiver->lanes->lanes[home];
	uint64_t pages = receiver->is_limited ? pages_of(came->length) : 0;
	if (!lane || receiver->lent_pages < pages)
		return NULL;
	struct lane_word word = {
		.endpoint = receiver->endpoint,
		.peer = setup->peer,
		.target = setup->ack_base + (uint64_t)came->ack_word * 8,
		.key = setup->ack_key,
		.word = came->durability == setup->written_code ? came->ack_generation << ACK_CODE_BITS | setup->written_code : 0,
		.tag = setup->tag,
	};
	pthread_mutex_lock(&receiver->shelf->lock);
	if (!names_have(&receiver->shelf->stored, name)) {
		int may_wait = tk_now_ns() - came->landed_ns < LATER_NS;
		if (may_wait && (lane_is_full_of(lane, came->length, setup->owner) || lane_awaits_ground(lane, came->length)))
			came->under_way = LATER;
		else {
			came->under_way = (uint8_t)(home + 1);
			record = lane_begin(lane, came, setup->owner, &word);
			came->under_way = record ? came->under_way : 0;
		}
	}
	pthread_mutex_unlock(&receiver->shelf->lock);
	if (record)
		receiver->lent_pages -= pages;
	return record;
}

/* Hands over blocks that found the lane full or without ground, in order of arrival, up to the first that has to wait on,
 * or whose peer has no word yet: that is the last. It runs in each round, and thousands may wait. */
void hand_over_later(struct tk_receiver *receiver)
{
	const struct reading *reading = &receiver->reading;
	pthread_mutex_lock(&receiver->lock);
	for (; receiver->later_at < receiver->came_count; receiver->later_at++) {
		struct tk_came *came = &receiver->came[receiver->later_at];
		if (came->under_way != LATER)
			continue;
		if (reading->is_open && reading->is_whole && came->id == reading->id)
			break;
		struct record *record = hand_over(receiver, came);
		if (came->under_way == LATER) {
			if (came->landed_ns + LATER_NS < receiver->fabric->next_deadline_ns)
				receiver->fabric->next_deadline_ns = came->landed_ns + LATER_NS;
			break;
		}
		count_later(receiver, -1);
		if (record) {
			lane_landed(record);
			came->under_way = GONE;
			receiver->gone_count++;
		} else {
			notify_arrival(receiver, came);
		}
	}
	if (receiver->gone_count > receiver->came_count / 2)
		remove_gone(receiver);
	pthread_mutex_unlock(&receiver->lock);
}

/* It has been read completely: keep the block, or reuse the room. */
static int settle(struct tk_receiver *receiver)
{
	struct reading *reading = &receiver->reading;
	const struct tk_put_head *head = &reading->head;
	struct tk_came came = {
		.address = reading->room.address,
		.ack_generation = head->ack_generation,
		.expires_unix_ms = head->expires_unix_ms,
		.landed_ns = reading->began_ns,
		.fired_ns = head->fired_ns,
		.ack_word = head->ack_word,
		.room = reading->room.number,
		.length = head->length,
		.crc32c = reading->crc,
		.metadata_bytes = head->metadata_bytes,
		.durability = head->durability,
	};
	memcpy(came.key, head->key, sizeof came.key);
	memcpy(came.fingerprint, head->fingerprint, sizeof came.fingerprint);
	if (memcmp(head->domain, receiver->setup.shared, sizeof came.domain))
		memcpy(came.domain, head->domain, sizeof came.domain);
	pthread_mutex_lock(&receiver->lock);
	int status = grow((void **)&receiver->came, &receiver->came_capacity, receiver->came_count, sizeof came);
	pthread_mutex_unlock(&receiver->lock);
	if (status)
		return status; /* tried again in the next round */
	reading->code = code_of(receiver, &came);
	pthread_mutex_lock(&receiver->lock);
	if (came.listed && receiver->later_count)
		came.under_way = LATER; /* behind the blocks that already wait */
	else if (came.listed)
		reading->record = hand_over(receiver, &came);
	if (!reading->code || reading->code == receiver->setup.landed_code) {
		if (!reading->record) { /* otherwise the lane reports it */
			receiver->came[receiver->came_count] = came; /* only this thread adds to them */
			__atomic_store_n(&receiver->came_count, receiver->came_count + 1, __ATOMIC_RELAXED);
		}
		count_later(receiver, came.under_way == LATER);
		reading->id = came.id;
		__atomic_add_fetch(&receiver->shelf->came, 1, __ATOMIC_RELEASE);
		if (came.under_way)
			notify_lane(receiver);
		else
			notify_arrival(receiver, &came);
	} else {
		status = give_room_back(receiver);
		receiver->differed += !status && reading->code == receiver->setup.differs_code;
		receiver->taken += !status && reading->code == receiver->setup.taken_code;
		receiver->expired += !status && reading->code == receiver->setup.expired_code;
		receiver->unsaid += !status && reading->code == receiver->setup.unsaid_code;
	}
	pthread_mutex_unlock(&receiver->lock);
	if (status)
		return status;
	reading->is_whole = 1;
	return 0;
}

/* Acknowledges the put. A peer that is gone, or gave an invalid word, gets no word. The lane waits for this one. */
static int acknowledge(struct tk_receiver *receiver)
{
	const struct tk_put_head *head = &receiver->reading.head;
	uint64_t word = head->ack_generation << ACK_CODE_BITS | receiver->reading.code;
	uint64_t target = receiver->setup.ack_base + (uint64_t)head->ack_word * 8;
	int status = post_or_queue_word(receiver->fabric, receiver->endpoint, word, receiver->setup.peer, target,
					receiver->setup.ack_key);
	if (status != -FI_EAGAIN)
		receiver->fabric->statistics.acks_sent++;
	return status != -FI_EAGAIN;
}

static void over(struct reading *reading)
{
	reading->is_open = 0;
	if (reading->record)
		lane_landed(reading->record);
}

/* Releases the slot. It belongs to the peer again once the peer gets a word, now or from the application. */
static int answer(struct tk_receiver *receiver)
{
	struct reading *reading = &receiver->reading;
	await_put(receiver, reading->slot, reading->head.generation + 1);
	if (reading->code && !acknowledge(receiver))
		return 0;
	over(reading);
	receiver->fabric->statistics.landed++;
	return 1;
}

/* Advances one receiver; returns whether it made progress. */
int take_puts(struct tk_receiver *receiver, uint32_t *budget)
{
	int busy = 0;
	while (*budget && receiver->endpoint) {
		struct reading *reading = &receiver->reading;
		if (!reading->is_open) {
			int begun = receiver->queue_count ? begin(receiver) : 0;
			if (begun < 0)
				break_off(receiver, -EPROTO);
			if (begun <= 0)
				return busy;
		}
		copy(receiver, budget);
		busy = 1;
		if (reading->copied < reading->head.length)
			break;
		if ((!reading->is_whole && settle(receiver)) || !answer(receiver))
			break;
	}
	return busy;
}

void take_rest(struct tk_receiver *receiver)
{
	struct reading *reading = &receiver->reading;
	scan_flags(receiver);
	while (receiver->endpoint && (reading->is_open || receiver->queue_count)) {
		uint32_t budget = UINT32_MAX;
		int begun = reading->is_open ? 1 : begin(receiver);
		if (begun < 0)
			break_off(receiver, -EPROTO);
		if (begun <= 0)
			break;
		copy(receiver, &budget);
		if (!reading->is_whole && settle(receiver))
			break;
		over(reading);
	}
}
