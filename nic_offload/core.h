/*
 * The C core: one progress thread that moves blocks without the application.
 *
 * A `tk_fabric` is one libfabric domain with its progress thread; a `tk_endpoint` is what one connection sends and
 * receives with; a `tk_counter` is what operations wait for and what they move when they end. The application queues
 * operations in batches and returns. An operation does up to three things, in this order: it moves bytes (a put or a
 * get), puts an 8-byte flag, moves a counter. A chain is an operation that waits for the counter of another one.
 *
 * The backend fires operations. The agent is the progress thread: it polls counters and posts operations that are due.
 * Where libfabric has deferred work (FI_QUEUE_WORK: sockets, cxi), as many operations as fit are handed to it in advance,
 * lowest threshold first, and fire without a call of ours; the agent fires the rest, so a full NIC slows nothing down.
 *
 * The thread also watches words of local memory: for landed blocks (it checks the generation, acknowledges, and computes
 * the CRC) and for acknowledgements. It reports in batches: events in a queue, and one eventfd that wakes the reader.
 *
 * What always holds, on every backend:
 *   - an operation never fires before its counter reaches its threshold, and at most once;
 *   - operations have no order, except in a chain. A flag put never arrives without the bytes before it. If an operation
 *     that was to move a counter fails, whatever waits for the counter doesn't fire: it fails with -EPIPE;
 *   - every operation and every watch ends with exactly one final event, unless it was queued as quiet or, for
 *     operations and ack watches, its endpoint was closed; a landing always ends with one, and a block whose
 *     flag had come before the endpoint was closed ends as landed;
 *   - an operation that has not gone out by its deadline ends, and never goes out. One that can't be recalled any more is
 *     reported as late, once, and its owner closes the endpoint;
 *   - once an endpoint is closed, no byte comes in through it and none of its operations touches memory: this, and
 *     not a revoked key alone, makes memory safe to reuse after a peer misbehaved (a message whose key was checked before
 *     may still be arriving when the key is revoked);
 *   - a call that has to wait for the progress thread waits for `answer_ns` at most. If that is exceeded the provider hangs
 *     (shm does if a peer died with its lock), and the fabric is given up: this call and all later ones return TK_STUCK,
 *     and memory that the thread might still touch is never freed;
 *   - nothing queued is unbounded: `work_max` is fixed when the fabric is opened; past it, -EAGAIN.
 *
 * What it does not do: use memory other than the host's. All functions return 0 (or a count) or a negative errno.
 * libfabric is loaded by dlopen, so the module imports on a machine without it.
 */
#ifndef TRIGGERKV_CORE_H
#define TRIGGERKV_CORE_H

#include "records.h"

#include <stddef.h>
#include <stdint.h>

struct tk_fabric;
struct tk_endpoint;
struct tk_region;
struct tk_caller;
struct tk_counter;
struct tk_group;
struct tk_shelf;
struct tk_desk;
struct tk_sender;
struct tk_receiver;
struct tk_lane;
struct tk_reader;
struct tk_pieces;

/* Shared with the cffi build, which reads everything between these two marks. */
/* cdef begin */
#define TK_PROVIDER_NAME_BYTES 32
#define TK_ADDRESS_BYTES 256
#define TK_MESSAGE_BYTES 256
#define TK_STUCK -35 /* -EDEADLK: the progress thread did not answer; see `tk_fabric_open` */

enum tk_event_kind {
	TK_FIRED,	/* value: the nanosecond at which the threshold was seen reached; only with TK_REPORT_FIRED,
			 * and never of a NIC that keeps its counters to itself */
	TK_DONE,	/* all of it has arrived at the peer; value: the nanosecond of posting, 0 if a NIC fired it; not with TK_ACKED_PUT */
	TK_SENT,	/* the same with TK_SENT_PUT, but it is not known whether it arrived or was refused */
	TK_FAILED,	/* status: why. -ECANCELED, -ETIMEDOUT, -EPIPE (one before it in the chain failed), -EBADMSG
			 * (a put's CRC differs), -ENODATA (its record was not read): nothing went out, nor will; any other
			 * is the provider's, and bytes may have moved, in whole or in part. value: of -EPIPE, the errno of
			 * the one that failed first */
	TK_LATE,	/* not final: the deadline is over and the operation can't be recalled. Closing its endpoint ends it */
	TK_LANDED,	/* the expected generation is in the slot's flag word; value: CRC32C of the payload; at a desk:
			 * the generation */
	TK_ACKED,	/* value: the acknowledgement word; final once its code is not below the one asked for */
	TK_WATCH_FAILED, /* status: -ETIMEDOUT, or -ECANCELED */
	TK_OVER,	 /* the last row of a group is over, and no caller was waiting for it */
	TK_CAME,	 /* a receiver has blocks for its owner; tag: the receiver's */
	TK_READ		 /* the drive no longer uses the memory of a batch of records; tag: the batch's */
};

/* Flags of an operation. */
#define TK_VERIFY_CRC 1   /* a put or a get fails unless its bytes have the expected CRC32C */
#define TK_QUIET 2        /* report nothing, not even a failure */
#define TK_REPORT_FIRED 4 /* one more event when the threshold was seen reached */
#define TK_FLAG_PUT 8     /* an 8-byte flag put follows the bytes, or stands alone if length is 0 */
#define TK_ACKED_PUT 16   /* an ack watch reports its success; only failures are reported here */
#define TK_GET 32         /* the bytes come from the peer */
#define TK_SENT_PUT 128	  /* it ends when local memory may be reused: on success with TK_SENT */
#define TK_SHARED_PUT 256 /* a peer that shares our memory can read these bytes itself: see shared_reads.c */
#define TK_SET_COUNTER 64 /* `completion` is set to `step`, not moved by it */

/* How a fabric is opened. */
#define TK_DEFERRED_WORK 1 /* hand operations to libfabric's deferred work; refused where it has none */

struct tk_provider_info {
	char name[TK_PROVIDER_NAME_BYTES];
	int rma;
	int ordered;	   /* writes to one peer arrive in the order in which they were posted */
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
	struct tk_endpoint *endpoint; /* NULL if only a counter is moved */
	uint64_t peer;
	uint64_t local;
	uint64_t remote;
	uint64_t remote_key;
	uint64_t flag_target; /* where the 8-byte flag goes once the bytes are there */
	uint64_t flag_key;
	uint64_t flag_value;
	struct tk_counter *trigger; /* NULL: it fires at once */
	uint64_t threshold;	    /* it fires when `trigger` is at least this */
	struct tk_counter *completion; /* NULL, or what is moved when all else is done */
	uint64_t step;
	uint64_t deadline_ns;
	struct tk_region *region; /* holds the local bytes; NULL when length is 0 */
	struct tk_group *group;	  /* NULL, or where the time of its firing is noted */
	struct tk_sender *sender; /* NULL, or the sender that assigns a slot when it fires, and sets `remote` and the flag; */
	const struct tk_put_head *head; /* then this is the block's head, with the metadata before it. Read when it fires */
	struct tk_pieces *pieces; /* NULL, or the pieces that are gathered at `local` when it fires */
	uint32_t length;
	uint32_t crc32c;
	uint32_t flags;
	uint32_t row; /* of the group */
	uint32_t skip, part; /* with TK_VERIFY_CRC: of the checksummed bytes, this many after these are put; 0: all */
};

/* The head of a put: it describes the block. It lies right before the payload, in the last bytes of the slot's first page;
 * metadata about the block's session or trace lies before it. */
#define TK_KEY_BYTES 32
#define TK_FINGERPRINT_BYTES 16
#define TK_OWNER_BYTES 16
#define TK_DRIVES_MAX 32 /* of a store */
#define TK_LOTS 8192 /* into which names fall; see kvstore/placement.py */
#define TK_HEAD_PAGE 4096 /* the room for both */
#define TK_PUT_HAS_CRC 1
struct tk_put_head {
	uint32_t head_crc32c; /* of the metadata and all following fields, with a tag of 0; the sender sets this, and others */
	uint32_t metadata_bytes;
	uint64_t generation;	 /* of the slot; the sender */
	uint64_t ack_generation; /* the sender */
	uint64_t expires_unix_ms;
	uint32_t ack_word; /* the sender */
	uint32_t length;
	uint32_t crc32c; /* of the payload; the sender */
	uint8_t flags;	 /* the sender */
	uint8_t durability;
	uint8_t zeros[2];
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint8_t domain[TK_DOMAIN_BYTES]; /* whose key it is encrypted with on the drive; zeros: none was named */
	uint64_t fired_ns; /* when the flag was seen, by the sender's CLOCK_MONOTONIC; 0: an earlier version. The sender */
	uint64_t tag; /* on a sealed connection, of the metadata and all fields before it; otherwise 0. The sender */
};

struct tk_landing {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t word;	     /* address of the slot's flag word */
	uint64_t generation; /* what the word must become */
	uint64_t payload;
	uint64_t peer;
	uint64_t ack_target; /* where `ack_value` is put the moment the generation matches */
	uint64_t ack_key;
	uint64_t ack_value;
	uint64_t deadline_ns;
	uint32_t length;
	uint32_t quiet;	      /* no acknowledgement: this is not a block, and is answered otherwise */
	struct tk_desk *desk; /* NULL, or calls come in here, which the desk may answer: then there is no event,
			       * and the next generation is waited for */
	struct tk_region *region; /* has the flag word; NULL only where the connection is not sealed */
};

struct tk_ack_watch {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t word; /* holds generation << 8 | code */
	uint64_t generation;
	uint64_t deadline_ns;
	struct tk_group *group; /* NULL, or the row that notes codes up to `good_max`, which are then not reported */
	uint32_t final_code; /* a code of at least this ends the watch; lower ones are reported once each */
	uint32_t good_max;
	uint32_t row; /* of the group */
	uint32_t zero;
};

/* One operation of a group; see group.c. Times are of CLOCK_MONOTONIC, 0: not yet. */
struct tk_row {
	uint64_t fired_ns, landed_ns, over_ns; /* the threshold was seen; the peer's first word; its last one */
	uint32_t code; /* of the last good one; 0: none */
	uint32_t over;
};

struct tk_statistics {
	uint64_t armed, fired, done, failed, cancelled, expired, late;
	uint64_t put_bytes, got_bytes;
	uint64_t landed, stale_words, acks_sent;
	uint64_t served;	/* blocks sent from the shelf, for calls that the desk answered */
	uint64_t handed;	/* to the NIC, in all */
	uint64_t taken_back;	/* taken back unfired, to be cancelled or handed over again */
	uint64_t waiting;	/* now, in our own queue */
	uint64_t held;		/* now, by the NIC */
	uint64_t slots_lost;	/* places at the NIC that can't be used before a flush or the end */
	uint64_t in_flight, watches;
	uint64_t loops, sleeps, asleep_ns, cpu_ns, alive_ns;
};

uint32_t tk_crc32c(const void *data, size_t length, uint32_t seed);
uint32_t tk_crc32c_own(const void *data, size_t length, uint32_t seed);   /* without ISA-L */
uint32_t tk_crc32c_table(const void *data, size_t length, uint32_t seed); /* without any instruction either */
int tk_crc32c_is_isal(void);
uint64_t tk_siphash(const uint64_t secret[2], const void *data, size_t length);

uint64_t tk_word_load(const void *address);
void tk_word_store(void *address, uint64_t value);
/* The bell after a set of flag words, in the same memory. A store to a word rings it: if a thread sleeps, a byte is written
 * to a pipe, for which each process has its own descriptor. */
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
struct tk_run {
	uint64_t piece; /* of which of the sources */
	uint64_t source, target, length;
};
void tk_copy_runs(const struct tk_run *runs, size_t count, const uint64_t *sources, uint64_t target);

/* Bytes that lie in pieces of registered memory, and are one block's in their order; see pieces.c. */
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

int tk_library_load(const char *path, char *message);
uint32_t tk_library_version(void);
/* How long a message may be, flag included, for its flag to be written last, by what a provider promises: the orders of its
 * writes, the longest that they hold for, the target ranges and the parts that one message may have. 0: none. */
uint64_t tk_order_max(uint64_t orders, uint64_t size_max, uint64_t ranges, uint64_t parts);
int tk_library_providers(struct tk_provider_info *out, int out_max);

int tk_fabric_open(const char *provider, const char *node, uint32_t work_max, uint64_t answer_ns, uint32_t flags,
		   struct tk_fabric **out, char *message);
int tk_fabric_close(struct tk_fabric *fabric);
int tk_fabric_event_fd(struct tk_fabric *fabric);
#define TK_FLAG_IN_MESSAGE 1 /* a put's flag travels in one message with its bytes */
#define TK_BINDS_MEMORY 2    /* peers reach memory only through the endpoint to which it is bound */
#define TK_IPV4 4	     /* addresses are socket addresses of IPv4 */
#define TK_IPV6 8	     /* ... of IPv6 */
int tk_fabric_traits(struct tk_fabric *fabric, char *provider_name);
int tk_fabric_reap(struct tk_fabric *fabric, struct tk_event *out, int out_max);
int tk_fabric_statistics(struct tk_fabric *fabric, struct tk_statistics *out);

/* `source` is the address to listen on, in the fabric's own format; with a `length` of 0 the fabric's, at any port. */
int tk_endpoint_open(struct tk_fabric *fabric, const void *source, size_t length, struct tk_endpoint **out,
		     char *message);
int tk_endpoint_close(struct tk_endpoint *endpoint);
int tk_endpoint_address(struct tk_endpoint *endpoint, void *out);
/* For how long its peer has taken nothing of what is to go out; 0: nothing waits. */
uint64_t tk_endpoint_stalled_ns(const struct tk_endpoint *endpoint);
/* Whether its connection has broken since something went through it, as far as the provider shows it: what was sent before
 * may never have arrived, though its end was reported. Seen when something is to go out. */
int tk_endpoint_has_broken(const struct tk_endpoint *endpoint);
/* Called once, before anything goes through it: from now on each word, head, call and answer is sent with a tag made with
 * one key, and accepted only with a tag made with the other; see seal.c. `words`: where acknowledgements come in, or NULL. */
#define TK_SEAL_BYTES 16
#define TK_TAG_BYTES 8
int tk_endpoint_seal(struct tk_endpoint *endpoint, const uint8_t *out, const uint8_t *in, struct tk_region *words);
/* The tag of bytes that will lie at this address of the peer's memory, or that lie at this one of ours. */
uint64_t tk_endpoint_tag(struct tk_endpoint *endpoint, uint64_t address, uint64_t key, uint64_t generation,
			 const void *data, size_t length);
int tk_endpoint_believes(struct tk_endpoint *endpoint, struct tk_region *region, uint64_t address, uint64_t generation,
			 const void *data, size_t length, uint64_t tag);

int tk_peer_add(struct tk_fabric *fabric, const void *address, size_t length, uint64_t *out);
int tk_peer_remove(struct tk_fabric *fabric, uint64_t peer);

/* `access`: what peers may do. If the provider binds memory to endpoints, they may do it only through `endpoint`, and
 * the access ends with it. */
#define TK_REMOTE_WRITE 1
#define TK_REMOTE_READ 2
int tk_region_open(struct tk_fabric *fabric, struct tk_endpoint *endpoint, void *address, size_t length,
		   uint32_t access, struct tk_region **out);
int tk_region_close(struct tk_region *region);
uint64_t tk_region_key(struct tk_region *region);
uint64_t tk_region_base(struct tk_region *region);
uint64_t tk_region_uses(struct tk_region *region); /* operations that are queued or under way */

/* With a `word`, the counter's value is that word, which any process that maps it may store to, and which only grows;
 * without one it is the NIC's own if there is deferred work with doorbells, and otherwise a word of ours. */
int tk_counter_open(struct tk_fabric *fabric, void *word, struct tk_bell *bell, int pipe_fd,
		    struct tk_counter **out);
int tk_counter_close(struct tk_counter *counter);
int tk_words_watched(struct tk_fabric *fabric, uint64_t *addresses, size_t count); /* zeroes those that no counter has */
int tk_counter_add(struct tk_counter *counter, uint64_t value);
int tk_counter_set(struct tk_counter *counter, uint64_t value);
int tk_counter_reset(struct tk_counter *counter);
int tk_counter_read(struct tk_counter *counter, uint64_t *value);
int tk_counter_failed(struct tk_counter *counter);
/* The address whose store moves it; does a store add (a NIC's doorbell) or set (a word)? */
int tk_counter_doorbell(struct tk_counter *counter, uint64_t *address, int *adds);

int tk_arm(struct tk_fabric *fabric, const struct tk_operation *operations, int count);
int tk_watch_landings(struct tk_fabric *fabric, const struct tk_landing *landings, int count);
int tk_watch_acks(struct tk_fabric *fabric, const struct tk_ack_watch *watches, int count);
int tk_cancel(struct tk_fabric *fabric, const uint64_t *tags, int count);

int tk_group_open(struct tk_fabric *fabric, uint64_t tag, uint32_t count, int awaited, struct tk_group **out);
int tk_group_read(struct tk_group *group, uint32_t first, uint32_t count, struct tk_row *out);
int tk_group_land(struct tk_group *group, uint32_t row, uint64_t now_ns); /* as a first word does */
int tk_group_end(struct tk_group *group, uint32_t row, uint32_t code); /* 0 leaves the code; returns the open rows */
int tk_group_open_rows(struct tk_group *group);
/* Waits until the first `rows` rows are over, or until all have landed; returns whether they are. */
int tk_group_wait(struct tk_group *group, uint32_t first, int landed, uint64_t timeout_ns);
void tk_group_close(struct tk_group *group);

int tk_flush(struct tk_fabric *fabric);

/* Blocks that the progress thread may send to peers that ask at a desk; see shelf.c and desk.c. All lie in one region, and
 * are freed with the fabric. */
#define TK_CALL_BYTES 73728
#define TK_CALL_BLOCKS 1024
#define TK_CALL_PLACES 4
#define TK_CALLS_WAITING 1024	       /* of a caller, for a place, */
#define TK_CALLS_WAITING_BYTES 8388608 /* and bytes of theirs */
#define TK_HELD_NS 2000000000 /* how long a desk keeps a block whose location it gave */
#define TK_CALL_AREA_HEAD 4096 /* before the places of a node's area are their flags */
struct tk_shelved {
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint64_t id; /* not that of any other block in the life of the shelf */
	uint64_t address;
	uint32_t length, crc32c;
};
struct tk_desk_setup {
	struct tk_endpoint *endpoint;
	uint64_t tag; /* reported with what was served */
	uint64_t peer;
	uint64_t ack_base; /* the peer's acknowledgement words */
	uint64_t ack_key;
	uint64_t bytes_max; /* under way at a time */
	uint64_t flags;	    /* those of the places that calls come in at, our own memory */
	uint64_t answers;   /* where the peer reads what answers them */
	uint32_t ack_words;
	uint32_t served_code, corrupt_code; /* the codes for a block that was sent, and for one that was found damaged */
	uint32_t shares; /* the peer can map the shelf's region, and may get locations in it */
	uint8_t owner[TK_OWNER_BYTES]; /* whose blocks may be asked for here */
};
struct tk_served {
	uint64_t desk;
	uint64_t began_ns, ended_ns;
	uint64_t size_bytes;
	uint32_t bytes; /* of this, of the ids of its blocks and of the call's metadata, which follow it, and then, if any was
			   cold, of a `tk_cold_head` with its rows */
	uint32_t blocks;
	uint32_t metadata_bytes;
	uint32_t corrupt; /* blocks found damaged: their callers got a miss */
	uint32_t failed;  /* blocks of which it is not known whether they arrived */
	uint32_t cold;	  /* blocks that were not in memory */
};
int tk_shelf_open(struct tk_fabric *fabric, struct tk_region *region, struct tk_shelf **out);
int tk_shelf_put(struct tk_shelf *shelf, const struct tk_shelved *blocks, int count);
/* Names: owner and key, one after the other. If others only, blocks that have landed and have no other id yet stay, and so do
 * places. */
void tk_shelf_unlist(struct tk_shelf *shelf, const uint8_t *names, size_t count, int others_only);
int tk_shelf_take(struct tk_shelf *shelf, uint64_t id); /* unlists it too; -EBUSY while it is being sent */
int tk_shelf_count(struct tk_shelf *shelf);
uint64_t tk_shelf_came(struct tk_shelf *shelf); /* blocks that receivers have for the application, ever */
/* Adds or removes names (owner and key of each) that are stored. */
void tk_shelf_stored(struct tk_shelf *shelf, const uint8_t *names, size_t count, int are_stored);
/* Gives blocks other ids: `done[i]` is 1, or 0 if one is not known any more, or another one has its new id. */
void tk_shelf_rename(struct tk_shelf *shelf, const uint64_t *ids, const uint64_t *new_ids, size_t count, uint8_t *done);
int tk_desk_open(struct tk_shelf *shelf, const struct tk_desk_setup *setup, struct tk_desk **out);
void tk_desk_answers(struct tk_desk *desk, int answers); /* initially the application answers all calls */
void tk_desk_close(struct tk_desk *desk);		 /* its endpoint is closed */
int tk_served_take(struct tk_shelf *shelf, void *out, size_t out_bytes); /* returns the bytes of whole records */

/* Calls of a client to its node; see caller.c. */
struct tk_caller_setup {
	struct tk_endpoint *endpoint;
	struct tk_region *region; /* has `words` and `calls`, our own memory */
	uint64_t peer;
	uint64_t area, area_key; /* the node's places */
	uint64_t words, calls, answers;
	uint64_t first_generation;
	uint32_t ack_words[TK_CALL_PLACES]; /* of the calls themselves */
};
/* The node's memory, mapped here to be read, and a group row's code for a block that was read from there. */
struct tk_shared {
	uint64_t address, length;
	uint64_t hold_ns; /* how long after a call the node keeps the blocks whose locations it gave */
	uint64_t rows; /* a row for each word, where the node says of a single block where it is; 0: it doesn't */
	uint32_t served_code, scattered_code, corrupt_code, late_code;
};
/* Where a block of a fetch is wanted in our own memory. */
struct tk_wanted {
	uint64_t address;
	uint64_t pieces; /* a struct tk_pieces: it is copied there instead, if it is read from the node's memory; 0: there are none */
};
struct tk_call {
	uint64_t tag; /* block i is watched with this and 2i, the call put with 2 `blocks` more, its answer with one more */
	uint64_t deadline_ns; /* deadline to go out, besides its blocks' deadline; the answer has as long again */
	uint64_t blocks_deadline_ns;
	uint64_t expires_unix_ms;
	struct tk_group *group; /* a fetch's blocks are its first rows */
	uint32_t row;		/* the call's own */
	uint32_t blocks, metadata_bytes, lease_ms;
	uint8_t kind, flags, durability, good_code;
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};
int tk_caller_open(const struct tk_caller_setup *setup, struct tk_caller **out);
/* `wanted`: for each block of a fetch, which may be read from the node's memory then; or NULL.
 * -EBUSY, -EMSGSIZE, -EAGAIN, -ENOMEM: it can't be made this way now. Of one that did not go out in its time a TK_FAILED
 * with -ETIMEDOUT is reported, before any report about its blocks. */
int tk_caller_call(struct tk_caller *caller, const struct tk_call *call, const void *metadata, const void *rows,
		   size_t rows_bytes, const struct tk_wanted *wanted);
void tk_caller_share(struct tk_caller *caller, const struct tk_shared *shared); /* before the first call */
uint64_t tk_caller_shared(const struct tk_caller *caller); /* blocks that were read from the node's memory */
int tk_caller_free(struct tk_caller *caller); /* how many calls could go out now */
/* The place with the answer to the call of this tag, and its generation; -ENOENT: there is none. */
int tk_caller_answer(struct tk_caller *caller, uint64_t tag, uint64_t *generation);
void tk_caller_read(struct tk_caller *caller, uint64_t tag); /* these bytes: the place is free */
int tk_caller_close(struct tk_caller *caller); /* its endpoint is closed */

/* A client's puts to its node by grants: slots that it may write to without a call; see sender.c. */
struct tk_sender_setup {
	struct tk_endpoint *endpoint;
	struct tk_region *region; /* has `words` and `heads`, our own memory */
	uint64_t peer;
	uint64_t flags, slots, slot_bytes, area_key; /* the node's: flag words, and slots with a page for the head each */
	uint64_t words;		   /* where acknowledgements come in, */
	uint64_t heads;		   /* and a page for each slot */
	uint64_t first_generation; /* of every slot */
	uint64_t first_ack_generation;
	uint64_t grace_ns;     /* a put is answered within this time of its deadline, or its watch fails */
	uint32_t first_word;   /* which of the client's words `words` is, as the node counts them */
	uint32_t words_count;  /* puts that are not over at a time */
	uint32_t slots_count;  /* puts that have not landed at a time; of more, the others wait */
	uint32_t good_max;
	int32_t doorbell; /* the node's, with these: */
	uint64_t shared_flags, shared_slots; /* 0, or where the node's are mapped here, and `words` with them */
};
int tk_sender_open(const struct tk_sender_setup *setup, struct tk_sender **out);
/* Where puts of pieces are gathered, this many bytes per slot. Called before the first of them is armed. */
int tk_sender_gather(struct tk_sender *sender, struct tk_region *region, uint64_t address, uint64_t slot_bytes);
int tk_sender_close(struct tk_sender *sender); /* its endpoint is closed */
uint64_t tk_sender_shared(const struct tk_sender *sender); /* how many puts went through shared memory */

/* What the two ends of a connection on one machine share; see shared_puts.c. */
/* A write to this eventfd or pipe wakes the progress thread, which reads the pipe and not the eventfd. */
int tk_fabric_hear(struct tk_fabric *fabric, int doorbell, int is_pipe);
int tk_fabric_ignore(struct tk_fabric *fabric, int doorbell);
/* The peer watches some of its words in memory of ours that it has mapped. So they are stored, and its doorbell is rung. */
int tk_endpoint_share_words(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t words, uint32_t count,
			    int doorbell);

/* It reads blocks of TK_SHARED_PUT there, as far as they are in this memory, and hears where they are from so many rows,
 * one for each of its first words, in the same memory as those words. */
int tk_endpoint_share_reads(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t rows, uint32_t count,
			    uint64_t memory, uint64_t bytes);

/* Where a node's client puts blocks by grants; see receiver.c. */
struct tk_receiver_setup {
	struct tk_endpoint *endpoint;
	uint64_t tag; /* of its events */
	uint64_t peer;
	uint64_t told_flags, told_key; /* what the peer calls `flags` */
	uint64_t flags, slots, slot_bytes; /* our memory */
	uint64_t first_generation;
	uint64_t ack_base, ack_key; /* the peer's acknowledgement words */
	uint32_t ack_words, slots_count, length_max;
	uint32_t landed_code;  /* codes of words: landed; */
	uint32_t differs_code; /* the bytes differ from those sent; */
	uint32_t taken_code;   /* another block has the key; */
	uint32_t expired_code; /* it had expired before it arrived; */
	uint32_t written_code; /* written, sent by a lane; */
	uint32_t unsaid_code;  /* it names no domain; 0: none needs to be named */
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t shared[TK_DOMAIN_BYTES]; /* the name by which peers give the owner's own domain, which is zeros for lanes */
};
/* Writes landed blocks to a drive without the application; see lane.c. */
struct tk_lane_setup {
	uint64_t tag; /* of its events */
	int32_t fd;   /* the drive, open for direct I/O */
	uint32_t depth; /* writes at a time */
	uint8_t magic[8]; /* of a record's header, */
	uint16_t version, kind; /* and what follows that */
	uint32_t bytes_max; /* bytes under way, plus one block; beyond that the application schedules writes */
	uint8_t secret[TK_TAGGED_KEY], name[TK_TAGGED_NAME]; /* what headers are tagged with */
	struct tk_encryption encryption;
};
/* Consecutive pages, and a generation for each record that may be written there. */
struct tk_ground {
	uint64_t page, generation;
	uint32_t pages, records;
};
/* A record that has been written, or has failed. */
struct tk_written {
	uint64_t id; /* as reported by the receiver with this tag: */
	uint64_t tag;
	uint64_t generation, offset, ended_ns;
	int32_t result; /* 0, or an errno */
	uint32_t is_answered; /* the lane acknowledges it to its peer, if requested */
};
/* The lanes of a store's drives, and which drive a name belongs to: that of its lot, the upper bits of CRC-32 of owner and key. */
struct tk_lanes {
	struct tk_lane *lanes[TK_DRIVES_MAX]; /* NULL: the drive has none */
	uint8_t homes[TK_LOTS];
};
int tk_lane_open(struct tk_fabric *fabric, const struct tk_lane_setup *setup, struct tk_lane **out); /* ends with the fabric */
/* In the place of what it had: how many records stand on that, and the rest of it. An errno if the lane has failed. */
int tk_lane_lend(struct tk_lane *lane, const struct tk_ground *ground, struct tk_ground *left, uint32_t *used);
void tk_lane_left(struct tk_lane *lane, struct tk_ground *left); /* what there is of it now */
uint32_t tk_lane_seal(struct tk_lane *lane, struct tk_ground *left); /* takes it back; returns the records on it */
/* All other records with a lower generation are on the drive. */
void tk_lane_clear(struct tk_lane *lane, uint64_t generation);
void tk_lane_fail(struct tk_lane *lane); /* begins no more writes, and acknowledges nothing */
uint64_t tk_lane_begun(struct tk_lane *lane); /* how many records it has begun */
int tk_lane_take(struct tk_lane *lane, struct tk_written *out, int out_max);

/* Sends blocks from a drive to peers without the application; see reader.c. */
struct tk_reader_setup {
	int32_t fd;	/* the drive, open for direct I/O */
	uint32_t depth; /* reads at a time */
	uint8_t magic[8]; /* of a record's header, */
	uint16_t version, kind; /* and what follows that */
	uint32_t zero;
	uint8_t secret[TK_TAGGED_KEY], name[TK_TAGGED_NAME]; /* what headers are tagged with */
	struct tk_encryption encryption; /* of records that are encrypted; with a vault of NULL there are none */
};
/* A record: what its header must contain, and where its payload goes. */
struct tk_reading {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t peer;
	uint64_t address; /* pages for all of it, the header's first */
	uint64_t remote, remote_key;
	uint64_t flag_target, flag_key, flag_value;
	uint64_t offset, generation;
	uint32_t length, crc32c;
	uint32_t skip, part; /* the part of the payload that is put, and the bytes before it; 0: all */
	uint32_t shares, zero; /* TK_SHARED_PUT, or 0 */
	uint8_t key[TK_KEY_BYTES];
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};
int tk_reader_open(struct tk_fabric *fabric, const struct tk_reader_setup *setup, struct tk_reader **out); /* ends with the fabric */
/* Reads the records into a region, together, and puts each payload, as an operation of which only failures are told. All or
 * none. With this tag comes one TK_READ, when the drive is done with their memory, and one TK_SENT, when all puts are over,
 * those whose endpoint was closed among them; value: the nanosecond at which the last one was posted. */
int tk_reader_put(struct tk_reader *reader, struct tk_region *region, uint64_t tag, const struct tk_reading *records,
		  int count);

/* Memory for one block: pages, the first for a header. */
struct tk_room {
	uint64_t address;
	uint32_t pages, number; /* the application's name for it */
};
/* A block that has arrived completely, in a room. Its metadata lies at the end of the room's first page. */
struct tk_came {
	uint64_t id; /* on the shelf, if it is listed there */
	uint64_t address;
	uint64_t ack_generation, expires_unix_ms, landed_ns;
	uint64_t fired_ns; /* as the peer has it: only a peer on this machine has the same clock */
	uint32_t ack_word, room, length, crc32c, metadata_bytes;
	uint8_t durability, listed;
	uint8_t is_stored; /* something may be stored under the name already: it is not listed, and a peer that asked
			      only for `landed` has not been answered */
	uint8_t under_way; /* to a drive, by the lane of this number in `tk_lanes`, from 1 on; 0: by none */
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint8_t domain[TK_DOMAIN_BYTES];
};
struct tk_receiver_state {
	uint32_t rooms;	       /* of the last size requested */
	uint32_t wanted_pages; /* that size; 0: nothing has come yet */
	uint32_t starved;      /* how often there was no room, since the last call; likewise */
	uint32_t differed, taken, expired, unsaid; /* how many were answered so */
	int32_t broken;	       /* the peer's put was invalid: an errno */
};
int tk_receiver_open(struct tk_shelf *shelf, const struct tk_receiver_setup *setup, struct tk_receiver **out);
/* The lanes for what comes from now on; NULL: none. `is_limited`: they get no more of it than was lent. */
void tk_receiver_use(struct tk_receiver *receiver, const struct tk_lanes *lanes, int is_limited);
void tk_receiver_lend(struct tk_receiver *receiver, uint64_t pages); /* of drives, headers included */
uint64_t tk_receiver_recall(struct tk_receiver *receiver);	     /* what is left of them */
int tk_receiver_feed(struct tk_receiver *receiver, const struct tk_room *rooms, int count);
int tk_receiver_take(struct tk_receiver *receiver, struct tk_came *out, int out_max, struct tk_receiver_state *state);
int tk_receiver_rooms(struct tk_receiver *receiver, struct tk_room *out, int out_max); /* takes unused ones back */
int tk_receiver_close(struct tk_receiver *receiver);				       /* its endpoint is closed */
/* cdef end */

#endif
