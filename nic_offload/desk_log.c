/*
 * The logs in which clients note their direct reads (direct.c), so that these count as uses and appear in the history like
 * other gets.
 *
 * What always holds: a note is taken once. What a client writes is copied once and then checked; a false note harms only
 * the statistics of its own tenant, and an impossible one closes its log for good. Nobody waits: a client whose log is full
 * makes a call, which has its notes taken; and whoever takes all notes takes those written when it began, so that
 * clients that go on writing don't keep it. All under the shelf's lock.
 */
#define _GNU_SOURCE
#include "desk_inside.h"
#include "directory.h"

#include <errno.h>
#include <string.h>

/* Of records that the application has not fetched, beyond which notes wait in their logs: all requests wait until it has
 * processed what is there, and clients read faster than it does that. */
#define NOTED_BYTES_MAX (128u << 10)

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
static uint32_t blocks_in(const struct read_note *note)
{
	return note->is_prefix ? 0 : note->blocks;
}

static int is_note(const struct read_note *note, uint64_t there)
{
	uint32_t blocks_max = note->is_prefix ? TK_DIRECT_KEYS : TK_DIRECT_BLOCKS;
	return note->blocks && note->blocks <= blocks_max && note->is_prefix <= 1 && note->metadata_bytes <= READ_METADATA_BYTES_MAX &&
	       note->metadata_bytes % 8 == 0 && note->bytes <= there &&
	       note->bytes == sizeof *note + blocks_in(note) * sizeof(struct read_block) + note->metadata_bytes;
}

/* The id by which the use of a block is reported, or 0 if it is no longer the one that was read. */
static uint64_t id_of(const struct tk_desk *desk, const struct read_block *read)
{
	struct shelved *block = directory_block(desk->shelf, read->slot, read->seq);
	return block && !memcmp(block->block.owner, desk->setup.owner, TK_OWNER_BYTES) ? note_use(block) : 0;
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
	if (shelf->served_bytes >= NOTED_BYTES_MAX)
		return 0;
	uint32_t blocks = blocks_in(&note);
	size_t rest_bytes = blocks * sizeof(uint64_t) + note.metadata_bytes;
	struct served *served = desk_new_note(shelf, rest_bytes);
	if (!served)
		return 0;
	uint64_t now_ns = tk_now_ns(), bytes_max = note.blocks * shelf->region->length;
	bytes_max = bytes_max < READ_BYTES_MAX ? bytes_max : READ_BYTES_MAX;
	int is_past = note.began_ns <= note.ended_ns && note.ended_ns <= now_ns;
	served->told.desk = desk->setup.tag;
	served->told.began_ns = is_past ? note.began_ns : now_ns;
	served->told.ended_ns = is_past ? note.ended_ns : now_ns;
	served->told.size_bytes = note.size_bytes < bytes_max ? note.size_bytes : bytes_max;
	served->told.blocks = note.blocks;
	served->told.metadata_bytes = note.metadata_bytes;
	served->told.is_prefix = note.is_prefix;
	uint64_t at = desk->log_taken + sizeof note;
	for (uint32_t i = 0; i < blocks; i++, at += sizeof(struct read_block)) {
		struct read_block read;
		copy_out(desk->log, at, &read, sizeof read);
		served->rest[i] = id_of(desk, &read);
	}
	copy_out(desk->log, at, served->rest + blocks, note.metadata_bytes);
	desk_append_note(shelf, served);
	desk->log_taken += note.bytes;
	return 1;
}

static void take_until(struct tk_desk *desk, uint64_t written)
{
	int taken = written - desk->log_taken > READ_LOG_DATA_BYTES ? -EINVAL : 1;
	while (taken > 0 && desk->log_taken != written)
		taken = take_note(desk, written);
	__atomic_store_n(&desk->log->taken, desk->log_taken, __ATOMIC_RELEASE);
	if (taken < 0)
		desk_close_log(desk);
}

static uint64_t written_in(const struct tk_desk *desk)
{
	return __atomic_load_n(&desk->log->written, __ATOMIC_ACQUIRE);
}

void desk_take_notes(struct tk_desk *desk)
{
	if (desk->log)
		take_until(desk, written_in(desk));
}

int desk_has_notes(const struct tk_desk *desk)
{
	return desk->log && desk->log_taken != written_in(desk);
}

int shelf_take_notes(struct tk_shelf *shelf, int begins)
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
