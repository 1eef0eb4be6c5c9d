/*
 * The node's side of reads through shared memory, block by block: for blocks that a reader has read from a drive or
 * that the application sends, to a client on the same machine.
 *
 * Instead of a put of its bytes, the block gets a row in memory that both ends have mapped, and a word that refers to
 * the row. A client that looks there finds the word in the row too, and other words that follow no bytes: they need no
 * message, only its doorbell. The block stays where it is until the client has noted in the row that it has read it, or for TK_HELD_NS;
 * then the put is over like any other. (Blocks on the shelf are reported for a whole call, see desk.c.)
 *
 * What always holds: a row belongs to the word with its generation, and says how long the bytes stay. The client may
 * use half of that time, so a client that was suspended does not read bytes that have replaced them. The payload's
 * checksum was checked before.
 *
 * What it doesn't do: trust anything that the client writes there, except that it is done with a generation; a false
 * claim can harm only the client itself.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"

#include <errno.h>

static uint64_t payload_of(const struct work *work)
{
	return work->op.part ? work->op.local - work->op.skip : work->op.local;
}

static struct shared_row *row_at(const struct shared_reads *reads, struct spot spot)
{
	uint64_t offset = spot.address - reads->first.address;
	if (spot.key != reads->first.key || offset % 8 || offset / 8 >= reads->count)
		return NULL;
	return (struct shared_row *)reads->rows + offset / 8;
}

static struct spot spot_of_word(const struct work *work)
{
	return (struct spot){work->op.flag_target, work->op.flag_key};
}

int put_row_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, struct spot spot)
{
	struct shared_reads *reads = &endpoint->shared_reads;
	struct shared_row *row = reads->has_words ? row_at(reads, spot) : NULL;
	if (!row)
		return 0;
	tk_word_store(&row->word, word);
	tk_word_store(&((struct shared_row *)reads->rows)->count, ++reads->words);
	ring_later(fabric, endpoint);
	return 1;
}

int may_share(const struct work *work)
{
	if (work->kind != WORK_OPERATION || !(work->op.flags & TK_SHARED_PUT) || !work->op.endpoint->shared_reads.count)
		return 0;
	const struct shared_reads *reads = &work->op.endpoint->shared_reads;
	uint64_t at = payload_of(work);
	return at >= reads->memory && at - reads->memory < reads->bytes && row_at(reads, spot_of_word(work));
}

int send_location(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_operation *op = &work->op;
	struct shared_row *row = row_at(&op->endpoint->shared_reads, spot_of_word(work));
	uint64_t generation = op->flag_value >> ACK_CODE_BITS, word = generation << ACK_CODE_BITS | BLOCK_WHERE;
	row->offset = payload_of(work) - op->endpoint->shared_reads.memory;
	row->crc32c = op->crc32c;
	row->until_ns = tk_now_ns() + TK_HELD_NS / 2;
	row->generation = generation;
	int status = 0;
	if (!put_row_word(fabric, op->endpoint, word, spot_of_word(work)))
		status = post_word(fabric, op->endpoint, word, op->peer, op->flag_target, op->flag_key);
	work->shared = row;
	return status;
}

void await_copy(struct tk_fabric *fabric, struct work *work)
{
	work->state = WORK_SHARED;
	queue_push(&fabric->shared, work);
}

static int is_read(const struct work *work)
{
	return tk_word_load(&work->shared->read) == work->op.flag_value >> ACK_CODE_BITS;
}

int poll_shared_reads(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct work *work = fabric->shared.head, *next; work; work = next) {
		next = work->next;
		uint64_t until_ns = work->posted_ns + TK_HELD_NS;
		if (!is_read(work) && fabric->now_ns < until_ns) {
			if (until_ns < fabric->next_deadline_ns)
				fabric->next_deadline_ns = until_ns;
			continue;
		}
		queue_remove(&fabric->shared, work);
		finish(fabric, work, 0);
		busy = 1;
	}
	return busy;
}

struct sharing {
	struct tk_endpoint *endpoint;
	struct shared_reads reads;
};

static int share_reads(struct tk_fabric *fabric, void *argument)
{
	(void)fabric;
	const struct sharing *sharing = argument;
	struct shared_reads *reads = &sharing->endpoint->shared_reads;
	*reads = sharing->reads;
	reads->has_words = reads->has_words && sharing->endpoint->shared_words.count; /* else it has no doorbell */
	return 0;
}

int tk_endpoint_share_reads(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t rows, uint32_t count,
			    int looks, uint64_t memory, uint64_t bytes)
{
	if (!endpoint || rows % sizeof(uint64_t))
		return -EINVAL;
	struct sharing sharing = {endpoint, {{target, key}, rows, memory, bytes, count, !!looks, 0}};
	return on_the_thread(endpoint->fabric, share_reads, &sharing, sizeof sharing);
}
