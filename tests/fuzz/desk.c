/*
 * A fuzzer of the desk (libFuzzer): calls of a peer, as they lie in memory, into `answer_at_desk`.
 *
 * The desk and its shelf are the real ones; of the progress thread there is as much as they call. What always holds,
 * or it stops: nothing is sent but from registered memory, to a word that the peer has, in a call answered whole, which
 * over a sealed connection has the peer's tag. Every third block is not in memory, but on a drive, which reads at once.
 * The input is also what the peer has noted of its direct reads. The first byte of an input says what of it is put right, so that more than checksums is reached.
 */
#define _GNU_SOURCE
#include "../../nic_offload/directory.h"
#include "../../nic_offload/reader_inside.h"
#include "../../nic_offload/desk_inside.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS 16
#define BLOCK_BYTES 512
#define ACK_BASE 0x10000
#define ANSWERS 0x20000
#define ACK_WORDS 64
#define GENERATION 5
#define ROOMS 4
#define ROOM_PAGES 2
#define READER 1
#define GENERATION_THERE (UINT64_C(7) << 30)

static _Alignas(PAGE) uint8_t memory[BLOCKS * BLOCK_BYTES + ROOMS * ROOM_PAGES * PAGE];
static struct tk_fabric *fabric;
static struct tk_endpoint *endpoint;
static struct tk_region *region;
static struct tk_shelf *shelf;
static struct tk_desk *desk;
static _Alignas(PAGE) uint8_t directory[TK_DIRECTORY_HEAD_BYTES + 64 * TK_DIRECTORY_SLOT_BYTES];
static _Alignas(PAGE) uint8_t read_log[TK_READ_LOG_BYTES];
static struct tk_reader reader;
static struct work *reading[BLOCKS];
static uint32_t readings;
static uint32_t taken, fired, answers;
static uint64_t place; /* of the call */
static int spoilt, located;
static uint8_t names_there[BLOCKS][NAME_BYTES];

static void must(int holds)
{
	if (!holds)
		abort();
}

/* Which of the blocks it is. */
static int key_there(const struct work *work)
{
	const struct served *served = work->served;
	const char *rows = (const char *)(served->rest + served->head.blocks) + served->head.metadata_bytes;
	const struct tk_cold_row *row = (const void *)(rows + sizeof(struct tk_cold_head) + work->op.row * sizeof *row);
	must(row->key[0] < BLOCKS && row->key[0] % 3 == 0);
	return row->key[0];
}

int fabric_refusal(const struct tk_fabric *one)
{
	(void)one;
	return 0;
}

uint64_t tk_now_ns(void)
{
	static uint64_t now;
	return ++now;
}

int on_the_thread(struct tk_fabric *one, int (*run)(struct tk_fabric *fabric, void *argument), void *argument, size_t bytes)
{
	(void)bytes;
	return run(one, argument);
}

struct work *take_free_work(struct tk_fabric *one, uint32_t count)
{
	(void)one;
	struct work *first = NULL;
	for (uint32_t i = 0; i < count; i++) {
		struct work *work = calloc(1, sizeof *work);
		work->next = first;
		first = work;
	}
	taken += count;
	return first;
}

void adopt(struct tk_fabric *one, struct work *work)
{
	(void)one, (void)work;
}

void recycle(struct tk_fabric *one, struct work *work)
{
	(void)one;
	free(work);
}

/* An answer that says where the blocks are lies over the call, with a row for each of them. */
static void check_where(const struct tk_operation *op)
{
	struct answer_head head;
	memcpy(&head, (const void *)(uintptr_t)op->local, sizeof head);
	must(op->local == place && op->remote == ANSWERS && op->length <= ANSWER_BYTES);
	must(head.kind == ANSWER_WHERE && head.generation == GENERATION && (op->flag_value & 0xff) == CALL_WHERE);
	for (uint32_t at = sizeof head; at < head.length; at += sizeof(struct where_row)) {
		struct where_row row;
		memcpy(&row, (const char *)(uintptr_t)op->local + at, sizeof row);
		must(row.offset <= sizeof memory - BLOCK_BYTES);
	}
	located = 1;
}

void fire(struct tk_fabric *one, struct work *work, uint64_t now_ns)
{
	(void)one, (void)now_ns;
	const struct tk_operation *op = &work->op;
	if (op->length && !work->shelved)
		check_where(op);
	must(op->endpoint == endpoint && op->flag_target >= ACK_BASE && op->flag_target % 8 == 0);
	must(op->flag_target < ACK_BASE + 8 * ACK_WORDS);
	fired++;
	if (work->shelved) {
		must(op->local >= (uint64_t)(uintptr_t)memory && op->length <= BLOCK_BYTES);
		must(op->local + op->length <= (uint64_t)(uintptr_t)memory + sizeof memory);
		if (spoilt && fired % 3 == 0)
			miss_at_desk(work);
		over_at_desk(work, fired % 5 == 0 ? -5 : 0);
	}
	free(work);
}

/* The peer looks for words in its rows, or does not. */
int put_row_word(struct tk_fabric *one, struct tk_endpoint *of, uint64_t word, struct spot spot)
{
	must(one == fabric && of == endpoint && word == (GENERATION << ACK_CODE_BITS | CALL_DONE));
	must(spot.address >= ACK_BASE && spot.address < ACK_BASE + 8 * ACK_WORDS && spot.address % 8 == 0);
	return fired += spoilt, spoilt;
}

int grow(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes)
{
	if (count < *capacity)
		return 0;
	*capacity = count + 1;
	*items = realloc(*items, *capacity * item_bytes);
	return 0;
}

void report(struct tk_fabric *one, enum tk_event_kind kind, uint64_t tag, uint64_t value, int status, uint64_t time_ns)
{
	(void)one, (void)value, (void)status, (void)time_ns;
	must(kind == TK_CAME && tag == 1);
}

void reading_fill_in(struct reading *one, struct batch *batch, struct tk_reader *of, uint32_t length, const uint8_t *key,
		     const uint8_t *owner, const uint8_t *fingerprint)
{
	(void)key, (void)owner, (void)fingerprint;
	must(of == &reader && batch->shelf == shelf);
	*one = (struct reading){.batch = batch, .reader = of, .size = length};
}

/* What is read lies in a room, with a page before it; its word is the peer's. */
void reader_begin(struct work *work)
{
	const struct tk_operation *op = &work->op;
	uint64_t rooms = (uint64_t)(uintptr_t)memory + BLOCKS * BLOCK_BYTES;
	must(op->local >= rooms + PAGE && op->length <= PAGE && (op->local - rooms) % (ROOM_PAGES * PAGE) == PAGE);
	must(op->local + op->length <= (uint64_t)(uintptr_t)memory + sizeof memory);
	must(op->endpoint == endpoint && op->flag_target >= ACK_BASE && op->flag_target < ACK_BASE + 8 * ACK_WORDS);
	must(op->part ? op->part <= op->length && op->skip <= op->length - op->part : !op->skip);
	must(work->reading->offset == 77 * PAGE && readings < BLOCKS);
	fired++;
	reading[readings++] = work;
}

/* It ends after the call, in one way or the other: a name that has another place by then is not sent. */
static void end_readings(void)
{
	for (uint32_t i = 0; i < readings; i++) {
		struct work *work = reading[i];
		struct batch *batch = work->batch;
		int is_gone = spoilt && i % 2;
		if (is_gone)
			tk_shelf_unlist(shelf, names_there[key_there(work)], 1, 0);
		int is_there = cold_is_there(work, work->reading->place, GENERATION_THERE);
		must(!is_gone || !is_there);
		work->failed = is_there ? 0 : -61;
		if (i % 3 == 2) { /* it was withdrawn while it was read */
			cold_room_stays(work);
			cold_room_back(shelf, &work->reading->room);
		}
		cold_over(work);
		if (!--batch->not_over)
			free(batch);
		free(work);
	}
	readings = 0;
}

static void begin(void)
{
	fabric = calloc(1, sizeof *fabric);
	endpoint = calloc(1, sizeof *endpoint);
	region = calloc(1, sizeof *region);
	pthread_mutex_init(&fabric->handle_lock, NULL);
	endpoint->fabric = region->fabric = fabric;
	region->address = (uint64_t)(uintptr_t)memory;
	region->length = sizeof memory;
	must(tk_shelf_open(fabric, region, &shelf) == 0);
	must(tk_shelf_share(shelf, directory, sizeof directory) == 0);
	struct tk_desk_setup setup = {
		.endpoint = endpoint,
		.ack_base = ACK_BASE,
		.bytes_max = sizeof memory,
		.flags = region->address,
		.answers = ANSWERS,
		.ack_words = ACK_WORDS,
		.served_code = 0x7f,
		.corrupt_code = 0x82,
	};
	must(tk_desk_open(shelf, &setup, &desk) == 0);
	tk_desk_answers(desk, 1);
	struct tk_cold_setup cold = {.readers = {[READER] = &reader}, .tag = 1, .bytes_max = 8 * BLOCK_BYTES};
	tk_shelf_use_readers(shelf, &cold);
	for (int i = 0; i < BLOCKS; i++)
		memset(names_there[i] + TK_OWNER_BYTES, i, TK_KEY_BYTES);
}

static void feed_rooms(void)
{
	struct tk_room rooms[ROOMS];
	while (tk_shelf_rooms(shelf, rooms, ROOMS))
		;
	for (uint32_t i = 0; i < ROOMS; i++)
		rooms[i] = (struct tk_room){region->address + BLOCKS * BLOCK_BYTES + i * ROOM_PAGES * PAGE, ROOM_PAGES, i};
	must(!tk_shelf_feed(shelf, rooms, ROOMS));
}

static void fill_shelf(void)
{
	static uint64_t id;
	struct tk_shelved blocks[BLOCKS] = {0};
	for (int i = 0; i < BLOCKS; i++) {
		memset(blocks[i].key, i, TK_KEY_BYTES);
		blocks[i].id = ++id;
		blocks[i].address = (uint64_t)(uintptr_t)memory + i * BLOCK_BYTES;
		blocks[i].length = BLOCK_BYTES;
		if (i % 3) {
			must(tk_shelf_put(shelf, &blocks[i], 1) == 0);
			continue;
		}
		struct tk_place there = {.place = 77 | (uint64_t)READER << TK_PLACE_DRIVE_BIT |
						  GENERATION_THERE << TK_PLACE_GENERATION_BIT};
		memcpy(there.key, blocks[i].key, TK_KEY_BYTES);
		tk_shelf_place(shelf, &there, 1);
	}
	feed_rooms();
}

static void put_right(uint8_t *call, size_t length, uint8_t what)
{
	struct call_head *head = (void *)call;
	if (length < sizeof *head)
		return;
	if (what & 2) {
		head->length = (uint32_t)length;
		head->generation = GENERATION;
		head->kind = what & 16 ? CALL_PREFIX : CALL_FETCH;
		head->flags = 0;
	}
	if (what & 4 && what & 16) {
		head->blocks = (uint32_t)((length - sizeof *head) / TK_KEY_BYTES);
		head->metadata_bytes = (uint32_t)(length - sizeof *head - head->blocks * TK_KEY_BYTES);
		head->ack_word %= ACK_WORDS;
		memset(head->fingerprint, 0, sizeof head->fingerprint);
		uint8_t *key = call + sizeof *head + head->metadata_bytes;
		for (; !(head->metadata_bytes % 8) && key < call + length; key += TK_KEY_BYTES)
			memset(key, key[0] % (BLOCKS + 1), TK_KEY_BYTES);
	}
	if (what & 4 && !(what & 16)) {
		uint32_t rows = (uint32_t)((length - sizeof *head) / sizeof(struct call_fetch_row));
		head->metadata_bytes = (uint32_t)(length - sizeof *head - rows * sizeof(struct call_fetch_row));
		head->blocks = rows;
		head->ack_word %= ACK_WORDS;
		memset(head->fingerprint, 0, sizeof head->fingerprint);
		struct call_fetch_row *row = (void *)(call + sizeof *head + head->metadata_bytes);
		for (uint32_t i = 0; i < rows && !(head->metadata_bytes % 8); i++) {
			memset(row[i].key, row[i].key[0] % (BLOCKS + 1), TK_KEY_BYTES);
			row[i].length = BLOCK_BYTES;
			row[i].ack_word %= ACK_WORDS + 1;
			row[i].ack_generation = row[i].ack_generation % 1000;
		}
	}
	if (what & 1)
		head->crc32c = tk_crc32c(call + sizeof head->crc32c, length - sizeof head->crc32c, 0);
}

/* Whether it is the peer's: of as many bytes as it says. */
static int has_tag(const uint8_t *call, size_t length)
{
	uint32_t said;
	uint64_t tag;
	memcpy(&said, call + sizeof(uint32_t), sizeof said);
	if (said > length)
		return 0;
	memcpy(&tag, call + said, sizeof tag);
	return tag == tk_endpoint_tag(endpoint, region->base, region->key, GENERATION, call, said);
}

/* Whatever is there, all entries are taken, or the log is closed. */
static void drain_log(const uint8_t *data, size_t size, uint8_t what)
{
	struct read_entry entry;
	struct read_log *log = (void *)read_log;
	memcpy(read_log + READ_LOG_HEAD_BYTES, data, size);
	log->written = what & 128 ? size : size / 8 * 8;
	log->taken = 0;
	if (what & 64 && size >= sizeof entry) { /* the first entry may be one */
		memcpy(&entry, data, sizeof entry);
		entry.blocks = entry.blocks % TK_DIRECT_BLOCKS + 1;
		entry.metadata_bytes = entry.metadata_bytes % 64 / 8 * 8;
		entry.is_prefix &= 1;
		entry.bytes = (uint32_t)sizeof entry + entry.metadata_bytes;
		entry.bytes += entry.is_prefix ? 0 : entry.blocks * (uint32_t)sizeof(struct read_block);
		memcpy(read_log + READ_LOG_HEAD_BYTES, &entry, sizeof entry);
		log->written = entry.bytes;
	}
	tk_desk_log(desk, log);
	desk_drain_log(desk); /* there is one thread */
	must(desk->log ? log->taken == log->written : !log->is_open && (!(what & 64) || size < sizeof entry));
	tk_desk_log(desk, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static uint8_t rows_out[1 << 20];
	if (!fabric)
		begin();
	if (size < 9 || size > TK_CALL_BYTES)
		return 0;
	fill_shelf();
	drain_log(data, size, data[0]);
	uint8_t *call = calloc(1, TK_CALL_BYTES); /* a place of its own, with nothing of the caller's behind it */
	memcpy(call, data + 8, size - 8);
	put_right(call, size - 8, data[0]);
	endpoint->seal.is_set = data[1] >> 1 & 1;
	if (data[0] & 8) {
		uint64_t tag = tk_endpoint_tag(endpoint, region->base, region->key, GENERATION, call, size - 8);
		memcpy(call + size - 8, &tag, sizeof tag);
	}
	spoilt = data[1] & 1;
	desk->setup.shares = data[1] >> 2 & 1;
	int is_tagged = !endpoint->seal.is_set || has_tag(call, size - 8);
	place = (uint64_t)(uintptr_t)call;
	taken = fired = located = 0;
	struct tk_landing landing = {
		.endpoint = endpoint,
		.generation = GENERATION,
		.payload = (uint64_t)(uintptr_t)call,
		.word = region->address,
		.desk = desk,
		.region = region,
	};
	int answered = answer_at_desk(fabric, &landing);
	answers += answered;
	must(shelf->cold.bytes <= 4 * BLOCK_BYTES && (answered || (!readings && shelf->cold.rooms_count == ROOMS)));
	end_readings();
	must(!shelf->cold.bytes && !shelf->cold.bytes_of[0]);
	int is_prefix = ((struct call_head *)shelf->call)->kind == CALL_PREFIX;
	must(answered ? (located || is_prefix || taken > 1) && fired == taken : !fired);
	must(!answered || is_tagged);
	must(desk->under_way_bytes == 0 && (located ? desk->held_bytes > 0 : !desk->held_bytes));
	fabric->now_ns = UINT64_MAX; /* what is held for the peer may go */
	poll_desks(fabric);
	must(desk->held_bytes == 0);
	while (tk_served_take(shelf, rows_out, sizeof rows_out, 1) > 0)
		;
	must(shelf->served_bytes == 0);
	tk_shelf_unlist(shelf, names_there[0], BLOCKS, 0);
	must(tk_shelf_count(shelf) == 0);
	free(call);
	return 0;
}

#ifdef STANDALONE
#define RUN_BYTES_MAX 2200
#define counted answers

static size_t run_bytes(uint64_t state, uint64_t run)
{
	size_t rows = state >> 40 & 15, size = 8 + sizeof(struct call_head) + rows * sizeof(struct call_fetch_row);
	return run % 4 ? size : size + (state >> 50 & 63);
}
#endif
#include "standalone.h"
