/*
 * The desk: where calls of one peer come in, and the progress thread answers those for which the shelf has all.
 *
 * A call is what `kvstore/wire/fabric_call.py` says. It is copied before it is looked at, because its caller can still
 * write where it lies. If it is a fetch, whole, with nothing to tell but the blocks it wants, and every one of them is on
 * the shelf, each goes out as any put with a checksum does, its acknowledgement behind it, and the desk waits for the
 * next call; what it did is noted, to be taken by who keeps the books. Anything else is an ordinary landing, and the
 * application's.
 *
 * What always holds: a call is answered here whole or not at all; a block whose checksum differs is not sent: its
 * caller is told that it is missed, and nobody finds it on the shelf any more; no more than `bytes_max` of one desk are
 * under way; where the connection is sealed, only its other end's calls are answered.
 */
#define _GNU_SOURCE
#include "call.h"
#include "parts.h"
#include "shelf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SERVED_BYTES_MAX (1u << 20) /* of what was answered here and nobody has taken note of */

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
}

void tk_desk_close(struct tk_desk *desk)
{
	struct tk_shelf *shelf = desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	struct tk_desk **link = &shelf->desks;
	while (*link != desk)
		link = &(*link)->next;
	*link = desk->next;
	pthread_mutex_unlock(&shelf->lock);
	free(desk);
}

int tk_served_take(struct tk_shelf *shelf, void *out, size_t out_bytes)
{
	size_t taken = 0;
	pthread_mutex_lock(&shelf->lock);
	while (shelf->first && shelf->first->told.bytes <= out_bytes - taken) {
		struct served *served = shelf->first;
		memcpy((char *)out + taken, &served->told, sizeof served->told);
		memcpy((char *)out + taken + sizeof served->told, served->rest,
		       served->told.bytes - sizeof served->told);
		taken += served->told.bytes;
		shelf->first = served->next;
		shelf->served_bytes -= served->told.bytes;
		free(served);
	}
	if (!shelf->first)
		shelf->last = NULL;
	pthread_mutex_unlock(&shelf->lock);
	return (int)taken;
}

/* A copy of the call in a place, if it is a fetch that can be answered here as far as the call itself goes. */
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

/* The rows of a call, one by one. */
static struct call_part_row row_of(const struct call_head *head, uint32_t number)
{
	struct call_part_row row = {.part = 0};
	size_t bytes = call_row_bytes(head->kind);
	memcpy(&row, (const char *)(head + 1) + head->metadata_bytes + number * bytes, bytes);
	return row;
}

static int is_inside_block(const struct call_part_row *row)
{
	return row->part ? row->part <= row->row.length && row->skip <= row->row.length - row->part : !row->skip;
}

static void give_back(struct tk_shelf *shelf, uint32_t count)
{
	while (count)
		shelf_let_go(shelf, shelf->found[--count]);
}

/* Under the shelf's lock: all of its blocks, or none. Each is held for sending. Returns their bytes, 0 for none. */
static uint64_t find_all(struct tk_desk *desk, const struct call_head *head, uint64_t *sent_bytes)
{
	struct tk_shelf *shelf = desk->shelf;
	uint64_t bytes = 0;
	uint32_t count = 0;
	for (; count < head->blocks; count++) {
		struct call_part_row row = row_of(head, count);
		struct shelved *block = shelf_find(shelf, desk->setup.owner, row.row.key);
		if (!block || block->block.length != row.row.length || !is_inside_block(&row) ||
		    memcmp(block->block.fingerprint, head->fingerprint, TK_FINGERPRINT_BYTES) ||
		    !may_be_acked(desk, row.row.ack_word, row.row.ack_generation))
			break;
		block->sending++;
		shelf->found[count] = block;
		bytes += row.row.length;
		*sent_bytes += row.part ? row.part : row.row.length;
	}
	if (count == head->blocks && bytes <= desk->setup.bytes_max - desk->under_way_bytes)
		return bytes;
	give_back(shelf, count);
	return 0;
}

/* Under the shelf's lock: what is told of the call once it is over. */
static struct served *note(struct tk_shelf *shelf, const struct tk_desk *desk, const struct call_head *head, uint64_t bytes)
{
	size_t ids_bytes = head->blocks * sizeof(uint64_t);
	size_t told_bytes = sizeof(struct tk_served) + ids_bytes + head->metadata_bytes;
	if (shelf->served_bytes + told_bytes > SERVED_BYTES_MAX)
		return NULL;
	struct served *served = malloc(sizeof *served + ids_bytes + head->metadata_bytes);
	if (!served)
		return NULL;
	served->next = NULL;
	served->left = head->blocks;
	served->told = (struct tk_served){
		.desk = desk->setup.tag,
		.began_ns = tk_now_ns(),
		.size_bytes = bytes,
		.bytes = (uint32_t)told_bytes,
		.blocks = head->blocks,
		.metadata_bytes = head->metadata_bytes,
	};
	for (uint32_t i = 0; i < head->blocks; i++)
		served->rest[i] = shelf->found[i]->block.id;
	memcpy(served->rest + head->blocks, head + 1, head->metadata_bytes);
	shelf->served_bytes += told_bytes;
	return served;
}

static void send_word(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk, uint32_t word,
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

static void send_block(struct tk_fabric *fabric, struct work *work, struct tk_desk *desk,
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
		.skip = wanted->skip, /* all of it is checked, whatever part of it goes out */
		.part = wanted->part,
	};
	__atomic_add_fetch(&desk->shelf->region->uses, 1, __ATOMIC_RELAXED);
	adopt(fabric, work);
	fire(fabric, work, fabric->now_ns);
}

int answer_at_desk(struct tk_fabric *fabric, const struct tk_landing *landing)
{
	struct tk_desk *desk = landing->desk;
	if (!desk || !__atomic_load_n(&desk->answers, __ATOMIC_ACQUIRE))
		return 0;
	struct tk_shelf *shelf = desk->shelf;
	const struct call_head *head = read_call(shelf, landing);
	if (!head || !may_be_acked(desk, head->ack_word, head->generation))
		return 0;
	uint64_t sent_bytes = 0;

	pthread_mutex_lock(&shelf->lock);
	uint64_t bytes = find_all(desk, head, &sent_bytes);
	struct served *served = bytes ? note(shelf, desk, head, sent_bytes) : NULL;
	struct work *work = served ? take_free_work(fabric, head->blocks + 1) : NULL;
	if (bytes && !work)
		give_back(shelf, head->blocks);
	if (served && !work) {
		shelf->served_bytes -= served->told.bytes;
		free(served);
	}
	pthread_mutex_unlock(&shelf->lock);
	if (!work)
		return 0;

	desk->under_way_bytes += bytes;
	fabric->statistics.served += head->blocks;
	for (uint32_t i = 0; i < head->blocks; i++) {
		struct work *next = work->next;
		struct call_part_row row = row_of(head, i);
		send_block(fabric, work, desk, &row, shelf->found[i], served);
		work = next;
	}
	send_word(fabric, work, desk, head->ack_word, head->generation, CALL_DONE);
	return 1;
}

/* The bytes on the shelf are not what they were: instead of them goes the word that they are missed. */
void miss_at_desk(struct work *work)
{
	struct tk_shelf *shelf = work->desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	shelf_unlist(shelf, work->shelved); /* known still, because it is being sent */
	work->served->told.corrupt++;
	pthread_mutex_unlock(&shelf->lock);
	uint64_t generation = work->op.flag_value >> ACK_CODE_BITS;
	work->op.flag_value = generation << ACK_CODE_BITS | work->desk->setup.corrupt_code;
	work->op.length = 0;
}

/* A block of an answer is over, however it went. */
void over_at_desk(struct work *work, int status)
{
	struct tk_desk *desk = work->desk;
	struct tk_shelf *shelf = desk->shelf;
	struct served *served = work->served;
	desk->under_way_bytes -= work->shelved->block.length;
	pthread_mutex_lock(&shelf->lock);
	served->told.failed += !!status;
	shelf_let_go(shelf, work->shelved);
	if (!--served->left) {
		served->told.ended_ns = tk_now_ns();
		if (shelf->last)
			shelf->last->next = served;
		else
			shelf->first = served;
		shelf->last = served;
	}
	pthread_mutex_unlock(&shelf->lock);
	work->shelved = NULL;
}
