/*
 * A desk's answers to a peer on this machine that has mapped the shelf's region: where blocks are, not their bytes.
 *
 * What always holds: a block whose location was given to a peer counts as being sent until the peer's next call in the
 * same place, but no longer than TK_HELD_NS.
 */
#define _GNU_SOURCE
#include "desk_inside.h"

#include <stdlib.h>
#include <string.h>

/* Under the shelf's lock: releases the blocks whose locations the peer got. */
void desk_release(struct tk_desk *desk, uint32_t place)
{
	struct held *held = &desk->held[place];
	for (uint32_t i = 0; i < held->count; i++)
		shelf_release(desk->shelf, held->blocks[i]);
	free(held->blocks);
	desk->held_bytes -= held->bytes;
	*held = (struct held){.count = 0};
}

static uint32_t place_of(const struct tk_desk *desk, const struct tk_landing *landing)
{
	return (uint32_t)((landing->word - desk->setup.flags) / sizeof(uint64_t));
}

/* Under the shelf's lock: keeps the blocks that were found, until the peer calls again. */
static int hold(struct tk_fabric *fabric, struct tk_desk *desk, uint32_t place, uint32_t count, uint64_t bytes)
{
	struct held *held = &desk->held[place];
	struct shelved **blocks = malloc(count * sizeof *blocks);
	if (!blocks)
		return 0;
	memcpy(blocks, desk->shelf->found, count * sizeof *blocks);
	*held = (struct held){.blocks = blocks, .count = count, .bytes = bytes, .until_ns = tk_now_ns() + TK_HELD_NS};
	desk->held_bytes += bytes;
	if (held->until_ns < fabric->held_until_ns)
		fabric->held_until_ns = held->until_ns;
	return 1;
}

/* Overwrites the call, which was copied; a peer that writes there meanwhile harms only itself. */
static uint32_t write_where(const struct tk_desk *desk, const struct tk_landing *landing, const struct call_head *call,
			    uint64_t target)
{
	char *to = (char *)(uintptr_t)landing->payload;
	struct answer_head head = {.length = sizeof head, .generation = call->generation, .kind = ANSWER_WHERE};
	for (uint32_t i = 0; i < call->blocks; i++) {
		const struct tk_shelved *block = &desk->shelf->found[i]->block;
		struct where_row row = {.offset = block->address - desk->shelf->region->address, .crc32c = block->crc32c};
		memcpy(to + head.length, &row, sizeof row);
		head.length += sizeof row;
	}
	memcpy(to, &head, sizeof head);
	head.crc32c = tk_crc32c(to + sizeof head.crc32c, head.length - sizeof head.crc32c, 0);
	memcpy(to, &head, sizeof head);
	uint32_t more = tag_bytes(landing->endpoint);
	uint64_t tag = tk_endpoint_tag(landing->endpoint, target, desk->setup.ack_key, head.generation, to, head.length);
	memcpy(to + head.length, &tag, more);
	return head.length + more;
}

static void send_where(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk,
		       const struct tk_landing *landing, const struct call_head *head, uint32_t place)
{
	uint64_t target = desk->setup.answers + (uint64_t)place * ANSWER_BYTES;
	work->op = (struct tk_operation){
		.endpoint = desk->setup.endpoint,
		.peer = desk->setup.peer,
		.local = landing->payload,
		.remote = target,
		.remote_key = desk->setup.ack_key,
		.flag_target = desk->setup.ack_base + (uint64_t)head->ack_word * 8,
		.flag_key = desk->setup.ack_key,
		.flag_value = head->generation << ACK_CODE_BITS | CALL_WHERE,
		.region = landing->region,
		.length = write_where(desk, landing, head, target),
		.flags = TK_QUIET | TK_FLAG_PUT,
	};
	__atomic_add_fetch(&landing->region->uses, 1, __ATOMIC_RELAXED);
	adopt(fabric, work);
	fire(fabric, work, fabric->now_ns);
}

/* Answers with locations: the peer reads the blocks itself. */
int desk_answer_where(struct tk_fabric *fabric, struct tk_desk *desk, const struct tk_landing *landing,
			const struct call_head *head)
{
	struct tk_shelf *shelf = desk->shelf;
	uint32_t place = place_of(desk, landing);
	uint64_t sent_bytes = 0;
	pthread_mutex_lock(&shelf->lock);
	uint64_t bytes = place < TK_CALL_PLACES ? desk_find_all(desk, head, &sent_bytes) : 0;
	struct served *served = bytes ? served_new(shelf, desk, head, sent_bytes, 0) : NULL;
	struct work *work = served ? take_free_work(fabric, 1) : NULL;
	if (work && hold(fabric, desk, place, head->blocks, bytes))
		desk_list_served(shelf, served);
	else if (work)
		recycle(fabric, work), work = NULL;
	if (bytes && !work)
		desk_give_back(shelf, head->blocks);
	if (served && !work)
		served_discard(shelf, served);
	pthread_mutex_unlock(&shelf->lock);
	if (!work)
		return 0;
	fabric->statistics.served += head->blocks;
	send_where(fabric, work, desk, landing, head, place);
	return 1;
}

/* Releases blocks whose locations peers have had for too long without another call. */
void poll_desks(struct tk_fabric *fabric)
{
	if (fabric->now_ns < fabric->held_until_ns)
		return;
	fabric->held_until_ns = UINT64_MAX;
	for (struct tk_shelf *shelf = fabric->shelves; shelf; shelf = shelf->next) {
		pthread_mutex_lock(&shelf->lock);
		for (struct tk_desk *desk = shelf->desks; desk; desk = desk->next)
			for (uint32_t place = 0; place < TK_CALL_PLACES; place++) {
				uint64_t until_ns = desk->held[place].until_ns;
				if (!desk->held[place].count)
					continue;
				if (fabric->now_ns >= until_ns)
					desk_release(desk, place);
				else if (until_ns < fabric->held_until_ns)
					fabric->held_until_ns = until_ns;
			}
		pthread_mutex_unlock(&shelf->lock);
	}
}

/* The last call in this place was answered, and its answer has been read. */
void desk_called_again(struct tk_desk *desk, const struct tk_landing *landing)
{
	uint32_t place = place_of(desk, landing);
	if (place >= TK_CALL_PLACES || !desk->held[place].count)
		return;
	pthread_mutex_lock(&desk->shelf->lock);
	desk_release(desk, place);
	pthread_mutex_unlock(&desk->shelf->lock);
}

void desk_tell(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk, const struct call_head *head)
{
	struct spot spot = {desk->setup.ack_base + (uint64_t)head->ack_word * 8, desk->setup.ack_key};
	if (put_row_word(fabric, desk->setup.endpoint, head->generation << ACK_CODE_BITS | CALL_DONE, spot))
		recycle(fabric, work);
	else
		desk_send_word(fabric, work, desk, head->ack_word, head->generation, CALL_DONE);
}
