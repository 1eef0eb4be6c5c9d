/*
 * The C core: one progress thread that moves blocks without asking the application.
 *
 * A `tk_fabric` is one libfabric domain with its progress thread; a `tk_endpoint` is what one connection
 * sends and receives with. The application queues work in batches and goes away; the thread
 *   - polls flag words and posts the puts whose threshold is reached (the trigger agent),
 *   - chains an 8-byte flag put behind each, so that the target sees the flag only after the bytes,
 *   - watches words of local memory: for landed blocks (then it checks the generation, acknowledges and
 *     makes the CRC) and for acknowledgements,
 *   - reports what happened in batches: events in a queue, one eventfd to wake the reader.
 *
 * What always holds:
 *   - a put never fires before its flag word reaches its threshold, and at most once;
 *   - its flag put never arrives unless the bytes before it did;
 *   - every put and every watch ends with exactly one final event, unless it was queued as quiet or, for
 *     puts and ack watches, its endpoint was closed; a landing always ends with one, and a block whose flag
 *     had come before the endpoint was closed ends as landed;
 *   - once an endpoint is closed, no byte comes in through it any more and none of its puts reads memory:
 *     this, and not a revoked key alone, is what makes memory safe to use again after a peer misbehaved
 *     (a message whose key was checked before may still be arriving when the key is revoked);
 *   - nothing queued is unbounded: `work_max` is fixed when the fabric is opened; past it, -EAGAIN.
 *
 * What it does not do: libfabric's own deferred work (FI_QUEUE_WORK), reads, memory other than the
 * host's. All functions return 0 (or a count) or a negative errno. libfabric is loaded by dlopen, so the
 * module imports on a machine that has none.
 */
#ifndef TRIGGERKV_CORE_H
#define TRIGGERKV_CORE_H

#include <stddef.h>
#include <stdint.h>

struct tk_fabric;
struct tk_endpoint;
struct tk_region;

/* Shared with the cffi build, which reads everything between these two marks. */
/* cdef begin */
#define TK_PROVIDER_NAME_BYTES 32
#define TK_ADDRESS_BYTES 256
#define TK_MESSAGE_BYTES 256

enum tk_event_kind {
	TK_PUT_FIRED,	/* value: the nanosecond at which the flag was seen; only with TK_REPORT_FIRED */
	TK_PUT_DONE,	/* the source may be used again; value: the nanosecond at which the put was posted; not with TK_ACKED_PUT */
	TK_PUT_FAILED,	/* status: why. -ECANCELED, -ETIMEDOUT, -EBADMSG (CRC differs): nothing went out, nor will;
			 * any other is the provider's, and bytes may have arrived, in whole or in part */
	TK_LANDED,	/* the expected generation is in the slot's flag word; value: CRC32C of the payload */
	TK_ACKED,	/* value: the acknowledgement word; final once its code is not below the one asked for */
	TK_WATCH_FAILED /* status: -ETIMEDOUT, or -ECANCELED */
};

/* Flags of a put. */
#define TK_VERIFY_CRC 1   /* send only if the source's CRC32C is the expected one */
#define TK_QUIET 2        /* report nothing, not even a failure */
#define TK_REPORT_FIRED 4 /* one more event when the flag was seen */
#define TK_ACKED_PUT 16   /* its end, if it is a good one, is seen from an ack watch; only failures are reported */
#define TK_FLAG_PUT 8     /* an 8-byte flag put is chained to the bytes, or stands alone if length is 0 */

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

struct tk_put {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t peer;
	uint64_t source;
	uint64_t target;
	uint64_t target_key;
	uint64_t flag_target; /* where the 8-byte flag goes once the bytes are there */
	uint64_t flag_key;
	uint64_t flag_value;
	uint64_t trigger;   /* address of the flag word that fires this put; 0: at once */
	uint64_t threshold; /* it fires when the word is at least this */
	uint64_t deadline_ns;
	struct tk_region *region; /* holds the source; NULL when length is 0 */
	uint32_t length;	  /* 0: only the flag put */
	uint32_t crc32c;
	uint32_t flags;
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
};

struct tk_ack_watch {
	uint64_t tag;
	struct tk_endpoint *endpoint;
	uint64_t word; /* holds generation << 8 | code */
	uint64_t generation;
	uint64_t deadline_ns;
	uint32_t final_code; /* a code of at least this ends the watch; lower ones are reported once each */
};

struct tk_statistics {
	uint64_t armed, fired, done, failed, cancelled, expired;
	uint64_t put_bytes;
	uint64_t landed, stale_words, acks_sent;
	uint64_t puts_waiting, puts_in_flight, watches;
	uint64_t loops, sleeps, asleep_ns, alive_ns;
};

uint32_t tk_crc32c(const void *data, size_t length, uint32_t seed);
uint32_t tk_crc32c_table(const void *data, size_t length, uint32_t seed);

uint64_t tk_word_load(const void *address);
void tk_word_store(void *address, uint64_t value);
uint64_t tk_now_ns(void);
int tk_memory_populate(void *address, size_t length);

int tk_library_load(const char *path, char *message);
uint32_t tk_library_version(void);
int tk_library_providers(struct tk_provider_info *out, int out_max);

int tk_fabric_open(const char *provider, const char *node, uint32_t work_max, struct tk_fabric **out,
		   char *message);
int tk_fabric_close(struct tk_fabric *fabric);
int tk_fabric_event_fd(struct tk_fabric *fabric);
int tk_fabric_provider(struct tk_fabric *fabric, char *out);
int tk_fabric_reap(struct tk_fabric *fabric, struct tk_event *out, int out_max);
int tk_fabric_statistics(struct tk_fabric *fabric, struct tk_statistics *out);

int tk_endpoint_open(struct tk_fabric *fabric, struct tk_endpoint **out, char *message);
int tk_endpoint_close(struct tk_endpoint *endpoint);
int tk_endpoint_address(struct tk_endpoint *endpoint, void *out);

int tk_peer_add(struct tk_fabric *fabric, const void *address, size_t length, uint64_t *out);
int tk_peer_remove(struct tk_fabric *fabric, uint64_t peer);

int tk_region_open(struct tk_fabric *fabric, void *address, size_t length, int remote_write,
		   struct tk_region **out);
int tk_region_close(struct tk_region *region);
uint64_t tk_region_key(struct tk_region *region);
uint64_t tk_region_base(struct tk_region *region);

int tk_arm(struct tk_fabric *fabric, const struct tk_put *puts, int count);
int tk_watch_landings(struct tk_fabric *fabric, const struct tk_landing *landings, int count);
int tk_watch_acks(struct tk_fabric *fabric, const struct tk_ack_watch *watches, int count);
int tk_cancel(struct tk_fabric *fabric, const uint64_t *tags, int count);
/* cdef end */

#endif
