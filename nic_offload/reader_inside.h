/*
 * Shared by the two files of a reader: reader.c and reader_pieces.c.
 */
#ifndef TRIGGERKV_READER_INSIDE_H
#define TRIGGERKV_READER_INSIDE_H

#include "cold.h"
#include "drive_ring.h"
#include "header.h"
#include "progress.h"
#include "record_encryption.h"
#include "staged.h"

#define PAGE TK_TAGGED_PAGE
#define STAGED_BYTES (8u << 20)	 /* pieces of encrypted records being read, or waiting to be decrypted */

/* A record that is being read. It belongs to the progress thread once that has taken in the work. */
struct reading {
	struct reading *next; /* in the list of those that wait for free pieces */
	struct batch *batch;
	struct tk_reader *reader;
	struct work *work; /* NULL: the bytes are no longer wanted */
	uint32_t size, begun, over; /* bytes in total, of pieces begun, and of finished pieces */
	int failed;
	uint64_t offset;
	uint64_t place; /* of a cold block: its generation and CRC are taken from its header */
	struct tk_room room; /* of a cold block */
	struct header_fixed header;
	struct aead *aead; /* NULL: not encrypted, or not begun */
	uint8_t payload_tag[TK_AEAD_TAG];
};

/* Part of a record. Memory is allocated and released in the order in which pieces begin. */
struct piece {
	struct piece *next; /* in the list of pieces that were read */
	struct reading *reading;
	uint64_t number;
	char *memory;
	uint32_t at, size, moved, stumbles; /* of the record */
	uint32_t taken; /* of memory, including the gap before it */
	enum { PIECE_READING, PIECE_READ, PIECE_OVER } state;
	int is_listed; /* in the list of pieces that were read: not reused yet */
};

/* Records submitted together. A batch is freed when both its reads and its puts have been reported as over. */
struct batch {
	struct batch *next; /* batches that were read and not reported yet */
	struct tk_region *region; /* in use while the drive may write to it */
	uint64_t tag, read_ns, posted_ns;
	uint32_t unread;   /* records whose pages the drive still uses */
	uint32_t not_over; /* puts that are not over */
	int read_is_reported;
	struct tk_shelf *shelf; /* of blocks of a call that a desk answers, from any drives; the application gets no event */
	struct reading readings[];
};

struct tk_reader {
	struct tk_fabric *fabric;
	struct tk_reader *next;
	struct tk_reader_setup setup;

	/* Used only by the thread that runs the rounds. */
	struct io_uring ring;
	int event_fd; /* rung when a read has ended */
	struct reading *first, *last; /* those that wait for free pieces */
	struct piece *pieces; /* as many as the ring is deep, by number */
	uint64_t begun, freed; /* the numbers of the next piece, and of the oldest one whose memory is in use */
	struct staged staged;
	struct piece *read_first_piece, *read_last_piece; /* to be checked */
	uint32_t in_ring, in_ring_bytes;
	int unsubmitted;
	struct batch *read_first; /* batches whose TK_READ waits for the end of their puts */
	char *scratch; /* a page */
};

void reading_fill_in(struct reading *reading, struct batch *batch, struct tk_reader *reader, uint32_t length,
		     const uint8_t *key, const uint8_t *owner, const uint8_t *fingerprint); /* the rest is zero */
void reading_over(struct tk_reader *reader, struct reading *reading); /* the drive no longer uses its memory */

/* reader_pieces.c */
int start_readings(struct tk_reader *reader);
void submit_reads(struct tk_reader *reader);
int reap_reads(struct tk_reader *reader);
int check_read(struct tk_reader *reader, uint32_t budget);

#endif
