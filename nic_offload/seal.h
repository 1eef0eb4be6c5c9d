/*
 * Tags that prove that bytes came from the other end of a connection.
 */
#ifndef TRIGGERKV_SEAL_H
#define TRIGGERKV_SEAL_H

#include "core.h"
#include "siphash.h"

/* A place in memory, as peers name it. */
struct spot {
	uint64_t address, key;
};

/* The secret keys of the two ends of a connection; all zeros: no keys, and everything is accepted. */
struct seal {
	int is_set;
	uint64_t out[2], in[2];
	struct spot words; /* the memory in which acknowledgements arrive, as peers name it */
	uint64_t here, words_bytes; /* its address here, and its length */
	uint64_t shared, shared_bytes; /* words that only the peer's process and this one can write to */
};

struct spot word_spot(uint64_t first, uint64_t key, uint32_t number); /* a word in an array of words */
struct spot spot_of(const struct tk_region *region, uint64_t address);
uint64_t word_out(const struct tk_endpoint *endpoint, struct spot spot, uint64_t word);
uint64_t word_in(const struct tk_endpoint *endpoint, struct spot spot, uint64_t word);
uint64_t ack_in(const struct tk_ack_watch *watch, uint64_t word); /* its code; 0: another sender or generation */
int may_watch(const struct tk_endpoint *endpoint, const struct tk_region *region, uint64_t word);
int may_watch_ack(const struct tk_endpoint *endpoint, uint64_t word);

/* The checksum of the metadata and head of a put, without its tag. Any thread. */
uint32_t sum_of_head(const struct tk_put_head *head, const char *metadata);
/* Tags of bytes: of a put's metadata and head, or of any others. Without a seal they are 0, and any tag is accepted. */
uint64_t head_out(const struct tk_endpoint *endpoint, struct spot spot, const void *metadata,
		  const struct tk_put_head *head);
int believes_head(const struct tk_endpoint *endpoint, struct spot spot, const void *metadata,
		  const struct tk_put_head *head);
uint32_t tag_bytes(const struct tk_endpoint *endpoint); /* the size of the tag that follows a call or an answer */

#endif
