/*
 * The client's side of reading blocks from the memory of a node on the same machine, if that memory is mapped.
 *
 * The client requests blocks as usual, and adds that it accepts locations. A node whose desk finds all of them on the
 * shelf answers with locations and checksums (desk.c), and keeps the blocks there until the place of the call is
 * reused, or for `hold_ns`. Each block is then copied to its destination, a bounded piece per round, with its checksum
 * computed from what is written there. A node that can't answer this way answers as to any other client.
 *
 * Blocks that must first be read from a drive, or are sent by the application, are reported one by one: a block's
 * word says that its location is in a row of memory that both ends have mapped (shared_reads.c). The word is in the row
 * as well: a count in the first row says that there are new ones.
 *
 * What always holds: a row of the group ends when all of its block's bytes have arrived with the checksum that the
 * node gave, or as a miss. Nothing is written for a row that is over. If a copy took so long that the node may have
 * reused the memory, it is a miss, whatever the checksum. After one wrong checksum this client reads over the fabric,
 * where the node checks its memory itself. The place of a call is reused after the last copy.
 *
 * What it doesn't do: write to the node's memory, which is mapped read-only.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

struct shared_block {
	struct shared_row *row; /* the node's row for this block; NULL: the answer to the call has its location */
	uint64_t until_ns;	 /* the node keeps its bytes until then */
	struct work *watch; /* for the word that ends it in another way; NULL: it is over */
	struct block_copy copy;
	uint32_t crc32c; /* as the node says */
};

/* A fetch that may be answered with locations. It ends with the last of its watches. */
struct shared_fetch {
	struct tk_caller *caller;
	const struct tk_shared *shared;
	uint64_t asked_ns;
	uint32_t blocks, place, watches;
	int is_answered; /* with the blocks' locations: so the place of the call is in use until the end */
	struct shared_block block[];
};

struct shared_fetch *shared_fetch(struct tk_caller *caller, const struct tk_shared *shared, uint32_t blocks,
				  const void *rows, size_t row_bytes, const struct tk_wanted *wanted)
{
	struct shared_fetch *fetch = calloc(1, sizeof *fetch + blocks * sizeof *fetch->block);
	if (!fetch)
		return NULL;
	fetch->caller = caller;
	fetch->shared = shared;
	fetch->blocks = blocks;
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < blocks; i++) {
		struct call_part_row row = {.part = 0};
		memcpy(&row, (const char *)rows + i * row_bytes, row_bytes);
		bytes += row.part ? row.part : row.row.length;
		struct block_copy *copy = &fetch->block[i].copy;
		copy->length = row.row.length;
		block_copy_into(copy, wanted[i].address, (struct tk_pieces *)(uintptr_t)wanted[i].pieces, row.skip, row.part);
		if (copy->pieces)
			pieces_use(copy->pieces);
		bytes += copy->part;
	}
	for (uint32_t i = 0; i < blocks; i++)
		fetch->block[i].copy.copy = copy_for(bytes);
	return fetch;
}

void shared_fetch_free(struct shared_fetch *fetch)
{
	for (uint32_t i = 0; fetch && i < fetch->blocks; i++)
		if (fetch->block[i].copy.pieces)
			pieces_release(fetch->block[i].copy.pieces);
	free(fetch);
}

void shared_watches(struct shared_fetch *fetch, struct work *watch, uint32_t row)
{
	watch->fetch = fetch;
	watch->fetch_row = row;
	fetch->watches++;
	if (row < fetch->blocks)
		fetch->block[row].watch = watch;
}

void shared_asked(struct shared_fetch *fetch, uint32_t place)
{
	fetch->place = place;
	fetch->asked_ns = tk_now_ns();
}

/* The block's memory on the node is no longer needed. */
static void done_with(struct shared_block *block, struct work *watch)
{
	if (!block->row)
		return;
	tk_word_store(&block->row->read, watch->ack.generation);
	block->row = NULL;
	ring_later(watch->ack.endpoint->fabric, watch->ack.endpoint);
}

/* A watch is over. */
void shared_over(struct work *watch)
{
	struct shared_fetch *fetch = watch->fetch;
	if (!fetch)
		return;
	watch->fetch = NULL;
	if (watch->fetch_row < fetch->blocks) {
		fetch->block[watch->fetch_row].watch = NULL;
		done_with(&fetch->block[watch->fetch_row], watch);
		group_copies(watch->ack.group, watch->ack.row, 0);
	}
	if (--fetch->watches)
		return;
	if (fetch->is_answered)
		caller_read(fetch->caller, fetch->place);
	shared_fetch_free(fetch);
}

static int has_place(const struct shared_fetch *fetch, const struct shared_block *block, uint64_t offset)
{
	const struct tk_shared *shared = fetch->shared;
	const struct block_copy *copy = &block->copy;
	return copy->length <= shared->length && offset <= shared->length - copy->length &&
	       copy->part <= copy->length && copy->skip <= copy->length - copy->part;
}

/* Reads the rows of an answer, each once: the node can still write there. */
static int read_rows(struct shared_fetch *fetch, const char *rows)
{
	const struct tk_shared *shared = fetch->shared;
	for (uint32_t i = 0; i < fetch->blocks; i++) {
		struct shared_block *block = &fetch->block[i];
		struct where_row row;
		memcpy(&row, rows + i * sizeof row, sizeof row);
		if (!has_place(fetch, block, row.offset))
			return 0;
		block->copy.from = (const char *)(uintptr_t)shared->address + row.offset;
		block->crc32c = row.crc32c;
	}
	return 1;
}

static void begin_copy(struct tk_fabric *fabric, struct work *watch)
{
	watch_remove(&fabric->acks, watch);
	group_copies(watch->ack.group, watch->ack.row, 1);
	watch->state = WORK_SUMMING;
	queue_push(&fabric->summing, watch);
}

/* Reads the row once: the node can still write there. */
int shared_located(struct tk_fabric *fabric, struct work *watch)
{
	struct shared_fetch *fetch = watch->fetch;
	if (!fetch || watch->fetch_row >= fetch->blocks || !fetch->shared->rows)
		return 0;
	struct shared_block *block = &fetch->block[watch->fetch_row];
	struct shared_row *there = (struct shared_row *)fetch->shared->rows + caller_word(fetch->caller, watch->ack.word);
	struct shared_row row;
	memcpy(&row, there, sizeof row);
	if (row.generation != watch->ack.generation || !has_place(fetch, block, row.offset))
		return 0;
	block->copy.from = (const char *)(uintptr_t)fetch->shared->address + row.offset;
	block->crc32c = row.crc32c;
	block->until_ns = row.until_ns;
	block->row = there;
	begin_copy(fabric, watch);
	return 1;
}

static int is_answer(const struct work *watch, struct tk_region *region, uint64_t address)
{
	const char *there = (const char *)(uintptr_t)address;
	struct answer_head head;
	uint32_t more = tag_bytes(watch->ack.endpoint);
	uint64_t tag = 0;
	memcpy(&head, there, sizeof head);
	if (head.length != sizeof head + watch->fetch->blocks * sizeof(struct where_row) || head.kind != ANSWER_WHERE ||
	    head.generation != watch->ack.generation)
		return 0;
	memcpy(&tag, there + head.length, more);
	if (more && !tk_endpoint_believes(watch->ack.endpoint, region, address, head.generation, there, head.length, tag))
		return 0;
	return tk_crc32c(there + sizeof head.crc32c, head.length - sizeof head.crc32c, 0) == head.crc32c;
}

/* The block was given up: its watch is over, and its caller waits for a word that confirms that no more of its bytes
 * will arrive. The node doesn't send one. */
static void give_up(struct tk_fabric *fabric, const struct work *call, uint32_t row)
{
	struct tk_ack_watch watch = call->ack;
	watch.row = row;
	group_acked(fabric, &watch, call->fetch->shared->late_code);
}

/* Begins to copy the blocks still wanted, if the answer to a call has their locations. Returns 0 if it doesn't. */
int shared_where(struct tk_fabric *fabric, struct work *watch, struct tk_region *region, uint64_t address)
{
	struct shared_fetch *fetch = watch->fetch;
	if (!is_answer(watch, region, address) || !read_rows(fetch, (const char *)(uintptr_t)address + sizeof(struct answer_head)))
		return 0;
	fetch->is_answered = 1;
	for (uint32_t i = 0; i < fetch->blocks; i++) {
		struct work *block = fetch->block[i].watch;
		if (!block) {
			give_up(fabric, watch, i);
			continue;
		}
		begin_copy(fabric, block);
	}
	return 1;
}

static uint32_t code_of(struct shared_fetch *fetch, const struct shared_block *block)
{
	const struct tk_shared *shared = fetch->shared;
	uint64_t now_ns = tk_now_ns();
	if (block->row ? now_ns > block->until_ns : now_ns - fetch->asked_ns > shared->hold_ns / 2)
		return shared->late_code;
	int is_good = block->copy.crc32c == block->crc32c;
	caller_shared(fetch->caller, is_good);
	if (!is_good)
		return shared->corrupt_code;
	return block->copy.pieces ? shared->scattered_code : shared->served_code;
}

uint32_t shared_copy(struct tk_fabric *fabric, struct work *work, uint32_t bytes_max)
{
	struct shared_fetch *fetch = work->fetch;
	struct shared_block *block = &fetch->block[work->fetch_row];
	uint32_t copied = block_copy_some(&block->copy, bytes_max);
	if (block->copy.done < block->copy.length)
		return copied;
	uint32_t code = code_of(fetch, block);
	queue_remove(&fabric->summing, work);
	shared_over(work); /* before its caller is notified, which may reuse the place */
	group_acked(fabric, &work->ack, code);
	release(fabric, work);
	return copied;
}
