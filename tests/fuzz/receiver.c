/*
 * A fuzzer of the receiver (libFuzzer): puts by grants of a peer, as they lie in its slots, into `take_puts`.
 *
 * The receiver and its shelf are the real ones; of the progress thread there is as much as they call. Between two steps
 * the peer writes to its slot again. What always holds, or it stops: what is reported has the checksum, the length and the
 * metadata that it is reported with, and stays within its room; on a sealed connection it has the peer's tag; a word goes to
 * one of the peer's words, and says `landed` only of a block that is taken; rooms are neither lost nor given twice.
 * The first byte of an input says what of it is put right, so that more than checksums is reached.
 */
#define _GNU_SOURCE
#include "../../nic_offload/call.h"
#include "../../nic_offload/lane.h"
#include "../../nic_offload/receiver_inside.h"

#include <stdlib.h>
#include <string.h>

#define SLOTS 4
#define LENGTH_MAX (9 * TK_HEAD_PAGE) /* more than is copied in a step */
#define SLOT_BYTES (TK_HEAD_PAGE + LENGTH_MAX)
#define ROOMS 3
#define PAGES(room) (2 + 4 * (room))
#define ACK_BASE 0x10000
#define ACK_WORDS 64
#define GENERATION 5

enum { LANDED = 1, WRITTEN, DIFFERS = 0x47, TAKEN = 0x45, EXPIRED, UNSAID = 0x48 };

enum { /* what is put right, */
	FIELDS = 1,
	SUM = 2,
	TAG = 4,
	PAYLOAD_SUM = 8,
	/* or otherwise */
	SEALED = 16,
	REWRITTEN = 32,
	NO_ROOM = 64,
	DOMAINS = 128,
};

static struct tk_fabric *fabric;
static struct tk_endpoint *endpoint;
static struct tk_shelf *shelf;
static uint64_t flags[SLOTS];
static uint8_t *slots;
static uint32_t landed_words, words, taken;

static void must(int holds)
{
	if (!holds)
		abort();
}

uint64_t tk_now_ns(void)
{
	static uint64_t now;
	return now += 1000;
}

int fabric_refusal(const struct tk_fabric *one)
{
	(void)one;
	return 0;
}

void fabric_wake(struct tk_fabric *one)
{
	(void)one;
}

int on_the_thread(struct tk_fabric *one, int (*run)(struct tk_fabric *, void *), void *argument, size_t argument_bytes)
{
	(void)argument_bytes;
	return run(one, argument);
}

void report(struct tk_fabric *one, enum tk_event_kind kind, uint64_t tag, uint64_t value, int status, uint64_t time_ns)
{
	(void)one, (void)kind, (void)tag, (void)value, (void)status, (void)time_ns;
}

int grow(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes)
{
	if (count < *capacity)
		return 0;
	*capacity = count + 1;
	*items = realloc(*items, *capacity * item_bytes);
	must(*items != NULL);
	return 0;
}

int post_or_queue_word(struct tk_fabric *one, struct tk_endpoint *from, uint64_t word, uint64_t peer, uint64_t target, uint64_t key)
{
	(void)one, (void)peer;
	must(from == endpoint && key == 7 && target >= ACK_BASE && target < ACK_BASE + 8 * ACK_WORDS && target % 8 == 0);
	must(word >> ACK_CODE_BITS != 0);
	if (++words % 7 == 0)
		return -FI_EAGAIN;
	landed_words += (word & ((1 << ACK_CODE_BITS) - 1)) == LANDED;
	return 0;
}

uint32_t lanes_home(const struct tk_lanes *lanes, const uint8_t *name)
{
	(void)lanes, (void)name;
	return 0;
}

int lane_is_full_of(const struct tk_lane *lane, uint32_t length, const uint8_t *owner)
{
	(void)lane;
	(void)length;
	(void)owner;
	return 0;
}

int lane_awaits_ground(struct tk_lane *lane, uint32_t length)
{
	(void)lane;
	(void)length;
	return 0;
}

struct record *lane_begin(struct tk_lane *lane, const struct tk_came *came, const uint8_t *owner,
			  const struct lane_word *word)
{
	(void)lane, (void)came, (void)owner, (void)word;
	return NULL;
}

void lane_landed(struct record *record)
{
	(void)record;
}

static void begin(void)
{
	static struct tk_region region;
	fabric = calloc(1, sizeof *fabric);
	endpoint = calloc(1, sizeof *endpoint);
	slots = malloc(SLOTS * SLOT_BYTES);
	must(fabric && endpoint && slots);
	pthread_mutex_init(&fabric->handle_lock, NULL);
	endpoint->fabric = region.fabric = fabric;
	region.length = UINT64_MAX;
	must(tk_shelf_open(fabric, &region, &shelf) == 0);
}

/* A head that is read as far as possible. */
static void put_right(struct tk_put_head *head, uint8_t *payload, uint8_t what)
{
	if (what & FIELDS) {
		head->generation = GENERATION;
		head->length = head->length % LENGTH_MAX + 1;
		head->metadata_bytes = head->metadata_bytes % 1024 * 8;
		head->ack_word %= ACK_WORDS;
		head->ack_generation = head->ack_generation % 1000 + 1;
		head->durability = head->durability % 3 + 1;
		head->flags &= TK_PUT_HAS_CRC;
		head->expires_unix_ms &= 1;
		memset(head->key + 1, 0, sizeof head->key - 1);
	}
	if (what & PAYLOAD_SUM && head->length <= LENGTH_MAX)
		head->crc32c = tk_crc32c(payload, head->length, 0);
	const char *metadata = (const char *)head - head->metadata_bytes;
	if (head->metadata_bytes > TK_HEAD_PAGE - sizeof *head)
		return;
	head->tag = 0;
	if (what & SUM)
		head->head_crc32c = sum_of_head(head, metadata);
}

static int has_tag(const struct tk_receiver_setup *setup, uint32_t slot, const char *metadata, const struct tk_put_head *head)
{
	return believes_head(endpoint, word_spot(setup->remote_flags, setup->remote_key, slot), metadata, head);
}

/* What was taken is what it is said to be. */
static void check_came(const struct tk_came *came, const uint8_t *room, uint32_t pages)
{
	must(came->length && came->length <= LENGTH_MAX && came->address == (uint64_t)(uintptr_t)room);
	must(TK_HEAD_PAGE + (uint64_t)came->length <= (uint64_t)pages * TK_HEAD_PAGE);
	must(tk_crc32c(room + TK_HEAD_PAGE, came->length, 0) == came->crc32c);
	must(came->metadata_bytes <= TK_HEAD_PAGE - sizeof(struct tk_put_head) && came->ack_word < ACK_WORDS);
	must(!came->listed || (!came->is_stored && !came->expires_unix_ms));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint64_t secret[2] = {3, 4};
	if (!fabric)
		begin();
	if (size < 8 + sizeof(struct tk_put_head))
		return 0;
	uint8_t what = data[0];
	uint32_t slot = data[1] % SLOTS, budget = data[2] * 64u + 1, rewritten = 0;
	endpoint->seal.is_set = !!(what & SEALED);
	memcpy(endpoint->seal.in, secret, sizeof secret);
	memcpy(endpoint->seal.out, secret, sizeof secret); /* the harness is the peer */
	struct tk_receiver_setup setup = {
		.endpoint = endpoint,
		.flags = (uint64_t)(uintptr_t)flags,
		.remote_flags = 0x100,
		.slots = (uint64_t)(uintptr_t)slots,
		.slot_bytes = SLOT_BYTES,
		.first_generation = GENERATION,
		.ack_base = ACK_BASE,
		.ack_key = 7,
		.ack_words = ACK_WORDS,
		.slots_count = SLOTS,
		.length_max = LENGTH_MAX,
		.landed_code = LANDED,
		.differs_code = DIFFERS,
		.taken_code = TAKEN,
		.expired_code = EXPIRED,
		.written_code = WRITTEN,
		.unsaid_code = what & DOMAINS ? UNSAID : 0,
	};
	struct tk_receiver *receiver;
	memset(flags, 0, sizeof flags);
	must(tk_receiver_open(shelf, &setup, &receiver) == 0);
	uint8_t *rooms[ROOMS];
	for (uint32_t i = 0; i < ROOMS; i++) {
		rooms[i] = malloc(PAGES(i) * TK_HEAD_PAGE);
		struct tk_room room = {(uint64_t)(uintptr_t)rooms[i], PAGES(i), i};
		if (!(what & NO_ROOM) || i == 1)
			must(tk_receiver_feed(receiver, &room, 1) == 0);
	}

	/* The peer's put, as it was when its flag came: the rest of the input, over and over. */
	uint8_t *there = slots + slot * SLOT_BYTES;
	struct tk_put_head *head = (void *)(there + TK_HEAD_PAGE - sizeof *head);
	size_t rest = size - 8 - sizeof *head;
	for (size_t at = 0; at < SLOT_BYTES; at++)
		there[at] = rest ? data[8 + sizeof *head + at % rest] : 0;
	memcpy(head, data + 8, sizeof *head);
	put_right(head, there + TK_HEAD_PAGE, what);
	if (what & TAG && head->metadata_bytes <= TK_HEAD_PAGE - sizeof *head) {
		struct spot spot = word_spot(setup.remote_flags, setup.remote_key, slot);
		head->tag = head_out(endpoint, spot, (char *)head - head->metadata_bytes, head);
	}
	struct tk_put_head was = *head;
	int is_tagged = was.metadata_bytes <= TK_HEAD_PAGE - sizeof was &&
			has_tag(&setup, slot, (char *)head - was.metadata_bytes, head);
	uint32_t words_before = words, landed_before = landed_words;
	flags[slot] = receiver->awaited[slot].due;
	for (int step = 0; step < 1000; step++) {
		uint32_t left = budget;
		scan_flags(receiver);
		take_puts(receiver, &left);
		if (what & REWRITTEN && receiver->reading.is_open && !rewritten++)
			memset(there, data[3], SLOT_BYTES);
		if (!receiver->reading.is_open && !receiver->queue_count)
			break;
	}

	struct tk_came came;
	struct tk_receiver_state state;
	int count = tk_receiver_take(receiver, 1, &came, 1, &state);
	if (count) {
		must(receiver->endpoint && is_tagged && was.length == came.length && was.generation == GENERATION);
		must(!memcmp(was.key, came.key, sizeof came.key) && came.room < ROOMS);
		check_came(&came, rooms[came.room], PAGES(came.room));
		must(!(was.flags & TK_PUT_HAS_CRC) || came.crc32c == was.crc32c);
		taken++;
		if (came.listed) {
			uint8_t name[NAME_BYTES] = {0};
			memcpy(name + TK_OWNER_BYTES, came.key, TK_KEY_BYTES);
			tk_shelf_unlist(shelf, name, 1, 0);
		}
	}
	must(landed_words - landed_before <= (uint32_t)count);
	must(!state.broken || (!receiver->endpoint && words == words_before));
	struct tk_room back[ROOMS + 1];
	int given = what & NO_ROOM ? 1 : ROOMS;
	must(tk_receiver_rooms(receiver, back, ROOMS + 1) + count + receiver->reading.is_open == given);
	must(tk_shelf_count(shelf) == 0);
	must(tk_receiver_close(receiver) == 0);
	for (uint32_t i = 0; i < ROOMS; i++)
		free(rooms[i]);
	return 0;
}

#ifdef STANDALONE
#define RUN_BYTES_MAX 600
#define counted taken

static size_t run_bytes(uint64_t state, uint64_t run)
{
	(void)run;
	return 8 + sizeof(struct tk_put_head) + (state >> 50) % 400;
}
#endif
#include "standalone.h"
