/*
 * The desk: receives the calls of one peer. The progress thread answers those that the shelf can serve completely.
 *
 * `kvstore/wire/fabric_call.py` describes a call. It is copied before it is examined, because the caller can still
 * write to it. If it is a valid fetch that requests nothing but blocks, and all of these are on the shelf, each block
 * is sent like any put with a checksum, followed by its acknowledgement, and the desk waits for the next call. A record
 * of what was served is kept for the application. A call that asks how many blocks of a list are stored is answered if
 * all are on the shelf. Any other call becomes an ordinary landing, and the application answers it. A peer on this
 * machine that has mapped the shelf's region may request the blocks' locations instead of their bytes (shared.c).
 * Blocks that are not in memory, but whose places on the drives are known, are read from there (desk_cold.c).
 *
 * What always holds: a call is answered here completely or not at all. A block whose checksum differs is not sent:
 * its caller gets a miss, and the block leaves the shelf. At most `bytes_max` of one desk are under way. On a sealed
 * connection only calls with a valid tag are answered. A block whose location was given to a peer counts as being
 * sent until the peer's next call in the same place, but no longer than TK_HELD_NS.
 */
#define _GNU_SOURCE
#include "desk_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SERVED_BYTES_MAX (1u << 20) /* of answered calls that the application has not fetched yet */

int tk_desk_open(struct tk_shelf *shelf, const struct tk_desk_setup *setup, struct tk_desk **out)
{
	int status = fabric_refusal(shelf->fabric);
	if (status)
		return status;
	if (!setup->endpoint || setup->endpoint->fabric != shelf->fabric || setup->ack_base % 8)
		return -EINVAL;
	struct tk_desk *desk = calloc(1, sizeof *desk);
	if (!desk)
		return -ENOMEM;
	desk->shelf = shelf;
	desk->setup = *setup;
	pthread_mutex_lock(&shelf->lock);
	desk->next = shelf->desks;
	shelf->desks = desk;
	pthread_mutex_unlock(&shelf->lock);
	*out = desk;
	return 0;
}

void tk_desk_answers(struct tk_desk *desk, int answers)
{
	__atomic_store_n(&desk->answers, answers, __ATOMIC_RELEASE);
	pthread_mutex_lock(&desk->shelf->lock);
	desk_open_log(desk, answers);
	pthread_mutex_unlock(&desk->shelf->lock);
}

void tk_desk_close(struct tk_desk *desk)
{
	struct tk_shelf *shelf = desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	struct tk_desk **link = &shelf->desks;
	while (*link != desk)
		link = &(*link)->next;
	*link = desk->next;
	desk_close_log(desk);
	for (uint32_t place = 0; place < TK_CALL_PLACES; place++)
		desk_release(desk, place);
	pthread_mutex_unlock(&shelf->lock);
	free(desk);
}

int tk_served_take(struct tk_shelf *shelf, void *out, size_t out_bytes, int begins)
{
	size_t taken = 0;
	pthread_mutex_lock(&shelf->lock);
	if (shelf_drain_logs(shelf, begins) || begins)
		shelf->served_until = shelf->served_listed;
	while (shelf->served_taken != shelf->served_until && shelf->first->head.bytes <= out_bytes - taken) {
		struct served *served = shelf->first;
		memcpy((char *)out + taken, &served->head, sizeof served->head);
		memcpy((char *)out + taken + sizeof served->head, served->rest,
		       served->head.bytes - sizeof served->head);
		taken += served->head.bytes;
		shelf->first = served->next;
		shelf->served_taken++;
		shelf->served_bytes -= served->head.bytes;
		free(served);
	}
	if (!shelf->first)
		shelf->last = NULL;
	shelf->cold.is_notified = shelf->cold.is_notified && shelf->first;
	int are_more = !taken && shelf->first;
	pthread_mutex_unlock(&shelf->lock);
	return are_more ? -1 : (int)taken;
}

/* Copies the call in a place; NULL if its contents show that it can't be answered here. */
static const struct call_head *read_call(struct tk_shelf *shelf, const struct tk_landing *landing)
{
	const struct call_head *there = (const void *)landing->payload;
	uint32_t length = __atomic_load_n(&there->length, __ATOMIC_RELAXED), more = tag_bytes(landing->endpoint);
	if (length < sizeof *there || length > TK_CALL_BYTES - more)
		return NULL;
	memcpy(shelf->call, there, length + more);
	uint64_t tag = 0;
	memcpy(&tag, shelf->call + length, more);
	if (more && !tk_endpoint_believes(landing->endpoint, landing->region, landing->word, landing->generation,
					  shelf->call, length, tag))
		return NULL;
	const struct call_head *head = (const void *)shelf->call;
	if (head->length != length || !call_row_bytes(head->kind) || head->flags & CALL_TELLS ||
	    head->generation != landing->generation || head->metadata_bytes % 8 || head->metadata_bytes > length ||
	    !head->blocks || head->blocks > TK_CALL_BLOCKS)
		return NULL;
	if (sizeof *head + head->metadata_bytes + head->blocks * call_row_bytes(head->kind) != length)
		return NULL;
	return tk_crc32c(shelf->call + sizeof head->crc32c, length - sizeof head->crc32c, 0) == head->crc32c ? head
													     : NULL;
}

static int may_be_acked(const struct tk_desk *desk, uint32_t word, uint64_t generation)
{
	return word < desk->setup.ack_words && generation && generation <= ACK_GENERATION_MAX;
}

/* One row of a call. */
struct call_part_row desk_row(const struct call_head *head, uint32_t number)
{
	struct call_part_row row = {.part = 0};
	size_t bytes = call_row_bytes(head->kind);
	memcpy(&row, (const char *)(head + 1) + head->metadata_bytes + number * bytes, bytes);
	return row;
}

int desk_may_send(const struct tk_desk *desk, const struct call_part_row *row)
{
	int is_inside = row->part ? row->part <= row->row.length && row->skip <= row->row.length - row->part : !row->skip;
	return is_inside && may_be_acked(desk, row->row.ack_word, row->row.ack_generation);
}

void desk_give_back(struct tk_shelf *shelf, uint32_t count)
{
	while (count--)
		if (shelf->found[count])
			shelf_release(shelf, shelf->found[count]);
}

/* Under the shelf's lock: marks all of the call's blocks as being sent, or none. Returns their bytes; 0: none. */
uint64_t desk_find_all(struct tk_desk *desk, const struct call_head *head, uint64_t *sent_bytes)
{
	struct tk_shelf *shelf = desk->shelf;
	uint64_t bytes = 0;
	uint32_t count = 0;
	for (; count < head->blocks; count++) {
		struct call_part_row row = desk_row(head, count);
		struct shelved *block = shelf_find(shelf, desk->setup.owner, row.row.key);
		if (!block || block->block.length != row.row.length || !desk_may_send(desk, &row) ||
		    memcmp(block->block.fingerprint, head->fingerprint, TK_FINGERPRINT_BYTES))
			break;
		block->sending++;
		shelf->found[count] = block;
		bytes += row.row.length;
		*sent_bytes += row.part ? row.part : row.row.length;
	}
	uint64_t busy = desk->under_way_bytes + desk->held_bytes;
	if (count == head->blocks && busy <= desk->setup.bytes_max && bytes <= desk->setup.bytes_max - busy)
		return bytes;
	desk_give_back(shelf, count);
	return 0;
}

/* Returns the id by which a block's use is reported; 0: there is no block. Uses of a block that has no lasting id yet
 * are reported when it gets one. */
uint64_t note_use(struct shelved *block)
{
	if (!block)
		return 0;
	if (block->block.id & LANDED_ID)
		block->was_used = 1;
	return block->block.id;
}

struct served *served_alloc(struct tk_shelf *shelf, size_t rest_bytes)
{
	size_t report_bytes = sizeof(struct tk_served) + rest_bytes;
	if (shelf->served_bytes + report_bytes > SERVED_BYTES_MAX)
		return NULL;
	struct served *served = malloc(sizeof *served + rest_bytes);
	if (!served)
		return NULL;
	*served = (struct served){.head = {.bytes = (uint32_t)report_bytes}};
	shelf->served_bytes += report_bytes;
	return served;
}

/* Under the shelf's lock: makes the report about a call, which is delivered when the call is over. */
struct served *served_new(struct tk_shelf *shelf, const struct tk_desk *desk, const struct call_head *head, uint64_t bytes,
			 uint32_t cold)
{
	uint32_t ids = call_fetches(head->kind) ? head->blocks : 0;
	size_t ids_bytes = ids * sizeof(uint64_t);
	size_t rows_bytes = cold ? sizeof(struct tk_cold_head) + head->blocks * sizeof(struct tk_cold_row) : 0;
	struct served *served = served_alloc(shelf, ids_bytes + head->metadata_bytes + rows_bytes);
	if (!served)
		return NULL;
	served->left = head->blocks;
	served->head.desk = desk->setup.tag;
	served->head.began_ns = tk_now_ns();
	served->head.size_bytes = bytes;
	served->head.blocks = head->blocks;
	served->head.metadata_bytes = head->metadata_bytes;
	served->head.cold = cold;
	served->head.is_prefix = head->kind == CALL_PREFIX;
	for (uint32_t i = 0; i < ids; i++)
		served->rest[i] = note_use(shelf->found[i]);
	memcpy(served->rest + ids, head + 1, head->metadata_bytes);
	return served;
}

/* Under the shelf's lock: discards the report of a call that is not answered here. */
void served_discard(struct tk_shelf *shelf, struct served *served)
{
	shelf->served_bytes -= served->head.bytes;
	free(served);
}

void desk_send_word(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk, uint32_t word,
		    uint64_t generation, uint32_t code)
{
	work->op = (struct tk_operation){
		.endpoint = desk->setup.endpoint,
		.peer = desk->setup.peer,
		.flag_target = desk->setup.ack_base + (uint64_t)word * 8,
		.flag_key = desk->setup.ack_key,
		.flag_value = generation << ACK_CODE_BITS | code,
		.flags = TK_QUIET | TK_FLAG_PUT,
	};
	adopt(fabric, work);
	fire(fabric, work, fabric->now_ns);
}

void desk_send_block(struct tk_fabric *fabric, struct work *work, struct tk_desk *desk,
		     const struct call_part_row *wanted, struct shelved *block, struct served *served)
{
	const struct call_fetch_row *row = &wanted->row;
	work->shelved = block;
	work->served = served;
	work->desk = desk;
	work->op = (struct tk_operation){
		.endpoint = desk->setup.endpoint,
		.peer = desk->setup.peer,
		.local = block->block.address,
		.remote = row->target,
		.remote_key = row->target_key,
		.flag_target = desk->setup.ack_base + (uint64_t)row->ack_word * 8,
		.flag_key = desk->setup.ack_key,
		.flag_value = row->ack_generation << ACK_CODE_BITS | desk->setup.served_code,
		.region = desk->shelf->region,
		.length = row->length,
		.crc32c = block->block.crc32c,
		.flags = TK_QUIET | TK_FLAG_PUT | TK_VERIFY_CRC,
		.skip = wanted->skip, /* all of it is checked, even if only a part is sent */
		.part = wanted->part,
	};
	__atomic_add_fetch(&desk->shelf->region->uses, 1, __ATOMIC_RELAXED);
	adopt(fabric, work);
	fire(fabric, work, fabric->now_ns);
}

/* Under the shelf's lock. */
void served_append(struct tk_shelf *shelf, struct served *served)
{
	if (shelf->last)
		shelf->last->next = served;
	else
		shelf->first = served;
	shelf->last = served;
	shelf->served_listed++;
}

/* Under the shelf's lock. */
void desk_list_served(struct tk_shelf *shelf, struct served *served)
{
	served->head.ended_ns = tk_now_ns();
	served_append(shelf, served);
	if (served->head.cold)
		cold_notify(shelf, served);
}

/* Under the shelf's lock: whether a fetch of any length would find all of these blocks here. */
static int are_here(const struct tk_desk *desk, const struct call_head *head)
{
	for (uint32_t i = 0; i < head->blocks; i++) {
		struct call_part_row row = desk_row(head, i);
		const struct shelved *block = shelf_find(desk->shelf, desk->setup.owner, row.row.key);
		if (!block || memcmp(block->block.fingerprint, head->fingerprint, TK_FINGERPRINT_BYTES))
			return 0;
	}
	return 1;
}

/* Answers only if all are here; else the application finds out how many are stored, and why the next one is not. */
static int answer_prefix(struct tk_fabric *fabric, struct tk_desk *desk, const struct call_head *head)
{
	struct tk_shelf *shelf = desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	struct served *served = are_here(desk, head) ? served_new(shelf, desk, head, 0, 0) : NULL;
	struct work *work = served ? take_free_work(fabric, 1) : NULL;
	if (work)
		desk_list_served(shelf, served);
	else if (served)
		served_discard(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
	if (!work)
		return 0;
	desk_tell(fabric, work, desk, head);
	return 1;
}

/* A client with a full log makes calls until there is room again. */
static void drain_log(struct tk_desk *desk)
{
	pthread_mutex_lock(&desk->shelf->lock);
	desk_drain_log(desk);
	if (desk_log_has_more(desk))
		served_notify(desk->shelf); /* else the client would make calls until the application asks for something */
	pthread_mutex_unlock(&desk->shelf->lock);
}

int answer_at_desk(struct tk_fabric *fabric, const struct tk_landing *landing)
{
	struct tk_desk *desk = landing->desk;
	if (!desk || !__atomic_load_n(&desk->answers, __ATOMIC_ACQUIRE))
		return 0;
	struct tk_shelf *shelf = desk->shelf;
	desk_called_again(desk, landing);
	const struct call_head *head = read_call(shelf, landing);
	if (!head || !may_be_acked(desk, head->ack_word, head->generation))
		return 0;
	if (head->kind == CALL_PREFIX)
		return answer_prefix(fabric, desk, head);
	if (desk->setup.shares && head->flags & CALL_SHARES)
		drain_log(desk);
	if (desk->setup.shares && head->flags & CALL_SHARES && desk_answer_where(fabric, desk, landing, head))
		return 1;
	uint64_t sent_bytes = 0;

	pthread_mutex_lock(&shelf->lock);
	uint64_t bytes = desk_find_all(desk, head, &sent_bytes);
	struct served *served = bytes ? served_new(shelf, desk, head, sent_bytes, 0) : NULL;
	struct work *work = served ? take_free_work(fabric, head->blocks + 1) : NULL;
	if (bytes && !work)
		desk_give_back(shelf, head->blocks);
	if (served && !work)
		served_discard(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
	if (!work)
		return desk_answer_cold(fabric, desk, head);

	desk->under_way_bytes += bytes;
	fabric->statistics.served += head->blocks;
	for (uint32_t i = 0; i < head->blocks; i++) {
		struct work *next = work->next;
		struct call_part_row row = desk_row(head, i);
		desk_send_block(fabric, work, desk, &row, shelf->found[i], served);
		work = next;
	}
	desk_send_word(fabric, work, desk, head->ack_word, head->generation, CALL_DONE);
	return 1;
}

/* The bytes on the shelf have changed: a miss is sent instead. */
void miss_at_desk(struct work *work)
{
	struct tk_shelf *shelf = work->desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	shelf_unlist(shelf, work->shelved); /* still known, because it is being sent */
	work->served->head.corrupt++;
	pthread_mutex_unlock(&shelf->lock);
	uint64_t generation = work->op.flag_value >> ACK_CODE_BITS;
	work->op.flag_value = generation << ACK_CODE_BITS | work->desk->setup.corrupt_code;
	work->op.length = 0;
}

/* A block of an answer has ended, successfully or not. */
void over_at_desk(struct work *work, int status)
{
	struct tk_desk *desk = work->desk;
	struct tk_shelf *shelf = desk->shelf;
	struct served *served = work->served;
	desk->under_way_bytes -= work->shelved->block.length;
	pthread_mutex_lock(&shelf->lock);
	served->head.failed += !!status;
	shelf_release(shelf, work->shelved);
	if (!--served->left)
		desk_list_served(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
	work->shelved = NULL;
}
