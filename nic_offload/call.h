/*
 * The memory layout of calls over the fabric, at both ends; `kvstore/wire/fabric_call.py` has the same in Python.
 */
#ifndef TRIGGERKV_CALL_H
#define TRIGGERKV_CALL_H

#include "core.h"

#define CALL_FETCH 1
#define CALL_FETCH_PARTS 3
#define CALL_PREFIX 5 /* its rows are keys; DONE: all of these blocks are in memory */
#define CALL_TELLS 1 /* flag: the metadata must be processed before the call is answered */
#define CALL_SHARES 2 /* flag: the caller has the node's memory mapped, and accepts locations in it */
#define CALL_ROWS 4 /* flag: the caller accepts locations of single blocks, in their rows */
#define CALL_DONE 1  /* code of an answer without bytes */
#define CALL_WHERE 3 /* code of an answer with the blocks' locations */
#define BLOCK_WHERE 0x87 /* code of a block's word: it is in the shared memory, see its row. The same as \
			    MISS(NODE_AWAY), which is what a client that no longer waits for it reads */
#define ANSWER_BYTES 36864
#define ANSWER_WHERE 3 /* kind of its bytes */
#define CALL_ALIGN 8
#define ACK_CODE_BITS 8
#define ACK_GENERATION_MAX ((UINT64_C(1) << 56) - 1)

struct call_head {
	uint32_t crc32c, length;
	uint64_t generation;
	uint8_t kind, flags, durability, zero;
	uint32_t metadata_bytes, blocks, ack_word, lease_ms;
	uint32_t zeros;
	uint64_t expires_unix_ms;
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
};

struct call_fetch_row {
	uint8_t key[TK_KEY_BYTES];
	uint32_t length, ack_word;
	uint64_t ack_generation, target, target_key;
};

/* Requests `part` bytes, from this offset on, of a block of `length`; a `part` of 0: all. */
struct call_part_row {
	struct call_fetch_row row;
	uint32_t skip, part;
};

struct answer_head {
	uint32_t crc32c, length;
	uint64_t generation;
	uint8_t kind, zeros[7];
};

/* The location of one block in the node's shared memory. */
struct where_row {
	uint64_t offset;
	uint32_t crc32c, zero;
};

/* By acknowledgement word, in memory that both ends have mapped: where a block is, and until when (CLOCK_MONOTONIC). */
struct shared_row {
	uint64_t generation; /* of the word */
	uint64_t offset, until_ns;
	uint64_t read; /* set by the client: the generation whose block it has read or no longer wants */
	uint32_t crc32c, zero;
	uint64_t word;	/* instead of a word over the fabric, for a client that looks for it here, */
	uint64_t count; /* and in the first row, how many of these were stored in all of them */
	uint64_t zeros;
};

static inline int call_fetches(uint8_t kind)
{
	return kind == CALL_FETCH || kind == CALL_FETCH_PARTS;
}

/* Bytes per block of a call that a desk may answer; 0: it answers no calls of this kind. */
static inline size_t call_row_bytes(uint8_t kind)
{
	switch (kind) {
	case CALL_FETCH:
		return sizeof(struct call_fetch_row);
	case CALL_FETCH_PARTS:
		return sizeof(struct call_part_row);
	case CALL_PREFIX:
		return TK_KEY_BYTES;
	default:
		return 0;
	}
}

_Static_assert(sizeof(struct call_part_row) == 72, "as fabric_call.py packs them");
_Static_assert(sizeof(struct call_head) == 64 && sizeof(struct call_fetch_row) == 64, "as fabric_call.py packs them");

_Static_assert(sizeof(struct shared_row) == 64, "as shared_slots.py says");
_Static_assert(sizeof(struct answer_head) == 24, "as fabric_call.py packs it");
_Static_assert(sizeof(struct answer_head) + TK_CALL_BLOCKS * sizeof(struct where_row) + TK_TAG_BYTES <= ANSWER_BYTES,
	       "the largest answer fits");

#endif
