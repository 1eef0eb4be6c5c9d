/*
 * The layout of a shelf's directory, which clients on the same machine map read-only, and of the log in which each of
 * them notes what it has read. See directory.c, desk_log.c and direct.c.
 */
#ifndef TRIGGERKV_DIRECTORY_H
#define TRIGGERKV_DIRECTORY_H

#include "attached.h"

#include <pthread.h>

#define DIRECTORY_HEAD_BYTES TK_DIRECTORY_HEAD_BYTES
#define DIRECTORY_PROBES 32 /* slots in which a name may be */
#define READ_LOG_HEAD_BYTES 4096
#define READ_LOG_DATA_BYTES (TK_READ_LOG_BYTES - READ_LOG_HEAD_BYTES)
#define READ_METADATA_BYTES_MAX 1024
#define READ_BYTES_MAX (64u << 20) /* of a get */

struct directory_head {
	uint64_t slots;	    /* a power of two */
	uint64_t secret[2]; /* of the hash that spreads names */
	uint64_t alive;	    /* offset of the word in `owner` that is the number of the thread that holds it */
	pthread_mutex_t owner; /* robust, and held until the node's thread ends: the kernel notes a death there */
};

/* One listed block. A `seq` that is odd: it is being changed. It differs whenever anything else here does. */
struct directory_slot {
	uint64_t seq;
	uint64_t offset; /* of the payload in the shelf's region */
	uint32_t length, crc32c; /* a length of 0: the slot is free */
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t key[TK_KEY_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
} __attribute__((aligned(128)));

/* The two ends' counts of bytes, which only rise; bytes are at their count modulo READ_LOG_DATA_BYTES. */
struct read_log {
	uint64_t written __attribute__((aligned(64))); /* by the client */
	uint64_t taken __attribute__((aligned(64)));   /* by the node */
	uint64_t is_open __attribute__((aligned(64))); /* set by the node: the client may read blocks */
};

/* A get: followed by a `read_block` for each block, and the metadata that a call would have had. Or a look-up, without
 * blocks. */
struct read_entry {
	uint32_t bytes; /* of all this, a multiple of 8 */
	uint32_t blocks, metadata_bytes, is_prefix;
	uint64_t began_ns, ended_ns, size_bytes;
};
struct read_block {
	uint64_t seq;
	uint32_t slot, zero;
};

_Static_assert(sizeof(struct directory_slot) == TK_DIRECTORY_SLOT_BYTES, "the slots fit");
_Static_assert(sizeof(struct directory_head) <= DIRECTORY_HEAD_BYTES, "the head fits");
_Static_assert(sizeof(struct read_log) <= READ_LOG_HEAD_BYTES, "its head fits");

static inline uint64_t directory_hash(const uint64_t secret[2], const uint8_t *owner, const uint8_t *key)
{
	uint8_t name[TK_OWNER_BYTES + TK_KEY_BYTES];
	__builtin_memcpy(name, owner, TK_OWNER_BYTES);
	__builtin_memcpy(name + TK_OWNER_BYTES, key, TK_KEY_BYTES);
	return tk_siphash(secret, name, sizeof name);
}

#endif
