/*
 * Operations and watches of a fabric, the events that report on them, and the memory that they use. A part of the
 * public header, core.h.
 */
#ifndef TRIGGERKV_OPERATIONS_H
#define TRIGGERKV_OPERATIONS_H

#include "records.h"

#include <stddef.h>
#include <stdint.h>

struct tk_endpoint;
struct tk_region;
struct tk_counter;
struct tk_group;
struct tk_desk;
struct tk_sender;
struct tk_pieces;

/* Shared with the cffi build, as in core.h. */
/* cdef begin */
#define TK_PROVIDER_NAME_BYTES 32
#define TK_ADDRESS_BYTES 256
#define TK_MESSAGE_BYTES 256
#define TK_STUCK -35 /* -EDEADLK: the progress thread did not answer; see `tk_fabric_open` */
#define TK_UNFLUSHED -115 /* -EINPROGRESS: the NIC still has operations, because a flush failed; see `tk_endpoint_close` */

enum tk_event_kind {
	TK_FIRED,	/* value: the nanosecond at which the threshold was seen reached; only with TK_REPORT_FIRED,
			 * and never if the counter's value is the NIC's own */
	TK_DONE,	/* all has arrived at the peer; value: nanosecond of posting, 0 if a NIC fired it; not with TK_ACKED_PUT */
	TK_SENT,	/* as TK_DONE, with TK_SENT_PUT: it is not known whether it arrived or was refused */
	TK_FAILED,	/* status: why. -ECANCELED, -ETIMEDOUT, -EPIPE (one before it in the chain failed), -EBADMSG
			 * (a put's CRC differs), -ENODATA (its record was not read): nothing went out, nor will; any other
			 * is the provider's, and bytes may have moved, in whole or in part. value: with -EPIPE, the errno
			 * of the one that failed first */
	TK_LATE,	/* not final: the deadline has passed and the operation can't be recalled. Closing its endpoint ends it */
	TK_LANDED,	/* the expected generation is in the slot's flag word; value: CRC32C of the payload; at a desk:
			 * the generation */
	TK_ACKED,	/* value: the acknowledgement word; final once its code is at least the one requested */
	TK_WATCH_FAILED, /* status: -ETIMEDOUT, or -ECANCELED */
	TK_OVER,	 /* the last row of a group is over, and no caller was waiting for it */
	TK_CAME,	 /* a receiver, lane or desk has something for the application to take; tag: as it was set up */
	TK_READ		 /* the drive no longer uses the memory of a batch of records; tag: the batch's */
};

/* Flags of an operation. */
#define TK_VERIFY_CRC 1   /* a put or a get fails unless its bytes have the expected CRC32C */
#define TK_QUIET 2        /* report nothing, not even a failure */
#define TK_REPORT_FIRED 4 /* one more event, when the threshold is seen reached */
#define TK_FLAG_PUT 8     /* an 8-byte flag put follows the bytes, or stands alone if length is 0 */
#define TK_ACKED_PUT 16   /* an ack watch reports its success; only failures are reported here */
#define TK_GET 32         /* the bytes come from the peer */
#define TK_SENT_PUT 128	  /* it ends when local memory may be reused; on success with TK_SENT */
#define TK_SHARED_PUT 256 /* a peer that shares our memory can read these bytes itself: see shared_reads.c */
#define TK_SET_COUNTER 64 /* `completion` is set to `step` instead of moved by it */

/* How a fabric is opened. */
#define TK_DEFERRED_WORK 1 /* hand operations to libfabric's deferred work; refused where it has none */
#define TK_DEVICE_MEMORY 2 /* so that memory of a GPU can be registered, if the provider can */

struct tk_provider_info {
	char name[TK_PROVIDER_NAME_BYTES];
	int rma;
	int ordered;	   /* writes to one peer arrive in the order of posting */
	int deferred_work; /* implements FI_QUEUE_WORK */
};

struct tk_event {
	uint64_t tag;
	uint64_t value;
	uint64_t time_ns; /* CLOCK_MONOTONIC */
	int32_t kind;
	int32_t status;
};

struct tk_operation {
	uint64_t tag;
	struct tk_endpoint *endpoint; /* NULL: only a counter is moved */
	uint64_t peer;
	uint64_t local;
	uint64_t remote;
	uint64_t remote_key;
	uint64_t flag_target; /* where the 8-byte flag goes once the bytes have arrived */
	uint64_t flag_key;
	uint64_t flag_value;
	struct tk_counter *trigger; /* NULL: it fires at once */
	uint64_t threshold;	    /* it fires when `trigger` is at least this */
	struct tk_counter *completion; /* the counter that is moved when all else is done, or NULL */
	uint64_t step;
	uint64_t deadline_ns;
	struct tk_region *region; /* holds the local bytes; NULL when length is 0 */
	struct tk_group *group;	  /* NULL, or the group that notes when it fired */
	struct tk_sender *sender; /* NULL, or the sender that assigns a slot when it fires, and sets `remote` and the flag; */
	const struct tk_put_head *head; /* then the block's head, with the metadata before it. Read when it fires */
	struct tk_pieces *pieces; /* NULL, or the pieces that are gathered at `local` when it fires */
	uint32_t length;
	uint32_t crc32c;
	uint32_t flags;
	uint32_t row; /* of the group */
	uint32_t skip, part; /* with TK_VERIFY_CRC: `part` of the checksummed bytes are put, after the first `skip`; 0: all */
};

/* The head of a put: it describes the block. It lies right before the payload, in the last bytes of the slot's first
 * page; metadata about the block's session or trace lies before it. */
#define TK_KEY_BYTES 32
#define TK_FINGERPRINT_BYTES 16
#define TK_OWNER_BYTES 16
#define TK_DRIVES_MAX 32 /* of a store */
#define TK_LOTS 8192 /* each name belongs to one; see kvstore/placement.py */
#define TK_HEAD_PAGE 4096 /* the room for both */
#define TK_PUT_HAS_CRC 1
struct tk_put_head {
	uint32_t head_crc32c; /* of the metadata and all following fields, with a tag of 0. Set by the sender */
	uint32_t metadata_bytes;
	uint64_t generation;	 /* of the slot. Set by the sender */
	uint64_t ack_generation; /* set by the sender */
	uint64_t expires_unix_ms;
	uint32_t ack_word; /* set by the sender */
	uint32_t length;
	uint32_t crc32c; /* of the payload. Set by the sender */
	uint8_t flags;	 /* set by the sender */
	uint8_t durability;
	uint8_t zeros[2];
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint8_t domain[TK_DOMAIN_BYTES]; /* its key encrypts the block on the drive; zeros: none was named */
	uint64_t fired_ns; /* when the flag was seen (sender's CLOCK_MONOTONIC); 0: an earlier version. Set by the sender */
	uint64_t tag; /* on a sealed connection, of the metadata and all fields before it; otherwise 0. Set by the sender */
};

/* A batch of puts by grants, followed by a row for each of its blocks. Their tags differ: tag + 2 * number. */
struct tk_puts {
	uint64_t tag;
	struct tk_sender *sender;
	struct tk_counter *trigger; /* NULL: they wait for `word`, or for nothing */
	void *word;
	struct tk_bell *bell; /* of the word, with its pipe; NULL: it has none */
	uint64_t deadline_ns;
	uint64_t expires_unix_ms;
	int32_t pipe_fd;
	uint32_t count;
	uint32_t first_bytes, other_bytes; /* of metadata: of the first block, and of each other; multiples of 8 */
	uint32_t durability;
	uint32_t zero;
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};
struct tk_put_row {
	struct tk_region *region; /* where the bytes are, or where `pieces` are gathered */
	uint64_t local;
	uint64_t threshold;
	struct tk_pieces *pieces;
	uint32_t length;
	uint32_t is_named; /* 0: it is sent only once it has a name */
	uint8_t key[TK_KEY_BYTES];
	uint8_t domain[TK_DOMAIN_BYTES];
};

struct tk_landing {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t word;	     /* address of the slot's flag word */
	uint64_t generation; /* what the word must become */
	uint64_t payload;
	uint64_t peer;
	uint64_t ack_target; /* where `ack_value` is put as soon as the generation matches */
	uint64_t ack_key;
	uint64_t ack_value;
	uint64_t deadline_ns;
	uint32_t length;
	uint32_t quiet;	      /* no acknowledgement: it is answered otherwise */
	struct tk_desk *desk; /* NULL, or calls arrive here, and this desk may answer them. If it does there is no
			       * event, and the landing waits for the next generation */
	struct tk_region *region; /* has the flag word; may be NULL if the connection is not sealed */
};

struct tk_ack_watch {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t word; /* holds generation << 8 | code */
	uint64_t generation;
	uint64_t deadline_ns;
	struct tk_group *group; /* NULL, or the group whose row notes codes up to `good_max`, which are then not reported */
	uint32_t final_code; /* this code or a higher one ends the watch; lower ones are reported once each */
	uint32_t good_max;
	uint32_t row; /* of the group */
	uint32_t zero;
};

/* One operation of a group; see group.c. Times are of CLOCK_MONOTONIC, 0: not yet. */
struct tk_row {
	uint64_t fired_ns, landed_ns, over_ns; /* when the threshold was seen; the peer's first word; its last word */
	uint32_t code; /* of the last good one; 0: none */
	uint32_t over;
};

struct tk_statistics {
	uint64_t armed, fired, done, failed, cancelled, expired, late;
	uint64_t put_bytes, got_bytes;
	uint64_t landed, stale_words, acks_sent;
	uint64_t served;	/* blocks sent from the shelf, for calls that the desk answered */
	uint64_t handed;	/* to the NIC, in total */
	uint64_t taken_back;	/* from the NIC unfired, to be cancelled or handed over again */
	uint64_t waiting;	/* now, in our own queue */
	uint64_t held;		/* now, by the NIC */
	uint64_t slots_lost;	/* places at the NIC that can't be used before a flush or the end */
	uint64_t in_flight, watches;
	uint64_t loops, sleeps, asleep_ns, cpu_ns, alive_ns;
	uint64_t searches; /* for sockets */
	uint64_t turns;	   /* times that callers ran rounds while they waited */
};

uint32_t tk_crc32c(const void *data, size_t length, uint32_t seed);
uint32_t tk_crc32c_own(const void *data, size_t length, uint32_t seed);   /* without ISA-L */
uint32_t tk_crc32c_table(const void *data, size_t length, uint32_t seed); /* without any instruction either */
int tk_crc32c_is_isal(void);
uint64_t tk_siphash(const uint64_t secret[2], const void *data, size_t length);

uint64_t tk_word_load(const void *address);
void tk_word_store(void *address, uint64_t value);
/* The bell after a set of flag words, in the same memory. Each store to a word rings it: if a thread sleeps, a byte is
 * written to a pipe, for which each process has its own descriptor. */
#define TK_BELL_MAGIC 0x6c6c65622d6b7476
struct tk_bell {
	uint64_t magic;
	uint32_t words;
	uint32_t sleepers; /* atomic: threads that a store is to wake */
	int32_t maker_fd;  /* the pipe's descriptor in the process that made the words */
	uint32_t zero;
};
void tk_word_ring(void *address, uint64_t value, struct tk_bell *bell, int pipe_fd);
uint64_t tk_now_ns(void);
int tk_memory_populate(void *address, size_t length);
size_t tk_memory_collapse(int fd, size_t length);
void *tk_memory_make_hole(size_t length);
void tk_memory_leave_hole(void *around, size_t length);
struct tk_run {
	uint64_t piece; /* index of the source */
	uint64_t source, target, length;
};
void tk_copy_runs(const struct tk_run *runs, size_t count, const uint64_t *sources, uint64_t target);

/* Pieces of registered memory that, in their order, are the bytes of one block; see pieces.c. */
struct tk_piece {
	uint32_t region; /* which of the regions */
	uint32_t length;
	uint64_t offset; /* in it */
};
struct tk_scattered {
	const struct tk_pieces *pieces;
	uint64_t source; /* an address */
};
int tk_pieces_open(struct tk_region *const *regions, uint32_t regions_count, const struct tk_piece *pieces,
		   uint32_t count, struct tk_pieces **out);
uint64_t tk_pieces_bytes(const struct tk_pieces *pieces);
void tk_pieces_close(struct tk_pieces *pieces); /* it is freed when no operation uses it any more */
void tk_scatter(const struct tk_scattered *blocks, uint32_t count);
void tk_gather(const struct tk_pieces *pieces, void *target); /* `tk_pieces_bytes` of them, in their order */
/* cdef end */

#endif
