/*
 * What an attached client and its node do through a fabric: the shelf and the desks that answer calls, the caller, the
 * sender of puts by grants, and what both share on one machine. A part of the public header, core.h.
 */
#ifndef TRIGGERKV_ATTACHED_H
#define TRIGGERKV_ATTACHED_H

#include "operations.h"

#include <stddef.h>
#include <stdint.h>

struct tk_fabric;
struct tk_endpoint;
struct tk_region;
struct tk_caller;
struct tk_group;
struct tk_shelf;
struct tk_desk;
struct tk_sender;
struct tk_pieces;
struct tk_direct;

/* Shared with the cffi build, as in core.h. */
/* cdef begin */
/* Blocks that the progress thread may send to peers that request them at a desk; see shelf.c and desk.c. All lie in one
 * region. Shelves are freed with the fabric. */
#define TK_CALL_BYTES 73728
#define TK_CALL_BLOCKS 1024
#define TK_CALL_PLACES 4
#define TK_CALLS_WAITING 1024	       /* calls of one caller that may wait for a place */
#define TK_CALLS_WAITING_BYTES 8388608 /* total bytes of these */
#define TK_HELD_NS 2000000000 /* how long a desk keeps a block after giving its location */
#define TK_CALL_AREA_HEAD 4096 /* a node's area begins with the flags of its places */
struct tk_shelved {
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint64_t id; /* never given to another block of this shelf */
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
	uint64_t flags;	    /* flag words of the places in which calls arrive, in our own memory */
	uint64_t answers;   /* where the peer reads the answers */
	uint32_t ack_words;
	uint32_t served_code, corrupt_code; /* the codes for a block that was sent, and for one that was found damaged */
	uint32_t shares; /* the peer can map the shelf's region, and may get locations in it */
	uint8_t owner[TK_OWNER_BYTES]; /* tenant whose blocks may be requested here */
};
struct tk_served {
	uint64_t desk;
	uint64_t began_ns, ended_ns;
	uint64_t size_bytes;
	uint32_t bytes; /* of this struct and all that follows it: the ids of its blocks, the call's metadata and, if any block
			   was cold, a `tk_cold_head` with its rows */
	uint32_t blocks;
	uint32_t metadata_bytes;
	uint32_t corrupt; /* blocks found damaged: their callers got a miss */
	uint32_t failed;  /* blocks that may or may not have arrived */
	uint32_t cold;	  /* blocks that were not in memory */
	uint32_t is_prefix, zero; /* the blocks were looked up, not sent: there are no ids */
};
int tk_shelf_open(struct tk_fabric *fabric, struct tk_region *region, struct tk_shelf **out);
int tk_shelf_put(struct tk_shelf *shelf, const struct tk_shelved *blocks, int count);
/* `names`: owner and key of each. `others_only`: blocks that still have the id they landed with stay listed, and places
 * on drives are kept. */
void tk_shelf_unlist(struct tk_shelf *shelf, const uint8_t *names, size_t count, int others_only);
/* Unlists blocks; `free` says of each whether its memory may be reused: not while it is being sent. */
void tk_shelf_take(struct tk_shelf *shelf, const uint64_t *ids, int count, uint8_t *free);
int tk_shelf_count(struct tk_shelf *shelf);
uint64_t tk_shelf_came(struct tk_shelf *shelf); /* blocks that receivers have noted for the application, in total */
/* The tags of receivers with such blocks. Called by the thread that opens and closes them. */
int tk_shelf_waiting(struct tk_shelf *shelf, uint64_t *tags, int tags_max);
/* Adds or removes names (owner and key of each) that are stored. */
void tk_shelf_stored(struct tk_shelf *shelf, const uint8_t *names, size_t count, int are_stored);
/* Changes the ids of blocks. `done[i]` is 0 if the block is no longer known or its new id is in use. */
enum { TK_RENAMED = 1, TK_RENAMED_USED }; /* used: calls were answered with it under the id that it had landed with */
void tk_shelf_rename(struct tk_shelf *shelf, const uint64_t *ids, const uint64_t *new_ids, size_t count, uint8_t *done);
int tk_desk_open(struct tk_shelf *shelf, const struct tk_desk_setup *setup, struct tk_desk **out);
void tk_desk_answers(struct tk_desk *desk, int answers); /* initially the application answers all calls */
void tk_desk_close(struct tk_desk *desk);		 /* its endpoint is closed */
/* Direct reads of clients on the same machine; see directory.c, desk_log.c and direct.c. */
#define TK_DIRECTORY_HEAD_BYTES 4096
#define TK_DIRECTORY_SLOT_BYTES 128
#define TK_READ_LOG_BYTES 69632
#define TK_DIRECT_BLOCKS 1024 /* in one get */
#define TK_DIRECT_KEYS 65536  /* in one look-up */
struct tk_direct_setup {
	uint64_t directory, directory_bytes; /* the node's, mapped here; all three outlive `tk_direct_close` */
	uint64_t memory, memory_bytes;
	uint64_t log;
	uint8_t owner[TK_OWNER_BYTES];
};
struct tk_direct_block {
	uint8_t key[TK_KEY_BYTES];
	uint32_t length, skip, part; /* of the stored block; a `part` of 0: all */
	uint32_t is_scattered;	     /* out: it is in the pieces */
	uint64_t address, pieces;    /* where it is wanted; pieces of another length are not used */
};
/* `memory` is a head and a power of two of slots, zeroed, and stays until the fabric is closed. The shelf is empty. */
int tk_shelf_share(struct tk_shelf *shelf, void *memory, size_t bytes);
/* `log`: TK_READ_LOG_BYTES, zeroed, until the desk has another or is closed; NULL: none. The peer may read
 * directly whenever the desk answers. */
void tk_desk_log(struct tk_desk *desk, void *log);
int tk_direct_open(const struct tk_direct_setup *setup, struct tk_direct **out);
/* Returns 1 if all blocks have been read; 0: make a call. Blocks of more than `bytes_max` together are not read. */
int tk_direct_read(struct tk_direct *direct, const uint8_t *fingerprint, struct tk_direct_block *blocks, uint32_t count,
		   uint64_t bytes_max, const void *metadata, uint32_t metadata_bytes);
/* Returns 1 if all blocks with these keys are listed; 0: make a call. */
int tk_direct_has(struct tk_direct *direct, const uint8_t *fingerprint, const uint8_t *keys, uint32_t count,
		  const void *metadata, uint32_t metadata_bytes);
uint64_t tk_direct_blocks(const struct tk_direct *direct); /* how many were read */
void tk_direct_close(struct tk_direct *direct);		   /* when it returns, nothing is read any more */
void tk_direct_free(struct tk_direct *direct);
/* Returns the bytes of whole records, in all of those listed, or noted by clients, when it last `begins`. 0: there are
 * no more. -1: none of these, but later ones; take them after other work, because clients may go on for ever. */
int tk_served_take(struct tk_shelf *shelf, void *out, size_t out_bytes, int begins);

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
/* The node's memory, mapped here read-only, and codes for the group rows of blocks that were read from there. */
struct tk_shared {
	uint64_t address, length;
	uint64_t hold_ns; /* how long after a call the node keeps the blocks whose locations it gave */
	uint64_t rows; /* a row for each word, in which the node gives a single block's location; 0: none */
	uint32_t served_code, scattered_code, corrupt_code, late_code;
	uint32_t rows_count, zero; /* so many of the caller's words have a row each, and may be stored there instead */
};
/* The destination of a block of a fetch, in our own memory. */
struct tk_wanted {
	uint64_t address;
	uint64_t pieces; /* a struct tk_pieces: a block read from the node's memory is copied there instead; 0: none */
};
struct tk_call {
	uint64_t tag; /* block i is watched as tag + 2i, the call is put as tag + 2 `blocks`, its answer watched as one more */
	uint64_t deadline_ns; /* to send the call by; its blocks' deadline applies too. The answer gets as long again */
	uint64_t blocks_deadline_ns;
	uint64_t expires_unix_ms;
	struct tk_group *group; /* a fetch's blocks are its first rows */
	uint32_t row;		/* of the call itself */
	uint32_t blocks, metadata_bytes, lease_ms;
	uint8_t kind, flags, durability, good_code;
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};
int tk_caller_open(const struct tk_caller_setup *setup, struct tk_caller **out);
/* `wanted`: one for each block of a fetch, which may then be read from the node's memory; or NULL. -EBUSY, -EMSGSIZE,
 * -EAGAIN, -ENOMEM: the call can't be made this way now. A call that is not sent by its deadline is reported as
 * TK_FAILED with -ETIMEDOUT, before any report about its blocks. */
int tk_caller_call(struct tk_caller *caller, const struct tk_call *call, const void *metadata, const void *rows,
		   size_t rows_bytes, const struct tk_wanted *wanted);
void tk_caller_share(struct tk_caller *caller, const struct tk_shared *shared); /* before the first call */
uint64_t tk_caller_shared(const struct tk_caller *caller); /* blocks that were read from the node's memory */
int tk_caller_free(struct tk_caller *caller); /* how many calls could be sent now */
/* The place with the answer to the call of this tag, and its generation; -ENOENT: there is none. */
int tk_caller_answer(struct tk_caller *caller, uint64_t tag, uint64_t *generation);
void tk_caller_read(struct tk_caller *caller, uint64_t tag); /* its answer has been read: the place is free */
int tk_caller_close(struct tk_caller *caller); /* its endpoint is closed */

/* A client's puts to its node by grants: slots that it may write to without a call; see sender.c. */
struct tk_sender_setup {
	struct tk_endpoint *endpoint;
	struct tk_region *region; /* has `words` and `heads`, our own memory */
	uint64_t peer;
	uint64_t flags, slots, slot_bytes, area_key; /* the node's: flag words, and slots with a page for the head each */
	uint64_t words;		   /* where acknowledgements arrive */
	uint64_t heads;		   /* a page for each slot */
	uint64_t first_generation; /* of every slot */
	uint64_t first_ack_generation;
	uint64_t grace_ns;     /* a put is answered within this time of its deadline, or its watch fails */
	uint32_t first_word;   /* index of `words` among all of the client's words, as the node counts them */
	uint32_t words_count;  /* maximum number of puts that are not over */
	uint32_t slots_count;  /* maximum number of puts that have not landed; further ones wait */
	uint32_t good_max;
	int32_t doorbell; /* the node's, if the next two are set: */
	uint64_t shared_flags, shared_slots; /* 0, or where the node's flags and slots are mapped here, as `words` are then */
};
int tk_sender_open(const struct tk_sender_setup *setup, struct tk_sender **out);
/* Memory in which puts of pieces are gathered, with this many bytes per slot. Called before any of them is armed. */
int tk_sender_gather(struct tk_sender *sender, struct tk_region *region, uint64_t address, uint64_t slot_bytes);
int tk_sender_close(struct tk_sender *sender); /* its endpoint is closed */
uint64_t tk_sender_shared(const struct tk_sender *sender); /* how many puts went through shared memory */

/* Shared by the two ends of a connection on one machine; see shared_puts.c. */
/* A write to this eventfd or pipe wakes the progress thread, which reads the pipe and not the eventfd. */
int tk_fabric_listen(struct tk_fabric *fabric, int doorbell, int is_pipe);
int tk_fabric_ignore(struct tk_fabric *fabric, int doorbell);
/* The peer watches some of its words in memory of ours that it has mapped. We store them there and ring its
 * doorbell. */
int tk_endpoint_share_words(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t words, uint32_t count,
			    int doorbell);

/* The peer reads blocks of TK_SHARED_PUT itself, if they are in this memory. It gets their locations in rows, one for
 * each of its first `count` words, in the same memory as those words; and if it `looks` there, also these words. */
int tk_endpoint_share_reads(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t rows, uint32_t count,
			    int looks, uint64_t memory, uint64_t bytes);
/* cdef end */

#endif
