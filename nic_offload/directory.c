/*
 * The node's side of direct reads: a table of the blocks on the shelf in memory that clients on the same machine have
 * mapped, so that such a client finds a block and copies it without a call; and the logs in which these clients note
 * their gets, so that they count as uses and appear in the history like any other.
 *
 * Each slot is a seqlock: the client reads its `seq`, copies the block, and reads `seq` again. Only slots that are
 * listed under the shelf's lock are written, by whoever lists or unlists a block.
 *
 * What always holds: a block that is unlisted has left its slot when `shelf_unlist` returns, so before its memory is
 * reused and before a deletion is confirmed. A `seq` is never used twice. When this process ends, however it ends, the
 * kernel marks `owner` before any descriptor or lock of the process is released, and nothing is read any more: so no
 * block is read that the node's next process has deleted. What a client writes into its log is copied once and then
 * checked; a false note harms only its own statistics, and an impossible one closes its log.
 *
 * What it doesn't do: list every block. If the slots in which a name may be are all in use, its block is not here, and
 * clients make a call. Nor wait for anybody: a full log makes its client call.
 */
#define _GNU_SOURCE
#include "directory.h"

#include "desk_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
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
	slot->length = block ? block->length : 0;
	if (block) {
		slot->offset = offset;
		slot->crc32c = block->crc32c;
		memcpy(slot->owner, block->owner, sizeof slot->owner);
		memcpy(slot->key, block->key, sizeof slot->key);
		memcpy(slot->fingerprint, block->fingerprint, sizeof slot->fingerprint);
	}
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

/* Locks a mutex that is never unlocked: this thread holds it until it ends. Returns the offset of the word with the
 * thread's number; 0: there is none, and nothing can be shared. */
static uint64_t hold_until_death(struct directory_head *head)
{
	pthread_mutexattr_t how;
	int32_t words[sizeof head->owner / sizeof(int32_t)];
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
	struct shelved **blocks = calloc(slots, sizeof *blocks);
	if (directory && blocks) {
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

/* --- logs */

void tk_desk_log(struct tk_desk *desk, void *log)
{
	struct tk_shelf *shelf = desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	desk_take_notes(desk);
	desk_close_log(desk);
	if (!log) {
		pthread_mutex_unlock(&shelf->lock);
		return;
	}
	desk->log = log;
	desk->log_taken = 0;
	desk->next_logged = shelf->logged;
	shelf->logged = desk;
	__atomic_store_n(&desk->log->is_open, (uint64_t)desk->answers, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&shelf->lock);
}

void desk_close_log(struct tk_desk *desk)
{
	struct tk_desk **link = &desk->shelf->logged;
	while (*link && *link != desk)
		link = &(*link)->next_logged;
	if (*link)
		*link = desk->next_logged;
	desk_open_log(desk, 0);
	desk->log = NULL;
}

void desk_open_log(struct tk_desk *desk, int is_open)
{
	if (desk->log)
		__atomic_store_n(&desk->log->is_open, (uint64_t)is_open, __ATOMIC_RELEASE);
}

static void copy_out(const struct read_log *log, uint64_t at, void *to, size_t bytes)
{
	const char *data = (const char *)log + READ_LOG_HEAD_BYTES;
	size_t start = at % READ_LOG_DATA_BYTES, first = READ_LOG_DATA_BYTES - start;
	first = bytes < first ? bytes : first;
	memcpy(to, data + start, first);
	memcpy((char *)to + first, data, bytes - first);
}

static int is_note(const struct read_note *note, uint64_t there)
{
	return note->blocks && note->blocks <= TK_DIRECT_BLOCKS && note->metadata_bytes <= READ_METADATA_BYTES_MAX &&
	       note->metadata_bytes % 8 == 0 && note->bytes <= there &&
	       note->bytes == sizeof *note + note->blocks * sizeof(struct read_block) + note->metadata_bytes;
}

/* The id by which the use of a block is reported, or 0 if it is no longer the one that was read. */
static uint64_t id_of(const struct tk_desk *desk, const struct read_block *read)
{
	struct directory *directory = desk->shelf->directory;
	if (!directory || read->slot > directory->mask)
		return 0;
	struct shelved *block = directory->blocks[read->slot];
	int is_it = block && find_slot(directory, read->slot)->seq == read->seq &&
		    !memcmp(block->block.owner, desk->setup.owner, TK_OWNER_BYTES);
	return is_it ? note_use(block) : 0;
}

/* Takes one note. Returns 0 if it has to wait, a negative number if there can't be such a note. */
static int take_note(struct tk_desk *desk, uint64_t written)
{
	struct tk_shelf *shelf = desk->shelf;
	struct read_note note;
	if (written - desk->log_taken < sizeof note)
		return -EINVAL;
	copy_out(desk->log, desk->log_taken, &note, sizeof note);
	if (!is_note(&note, written - desk->log_taken))
		return -EINVAL;
	size_t rest_bytes = note.blocks * sizeof(uint64_t) + note.metadata_bytes;
	struct served *served = desk_new_note(shelf, rest_bytes);
	if (!served)
		return 0;
	uint64_t now_ns = tk_now_ns(), bytes_max = note.blocks * shelf->region->length;
	int is_past = note.began_ns <= note.ended_ns && note.ended_ns <= now_ns;
	served->told.desk = desk->setup.tag;
	served->told.began_ns = is_past ? note.began_ns : now_ns;
	served->told.ended_ns = is_past ? note.ended_ns : now_ns;
	served->told.size_bytes = note.size_bytes < bytes_max ? note.size_bytes : bytes_max;
	served->told.blocks = note.blocks;
	served->told.metadata_bytes = note.metadata_bytes;
	uint64_t at = desk->log_taken + sizeof note;
	for (uint32_t i = 0; i < note.blocks; i++, at += sizeof(struct read_block)) {
		struct read_block read;
		copy_out(desk->log, at, &read, sizeof read);
		served->rest[i] = id_of(desk, &read);
	}
	copy_out(desk->log, at, served->rest + note.blocks, note.metadata_bytes);
	desk_append_note(shelf, served);
	desk->log_taken += note.bytes;
	return 1;
}

void desk_take_notes(struct tk_desk *desk)
{
	if (!desk->log)
		return;
	uint64_t written = __atomic_load_n(&desk->log->written, __ATOMIC_ACQUIRE);
	int taken = written - desk->log_taken > READ_LOG_DATA_BYTES ? -EINVAL : 1;
	while (taken > 0 && desk->log_taken != written)
		taken = take_note(desk, written);
	__atomic_store_n(&desk->log->taken, desk->log_taken, __ATOMIC_RELEASE);
	if (taken < 0)
		desk_close_log(desk);
}

void shelf_take_notes(struct tk_shelf *shelf)
{
	for (struct tk_desk *desk = shelf->logged, *next; desk; desk = next) {
		next = desk->next_logged;
		desk_take_notes(desk);
	}
}
