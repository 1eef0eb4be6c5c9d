/*
 * Arms a batch of puts by grants in one call: the group, the heads of its blocks, and the counter over its flag word.
 *
 * What always holds: all puts of a batch are armed, or none. Heads are part of the group's memory, so they exist for as
 * long as a put may be sent. A block without a name is not sent until it has one (sender.c).
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <string.h>

struct batch {
	const struct tk_puts *puts;
	const struct tk_put_row *rows;
	struct tk_group *group;
	struct tk_counter *trigger;
};

static void make_heads(const struct batch *batch, const char *metadata)
{
	const struct tk_puts *puts = batch->puts;
	for (uint32_t i = 0; i < puts->count; i++) {
		const struct tk_put_row *row = &batch->rows[i];
		struct tk_put_head *head = group_head(batch->group, i);
		head->metadata_bytes = i ? puts->other_bytes : puts->first_bytes;
		memcpy((char *)head - head->metadata_bytes, metadata + (i ? puts->first_bytes : 0), head->metadata_bytes);
		head->expires_unix_ms = puts->expires_unix_ms;
		head->durability = row->is_named ? (uint8_t)puts->durability : 0;
		memcpy(head->key, row->key, sizeof head->key);
		memcpy(head->fingerprint, puts->fingerprint, sizeof head->fingerprint);
		memcpy(head->domain, row->domain, sizeof head->domain);
	}
}

static struct tk_operation operation_of(const struct batch *batch, uint32_t number)
{
	const struct tk_puts *puts = batch->puts;
	const struct tk_put_row *row = &batch->rows[number];
	const struct tk_sender_setup *setup = sender_setup(puts->sender);
	return (struct tk_operation){
		.tag = puts->tag + 2 * (uint64_t)number,
		.endpoint = setup->endpoint,
		.peer = setup->peer,
		.local = row->local,
		.trigger = batch->trigger,
		.threshold = row->threshold,
		.deadline_ns = puts->deadline_ns,
		.region = row->region,
		.group = batch->group,
		.sender = puts->sender,
		.head = group_head(batch->group, number),
		.pieces = row->pieces,
		.length = row->length,
		.flags = TK_FLAG_PUT | TK_ACKED_PUT,
		.row = number,
	};
}

static int arm(struct tk_fabric *fabric, const struct batch *batch)
{
	uint32_t count = batch->puts->count;
	for (uint32_t i = 0; i < count; i++) {
		struct tk_operation op = operation_of(batch, i);
		int status = check_operation(fabric, &op);
		if (status)
			return status;
	}
	pthread_mutex_lock(&fabric->inbox_lock);
	int status = reserve_work(fabric, count);
	for (uint32_t i = 0; !status && i < count; i++) {
		struct tk_operation op = operation_of(batch, i);
		enqueue_operation(fabric, &op);
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		fabric_wake(fabric);
	return status;
}

int tk_put(struct tk_fabric *fabric, const void *given, const void *metadata, struct tk_group **out)
{
	const struct tk_puts *puts = given;
	struct batch batch = {.puts = puts, .rows = (const struct tk_put_row *)(puts + 1), .trigger = puts->trigger};
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (puts->first_bytes % 8 || puts->other_bytes % 8)
		return -EINVAL;
	size_t metadata_most = puts->first_bytes > puts->other_bytes ? puts->first_bytes : puts->other_bytes;
	size_t head_bytes = metadata_most + sizeof(struct tk_put_head);
	status = group_open(fabric, puts->tag, puts->count, 0, head_bytes, &batch.group);
	if (status)
		return status;
	make_heads(&batch, metadata);
	if (!puts->trigger && puts->word)
		status = counter_over_word(fabric, puts->word, puts->bell, puts->pipe_fd, &batch.trigger);
	if (!status) {
		status = arm(fabric, &batch);
		if (!puts->trigger && puts->word)
			counter_put_down(batch.trigger);
	}
	if (status)
		tk_group_close(batch.group);
	else
		*out = batch.group;
	return status;
}

int tk_put_name(struct tk_group *group, uint32_t number, const void *key, uint32_t durability)
{
	struct tk_put_head *head = group_head(group, number);
	if (!head)
		return -EINVAL;
	memcpy(head->key, key, sizeof head->key);
	__atomic_store_n(&head->durability, (uint8_t)durability, __ATOMIC_RELEASE);
	return 0;
}
