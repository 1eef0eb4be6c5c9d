/*
 * Shared by the files of a lane: lane.c, lane_open.c and lane_writes.c.
 */
#ifndef TRIGGERKV_LANE_INSIDE_H
#define TRIGGERKV_LANE_INSIDE_H

#include "lane.h"

#include "drive_ring.h"
#include "header.h"
#include "progress.h"
#include "record_encryption.h"
#include "staged.h"

#define PAGE TK_TAGGED_PAGE

/* A record under way. */
struct record {
	struct lane_word word;
	struct tk_written row; /* `was_reported` and `is_reported` under the lock */
	uint64_t size;
	uint32_t pieces; /* those that are not over */
	int is_whole;	 /* no more pieces will begin */
	int has_ended, is_reported; /* reported to the application; its peer is next */
	int has_landed; /* the peer got `landed`, or is gone */
	int changes_owner; /* the record before it, if any, has another owner */

	/* Of an encrypted record, until it is complete. */
	char *payload;
	uint32_t length, encrypted; /* bytes */
	struct header_fixed header;
	struct vault_key key;
};

/* A part of a record, written at once. Staged memory is allocated and released in the order in which pieces begin. */
struct piece {
	struct record *record;
	uint32_t taken; /* of staged memory, including the gap before it */
	int is_over;

	/* If a write begins with it: of that write, which has the next pieces as well. */
	uint32_t count;		      /* pieces */
	uint32_t stumbles;
	uint64_t offset, moved, size; /* offset: of its first byte */
};

struct tk_lane {
	struct tk_fabric *fabric;
	struct tk_lane *next;
	struct tk_lane_setup setup;

	/* Used only by the thread that runs the rounds. */
	struct io_uring ring;
	int event_fd; /* rung when a write has ended */
	struct record *records; /* a ring of `depth` */
	char *headers;		/* a page for each record, unless records are encrypted */
	uint32_t first, count;	/* changed under the lock */
	uint64_t bytes; /* of these */
	uint32_t owner_changes; /* records, except the first, that change the owner */
	struct piece *pieces; /* a ring of `depth`, by their numbers: */
	struct iovec (*parts)[2]; /* likewise: the bytes that are not written yet */
	uint64_t pieces_begun, pieces_freed; /* of the next piece, and of the oldest still in use */

	uint32_t whole; /* records of which no more pieces will begin; the next ones follow in order */
	/* With encryption. */
	struct record_stream stream; /* the first record that is not complete */
	struct staged staged;
	/* Writes that were prepared and not submitted, */
	uint32_t unsubmitted, unsubmitted_pieces;
	uint64_t unsubmitted_bytes;
	uint64_t submit_at_ns; /* at the latest; 0: a peer waits for one */
	struct io_uring_sqe *last_write; /* the last of them, if it may get more pieces; it begins with */
	struct piece *last_first;
	uint32_t in_flight; /* submitted, and not ended */

	pthread_mutex_t lock; /* for all that follows */
	struct tk_ground ground, next_ground, ground_before; /* see `tk_lane_state` */
	uint32_t used, used_before; /* records begun on the first and the last of them */
	int expects;	       /* more ground will follow */
	uint32_t wanted_pages; /* for the blocks that wait for ground, as reported to the application */
	uint64_t begun;	       /* since the lane was opened, atomic */
	uint64_t clear_until;  /* records of lower generations may be acknowledged */
	int failed; /* the errno of a failed write; 0: none */
	struct tk_written *written;
	uint32_t written_count, written_capacity;
	int is_notified;
	uint64_t notify_at_ns;
};

/* lane_writes.c */
int write_some(struct tk_lane *lane, uint32_t budget); /* begins to write records, until it has prepared so many bytes */
int reap_writes(struct tk_lane *lane);
void submit_writes(struct tk_lane *lane);

#endif
