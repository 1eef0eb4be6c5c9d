/*
 * The C core: one progress thread that moves blocks without the application.
 *
 * A `tk_fabric` is one or a few libfabric domains with one progress thread. One connection sends and receives through a
 * `tk_endpoint`. Operations wait for a `tk_counter`, and move one when they end. The application queues operations in
 * batches and returns. An operation does up to three things, in this order: it moves bytes (a put or a get), puts an
 * 8-byte flag, moves a counter. A chain is an operation that waits for the counter of another one.
 *
 * The backend fires operations. The agent is the progress thread: it polls counters and posts operations that are due.
 * Where libfabric has deferred work (FI_QUEUE_WORK: sockets, cxi), as many operations as fit are handed to it in
 * advance, lowest threshold first, and fire without a call from us; the agent fires the rest, so a full NIC slows
 * nothing down.
 *
 * The thread also watches words of local memory: for landed blocks (it checks the generation, acknowledges, and
 * computes the CRC) and for acknowledgements. It reports in batches: events in a queue, and one eventfd that wakes the
 * reader.
 *
 * What always holds, on every backend:
 *   - an operation never fires before its counter reaches its threshold, and at most once;
 *   - operations are not ordered, except in a chain. A flag put never arrives without the bytes before it. If an
 *     operation that was to move a counter fails, operations that wait for the counter don't fire: they fail with
 *     -EPIPE;
 *   - every operation and every watch ends with exactly one final event, unless it was queued as quiet or, for
 *     operations and ack watches, its endpoint was closed; a landing always ends with one, and a block whose
 *     flag arrived before the endpoint was closed ends as landed;
 *   - an operation that has not gone out by its deadline ends, and never goes out. One that can no longer be recalled
 *     is reported as late, once, and its owner closes the endpoint;
 *   - once an endpoint is closed, no byte arrives through it and none of its operations touches memory: this, and
 *     not a revoked key alone, makes memory safe to reuse after a peer misbehaved (a message whose key was checked
 *     earlier may still be arriving when the key is revoked);
 *   - a call that has to wait for the progress thread waits for `answer_ns` at most. After that the provider counts as
 *     hung (shm hangs if a peer died while holding its lock), and the fabric is given up: this call and all later ones
 *     return TK_STUCK, and memory that the thread might still touch is never freed;
 *   - all queues are bounded: `work_max` is fixed when the fabric is opened; beyond it calls return -EAGAIN.
 *
 * What it does not do: use memory other than the host's. All functions return 0 (or a count) or a negative errno.
 * libfabric is loaded by dlopen, so the module can be imported on a machine without it.
 *
 * Its parts: operations.h (operations, events, pieces), attached.h (calls and puts by grants), records.h (records of a
 * drive).
 */
#ifndef TRIGGERKV_CORE_H
#define TRIGGERKV_CORE_H

#include "attached.h"
#include "operations.h"
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
int tk_library_load(const char *path, char *message);
uint32_t tk_library_version(void);
/* The longest message, flag included, whose flag is written last. It follows from the provider's guarantees: the orders
 * of its writes, the size up to which they hold, the target ranges and the parts that a message may have. 0: none. */
uint64_t tk_order_max(uint64_t orders, uint64_t size_max, uint64_t ranges, uint64_t parts);
int tk_keeps_order(uint64_t orders, uint64_t size_max);
int tk_library_providers(struct tk_provider_info *out, int out_max);

int tk_fabric_open(const char *provider, const char *node, uint32_t work_max, uint64_t answer_ns, uint32_t flags,
		   struct tk_fabric **out, char *message);
int tk_fabric_close(struct tk_fabric *fabric); /* TK_UNFLUSHED: nothing is freed, as with TK_STUCK */
int tk_fabric_event_fd(struct tk_fabric *fabric);
#define TK_FLAG_IN_MESSAGE 1 /* a put's flag travels in one message with its bytes */
#define TK_BINDS_MEMORY 2    /* peers reach memory only through the endpoint to which it is bound */
#define TK_IPV4 4	     /* addresses are socket addresses of IPv4 */
#define TK_IPV6 8	     /* ... of IPv6 */
#define TK_HAS_DOMAINS 16    /* it may have up to TK_DOMAINS_MAX domains */
#define TK_TAKES_DEVICES 32  /* memory of a GPU can be registered */
#define TK_DOMAINS_MAX 16    /* each is polled in each round of the thread: 0.1 us with net */
int tk_fabric_traits(struct tk_fabric *fabric, char *provider_name);
int tk_fabric_reap(struct tk_fabric *fabric, struct tk_event *out, int out_max);
int tk_fabric_statistics(struct tk_fabric *fabric, struct tk_statistics *out);
void tk_fabric_shrink(struct tk_fabric *fabric); /* frees work items not needed since the last call */

/* `source` is the address to listen on, in the fabric's own format; a `length` of 0 means the fabric's address, any
 * port. The key of memory registered through an endpoint is invalid at endpoints of other domains. */
int tk_endpoint_open(struct tk_fabric *fabric, const void *source, size_t length, uint32_t domain,
		     struct tk_endpoint **out, char *message);
/* TK_UNFLUSHED: the NIC may still fire some of its operations, so it stays open, and can be closed again. */
int tk_endpoint_close(struct tk_endpoint *endpoint);
int tk_endpoint_address(struct tk_endpoint *endpoint, void *out);
int tk_endpoint_listener(struct tk_endpoint *endpoint); /* the provider's own descriptor; -ENOENT: it listens on none */
/* How long its peer has accepted nothing while something was waiting to be sent; 0: nothing waits. */
uint64_t tk_endpoint_stalled_ns(const struct tk_endpoint *endpoint);
/* Whether its connection broke after something was sent through it, as far as the provider reports it: earlier sends
 * may never have arrived, though they were reported as sent. Detected only when something is to be sent. */
int tk_endpoint_has_broken(const struct tk_endpoint *endpoint);
/* Called once, before anything is sent through it. From then on each word, head, call and answer is sent with a tag
 * made with `out`, and accepted only with a tag made with `in`; see seal.c. `words`: where acknowledgements arrive, or
 * NULL. */
#define TK_SEAL_BYTES 16
#define TK_TAG_BYTES 8
int tk_endpoint_seal(struct tk_endpoint *endpoint, const uint8_t *out, const uint8_t *in, struct tk_region *words);
/* Makes the tag of bytes for this address of the peer's memory; the next function checks the tag of bytes at an address
 * of ours. */
uint64_t tk_endpoint_tag(struct tk_endpoint *endpoint, uint64_t address, uint64_t key, uint64_t generation,
			 const void *data, size_t length);
int tk_endpoint_believes(struct tk_endpoint *endpoint, struct tk_region *region, uint64_t address, uint64_t generation,
			 const void *data, size_t length, uint64_t tag);

/* A peer is added to one domain: only that domain's endpoints can reach it. */
int tk_peer_add(struct tk_fabric *fabric, uint32_t domain, const void *address, size_t length, uint64_t *out);
int tk_peer_remove(struct tk_fabric *fabric, uint32_t domain, uint64_t peer);

/* `access`: what peers may do. If the provider binds memory to endpoints, they may do it only through `endpoint`, and
 * the access ends with it. `gpu`: the CUDA device that has the memory, or TK_HOST. */
#define TK_HOST -1
#define TK_REMOTE_WRITE 1
#define TK_REMOTE_READ 2
int tk_region_open(struct tk_fabric *fabric, struct tk_endpoint *endpoint, void *address, size_t length,
		   uint32_t access, int gpu, struct tk_region **out);
int tk_region_close(struct tk_region *region);
uint64_t tk_region_key(struct tk_region *region);
uint64_t tk_region_base(struct tk_region *region);
uint64_t tk_region_uses(struct tk_region *region); /* operations that are queued or under way */

/* With a `word`, the counter's value is that word, which only grows, and which any process that maps it may store to.
 * Without one the value is the NIC's own if there is deferred work with doorbells, and otherwise a word of ours. */
int tk_counter_open(struct tk_fabric *fabric, void *word, struct tk_bell *bell, int pipe_fd,
		    struct tk_counter **out);
int tk_counter_close(struct tk_counter *counter);
/* Zeroes addresses that no counter uses. */
int tk_words_watched(struct tk_fabric *fabric, uint64_t *addresses, size_t count);
int tk_counter_add(struct tk_counter *counter, uint64_t value);
int tk_counter_set(struct tk_counter *counter, uint64_t value);
int tk_counter_reset(struct tk_counter *counter);
int tk_counter_read(struct tk_counter *counter, uint64_t *value);
int tk_counter_failed(struct tk_counter *counter);
/* The address to store to in order to move it, and whether a store adds (a NIC's doorbell) or sets (a word). */
int tk_counter_doorbell(struct tk_counter *counter, uint64_t *address, int *adds);

int tk_arm(struct tk_fabric *fabric, const struct tk_operation *operations, int count);
int tk_watch_landings(struct tk_fabric *fabric, const struct tk_landing *landings, int count);
int tk_watch_acks(struct tk_fabric *fabric, const struct tk_ack_watch *watches, int count);
int tk_cancel(struct tk_fabric *fabric, const uint64_t *tags, int count);

int tk_group_open(struct tk_fabric *fabric, uint64_t tag, uint32_t count, int awaited, struct tk_group **out);
/* All or none. `puts` is a tk_puts followed by its rows, `metadata` that of the first block and then of the others. */
int tk_put(struct tk_fabric *fabric, const void *puts, const void *metadata, struct tk_group **out);
int tk_put_name(struct tk_group *group, uint32_t row, const void *key, uint32_t durability);
int tk_group_read(struct tk_group *group, uint32_t first, uint32_t count, struct tk_row *out);
int tk_group_land(struct tk_group *group, uint32_t row, uint64_t now_ns); /* as the peer's first word does */
int tk_group_end(struct tk_group *group, uint32_t row, uint32_t code); /* 0 leaves the code; returns the open rows */
int tk_group_open_rows(struct tk_group *group);
/* Waits until the first `rows` rows are over, or until all have landed; returns whether they are, or -ECHILD. */
int tk_group_wait(struct tk_group *group, uint32_t first, int landed, uint64_t timeout_ns);
void tk_group_close(struct tk_group *group);

int tk_flush(struct tk_fabric *fabric);

/* Takes the blocks that one client puts by grants; see receiver.c. */
struct tk_receiver_setup {
	struct tk_endpoint *endpoint;
	uint64_t tag; /* of its events */
	uint64_t peer;
	uint64_t remote_flags, remote_key; /* address and key by which the peer names `flags` */
	uint64_t flags, slots, slot_bytes; /* our memory */
	uint64_t first_generation;
	uint64_t ack_base, ack_key; /* the peer's acknowledgement words */
	uint32_t ack_words, slots_count, length_max;
	uint32_t landed_code;  /* code of a word: landed */
	uint32_t differs_code; /* code: the bytes differ from those sent */
	uint32_t taken_code;   /* code: another block has the key */
	uint32_t expired_code; /* code: the block expired before it arrived */
	uint32_t written_code; /* code: written; sent by a lane */
	uint32_t unsaid_code;  /* code: the put names no domain; 0: a put needs none */
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t shared[TK_DOMAIN_BYTES]; /* the peers' name for the owner's own domain, which is zeros in lanes */
};
/* Writes landed blocks to a drive without the application; see lane.c. */
struct tk_lane_setup {
	uint64_t tag; /* of its events */
	int32_t fd;   /* the drive, open for direct I/O */
	uint32_t depth; /* writes at a time */
	uint8_t magic[8]; /* of a record's header */
	uint16_t version, kind; /* of a record's header, too */
	uint32_t bytes_max; /* bytes under way, or one block of any size; beyond that the application schedules writes */
	uint8_t secret[TK_TAGGED_KEY], name[TK_TAGGED_NAME]; /* key and name for headers' tags */
	struct tk_encryption encryption;
};
/* Consecutive pages, and a generation for each record that may be written in them. */
struct tk_ground {
	uint64_t page, generation;
	uint32_t pages, records;
};
/* A block that has arrived completely, in a room. Its metadata lies at the end of the room's first page. */
struct tk_came {
	uint64_t id; /* on the shelf, if it is listed there */
	uint64_t address;
	uint64_t ack_generation, expires_unix_ms, landed_ns;
	uint64_t fired_ns; /* by the peer's clock: comparable only if the peer is on this machine */
	uint32_t ack_word, room, length, crc32c, metadata_bytes;
	uint8_t durability, listed;
	uint8_t is_stored; /* a block may be stored under the name already: it is not listed, and a peer that requested
			      only `landed` has not been answered */
	uint8_t under_way; /* one plus the number of the lane that writes it, in `tk_lanes`; 0: none */
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint8_t domain[TK_DOMAIN_BYTES];
};
/* A record that a lane is writing, has written, or failed to write. */
struct tk_written {
	struct tk_came came; /* the block, which its receiver doesn't report */
	uint64_t tag;	     /* of that receiver */
	uint64_t generation, offset, ended_ns;
	uint64_t key_id; /* of the key it was encrypted with */
	int32_t result; /* 0, or an errno */
	uint32_t is_answered; /* the lane acknowledges it to its peer, if requested */
	uint32_t key_number; /* from 1; 0: not encrypted */
	uint32_t was_reported; /* `tk_lane_under_way` has reported it already */
};
/* The lanes of a store's drives, and the drive of each lot. A name's lot is the upper bits of the CRC-32 of owner and
 * key. */
struct tk_lanes {
	struct tk_lane *lanes[TK_DRIVES_MAX]; /* NULL: the drive has none */
	uint8_t homes[TK_LOTS];
};
/* A lane ends with the fabric. */
int tk_lane_open(struct tk_fabric *fabric, const struct tk_lane_setup *setup, struct tk_lane **out);
/* A lane's ground, and how many records it has begun there. It moves to the next ground when a record doesn't fit. */
struct tk_lane_state {
	struct tk_ground left;	 /* rest of the ground in use, identified by its generation; 0: none yet */
	struct tk_ground next;	 /* all of it, or none */
	struct tk_ground before; /* rest of the previous ground */
	uint32_t used, used_before;
	uint32_t wanted_pages; /* for the largest block that waits for ground; 0: none does */
	uint32_t zero;
};
void tk_lane_state(struct tk_lane *lane, struct tk_lane_state *state);
/* Both return the state just before the call. `lend` sets the next ground, in place of any other, and fails with an
 * errno if the lane has failed. `seal` takes back all ground. */
int tk_lane_lend(struct tk_lane *lane, const struct tk_ground *ground, struct tk_lane_state *before);
void tk_lane_seal(struct tk_lane *lane, struct tk_lane_state *before);
/* Whether more ground will follow. If so, blocks that find too little of it wait, and the application is notified. */
void tk_lane_expect(struct tk_lane *lane, int expects);
/* Confirms that all records of lower generations that the lane did not write are on the drive. */
void tk_lane_clear(struct tk_lane *lane, uint64_t generation);
void tk_lane_fail(struct tk_lane *lane); /* from now on it begins no writes, and acknowledges nothing */
uint64_t tk_lane_begun(struct tk_lane *lane); /* number of records begun */
int tk_lane_take(struct tk_lane *lane, struct tk_written *out, int out_max); /* records that have ended */
/* Records under way that the application doesn't have yet, before they end: only their blocks and tags are valid. */
int tk_lane_under_way(struct tk_lane *lane, struct tk_written *out, int out_max);

/* Sends blocks from a drive to peers without the application; see reader.c. */
struct tk_reader_setup {
	int32_t fd;	/* the drive, open for direct I/O */
	uint32_t depth; /* reads at a time */
	uint8_t magic[8]; /* of a record's header */
	uint16_t version, kind; /* of a record's header, too */
	uint32_t zero;
	uint8_t secret[TK_TAGGED_KEY], name[TK_TAGGED_NAME]; /* key and name for headers' tags */
	struct tk_encryption encryption; /* of encrypted records; if its vault is NULL there are none */
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
	uint32_t skip, part; /* puts `part` bytes of the payload after the first `skip`; 0: all */
	uint32_t shares, zero; /* TK_SHARED_PUT, or 0 */
	uint8_t key[TK_KEY_BYTES];
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};
/* A reader ends with the fabric. */
int tk_reader_open(struct tk_fabric *fabric, const struct tk_reader_setup *setup, struct tk_reader **out);
/* Reads the records into a region as one batch, and puts each payload, as an operation that reports only failures. All
 * or none. Two events have this tag: TK_READ, when the drive no longer uses their memory, and TK_SENT, when all puts
 * are over, including those whose endpoint was closed; value: the nanosecond at which the last one was posted. */
int tk_reader_put(struct tk_reader *reader, struct tk_region *region, uint64_t tag, const struct tk_reading *records,
		  int count);

/* Memory for one block: pages, the first for a header. */
struct tk_room {
	uint64_t address;
	uint32_t pages, number; /* the application's number for it */
};
struct tk_receiver_state {
	uint32_t rooms;	       /* of the last size requested */
	uint32_t wanted_pages; /* that size; 0: nothing has arrived yet */
	uint32_t starved;      /* a put waits for a room of that size, and none has been provided since */
	uint32_t differed, taken, expired, unsaid; /* how many got each of these answers since the last call */
	int32_t broken;	       /* the peer's put was invalid: an errno */
};
int tk_receiver_open(struct tk_shelf *shelf, const struct tk_receiver_setup *setup, struct tk_receiver **out);
/* The lanes for blocks that arrive from now on; NULL: none. `is_limited`: they get no more pages than were lent. */
void tk_receiver_use(struct tk_receiver *receiver, const struct tk_lanes *lanes, int is_limited);
void tk_receiver_lend(struct tk_receiver *receiver, uint64_t pages); /* of drives, headers included */
uint64_t tk_receiver_recall(struct tk_receiver *receiver);	     /* takes unused pages back; returns their number */
int tk_receiver_feed(struct tk_receiver *receiver, const struct tk_room *rooms, int count);
/* Takes blocks that have arrived and that no lane writes: all, or all except those that wait for a lane, unless a call
 * is about to be reported. */
int tk_receiver_take(struct tk_receiver *receiver, int all, struct tk_came *out, int out_max,
		     struct tk_receiver_state *state);
int tk_receiver_rooms(struct tk_receiver *receiver, struct tk_room *out, int out_max); /* takes unused rooms back */
int tk_receiver_close(struct tk_receiver *receiver);				       /* its endpoint is closed */
/* cdef end */

#endif
