/*
 * The client's side of direct reads: gets of blocks that are in the memory of a node on the same machine, in the calling
 * thread, without a call (directory.c and desk_log.c are the node's side).
 *
 * A block is found in the directory, copied to its destination with its checksum computed on the way, and then looked
 * at again: if its slot has not changed, the node had the block listed all that time. If it has, or if the checksum is
 * another one, the caller makes a call instead, which may find other bytes or none, and overwrites what was copied.
 *
 * What always holds: a get is answered here completely or not at all. It is noted in the log, or not answered here. One
 * wrong checksum ends direct reads on this connection: the node checks its memory itself when it is called. Nothing is
 * read once the node's thread has ended, or after `tk_direct_close` has returned; it waits for reads in progress. Nor in a
 * child after fork: the log has one writer, and its lock may be held by a thread that the child doesn't have.
 *
 * A look-up of many names is answered likewise if all of them are listed.
 *
 * What it doesn't do: hold the destination's region, or trust the node's memory to stay as it was: nothing there is used
 * before it was copied and checked.
 */
#define _GNU_SOURCE
#include "directory.h"

#include "progress.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct tk_direct {
	const struct directory_head *head;
	const struct directory_slot *slots;
	const uint32_t *alive;
	const char *memory;
	uint64_t memory_bytes, mask;
	struct read_log *log;
	uint8_t owner[TK_OWNER_BYTES];

	pid_t pid;
	int users, closing, distrusts; /* atomic */
	uint64_t blocks;	       /* atomic: read here */
	pthread_mutex_t log_lock;
};

struct found {
	struct read_block block;
	uint64_t offset;
	uint32_t crc32c;
};

int tk_direct_open(const struct tk_direct_setup *setup, struct tk_direct **out)
{
	const struct directory_head *head = (const void *)(uintptr_t)setup->directory;
	if (setup->directory_bytes < DIRECTORY_HEAD_BYTES || setup->log % 64)
		return -EINVAL;
	uint64_t slots = head->slots, alive = head->alive;
	if (slots < DIRECTORY_PROBES || slots & (slots - 1) || alive % sizeof(uint32_t) ||
	    alive > DIRECTORY_HEAD_BYTES - sizeof(uint32_t) ||
	    slots != (setup->directory_bytes - DIRECTORY_HEAD_BYTES) / sizeof(struct directory_slot))
		return -EINVAL;
	struct tk_direct *direct = calloc(1, sizeof *direct);
	if (!direct)
		return -ENOMEM;
	direct->head = head;
	direct->slots = (const void *)((const char *)head + DIRECTORY_HEAD_BYTES);
	direct->alive = (const void *)((const char *)head + alive);
	direct->memory = (const void *)(uintptr_t)setup->memory;
	direct->memory_bytes = setup->memory_bytes;
	direct->mask = slots - 1;
	direct->log = (void *)(uintptr_t)setup->log;
	memcpy(direct->owner, setup->owner, sizeof direct->owner);
	direct->pid = getpid();
	pthread_mutex_init(&direct->log_lock, NULL);
	*out = direct;
	return 0;
}

void tk_direct_close(struct tk_direct *direct)
{
	__atomic_store_n(&direct->closing, 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&direct->users, __ATOMIC_SEQ_CST))
		sched_yield();
}

void tk_direct_free(struct tk_direct *direct)
{
	pthread_mutex_destroy(&direct->log_lock);
	free(direct);
}

uint64_t tk_direct_blocks(const struct tk_direct *direct)
{
	return __atomic_load_n(&direct->blocks, __ATOMIC_RELAXED);
}

static int may_read(const struct tk_direct *direct)
{
	if (direct->pid != getpid())
		return 0;
	uint32_t owner = __atomic_load_n(direct->alive, __ATOMIC_ACQUIRE);
	return owner & FUTEX_TID_MASK && !(owner & FUTEX_OWNER_DIED) && !__atomic_load_n(&direct->distrusts, __ATOMIC_RELAXED) &&
	       __atomic_load_n(&direct->log->is_open, __ATOMIC_ACQUIRE);
}

static int is_unchanged(const struct directory_slot *slot, uint64_t seq)
{
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return __atomic_load_n(&slot->seq, __ATOMIC_RELAXED) == seq;
}

/* Copies the slot of a name. Returns 0 if it has none with a block of this length (0: any), or if that is just being
 * changed. */
static int find(const struct tk_direct *direct, const uint8_t *key, const uint8_t *fingerprint, uint32_t length,
		struct found *found)
{
	uint64_t first = directory_hash(direct->head->secret, direct->owner, key);
	for (uint64_t i = first; i < first + DIRECTORY_PROBES; i++) {
		const struct directory_slot *slot = &direct->slots[i & direct->mask];
		uint64_t seq = __atomic_load_n(&slot->seq, __ATOMIC_ACQUIRE);
		if (!seq)
			return 0; /* it was never used, so nothing that could have been there is further on */
		if (seq & 1)
			continue;
		struct directory_slot there;
		memcpy(&there, slot, sizeof there);
		if (!is_unchanged(slot, seq) || !there.length || memcmp(there.key, key, TK_KEY_BYTES) ||
		    memcmp(there.owner, direct->owner, TK_OWNER_BYTES))
			continue;
		*found = (struct found){{seq, (uint32_t)(i & direct->mask), 0}, there.offset, there.crc32c};
		return (!length || length == there.length) && there.length <= direct->memory_bytes &&
		       there.offset <= direct->memory_bytes - there.length &&
		       !memcmp(there.fingerprint, fingerprint, TK_FINGERPRINT_BYTES);
	}
	return 0;
}

/* Returns whether what was copied are the block's bytes. */
static int copy_block(struct tk_direct *direct, const struct found *found, struct tk_direct_block *wanted,
		      struct block_copy *block)
{
	block->length = wanted->length;
	block->from = direct->memory + found->offset;
	block_copy_into(block, wanted->address, (struct tk_pieces *)(uintptr_t)wanted->pieces, wanted->skip, wanted->part);
	block_copy_some(block, wanted->length);
	if (!is_unchanged(&direct->slots[found->block.slot], found->block.seq))
		return 0;
	if (block->crc32c != found->crc32c)
		__atomic_store_n(&direct->distrusts, 1, __ATOMIC_RELAXED);
	wanted->is_scattered = block->pieces != NULL;
	return block->crc32c == found->crc32c;
}

static uint64_t left_in_log(const struct tk_direct *direct)
{
	uint64_t taken = __atomic_load_n(&direct->log->taken, __ATOMIC_ACQUIRE);
	uint64_t used = __atomic_load_n(&direct->log->written, __ATOMIC_RELAXED) - taken;
	return used > READ_LOG_DATA_BYTES ? 0 : READ_LOG_DATA_BYTES - used;
}

static uint64_t copy_in(struct read_log *log, uint64_t at, const void *from, size_t bytes)
{
	char *data = (char *)log + READ_LOG_HEAD_BYTES;
	size_t start = at % READ_LOG_DATA_BYTES, first = READ_LOG_DATA_BYTES - start;
	first = bytes < first ? bytes : first;
	memcpy(data + start, from, first);
	memcpy(data, (const char *)from + first, bytes - first);
	return at + bytes;
}

/* `found`: NULL for a look-up. */
static int append_entry(struct tk_direct *direct, const struct read_entry *entry, const struct found *found, const void *metadata)
{
	pthread_mutex_lock(&direct->log_lock);
	int has_room = entry->bytes <= left_in_log(direct);
	if (has_room) {
		uint64_t at = copy_in(direct->log, direct->log->written, entry, sizeof *entry);
		for (uint32_t i = 0; i < entry->blocks && found; i++)
			at = copy_in(direct->log, at, &found[i].block, sizeof found[i].block);
		at = copy_in(direct->log, at, metadata, entry->metadata_bytes);
		__atomic_store_n(&direct->log->written, at, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&direct->log_lock);
	return has_room;
}

static int read_all(struct tk_direct *direct, const uint8_t *fingerprint, struct tk_direct_block *blocks, uint32_t count,
		    uint64_t bytes_max, const void *metadata, uint32_t metadata_bytes, struct found *found)
{
	struct read_entry entry = {
		.bytes = (uint32_t)(sizeof entry + count * sizeof(struct read_block) + metadata_bytes),
		.blocks = count,
		.metadata_bytes = metadata_bytes,
		.began_ns = tk_now_ns(),
	};
	uint64_t bytes = 0;
	if (!may_read(direct) || entry.bytes > left_in_log(direct))
		return 0;
	for (uint32_t i = 0; i < count; i++) {
		const struct tk_direct_block *wanted = &blocks[i];
		bytes += wanted->length;
		entry.size_bytes += wanted->part ? wanted->part : wanted->length;
		if (wanted->part > wanted->length || (wanted->part && wanted->skip > wanted->length - wanted->part))
			return 0;
		if (bytes > bytes_max || bytes > READ_BYTES_MAX || !find(direct, wanted->key, fingerprint, wanted->length, &found[i]))
			return 0;
	}
	for (uint32_t i = 0; i < count; i++) {
		struct block_copy block = {.copy = copy_for(bytes)};
		if (i + 1 < count)
			block.then = direct->memory + found[i + 1].offset;
		if (!copy_block(direct, &found[i], &blocks[i], &block))
			return 0;
	}
	entry.ended_ns = tk_now_ns();
	return append_entry(direct, &entry, found, metadata);
}

static int find_all(struct tk_direct *direct, const uint8_t *fingerprint, const uint8_t *keys, uint32_t count,
		    const void *metadata, uint32_t metadata_bytes)
{
	struct read_entry entry = {
		.bytes = (uint32_t)sizeof entry + metadata_bytes,
		.blocks = count,
		.metadata_bytes = metadata_bytes,
		.is_prefix = 1,
		.began_ns = tk_now_ns(),
	};
	if (!may_read(direct))
		return 0;
	for (uint32_t i = 0; i < count; i++) {
		struct found found;
		if (!find(direct, keys + (size_t)i * TK_KEY_BYTES, fingerprint, 0, &found))
			return 0;
	}
	entry.ended_ns = tk_now_ns();
	return append_entry(direct, &entry, NULL, metadata);
}

int tk_direct_has(struct tk_direct *direct, const uint8_t *fingerprint, const uint8_t *keys, uint32_t count,
		  const void *metadata, uint32_t metadata_bytes)
{
	if (!count || count > TK_DIRECT_KEYS || metadata_bytes > READ_METADATA_BYTES_MAX || metadata_bytes % 8)
		return 0;
	__atomic_add_fetch(&direct->users, 1, __ATOMIC_SEQ_CST);
	int has = !__atomic_load_n(&direct->closing, __ATOMIC_SEQ_CST) &&
		  find_all(direct, fingerprint, keys, count, metadata, metadata_bytes);
	__atomic_sub_fetch(&direct->users, 1, __ATOMIC_SEQ_CST);
	return has;
}

int tk_direct_read(struct tk_direct *direct, const uint8_t *fingerprint, struct tk_direct_block *blocks, uint32_t count,
		   uint64_t bytes_max, const void *metadata, uint32_t metadata_bytes)
{
	if (!count || count > TK_DIRECT_BLOCKS || metadata_bytes > READ_METADATA_BYTES_MAX || metadata_bytes % 8)
		return 0;
	struct found *found = malloc(count * sizeof *found); /* the caller's thread may have a small stack */
	if (!found)
		return 0;
	__atomic_add_fetch(&direct->users, 1, __ATOMIC_SEQ_CST);
	int is_read = !__atomic_load_n(&direct->closing, __ATOMIC_SEQ_CST) &&
		      read_all(direct, fingerprint, blocks, count, bytes_max, metadata, metadata_bytes, found);
	if (is_read)
		__atomic_add_fetch(&direct->blocks, count, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&direct->users, 1, __ATOMIC_SEQ_CST);
	free(found);
	return is_read;
}
