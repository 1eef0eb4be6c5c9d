/*
 * The logs in which clients record their direct reads (direct.c), so that these count as uses and appear in the history like
 * other gets.
 *
 * What always holds: an entry is taken once. What a client writes is copied once and then checked; a false entry harms only
 * the statistics of its own tenant, and an impossible one closes its log for good. Nobody waits: a client whose log is full
 * makes a call, which has its entries taken. Draining all logs takes only what was written when it began, so that clients
 * that go on writing don't keep it. All under the shelf's lock.
 */
#define _GNU_SOURCE
#include "desk_inside.h"
#include "directory.h"

#include <errno.h>
#include <string.h>

/* Of records that the application has not fetched, beyond which entries wait in their logs: all requests wait until it has
 * processed what is there, and clients read faster than it does that. */
#define LOGGED_BYTES_MAX (128u << 10)

void tk_desk_log(struct tk_desk *desk, void *log)
{
	struct tk_shelf *shelf = desk->shelf;
	pthread_mutex_lock(&shelf->lock);
	desk_drain_log(desk);
	desk_close_log(desk);
	if (!log) {
		pthread_mutex_unlock(&shelf->lock);
		return;
	}
	desk->log = log;
	desk->log_taken = desk->log_until = 0;
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

/* How many blocks it names. */
static uint32_t blocks_in(const struct read_entry *entry)
{
	return entry->is_prefix ? 0 : entry->blocks;
}

static int is_entry(const struct read_entry *entry, uint64_t there)
{
	uint32_t blocks_max = entry->is_prefix ? TK_DIRECT_KEYS : TK_DIRECT_BLOCKS;
	return entry->blocks && entry->blocks <= blocks_max && entry->is_prefix <= 1 && entry->metadata_bytes <= READ_METADATA_BYTES_MAX &&
	       entry->metadata_bytes % 8 == 0 && entry->bytes <= there &&
	       entry->bytes == sizeof *entry + blocks_in(entry) * sizeof(struct read_block) + entry->metadata_bytes;
}

/* The id by which the use of a block is reported, or 0 if it is no longer the one that was read. */
static uint64_t id_of(const struct tk_desk *desk, const struct read_block *read)
{
	struct shelved *block = directory_block(desk->shelf, read->slot, read->seq);
	return block && !memcmp(block->block.owner, desk->setup.owner, TK_OWNER_BYTES) ? note_use(block) : 0;
}

/* Takes one entry. Returns 0 if it has to wait, a negative number if there can't be such an entry. */
static int take_entry(struct tk_desk *desk, uint64_t written)
{
	struct tk_shelf *shelf = desk->shelf;
	struct read_entry entry;
	if (written - desk->log_taken < sizeof entry)
		return -EINVAL;
	copy_out(desk->log, desk->log_taken, &entry, sizeof entry);
	if (!is_entry(&entry, written - desk->log_taken))
		return -EINVAL;
	if (shelf->served_bytes >= LOGGED_BYTES_MAX)
		return 0;
	uint32_t blocks = blocks_in(&entry);
	size_t rest_bytes = blocks * sizeof(uint64_t) + entry.metadata_bytes;
	struct served *served = served_alloc(shelf, rest_bytes);
	if (!served)
		return 0;
	uint64_t now_ns = tk_now_ns(), bytes_max = entry.blocks * shelf->region->length;
	bytes_max = bytes_max < READ_BYTES_MAX ? bytes_max : READ_BYTES_MAX;
	int is_past = entry.began_ns <= entry.ended_ns && entry.ended_ns <= now_ns;
	served->head.desk = desk->setup.tag;
	served->head.began_ns = is_past ? entry.began_ns : now_ns;
	served->head.ended_ns = is_past ? entry.ended_ns : now_ns;
	served->head.size_bytes = entry.size_bytes < bytes_max ? entry.size_bytes : bytes_max;
	served->head.blocks = entry.blocks;
	served->head.metadata_bytes = entry.metadata_bytes;
	served->head.is_prefix = entry.is_prefix;
	uint64_t at = desk->log_taken + sizeof entry;
	for (uint32_t i = 0; i < blocks; i++, at += sizeof(struct read_block)) {
		struct read_block read;
		copy_out(desk->log, at, &read, sizeof read);
		served->rest[i] = id_of(desk, &read);
	}
	copy_out(desk->log, at, served->rest + blocks, entry.metadata_bytes);
	served_append(shelf, served);
	desk->log_taken += entry.bytes;
	return 1;
}

static void take_until(struct tk_desk *desk, uint64_t written)
{
	int taken = written - desk->log_taken > READ_LOG_DATA_BYTES ? -EINVAL : 1;
	while (taken > 0 && desk->log_taken != written)
		taken = take_entry(desk, written);
	__atomic_store_n(&desk->log->taken, desk->log_taken, __ATOMIC_RELEASE);
	if (taken < 0)
		desk_close_log(desk);
}

static uint64_t written_in(const struct tk_desk *desk)
{
	return __atomic_load_n(&desk->log->written, __ATOMIC_ACQUIRE);
}

void desk_drain_log(struct tk_desk *desk)
{
	if (desk->log)
		take_until(desk, written_in(desk));
}

int desk_log_has_more(const struct tk_desk *desk)
{
	return desk->log && desk->log_taken != written_in(desk);
}

int shelf_drain_logs(struct tk_shelf *shelf, int begins)
{
	uint64_t listed = shelf->served_listed;
	for (struct tk_desk *desk = shelf->logged, *next; desk; desk = next) {
		next = desk->next_logged;
		if (begins)
			desk->log_until = written_in(desk);
		if (begins || desk->log_until - desk->log_taken <= READ_LOG_DATA_BYTES) /* else a call had more taken */
			take_until(desk, desk->log_until);
	}
	return listed != shelf->served_listed;
}
