/*
 * Seals: everything that one end of a connection puts into the other's memory has a tag that only these two ends can
 * make.
 *
 * Each end has two keys, one for what it puts and one for what it receives; the applications exchanged them inside
 * TLS. A tag is SipHash-2-4 of the location (the address and key by which peers name it), the generation and the
 * contents. So a tag is invalid in another location, for another use of the same location, in the other direction,
 * and on another connection.
 *
 * A word (a flag, an acknowledgement) has 56 bits of its tag; its lowest byte is in the clear: the code of an
 * acknowledgement. It doesn't contain its generation, which the reader knows. Heads of puts, calls and answers have
 * tags of 64 bits.
 *
 * What it doesn't do: protect payloads. Their CRC32C is in the head, and a process that can write to a slot can make
 * bytes that match it.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#define OF_A_WORD 1
#define OF_BYTES 2
#define IN_THE_CLEAR UINT64_C(0xff)

_Static_assert(offsetof(struct tk_put_head, tag) == sizeof(struct tk_put_head) - TK_TAG_BYTES, "it covers all before it");

struct spot word_spot(uint64_t first, uint64_t key, uint32_t number)
{
	return (struct spot){first + (uint64_t)number * sizeof(uint64_t), key};
}

struct spot spot_of(const struct tk_region *region, uint64_t address)
{
	return (struct spot){region->base + (address - region->address), region->key};
}

static uint64_t sealed(const uint64_t secret[2], struct spot spot, uint64_t word)
{
	const uint64_t said[] = {OF_A_WORD, spot.address, spot.key, word};
	return (tk_siphash(secret, said, sizeof said) & ~IN_THE_CLEAR) | (word & IN_THE_CLEAR);
}

uint64_t word_out(const struct tk_endpoint *endpoint, struct spot spot, uint64_t word)
{
	return endpoint->seal.is_set ? sealed(endpoint->seal.out, spot, word) : word;
}

uint64_t word_in(const struct tk_endpoint *endpoint, struct spot spot, uint64_t word)
{
	return endpoint->seal.is_set ? sealed(endpoint->seal.in, spot, word) : word;
}

static int holds(uint64_t start, uint64_t length, uint64_t word)
{
	return length >= sizeof word && word >= start && word - start <= length - sizeof word;
}

uint64_t ack_in(const struct tk_ack_watch *watch, uint64_t word)
{
	const struct seal *seal = &watch->endpoint->seal;
	if (holds(seal->shared, seal->shared_bytes, watch->word)) /* it did not arrive over a network */
		return word >> ACK_CODE_BITS == watch->generation ? word : 0;
	struct spot spot = {seal->words.address + (watch->word - seal->here), seal->words.key};
	uint64_t said = watch->generation << ACK_CODE_BITS | (word & IN_THE_CLEAR);
	return word_in(watch->endpoint, spot, said) == word ? said : 0;
}

int may_watch(const struct tk_endpoint *endpoint, const struct tk_region *region, uint64_t word)
{
	return !endpoint->seal.is_set || (region && holds(region->address, region->length, word));
}

int may_watch_ack(const struct tk_endpoint *endpoint, uint64_t word)
{
	return !endpoint->seal.is_set || holds(endpoint->seal.here, endpoint->seal.words_bytes, word);
}

static struct siphash begin(const uint64_t secret[2], struct spot spot, uint64_t generation)
{
	const uint64_t first[] = {OF_BYTES, spot.address, spot.key, generation};
	struct siphash hash;
	siphash_begin(&hash, secret);
	siphash_words(&hash, first, sizeof first);
	return hash;
}

static uint64_t tag_of_head(const uint64_t secret[2], struct spot spot, const void *metadata,
			    const struct tk_put_head *head)
{
	struct siphash hash = begin(secret, spot, head->generation);
	siphash_words(&hash, metadata, head->metadata_bytes);
	return siphash_end(&hash, head, offsetof(struct tk_put_head, tag));
}

uint64_t head_out(const struct tk_endpoint *endpoint, struct spot spot, const void *metadata,
		  const struct tk_put_head *head)
{
	return endpoint->seal.is_set ? tag_of_head(endpoint->seal.out, spot, metadata, head) : 0;
}

uint32_t sum_of_head(const struct tk_put_head *head, const char *metadata)
{
	static const uint64_t no_tag;
	size_t first = offsetof(struct tk_put_head, metadata_bytes), end = offsetof(struct tk_put_head, tag);
	uint32_t crc32c = tk_crc32c(metadata, head->metadata_bytes, 0);
	crc32c = tk_crc32c((const char *)head + first, end - first, crc32c);
	return tk_crc32c(&no_tag, sizeof no_tag, crc32c);
}

int believes_head(const struct tk_endpoint *endpoint, struct spot spot, const void *metadata,
		  const struct tk_put_head *head)
{
	return !endpoint->seal.is_set || tag_of_head(endpoint->seal.in, spot, metadata, head) == head->tag;
}

uint32_t tag_bytes(const struct tk_endpoint *endpoint)
{
	return endpoint->seal.is_set ? TK_TAG_BYTES : 0;
}

uint64_t tk_endpoint_tag(struct tk_endpoint *endpoint, uint64_t address, uint64_t key, uint64_t generation,
			 const void *data, size_t length)
{
	if (!endpoint->seal.is_set)
		return 0;
	struct siphash hash = begin(endpoint->seal.out, (struct spot){address, key}, generation);
	return siphash_end(&hash, data, length);
}

int tk_endpoint_believes(struct tk_endpoint *endpoint, struct tk_region *region, uint64_t address, uint64_t generation,
			 const void *data, size_t length, uint64_t tag)
{
	if (!endpoint->seal.is_set)
		return 1;
	struct siphash hash = begin(endpoint->seal.in, spot_of(region, address), generation);
	return siphash_end(&hash, data, length) == tag;
}

int tk_endpoint_seal(struct tk_endpoint *endpoint, const uint8_t *out, const uint8_t *in, struct tk_region *words)
{
	struct seal *seal = &endpoint->seal;
	if (seal->is_set)
		return -EALREADY;
	memcpy(seal->out, out, sizeof seal->out);
	memcpy(seal->in, in, sizeof seal->in);
	if (words) {
		seal->words = spot_of(words, words->address);
		seal->here = words->address;
		seal->words_bytes = words->length;
	}
	seal->is_set = 1;
	return 0;
}
