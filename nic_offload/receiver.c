/*
 * The receiver: takes the blocks that one peer puts by grants. Each is read once, from its slot into memory of our
 * own.
 *
 * The peer may write to all slots, one put per generation. When a slot's flag has the expected generation, the head
 * is copied and checked, and the payload is copied into a room that the application has provided, with its checksum
 * computed from the copy. Then the block is listed on the shelf, where it can be read at once, the peer gets
 * `landed`, and the slot waits for its next put.
 *
 * What always holds: nothing that the peer writes into a slot after its flag has any effect, because nothing there is
 * read twice. A block is on the shelf before its peer gets `landed`, and only if its bytes have the checksum in its
 * head, if there is one. If something may be stored under its name already, it is not listed, and the application,
 * which knows the stored bytes, answers. A room holds one block. An invalid put ends the connection: nothing more is
 * taken from that peer. Without a free room a put waits in its slot.
 *
 * What it doesn't do: decide whether a block may stay. The application does, which gets each block from
 * `tk_receiver_take`.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"
#include "shelf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES_A_ROUND (256u << 10) /* so that the wire is not kept waiting */
#define BYTES_A_STEP (16u << 10)   /* copied, and summed while they are in the cache */
#define LANDED_ID (UINT64_C(1) << 63)
#define TOLD_COUNT 64u /* blocks reported to the application together, */
#define TOLD_NS 1000000u /* or after so long, where nobody waits for a word, */
#define TOLD_AWAITED_NS 300000u /* and where somebody does, so long after the last time */

/* A put that is being read. */
struct reading {
	int is_open;
	int is_whole; /* it has been read, and its peer is to be told `code`, if that is any */
	uint32_t slot, code, copied;
	struct record *record; /* with which a lane writes it; NULL: none does */
	struct tk_room room;
	struct tk_put_head head;
	uint32_t crc;
	uint64_t began_ns;
};

/* A slot: the generation of its next or current put; the flag's value when that comes, 0 once it has; its last value. */
struct flag {
	uint64_t generation, due, before;
};

struct tk_receiver {
	struct tk_receiver_setup setup;
	struct tk_fabric *fabric;
	struct tk_shelf *shelf;

	/* The progress thread's own. */
	struct tk_receiver *next;
	struct tk_endpoint *endpoint; /* NULL: it is closed, or the peer has broken the protocol */
	struct flag *awaited; /* by slot */
	uint32_t *queue; /* slots whose flags have come, a ring */
	uint32_t queue_first, queue_count;
	struct reading reading;

	pthread_mutex_t lock; /* for all that follows */
	const struct tk_lanes *lanes;
	struct tk_room *rooms;
	uint32_t rooms_count, rooms_capacity;
	struct tk_came *came;
	uint32_t came_count, came_capacity;
	uint32_t wanted_pages, starved;
	uint32_t differed, taken, expired;
	int broken;
	int told;	     /* reported: there is something to take */
	uint64_t told_ns;    /* when it last was */
	uint64_t tell_at_ns; /* when to report it; atomic, because it is read without the lock; 0: nothing to report */
};

static void free_receiver(struct tk_receiver *receiver)
{
	pthread_mutex_destroy(&receiver->lock);
	free(receiver->awaited);
	free(receiver->queue);
	free(receiver->rooms);
	free(receiver->came);
	free(receiver);
}

static int add_receiver(struct tk_fabric *fabric, void *argument)
{
	struct tk_receiver *receiver = *(struct tk_receiver **)argument;
	receiver->next = fabric->receivers;
	fabric->receivers = receiver;
	return 0;
}

static int remove_receiver(struct tk_fabric *fabric, void *argument)
{
	struct tk_receiver *receiver = *(struct tk_receiver **)argument, **link = &fabric->receivers;
	while (*link && *link != receiver)
		link = &(*link)->next;
	if (*link)
		*link = receiver->next;
	return 0;
}

static void await(struct tk_receiver *receiver, uint32_t slot, uint64_t generation)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	struct spot flag = word_spot(setup->told_flags, setup->told_key, slot);
	receiver->awaited[slot].generation = generation;
	receiver->awaited[slot].due = word_in(setup->endpoint, flag, generation);
}

int tk_receiver_open(struct tk_shelf *shelf, const struct tk_receiver_setup *setup, struct tk_receiver **out)
{
	if (!setup->endpoint || setup->endpoint->fabric != shelf->fabric || !setup->slots_count || setup->flags % 8 ||
	    setup->ack_base % 8 || !setup->first_generation ||
	    setup->slot_bytes < TK_HEAD_PAGE + (uint64_t)setup->length_max)
		return -EINVAL;
	struct tk_receiver *receiver = calloc(1, sizeof *receiver);
	if (!receiver)
		return -ENOMEM;
	pthread_mutex_init(&receiver->lock, NULL);
	receiver->setup = *setup;
	receiver->fabric = shelf->fabric;
	receiver->shelf = shelf;
	receiver->endpoint = setup->endpoint;
	receiver->awaited = calloc(setup->slots_count, sizeof *receiver->awaited);
	receiver->queue = calloc(setup->slots_count, sizeof *receiver->queue);
	if (!receiver->awaited || !receiver->queue) {
		free_receiver(receiver);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < setup->slots_count; i++)
		await(receiver, i, setup->first_generation);
	int status = on_the_thread(receiver->fabric, add_receiver, &receiver, sizeof receiver);
	if (status) {
		if (status != TK_STUCK)
			free_receiver(receiver);
		return status;
	}
	*out = receiver;
	return 0;
}

int tk_receiver_close(struct tk_receiver *receiver)
{
	int status = on_the_thread(receiver->fabric, remove_receiver, &receiver, sizeof receiver);
	if (status != TK_STUCK)
		free_receiver(receiver);
	return status;
}

/* --- what the application gives and takes; any thread */

void tk_receiver_use(struct tk_receiver *receiver, const struct tk_lanes *lanes)
{
	pthread_mutex_lock(&receiver->lock);
	receiver->lanes = lanes;
	pthread_mutex_unlock(&receiver->lock);
}

int tk_receiver_feed(struct tk_receiver *receiver, const struct tk_room *rooms, int count)
{
	int status = 0;
	pthread_mutex_lock(&receiver->lock);
	for (int i = 0; !status && i < count; i++) {
		status = grow((void **)&receiver->rooms, &receiver->rooms_capacity, receiver->rooms_count,
			      sizeof *receiver->rooms);
		if (!status)
			receiver->rooms[receiver->rooms_count++] = rooms[i];
		else
			receiver->rooms_count -= (uint32_t)i; /* none of them */
	}
	pthread_mutex_unlock(&receiver->lock);
	if (!status)
		fabric_wake(receiver->fabric);
	return status;
}

int tk_receiver_rooms(struct tk_receiver *receiver, struct tk_room *out, int out_max)
{
	int count = 0;
	pthread_mutex_lock(&receiver->lock);
	while (receiver->rooms_count && count < out_max)
		out[count++] = receiver->rooms[--receiver->rooms_count];
	pthread_mutex_unlock(&receiver->lock);
	return count;
}

static void set_time(struct tk_receiver *receiver, uint64_t at_ns)
{
	__atomic_store_n(&receiver->tell_at_ns, at_ns, __ATOMIC_RELAXED);
}

int tk_receiver_take(struct tk_receiver *receiver, struct tk_came *out, int out_max, struct tk_receiver_state *state)
{
	pthread_mutex_lock(&receiver->lock);
	uint32_t count = receiver->came_count < (uint32_t)out_max ? receiver->came_count : (uint32_t)out_max;
	if (count) {
		memcpy(out, receiver->came, count * sizeof *out);
		receiver->came_count -= count;
		memmove(receiver->came, receiver->came + count, receiver->came_count * sizeof *out);
	}
	receiver->told = !!receiver->came_count;
	set_time(receiver, 0);
	*state = (struct tk_receiver_state){
		.wanted_pages = receiver->wanted_pages,
		.starved = receiver->starved,
		.differed = receiver->differed,
		.taken = receiver->taken,
		.expired = receiver->expired,
		.broken = receiver->broken,
	};
	for (uint32_t i = 0; i < receiver->rooms_count; i++)
		state->rooms += receiver->rooms[i].pages == receiver->wanted_pages;
	receiver->starved = receiver->differed = receiver->taken = receiver->expired = 0;
	pthread_mutex_unlock(&receiver->lock);
	return (int)count;
}

/* --- the progress thread */

/* Under the lock. */
static void tell(struct tk_receiver *receiver)
{
	set_time(receiver, 0);
	if (receiver->told)
		return;
	receiver->told = 1;
	receiver->told_ns = tk_now_ns();
	report(receiver->fabric, TK_CAME, receiver->setup.tag, 0, 0, receiver->told_ns);
}

/* Under the lock. The application is not woken for each block: that would take the core from the wire, and many blocks cost
 * it little more than one. After a quiet time a block whose peer waits for more than `landed` is reported at once. */
static void tell_of(struct tk_receiver *receiver, const struct tk_came *came)
{
	uint64_t now_ns = tk_now_ns(), at_ns = now_ns + TOLD_NS;
	if ((came->durability > receiver->setup.landed_code && !came->under_way) || came->is_stored)
		at_ns = receiver->told_ns + TOLD_AWAITED_NS;
	if (at_ns <= now_ns || receiver->came_count >= TOLD_COUNT || receiver->rooms_count <= receiver->came_count)
		tell(receiver);
	else if (!receiver->told && (!receiver->tell_at_ns || at_ns < receiver->tell_at_ns))
		set_time(receiver, at_ns);
}

/* Under the lock. */
static int give_room_back(struct tk_receiver *receiver)
{
	int status = grow((void **)&receiver->rooms, &receiver->rooms_capacity, receiver->rooms_count,
			  sizeof *receiver->rooms);
	if (!status)
		receiver->rooms[receiver->rooms_count++] = receiver->reading.room;
	return status;
}

static void break_off(struct tk_receiver *receiver, int status)
{
	receiver->endpoint = NULL;
	receiver->queue_count = 0;
	pthread_mutex_lock(&receiver->lock);
	receiver->broken = status;
	if (receiver->reading.is_open)
		give_room_back(receiver);
	receiver->reading.is_open = 0;
	tell(receiver);
	pthread_mutex_unlock(&receiver->lock);
}

static void scan(struct tk_receiver *receiver)
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

/* A room of the right size, or else any that is large enough. */
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
		memmove(&receiver->rooms[best], &receiver->rooms[best + 1],
			(--receiver->rooms_count - best) * sizeof *out);
	} else if (!receiver->starved || is_new) {
		receiver->starved++;
		receiver->told = 0;
		tell(receiver);
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
	struct spot flag = word_spot(receiver->setup.told_flags, receiver->setup.told_key, slot);
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
	const char *from = head_end(receiver, reading->slot);
	while (*budget && reading->copied < reading->head.length) {
		uint32_t piece = reading->head.length - reading->copied;
		if (piece > BYTES_A_STEP)
			piece = BYTES_A_STEP;
		memcpy(to + reading->copied, from + reading->copied, piece);
		reading->crc = tk_crc32c(to + reading->copied, piece, reading->crc);
		reading->copied += piece;
		*budget -= piece < *budget ? piece : *budget;
	}
}

/* Lists it, unless another block has or may have the name, or it expires. Returns the code for its peer; 0: none yet. */
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
	const uint8_t *name = (const uint8_t *)&block; /* which begins with owner and key */
	came->is_stored = !there && names_have(&shelf->stored, name);
	came->listed = !there && !came->is_stored && !came->expires_unix_ms && !shelf_list(shelf, &block);
	if (!there && !came->listed) /* the next of this name is to find it */
		names_change(&shelf->stored, name, 1, 1);
	pthread_mutex_unlock(&shelf->lock);
	if (came->durability > setup->landed_code)
		return setup->landed_code; /* the application sends the other codes */
	return is_other ? setup->taken_code : came->is_stored ? 0 : setup->landed_code;
}

/* A peer that asked only for `landed` could not be told afterwards that it was too late. */
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
	return list(receiver, came);
}

/* To the lane of its drive, if that takes it. Under the lock. An application that is going to put a name itself notes it,
 * under the shelf's lock, and then looks at what lanes have begun: so either that note is seen here, or this is seen there. */
static void hand_over(struct tk_receiver *receiver, struct tk_came *came)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	uint8_t name[NAME_BYTES];
	memcpy(name, setup->owner, TK_OWNER_BYTES);
	memcpy(name + TK_OWNER_BYTES, came->key, TK_KEY_BYTES);
	if (!receiver->lanes || came->durability > setup->written_code)
		return;
	uint32_t home = lanes_home(receiver->lanes, name);
	struct tk_lane *lane = receiver->lanes->lanes[home];
	if (!lane)
		return;
	struct lane_word word = {
		.endpoint = receiver->endpoint,
		.peer = setup->peer,
		.target = setup->ack_base + (uint64_t)came->ack_word * 8,
		.key = setup->ack_key,
		.word = came->durability == setup->written_code ? came->ack_generation << ACK_CODE_BITS | setup->written_code : 0,
		.tag = setup->tag,
	};
	pthread_mutex_lock(&receiver->shelf->lock);
	if (!names_have(&receiver->shelf->stored, name))
		receiver->reading.record = lane_begin(lane, came, setup->owner, &word);
	pthread_mutex_unlock(&receiver->shelf->lock);
	came->under_way = receiver->reading.record ? (uint8_t)(home + 1) : 0;
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
		.ack_word = head->ack_word,
		.room = reading->room.number,
		.length = head->length,
		.crc32c = reading->crc,
		.metadata_bytes = head->metadata_bytes,
		.durability = head->durability,
	};
	memcpy(came.key, head->key, sizeof came.key);
	memcpy(came.fingerprint, head->fingerprint, sizeof came.fingerprint);
	memcpy(came.domain, head->domain, sizeof came.domain);
	pthread_mutex_lock(&receiver->lock);
	int status = grow((void **)&receiver->came, &receiver->came_capacity, receiver->came_count, sizeof came);
	pthread_mutex_unlock(&receiver->lock);
	if (status)
		return status; /* once more in the next round */
	reading->code = code_of(receiver, &came);
	pthread_mutex_lock(&receiver->lock);
	if (came.listed)
		hand_over(receiver, &came);
	if (!reading->code || reading->code == receiver->setup.landed_code) {
		receiver->came[receiver->came_count++] = came; /* nobody else adds to them */
		__atomic_add_fetch(&receiver->shelf->came, 1, __ATOMIC_RELEASE);
		tell_of(receiver, &came);
	} else {
		status = give_room_back(receiver);
		receiver->differed += !status && reading->code == receiver->setup.differs_code;
		receiver->taken += !status && reading->code == receiver->setup.taken_code;
		receiver->expired += !status && reading->code == receiver->setup.expired_code;
	}
	pthread_mutex_unlock(&receiver->lock);
	if (status)
		return status;
	reading->is_whole = 1;
	return 0;
}

/* Acknowledges to the peer. One that is gone, or gave an invalid word, gets nothing. */
static int tell_peer(struct tk_receiver *receiver)
{
	const struct tk_put_head *head = &receiver->reading.head;
	uint64_t word = head->ack_generation << ACK_CODE_BITS | receiver->reading.code;
	uint64_t target = receiver->setup.ack_base + (uint64_t)head->ack_word * 8;
	int status = post_word(receiver->fabric, receiver->endpoint, word, receiver->setup.peer, target,
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

/* Releases the slot, which is the peer's again once it has had a word, now or from the application. */
static int answer(struct tk_receiver *receiver)
{
	struct reading *reading = &receiver->reading;
	await(receiver, reading->slot, reading->head.generation + 1);
	if (reading->code && !tell_peer(receiver))
		return 0;
	over(reading);
	receiver->fabric->statistics.landed++;
	return 1;
}

/* Advances one receiver; returns whether it made progress. */
static int go_on(struct tk_receiver *receiver, uint32_t *budget)
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

static void tell_in_time(struct tk_fabric *fabric, struct tk_receiver *receiver)
{
	pthread_mutex_lock(&receiver->lock);
	uint64_t at_ns = receiver->tell_at_ns;
	if (at_ns && fabric->now_ns >= at_ns)
		tell(receiver);
	else if (at_ns && at_ns < fabric->next_deadline_ns)
		fabric->next_deadline_ns = at_ns; /* it sleeps no longer than that */
	pthread_mutex_unlock(&receiver->lock);
}

int poll_receivers(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (!receiver->endpoint)
			continue;
		uint32_t budget = BYTES_A_ROUND;
		scan(receiver);
		if (receiver->queue_count || receiver->reading.is_open)
			busy |= go_on(receiver, &budget);
		if (__atomic_load_n(&receiver->tell_at_ns, __ATOMIC_RELAXED))
			tell_in_time(fabric, receiver);
	}
	return busy;
}

/* The application is about to get a call: it must first know of all blocks that came before. */
void receivers_tell(struct tk_fabric *fabric)
{
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (!__atomic_load_n(&receiver->tell_at_ns, __ATOMIC_RELAXED))
			continue;
		pthread_mutex_lock(&receiver->lock);
		tell(receiver);
		pthread_mutex_unlock(&receiver->lock);
	}
}

/* The endpoint is about to be closed. Blocks that have come are taken if there are rooms; nothing is acknowledged. */
void receivers_end(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (receiver->endpoint != endpoint)
			continue;
		struct reading *reading = &receiver->reading;
		scan(receiver);
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
		receiver->endpoint = NULL;
	}
}
