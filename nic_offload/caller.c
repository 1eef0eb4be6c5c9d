/*
 * The caller: makes calls of one client to its node over the fabric, in one step: the call's bytes into a place of our own
 * memory, the watches for the words that will answer it, and the put that brings it into the same place at the node.
 *
 * What always holds: a place is used again only after its answer: DONE, which has nothing more to say, or BYTES, and then
 * when its reader has said so. A call is begun whole or not at all; with all places in use, or with more to say than a place
 * holds, it is not, and goes another way. Calls of a place carry rising generations.
 *
 * What it doesn't do: read answers, or decide what a call's failure means. Both are told by the words, or as events.
 */
#define _GNU_SOURCE
#include "call.h"
#include "parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct place {
	struct tk_group *group; /* NULL: it is free */
	uint32_t row;
	uint64_t generation; /* the next call's */
};

struct tk_caller {
	struct tk_caller_setup setup;
	pthread_mutex_t lock;
	struct place places[TK_CALL_PLACES];
};

int tk_caller_open(const struct tk_caller_setup *setup, struct tk_caller **out)
{
	const struct tk_region *region = setup->region;
	if (!setup->endpoint || !region || setup->calls < region->address ||
	    setup->calls + (uint64_t)TK_CALL_PLACES * TK_CALL_BYTES > region->address + region->length)
		return -EINVAL;
	struct tk_caller *caller = calloc(1, sizeof *caller);
	if (!caller)
		return -ENOMEM;
	caller->setup = *setup;
	pthread_mutex_init(&caller->lock, NULL);
	for (int i = 0; i < TK_CALL_PLACES; i++)
		caller->places[i].generation = setup->first_generation;
	*out = caller;
	return 0;
}

static void free_place(struct place *place)
{
	group_let_go(place->group);
	place->group = NULL;
}

void tk_caller_close(struct tk_caller *caller)
{
	for (int i = 0; i < TK_CALL_PLACES; i++)
		if (caller->places[i].group)
			free_place(&caller->places[i]);
	pthread_mutex_destroy(&caller->lock);
	free(caller);
}

/* Under the lock; -1 if all are in use. */
static int find_place(struct tk_caller *caller)
{
	for (int i = 0; i < TK_CALL_PLACES; i++) {
		struct place *place = &caller->places[i];
		if (place->group && group_code(place->group, place->row) == CALL_DONE)
			free_place(place);
		if (!place->group)
			return i;
	}
	return -1;
}

int tk_caller_free(struct tk_caller *caller)
{
	int count = 0;
	pthread_mutex_lock(&caller->lock);
	for (int i = 0; i < TK_CALL_PLACES; i++)
		count += !caller->places[i].group ||
			 group_code(caller->places[i].group, caller->places[i].row) == CALL_DONE;
	pthread_mutex_unlock(&caller->lock);
	return count;
}

void tk_caller_read(struct tk_caller *caller, uint32_t place)
{
	pthread_mutex_lock(&caller->lock);
	if (place < TK_CALL_PLACES && caller->places[place].group)
		free_place(&caller->places[place]);
	pthread_mutex_unlock(&caller->lock);
}

/* Where a place's flag is, as we address it. */
static uint64_t flag_of(const struct tk_caller_setup *setup, uint32_t number)
{
	return setup->area + (uint64_t)number * 8;
}

/* Returns how many bytes are to be put. */
static uint32_t write_call(const struct tk_caller *caller, uint32_t number, const struct tk_call *call,
			   const void *metadata, const void *rows, size_t rows_bytes)
{
	char *at = (char *)caller->setup.calls + (size_t)number * TK_CALL_BYTES;
	uint32_t metadata_bytes = (call->metadata_bytes + CALL_ALIGN - 1) / CALL_ALIGN * CALL_ALIGN;
	struct call_head head = {
		.length = (uint32_t)(sizeof head + metadata_bytes + rows_bytes),
		.generation = caller->places[number].generation,
		.kind = call->kind,
		.flags = call->flags,
		.durability = call->durability,
		.metadata_bytes = metadata_bytes,
		.blocks = call->blocks,
		.ack_word = caller->setup.ack_words[number],
		.lease_ms = call->lease_ms,
		.expires_unix_ms = call->expires_unix_ms,
	};
	memcpy(head.fingerprint, call->fingerprint, sizeof head.fingerprint);
	memcpy(at, &head, sizeof head);
	memcpy(at + sizeof head, metadata, call->metadata_bytes);
	memset(at + sizeof head + call->metadata_bytes, 0, metadata_bytes - call->metadata_bytes);
	memcpy(at + sizeof head + metadata_bytes, rows, rows_bytes);
	uint32_t crc32c = tk_crc32c(at + sizeof crc32c, head.length - sizeof crc32c, 0);
	memcpy(at, &crc32c, sizeof crc32c);
	const struct tk_caller_setup *setup = &caller->setup;
	uint64_t tag = tk_endpoint_tag(setup->endpoint, flag_of(setup, number), setup->area_key, head.generation, at, head.length);
	memcpy(at + head.length, &tag, tag_bytes(setup->endpoint));
	return head.length + tag_bytes(setup->endpoint);
}

/* The words in which the node says of each block that it has come, or why not. */
static void watch_blocks(const struct tk_caller *caller, const struct tk_call *call, const char *rows)
{
	for (uint32_t i = 0; i < call->blocks; i++, rows += call_row_bytes(call->kind)) {
		const struct call_fetch_row *row = (const void *)rows;
		struct tk_ack_watch watch = {
			.tag = call->tag + 2 * i,
			.endpoint = caller->setup.endpoint,
			.word = caller->setup.words + (uint64_t)row->ack_word * 8,
			.generation = row->ack_generation,
			.deadline_ns = call->blocks_deadline_ns,
			.group = call->group,
			.final_code = 1,
			.good_max = UINT8_MAX,
			.row = i,
		};
		enqueue_ack(caller->setup.endpoint->fabric, &watch);
	}
}

static void put_call(const struct tk_caller *caller, uint32_t number, const struct tk_call *call, uint32_t length)
{
	const struct tk_caller_setup *setup = &caller->setup;
	uint64_t generation = caller->places[number].generation, tag = call->tag + 2 * (uint64_t)call->blocks;
	struct tk_ack_watch watch = {
		.tag = tag + 1,
		.endpoint = setup->endpoint,
		.word = setup->words + (uint64_t)setup->ack_words[number] * 8,
		.generation = generation,
		.deadline_ns = call->deadline_ns,
		.group = call->group,
		.final_code = 1,
		.good_max = call->good_code,
		.row = call->row,
	};
	struct tk_operation put = {
		.tag = tag,
		.endpoint = setup->endpoint,
		.peer = setup->peer,
		.local = setup->calls + (uint64_t)number * TK_CALL_BYTES,
		.remote = setup->area + TK_CALL_AREA_HEAD + (uint64_t)number * TK_CALL_BYTES,
		.remote_key = setup->area_key,
		.flag_target = flag_of(setup, number),
		.flag_key = setup->area_key,
		.flag_value = generation,
		.region = setup->region,
		.length = length,
		.flags = TK_FLAG_PUT | TK_ACKED_PUT,
	};
	enqueue_ack(setup->endpoint->fabric, &watch);
	enqueue_operation(setup->endpoint->fabric, &put);
}

int tk_caller_call(struct tk_caller *caller, const struct tk_call *call, const void *metadata, const void *rows,
		   size_t rows_bytes)
{
	struct tk_fabric *fabric = caller->setup.endpoint->fabric;
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	int is_fetch = !!call_row_bytes(call->kind);
	if (is_fetch && rows_bytes != call->blocks * call_row_bytes(call->kind))
		return -EINVAL;
	if (sizeof(struct call_head) + call->metadata_bytes + CALL_ALIGN + rows_bytes + TK_TAG_BYTES > TK_CALL_BYTES)
		return -EMSGSIZE;
	pthread_mutex_lock(&caller->lock);
	int number = find_place(caller);
	if (number < 0) {
		pthread_mutex_unlock(&caller->lock);
		return -EBUSY;
	}
	struct place *place = &caller->places[number];
	uint32_t length = write_call(caller, (uint32_t)number, call, metadata, rows, rows_bytes);
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, 2 + (is_fetch ? call->blocks : 0));
	if (!status) {
		if (is_fetch)
			watch_blocks(caller, call, rows);
		put_call(caller, (uint32_t)number, call, length);
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status) {
		place->generation++;
		place->group = call->group;
		place->row = call->row;
		group_use(call->group);
		fabric_wake(fabric);
	}
	pthread_mutex_unlock(&caller->lock);
	return status ? status : number;
}
