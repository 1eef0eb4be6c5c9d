/*
 * The sender: a client's puts by grants, into slots of the node that it may write to without a call.
 *
 * A put gets its slot when it fires, not when it is armed: so any number may be armed with only a few slots. The head
 * of the block goes before its payload, in one message where the provider carries messages as a stream, and the flag
 * follows. The node's first word, whatever its code, means that the slot was read; it frees the slot for its next
 * generation. The last word frees the acknowledgement word. Both sides count generations, so none are sent.
 *
 * What always holds: a slot is written by one put per generation. A put that was taken back before it was posted has
 * used no generation, and its slot serves the next put. The slot of a put that was posted and never answered is not
 * used again; a caller whose word never arrives closes the link. Payloads are checksummed when they go out, so the node
 * gets the bytes of that moment or refuses them. On a sealed connection the head has a tag for its slot and generation.
 *
 * If the node is on the same machine and its slots are mapped here, payload, head and flag are copied into them, in
 * this order, without a message, and the node's doorbell is rung (shared_puts.c). The head is made in private memory,
 * as the node can write to a slot. Few bytes go ahead of the node, which so reads them from a cache.
 *
 * What it doesn't do: hand puts to a NIC's deferred work; the agent fires them.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define BYTES_A_STEP (8u << 10) /* checksummed, and copied while they are in a core's first cache */
#define AHEAD_BYTES (4u << 20) /* in shared slots that the node has not read, */
#define AHEAD_COUNT 2u	       /* or this many puts, whatever their size */

struct granted {
	uint64_t generation, length; /* of its next put, and of the one in it */
};

struct tk_sender {
	struct tk_sender_setup setup;
	struct tk_fabric *fabric;

	/* Used only by the thread that runs the rounds. */
	struct tk_sender *next;
	struct queue ungranted;
	struct granted *each_slot;
	uint32_t *slots, *words; /* free ones, last used first: its memory is warm */
	uint32_t slots_free, words_free;
	uint64_t ahead; /* bytes of the puts in slots */
	uint64_t ack_generation;
	uint64_t shared; /* atomic: puts that went through shared memory */

	/* Memory in which puts of pieces are gathered; set before the first of them. */
	struct tk_region *gather_region;
	uint64_t gather, gather_slot_bytes;
};

const struct tk_sender_setup *sender_setup(const struct tk_sender *sender)
{
	return &sender->setup;
}

static void free_sender(struct tk_sender *sender)
{
	free(sender->each_slot);
	free(sender->slots);
	free(sender->words);
	free(sender);
}

static int add_sender(struct tk_fabric *fabric, void *argument)
{
	struct tk_sender *sender = *(struct tk_sender **)argument;
	sender->next = fabric->senders;
	fabric->senders = sender;
	return 0;
}

static int remove_sender(struct tk_fabric *fabric, void *argument)
{
	struct tk_sender *sender = *(struct tk_sender **)argument, **link = &fabric->senders;
	while (*link && *link != sender)
		link = &(*link)->next;
	if (*link)
		*link = sender->next;
	return 0;
}

/* The words are in the node's memory, which no other process has mapped: they need no tag. */
static int share(const struct tk_sender_setup *setup)
{
	struct seal *seal = &setup->endpoint->seal;
	if (setup->shared_flags % 8 || setup->shared_slots % 8 || setup->doorbell < 0)
		return -EINVAL;
	seal->shared = setup->words;
	seal->shared_bytes = (uint64_t)setup->words_count * 8;
	setup->endpoint->doorbell = setup->doorbell;
	return 0;
}

static int holds(const struct tk_region *region, uint64_t address, uint64_t bytes)
{
	return address >= region->address && bytes <= region->length &&
	       address - region->address <= region->length - bytes;
}

static int may_watch_words(const struct tk_sender_setup *setup)
{
	uint64_t bytes = (uint64_t)setup->words_count * 8;
	return holds(setup->region, setup->words, bytes) && may_watch_ack(setup->endpoint, setup->words) &&
	       may_watch_ack(setup->endpoint, setup->words + bytes - 8);
}

int tk_sender_open(const struct tk_sender_setup *setup, struct tk_sender **out)
{
	if (!setup->endpoint || !setup->region || !setup->slots_count || !setup->words_count || setup->words % 8 ||
	    (!setup->shared_slots && !may_watch_words(setup)) ||
	    !holds(setup->region, setup->heads, (uint64_t)setup->slots_count * TK_HEAD_PAGE) ||
	    (setup->shared_slots && share(setup)))
		return -EINVAL;
	struct tk_sender *sender = calloc(1, sizeof *sender);
	if (!sender)
		return -ENOMEM;
	sender->setup = *setup;
	sender->fabric = setup->endpoint->fabric;
	sender->ack_generation = setup->first_ack_generation;
	sender->each_slot = calloc(setup->slots_count, sizeof *sender->each_slot);
	sender->slots = calloc(setup->slots_count, sizeof *sender->slots);
	sender->words = calloc(setup->words_count, sizeof *sender->words);
	if (!sender->each_slot || !sender->slots || !sender->words) {
		free_sender(sender);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < setup->slots_count; i++) {
		sender->each_slot[i].generation = setup->first_generation;
		sender->slots[sender->slots_free++] = setup->slots_count - 1 - i;
	}
	for (uint32_t i = 0; i < setup->words_count; i++)
		sender->words[sender->words_free++] = setup->words_count - 1 - i;
	int status = on_the_thread(sender->fabric, add_sender, &sender, sizeof sender);
	if (status && status != TK_STUCK)
		free_sender(sender);
	*out = status ? NULL : sender;
	return status;
}

int tk_sender_gather(struct tk_sender *sender, struct tk_region *region, uint64_t address, uint64_t slot_bytes)
{
	if (sender->gather_region)
		return -EALREADY;
	if (region->fabric != sender->fabric || slot_bytes > UINT32_MAX ||
	    !holds(region, address, slot_bytes * sender->setup.slots_count))
		return -EINVAL;
	sender->gather = address;
	sender->gather_slot_bytes = slot_bytes;
	sender->gather_region = region;
	return 0;
}

uint32_t sender_gathers(const struct tk_sender *sender, const struct tk_region *region)
{
	return region && region == sender->gather_region ? (uint32_t)sender->gather_slot_bytes : 0;
}

int tk_sender_close(struct tk_sender *sender)
{
	int status = on_the_thread(sender->fabric, remove_sender, &sender, sizeof sender);
	if (status != TK_STUCK)
		free_sender(sender);
	return status;
}

/* The place where the put's head is made: at the end of its slot's page. */
static struct tk_put_head *head_of(const struct work *work)
{
	const struct tk_sender_setup *setup = &work->op.sender->setup;
	return (struct tk_put_head *)(setup->heads + (uint64_t)work->grant * TK_HEAD_PAGE) - 1;
}

int sender_shares(const struct work *work)
{
	return work->op.sender && work->op.sender->setup.shared_slots;
}

/* The payload of its slot, as mapped here. */
static uint64_t shared_payload(const struct work *work)
{
	const struct tk_sender_setup *setup = &work->op.sender->setup;
	return setup->shared_slots + (uint64_t)(work->grant - 1) * setup->slot_bytes + TK_HEAD_PAGE;
}

/* Copies the next bytes into the slot. The checksum is of the application's bytes: if those in the slot differ, because
 * either was written to meanwhile, the node refuses the put. */
uint32_t sender_copies(struct work *work, uint32_t bytes_max)
{
	uint32_t bytes = bytes_max < BYTES_A_STEP ? bytes_max : BYTES_A_STEP;
	const char *from = (const char *)work->op.local + work->summed;
	work->crc = tk_crc32c(from, bytes, work->crc);
	memcpy((char *)shared_payload(work) + work->summed, from, bytes);
	work->summed += bytes;
	return bytes;
}

void sender_put(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_operation *op = &work->op;
	const void *head;
	uint32_t bytes = sender_head(work, &head);
	memcpy((char *)shared_payload(work) - bytes, head, bytes);
	uint64_t *flag = (uint64_t *)op->sender->setup.shared_flags + work->grant - 1;
	tk_word_store(flag, word_out(op->endpoint, (struct spot){op->flag_target, op->flag_key}, op->flag_value));
	ring_later(fabric, op->endpoint);
	__atomic_add_fetch(&op->sender->shared, 1, __ATOMIC_RELAXED);
}

uint64_t tk_sender_shared(const struct tk_sender *sender)
{
	return __atomic_load_n(&sender->shared, __ATOMIC_RELAXED);
}

uint32_t sender_head(const struct work *work, const void **bytes)
{
	const struct tk_put_head *head = head_of(work);
	*bytes = (const char *)head - head->metadata_bytes;
	return head->metadata_bytes + (uint32_t)sizeof *head;
}

void *sender_head_desc(const struct work *work)
{
	return work->op.sender->setup.region->desc;
}

/* Watches the words in which the node reports the put's outcome. */
static int watch_words(struct tk_fabric *fabric, struct work *work, struct work *watch)
{
	const struct tk_operation *op = &work->op;
	struct tk_sender *sender = op->sender;
	watch->kind = WORK_ACK;
	watch->sender = sender;
	watch->grant = work->grant;
	watch->word = work->word;
	watch->ack = (struct tk_ack_watch){
		.tag = op->tag + 1,
		.endpoint = op->endpoint,
		.word = sender->setup.words + (uint64_t)(work->word - 1) * 8,
		.generation = sender->ack_generation++,
		.deadline_ns = op->deadline_ns ? op->deadline_ns + sender->setup.grace_ns : 0,
		.group = op->group,
		.final_code = op->head->durability,
		.good_max = sender->setup.good_max,
		.row = op->row,
	};
	if (watch_add(&fabric->acks, (const uint64_t *)watch->ack.word, 0, watch))
		return -ENOMEM;
	if (op->group)
		group_use(op->group);
	adopt(fabric, watch);
	watch->partner = work;
	work->partner = watch;
	return 0;
}

static void make_head(struct work *work)
{
	struct tk_operation *op = &work->op;
	const struct tk_sender *sender = op->sender;
	struct tk_put_head *head = head_of(work);
	size_t metadata_bytes = op->head->metadata_bytes;
	memcpy((char *)head - metadata_bytes, (const char *)op->head - metadata_bytes, metadata_bytes + sizeof *head);
	head->metadata_bytes = (uint32_t)metadata_bytes;
	head->generation = sender->each_slot[work->grant - 1].generation;
	head->ack_generation = work->partner->ack.generation;
	head->ack_word = sender->setup.first_word + work->word - 1;
	head->length = op->length;
	head->fired_ns = work->fired_ns;
	if (op->pieces && sender_shares(work))
		op->local = shared_payload(work);
	else if (op->pieces)
		op->local = sender->gather + (uint64_t)(work->grant - 1) * sender->gather_slot_bytes;
	op->remote = sender->setup.slots + (uint64_t)(work->grant - 1) * sender->setup.slot_bytes + TK_HEAD_PAGE;
	op->remote_key = op->flag_key = sender->setup.area_key;
	op->flag_target = sender->setup.flags + (uint64_t)(work->grant - 1) * 8;
	op->flag_value = head->generation;
}

static int may_be_sent(const struct tk_operation *op)
{
	uint32_t metadata_bytes = op->head->metadata_bytes;
	int is_named = __atomic_load_n(&op->head->durability, __ATOMIC_ACQUIRE);
	return is_named && metadata_bytes <= TK_HEAD_PAGE - sizeof *op->head && metadata_bytes % 8 == 0;
}

static int may_go_ahead(const struct tk_sender *sender, uint32_t length)
{
	return !sender->setup.shared_slots || sender->setup.slots_count - sender->slots_free < AHEAD_COUNT ||
	       sender->ahead + length <= AHEAD_BYTES;
}

static void free_slot(struct tk_sender *sender, uint32_t slot)
{
	sender->ahead -= sender->each_slot[slot].length;
	sender->slots[sender->slots_free++] = slot;
}

/* Gives the put a slot and a word, if any are free; next its bytes are checksummed. */
static int grant(struct tk_fabric *fabric, struct work *work)
{
	struct tk_sender *sender = work->op.sender;
	if (!sender->slots_free || !sender->words_free || !may_go_ahead(sender, work->op.length))
		return 0;
	struct work *watch = take_free_work(fabric, 1);
	if (!watch)
		return 0;
	work->grant = sender->slots[sender->slots_free - 1] + 1;
	work->word = sender->words[sender->words_free - 1] + 1;
	if (watch_words(fabric, work, watch)) {
		work->grant = work->word = 0;
		recycle(fabric, watch);
		return 0;
	}
	sender->slots_free--;
	sender->words_free--;
	sender->each_slot[work->grant - 1].length = work->op.length;
	sender->ahead += work->op.length;
	make_head(work);
	return 1;
}

static void sum(struct tk_fabric *fabric, struct work *work)
{
	work->state = WORK_SUMMING;
	queue_push(&fabric->summing, work);
}

void sender_fire(struct tk_fabric *fabric, struct work *work)
{
	struct tk_sender *sender = work->op.sender;
	if (!may_be_sent(&work->op)) {
		finish(fabric, work, -EDESTADDRREQ); /* a code that no provider returns */
	} else if (!sender->ungranted.head && grant(fabric, work)) {
		sum(fabric, work);
	} else {
		work->state = WORK_UNGRANTED;
		queue_push(&sender->ungranted, work);
	}
}

struct queue *sender_queue(const struct work *work)
{
	return &work->op.sender->ungranted;
}

int poll_senders(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_sender *sender = fabric->senders; sender; sender = sender->next)
		while (sender->ungranted.head && grant(fabric, sender->ungranted.head)) {
			sum(fabric, queue_pop(&sender->ungranted));
			busy = 1;
		}
	return busy;
}

void sender_summed(struct work *work)
{
	struct tk_put_head *head = head_of(work);
	head->crc32c = work->crc;
	head->flags |= TK_PUT_HAS_CRC;
	const char *metadata = (const char *)head - head->metadata_bytes;
	head->head_crc32c = sum_of_head(head, metadata);
	head->tag = head_out(work->op.endpoint, (struct spot){work->op.flag_target, work->op.flag_key}, metadata, head);
}

/* The put itself is over. One that was never posted leaves its slot and word to the next put. */
void sender_put_over(struct tk_fabric *fabric, struct work *work)
{
	struct tk_sender *sender = work->op.sender;
	struct work *watch = work->partner;
	unpair(work);
	if (!work->grant || work->posted_ns)
		return;
	free_slot(sender, work->grant - 1);
	sender->words[sender->words_free++] = work->word - 1;
	if (watch) {
		watch->grant = watch->word = 0;
		watch_remove(&fabric->acks, watch);
		release(fabric, watch);
	}
}

void sender_acked(struct work *watch, int is_final)
{
	struct tk_sender *sender = watch->sender;
	if (watch->grant) {
		sender->each_slot[watch->grant - 1].generation++;
		free_slot(sender, watch->grant - 1);
		watch->grant = 0;
	}
	if (is_final) {
		sender->words[sender->words_free++] = watch->word - 1;
		watch->word = 0;
	}
}
