/*
 * The node's side of direct reads: a table of the blocks on the shelf in memory that clients on the same machine have
 * mapped, so that such a client finds a block and copies it without a call (direct.c).
 *
 * Each slot is a seqlock: the client reads its `seq`, copies the block, and reads `seq` again. A slot is written under the
 * shelf's lock by whoever lists or unlists its block.
 *
 * What always holds: a block that is unlisted has left its slot when `shelf_unlist` returns, so before its memory is
 * reused and before a deletion is confirmed. A `seq` is never used twice. When this process ends, however it ends, the
 * kernel marks `owner` before any descriptor or lock of the process is released, and nothing is read any more: so no
 * block is read that the node's next process has deleted.
 *
 * What it doesn't do: list every block. If the slots in which a name may be are all in use, its block is not here, and
 * clients make a call.
 */
#define _GNU_SOURCE
#include "directory.h"

#include "progress.h"
#include "shelf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

struct directory {
	struct directory_head *head;
	struct directory_slot *slots;
	struct shelved **blocks; /* by slot; NULL: it is free */
	uint64_t mask;
};

static struct directory_slot *find_slot(struct directory *directory, uint64_t number)
{
	return &directory->slots[number & directory->mask];
}

static void change(struct directory_slot *slot, const struct tk_shelved *block, uint64_t offset)
{
	uint64_t seq = slot->seq;
	__atomic_store_n(&slot->seq, seq + 1, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_RELEASE);
	struct directory_slot there = {0};
	if (block) {
		there.offset = offset;
		there.length = block->length;
		there.crc32c = block->crc32c;
		memcpy(there.owner, block->owner, sizeof there.owner);
		memcpy(there.key, block->key, sizeof there.key);
		memcpy(there.fingerprint, block->fingerprint, sizeof there.fingerprint);
	}
	/* Of a block that has gone, clients are left neither the name nor the checksum. */
	memcpy(&slot->offset, &there.offset, sizeof there - offsetof(struct directory_slot, offset));
	__atomic_store_n(&slot->seq, seq + 2, __ATOMIC_RELEASE);
	/* Memory that is reused next must not be seen before this. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void directory_list(struct tk_shelf *shelf, struct shelved *block)
{
	struct directory *directory = shelf->directory;
	if (!directory)
		return;
	uint64_t first = directory_hash(directory->head->secret, block->block.owner, block->block.key);
	for (uint64_t i = first; i < first + DIRECTORY_PROBES; i++) {
		struct shelved **there = &directory->blocks[i & directory->mask];
		if (*there)
			continue;
		*there = block;
		block->slot = 1 + (uint32_t)(i & directory->mask);
		change(find_slot(directory, i), &block->block, block->block.address - shelf->region->address);
		return;
	}
}

void directory_unlist(struct tk_shelf *shelf, struct shelved *block)
{
	if (!block->slot)
		return;
	change(find_slot(shelf->directory, block->slot - 1), NULL, 0);
	shelf->directory->blocks[block->slot - 1] = NULL;
	block->slot = 0;
}

void directory_free(struct tk_shelf *shelf)
{
	if (shelf->directory)
		free(shelf->directory->blocks);
	free(shelf->directory);
}

/* Whether the kernel knows this thread's robust mutexes. A sandbox or an emulator may not have the call by which the C
 * library says so, and the library doesn't tell. */
static int is_death_noted(void)
{
	void *list = NULL;
	size_t bytes;
	return !syscall(SYS_get_robust_list, 0, &list, &bytes) && list;
}

/* Locks a mutex that is never unlocked: this thread holds it until it ends. Returns the offset of the word with the
 * thread's number; 0: there is none, and nothing can be shared. */
static uint64_t hold_until_death(struct directory_head *head)
{
	pthread_mutexattr_t how;
	int32_t words[sizeof head->owner / sizeof(int32_t)];
	if (!is_death_noted())
		return 0;
	pthread_mutexattr_init(&how);
	int failed = pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED) ||
		     pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST) || pthread_mutex_init(&head->owner, &how) ||
		     pthread_mutex_lock(&head->owner);
	pthread_mutexattr_destroy(&how);
	memcpy(words, &head->owner, sizeof words);
	for (size_t i = 0; !failed && i < sizeof words / sizeof *words; i++)
		if (words[i] == gettid())
			return offsetof(struct directory_head, owner) + i * sizeof *words;
	return 0;
}

struct sharing {
	struct tk_shelf *shelf;
	struct directory *directory;
};

/* On the node's own thread, which ends with its fabric. */
static int share(struct tk_fabric *fabric, void *argument)
{
	(void)fabric;
	const struct sharing *sharing = argument;
	struct directory_head *head = sharing->directory->head;
	uint64_t alive = hold_until_death(head);
	if (!alive)
		return -ENOTSUP;
	head->alive = alive;
	head->slots = sharing->directory->mask + 1;
	pthread_mutex_lock(&sharing->shelf->lock);
	sharing->shelf->directory = sharing->directory;
	pthread_mutex_unlock(&sharing->shelf->lock);
	return 0;
}

int tk_shelf_share(struct tk_shelf *shelf, void *memory, size_t bytes)
{
	uint64_t slots = bytes < DIRECTORY_HEAD_BYTES ? 0 : (bytes - DIRECTORY_HEAD_BYTES) / sizeof(struct directory_slot);
	int status = fabric_refusal(shelf->fabric);
	if (status)
		return status;
	if (slots < DIRECTORY_PROBES || slots > UINT32_MAX / 2 || slots & (slots - 1) || shelf->count || shelf->directory)
		return -EINVAL;
	struct directory *directory = calloc(1, sizeof *directory);
	struct shelved **blocks = aligned_alloc(sizeof *directory->slots, slots * sizeof *blocks);
	if (directory && blocks) {
		memset(blocks, 0, slots * sizeof *blocks); /* a page fault while a peer waits would cost as much as its put */
		*directory = (struct directory){
			.head = memory,
			.slots = (void *)((char *)memory + DIRECTORY_HEAD_BYTES),
			.blocks = blocks,
			.mask = slots - 1,
		};
		struct sharing sharing = {shelf, directory};
		if (getrandom(directory->head->secret, sizeof directory->head->secret, 0) !=
		    sizeof directory->head->secret)
			status = -errno;
		else
			status = on_the_thread(shelf->fabric, share, &sharing, sizeof sharing);
	} else {
		status = -ENOMEM;
	}
	if (status && status != TK_STUCK) {
		free(blocks);
		free(directory);
	}
	return status;
}

struct shelved *directory_block(struct tk_shelf *shelf, uint32_t slot, uint64_t seq)
{
	struct directory *directory = shelf->directory;
	if (!directory || slot > directory->mask)
		return NULL;
	return find_slot(directory, slot)->seq == seq ? directory->blocks[slot] : NULL;
}
