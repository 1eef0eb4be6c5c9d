/*
 * A desk's answers from the drives: to calls for blocks of which some are not in memory, but have known places.
 *
 * Each such block is read (reader.c) into a room, a piece of the shelf's region that the application has provided in
 * advance, and sent from there. The application gets the call afterwards, with a row for each block: it keeps the
 * rooms' bytes in its hot memory, or reuses the rooms. A room into which the drive is still reading stays here until
 * the read has ended.
 *
 * What always holds: a call is answered completely or not at all, except that a block that could not be read, or is the
 * wrong one, is left to the application, which is notified at once. A block is sent only if its header has the
 * requested name, no expiry and a valid tag for that place, its payload has the CRC of that header, or its own tag, and
 * its name still had that place after all of it had been read. The application unlists a name before its pages on the
 * drive are reused, so no pin is needed. A call reads at most the unused part of the limit, minus its owner's reads
 * under way.
 *
 * What it doesn't do: keep statistics, order calls, or read large calls: the application does.
 */
#define _GNU_SOURCE
#include "desk_inside.h"
#include "reader_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define IN_MEMORY UINT32_MAX /* instead of a room */
#define CALL_SHARE 2	     /* a call reads at most this part of the limit */
#define REPORT_NS 2000000u     /* answered calls are reported together, after this time, */
#define ROOMS_LOW 4	     /* or when so few rooms are left as the last call used, times this */

static uint32_t pages_of(uint32_t length)
{
	return 1 + (length + PAGE - 1) / PAGE;
}

static struct tk_reader *reader_at(const struct tk_shelf *shelf, uint64_t place)
{
	return shelf->cold.setup.readers[place >> TK_PLACE_DRIVE_BIT & (TK_DRIVES_MAX - 1)];
}

static uint64_t offset_at(uint64_t place)
{
	return (place & ((UINT64_C(1) << TK_PLACE_DRIVE_BIT) - 1)) * PAGE;
}

static struct tk_cold_head *cold_head(struct served *served)
{
	return (void *)((char *)(served->rest + served->head.blocks) + served->head.metadata_bytes);
}

static struct tk_cold_row *cold_row(struct served *served, uint32_t number)
{
	return (struct tk_cold_row *)(cold_head(served) + 1) + number;
}

/* --- all under the shelf's lock */

/* Takes a room of this many pages. There is one size at a time, as the application provides them. */
static int take_room(struct cold *cold, uint32_t pages, struct tk_room *out)
{
	if (!cold->rooms_count || cold->rooms[cold->rooms_count - 1].pages < pages)
		return 0;
	*out = cold->rooms[--cold->rooms_count];
	return 1;
}

static void give_back(struct tk_shelf *shelf, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		if (!shelf->found[i])
			shelf->cold.rooms[shelf->cold.rooms_count++] = shelf->into[i]; /* there was room for them */
	desk_give_back(shelf, count);
}

/* Finds a block in memory or on a drive, and takes what sending it needs. */
static int find(struct tk_desk *desk, const struct call_head *head, uint32_t number, const struct call_part_row *row)
{
	struct tk_shelf *shelf = desk->shelf;
	struct shelved *block = shelf_find(shelf, desk->setup.owner, row->row.key);
	if (!desk_may_send(desk, row) || !row->row.length || row->row.length > UINT32_MAX - 2 * PAGE)
		return 0;
	if (block) {
		if (block->block.length != row->row.length ||
		    memcmp(block->block.fingerprint, head->fingerprint, TK_FINGERPRINT_BYTES))
			return 0;
		shelf->found[number] = block;
		block->sending++;
		return 1;
	}
	uint8_t name[NAME_BYTES];
	names_join(name, desk->setup.owner, row->row.key);
	uint64_t place = names_place(&shelf->stored, name);
	if (!place || !reader_at(shelf, place))
		return 0;
	uint32_t pages = pages_of(row->row.length);
	if (!take_room(&shelf->cold, pages, &shelf->into[number])) {
		shelf->cold.wanted_pages = pages;
		return 0;
	}
	shelf->found[number] = NULL;
	shelf->places[number] = place;
	return 1;
}

struct sizes {
	uint64_t all, cold, sent;
	uint32_t cold_blocks;
};

/* All blocks of a call, or none: then the application answers it. */
static int find_all(struct tk_desk *desk, const struct call_head *head, struct sizes *sizes)
{
	const struct cold *cold = &desk->shelf->cold;
	uint64_t mine = cold->bytes_of[desk->setup.owner[0]], others = cold->setup.bytes_max - cold->bytes;
	uint64_t most = mine < others ? others - mine : 0, busy = desk->under_way_bytes + desk->held_bytes;
	uint32_t count = 0;
	if (most > cold->setup.bytes_max / CALL_SHARE)
		most = cold->setup.bytes_max / CALL_SHARE;
	for (; count < head->blocks; count++) {
		struct call_part_row row = desk_row(head, count);
		if (!find(desk, head, count, &row))
			break;
		sizes->all += row.row.length;
		sizes->sent += row.part ? row.part : row.row.length;
		if (!desk->shelf->found[count]) {
			sizes->cold += row.row.length;
			sizes->cold_blocks++;
		}
		if (sizes->cold > most) {
			count++;
			break;
		}
	}
	int fits = busy <= desk->setup.bytes_max && sizes->all <= desk->setup.bytes_max - busy && sizes->cold <= most;
	if (count == head->blocks && sizes->cold_blocks && fits)
		return 1;
	give_back(desk->shelf, count);
	return 0;
}

static void fill_in_rows(struct served *served, const struct tk_shelf *shelf, const struct call_head *head)
{
	struct tk_cold_head *call = cold_head(served);
	*call = (struct tk_cold_head){.shares = !!(head->flags & CALL_ROWS)};
	memcpy(call->fingerprint, head->fingerprint, sizeof call->fingerprint);
	for (uint32_t i = 0; i < head->blocks; i++) {
		struct call_part_row wanted = desk_row(head, i);
		struct tk_cold_row *row = cold_row(served, i);
		*row = (struct tk_cold_row){
			.length = wanted.row.length,
			.ack_word = wanted.row.ack_word,
			.ack_generation = wanted.row.ack_generation,
			.target = wanted.row.target,
			.target_key = wanted.row.target_key,
			.skip = wanted.skip,
			.part = wanted.part,
			.room = shelf->found[i] ? IN_MEMORY : shelf->into[i].number,
		};
		memcpy(row->key, wanted.row.key, sizeof row->key);
	}
}

void served_notify(struct tk_shelf *shelf)
{
	shelf->cold.is_due = 0;
	if (shelf->cold.is_notified)
		return;
	shelf->cold.is_notified = 1;
	report(shelf->fabric, TK_CAME, shelf->cold.setup.tag, 0, 0, tk_now_ns());
}

/* Reports at once if a caller waits for blocks that were not sent, or if rooms are short: without rooms later calls go
 * to the application. */
void cold_notify(struct tk_shelf *shelf, const struct served *served)
{
	uint64_t at_ns = served->head.ended_ns + REPORT_NS;
	if (served->has_unsent || shelf->cold.rooms_count < ROOMS_LOW * served->head.cold) {
		served_notify(shelf);
	} else if (!shelf->cold.is_notified && !shelf->cold.is_due) {
		shelf->cold.is_due = 1;
		if (at_ns < shelf->fabric->cold_notify_ns)
			shelf->fabric->cold_notify_ns = at_ns;
	}
}

static int is_in_region(const struct tk_region *region, const struct tk_room *room)
{
	uint64_t bytes = (uint64_t)room->pages * PAGE;
	return room->address % PAGE == 0 && room->address >= region->address && bytes <= region->length &&
	       room->address - region->address <= region->length - bytes;
}

/* --- the progress thread */

static void read_block(struct tk_fabric *fabric, struct work *work, struct tk_desk *desk, const struct call_head *head,
		       struct reading *reading, struct served *served, uint32_t number)
{
	struct tk_shelf *shelf = desk->shelf;
	struct call_part_row row = desk_row(head, number);
	uint64_t place = shelf->places[number];
	reading_fill_in(reading, reading->batch, reader_at(shelf, place), row.row.length, row.row.key, desk->setup.owner,
			head->fingerprint);
	reading->offset = offset_at(place);
	reading->place = place;
	reading->room = shelf->into[number];
	reading->work = work;
	work->reading = reading;
	work->batch = reading->batch;
	work->served = served;
	work->desk = desk;
	work->op = (struct tk_operation){
		.endpoint = desk->setup.endpoint,
		.peer = desk->setup.peer,
		.local = shelf->into[number].address + PAGE,
		.remote = row.row.target,
		.remote_key = row.row.target_key,
		.flag_target = desk->setup.ack_base + (uint64_t)row.row.ack_word * 8,
		.flag_key = desk->setup.ack_key,
		.flag_value = row.row.ack_generation << ACK_CODE_BITS | desk->setup.served_code,
		.region = shelf->region,
		.row = number,
		.length = row.row.length,
		.flags = TK_QUIET | TK_FLAG_PUT | TK_VERIFY_CRC | (head->flags & CALL_ROWS ? TK_SHARED_PUT : 0),
		.skip = row.skip,
		.part = row.part,
	};
	__atomic_add_fetch(&shelf->region->uses, 1, __ATOMIC_RELAXED);
	adopt(fabric, work);
	reader_begin(work);
}

static struct batch *open_batch(struct tk_shelf *shelf, uint32_t blocks)
{
	struct batch *batch = malloc(sizeof *batch + blocks * sizeof *batch->readings);
	if (batch)
		*batch = (struct batch){.region = shelf->region, .shelf = shelf, .unread = blocks, .not_over = blocks};
	return batch;
}

static void begin_all(struct tk_fabric *fabric, struct work *work, struct tk_desk *desk, const struct call_head *head,
		      struct batch *batch, struct served *served)
{
	struct reading *reading = batch->readings;
	__atomic_add_fetch(&batch->region->uses, 1, __ATOMIC_RELAXED); /* by the readings */
	for (uint32_t i = 0; i < head->blocks; i++) {
		struct work *next = work->next;
		struct call_part_row row = desk_row(head, i);
		if (desk->shelf->found[i]) {
			desk_send_block(fabric, work, desk, &row, desk->shelf->found[i], served);
		} else {
			reading->batch = batch;
			read_block(fabric, work, desk, head, reading++, served, i);
		}
		work = next;
	}
	desk_tell(fabric, work, desk, head);
}

int desk_answer_cold(struct tk_fabric *fabric, struct tk_desk *desk, const struct call_head *head)
{
	struct tk_shelf *shelf = desk->shelf;
	struct sizes sizes = {0};
	pthread_mutex_lock(&shelf->lock);
	int found = find_all(desk, head, &sizes);
	struct batch *batch = found ? open_batch(shelf, sizes.cold_blocks) : NULL;
	struct served *served = batch ? served_new(shelf, desk, head, sizes.sent, sizes.cold_blocks) : NULL;
	struct work *work = served ? take_free_work(fabric, head->blocks + 1) : NULL;
	if (work) {
		fill_in_rows(served, shelf, head);
		shelf->cold.bytes += sizes.cold;
		shelf->cold.bytes_of[desk->setup.owner[0]] += sizes.cold;
	} else if (found) {
		give_back(shelf, head->blocks);
		free(batch);
	}
	if (served && !work)
		served_discard(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
	if (!work)
		return 0;
	desk->under_way_bytes += sizes.all;
	fabric->statistics.served += head->blocks;
	begin_all(fabric, work, desk, head, batch, served);
	return 1;
}

int cold_is_there(struct work *work, uint64_t place, uint64_t generation)
{
	struct tk_shelf *shelf = work->desk->shelf;
	uint8_t name[NAME_BYTES];
	names_join(name, work->desk->setup.owner, cold_row(work->served, work->op.row)->key);
	work->served->rest[work->op.row] = generation;
	pthread_mutex_lock(&shelf->lock);
	int is_there = names_place(&shelf->stored, name) == place;
	pthread_mutex_unlock(&shelf->lock);
	return is_there;
}

/* A block is not wanted any more, and the drive may still be reading it: so its room is not reported with the call. */
void cold_room_stays(struct work *work)
{
	cold_row(work->served, work->op.row)->room = IN_MEMORY;
}

/* The drive has finished with the room. */
void cold_room_back(struct tk_shelf *shelf, const struct tk_room *room)
{
	struct cold *cold = &shelf->cold;
	pthread_mutex_lock(&shelf->lock);
	if (!grow((void **)&cold->rooms, &cold->rooms_capacity, cold->rooms_count, sizeof *cold->rooms))
		cold->rooms[cold->rooms_count++] = *room;
	pthread_mutex_unlock(&shelf->lock);
}

/* A block has ended, successfully or not. The application handles a block that was not read, or is the wrong one. */
void cold_over(struct work *work)
{
	struct tk_desk *desk = work->desk;
	struct tk_shelf *shelf = desk->shelf;
	struct served *served = work->served;
	struct tk_cold_row *row = cold_row(served, work->op.row);
	int is_left = work->failed == -ENODATA || work->failed == -EBADMSG || work->failed == -ECANCELED;
	desk->under_way_bytes -= row->length;
	pthread_mutex_lock(&shelf->lock);
	shelf->cold.bytes -= row->length;
	shelf->cold.bytes_of[desk->setup.owner[0]] -= row->length;
	row->status = is_left ? work->failed : 0;
	served->has_unsent |= is_left;
	served->head.failed += work->failed && !is_left;
	if (!--served->left)
		desk_list_served(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
}

void poll_cold(struct tk_fabric *fabric)
{
	if (fabric->now_ns < fabric->cold_notify_ns) {
		if (fabric->cold_notify_ns < fabric->next_deadline_ns)
			fabric->next_deadline_ns = fabric->cold_notify_ns;
		return;
	}
	fabric->cold_notify_ns = UINT64_MAX;
	for (struct tk_shelf *shelf = fabric->shelves; shelf; shelf = shelf->next) {
		pthread_mutex_lock(&shelf->lock);
		if (shelf->cold.is_due && shelf->first)
			served_notify(shelf);
		shelf->cold.is_due = 0; /* the application may have taken them before */
		pthread_mutex_unlock(&shelf->lock);
	}
}

/* --- the application's side; any thread */

int tk_shelf_feed(struct tk_shelf *shelf, const struct tk_room *rooms, int count)
{
	struct cold *cold = &shelf->cold;
	int status = 0;
	pthread_mutex_lock(&shelf->lock);
	for (int i = 0; !status && i < count; i++) {
		status = is_in_region(shelf->region, &rooms[i]) ? 0 : -ERANGE;
		if (!status)
			status = grow((void **)&cold->rooms, &cold->rooms_capacity, cold->rooms_count, sizeof *cold->rooms);
		if (!status)
			cold->rooms[cold->rooms_count++] = rooms[i];
		else
			cold->rooms_count -= (uint32_t)i; /* all or none */
	}
	pthread_mutex_unlock(&shelf->lock);
	return status;
}

int tk_shelf_rooms(struct tk_shelf *shelf, struct tk_room *out, int out_max)
{
	int count = 0;
	pthread_mutex_lock(&shelf->lock);
	while (shelf->cold.rooms_count && count < out_max)
		out[count++] = shelf->cold.rooms[--shelf->cold.rooms_count];
	pthread_mutex_unlock(&shelf->lock);
	return count;
}
