/*
 * Checks the slots of a keyring, thousands in one call: whether each is intact, its domain's tag, and whether a key
 * wraps it.
 *
 * A slot is `struct slot`. A wrapped key is authenticated together with the store, the slot's number and the part of
 * the slot that is in the clear. What it doesn't do: interpret that part (`kvstore.sealing.slots` does), or give out a
 * key.
 */
#include "aead.h"
#include "blake2b.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#define TAG_BYTES 6u /* of a domain */

struct slot {
	uint8_t clear[TK_SLOT_CLEAR];
	uint8_t nonce[TK_AEAD_NONCE], key[TK_AEAD_KEY], tag[TK_AEAD_TAG];
	uint8_t crc[4]; /* of all before it */
};

struct associated {
	uint8_t store[TK_SLOT_STORE];
	uint32_t number;
	uint8_t clear[TK_SLOT_CLEAR];
};

_Static_assert(sizeof(struct slot) == TK_SLOT, "");
_Static_assert(sizeof(struct associated) == TK_SLOT_STORE + 4 + TK_SLOT_CLEAR, "nothing lies between");

void tk_slots_whole(const void *slots, uint32_t count, uint8_t *whole)
{
	const struct slot *slot = slots;
	for (uint32_t at = 0; at < count; at++, slot++) {
		uint32_t crc;
		memcpy(&crc, slot->crc, sizeof crc);
		whole[at] = tk_crc32c(slot, offsetof(struct slot, crc), 0) == crc;
	}
}

void tk_domain_tags(const void *domains, uint32_t count, uint64_t *tags)
{
	/* The length of the domain's name, and the name. */
	uint64_t block[BLAKE2B_BLOCK / 8] = {TK_DOMAIN_BYTES};
	for (uint32_t at = 0; at < count; at++) {
		memcpy(block + 1, (const uint8_t *)domains + (size_t)at * TK_DOMAIN_BYTES, TK_DOMAIN_BYTES);
		tags[at] = 0;
		blake2b_unkeyed((const uint8_t *)"triggerkv dom of", block, 8 + TK_DOMAIN_BYTES, &tags[at], TAG_BYTES);
	}
}

int tk_slots_authentic(const void *key, const void *store, const void *slots, uint32_t slot_count,
		       const struct tk_slot_at *which, uint32_t count, uint8_t *authentic)
{
	struct aead *aead = aead_open();
	if (!aead) {
		char message[TK_AEAD_MESSAGE];
		int why = tk_aead_load(message);
		return why ? why : -ENOMEM;
	}
	struct associated associated;
	uint8_t opened[TK_AEAD_KEY], tag[TK_AEAD_TAG];
	int status = 0;
	memcpy(associated.store, store, sizeof associated.store);
	for (uint32_t at = 0; at < count && !status; at++) {
		if (which[at].row >= slot_count) {
			status = -EINVAL;
			break;
		}
		const struct slot *slot = (const struct slot *)slots + which[at].row;
		associated.number = which[at].number;
		memcpy(associated.clear, slot->clear, sizeof associated.clear);
		memcpy(tag, slot->tag, sizeof tag);
		status = aead_begin(aead, 1, at ? NULL : key, slot->nonce, &associated, sizeof associated);
		if (!status)
			status = aead_step(aead, opened, slot->key, sizeof opened);
		if (!status) {
			int end = aead_end(aead, tag);
			authentic[at] = !end;
			status = end == -EBADMSG ? 0 : end;
		}
	}
	wipe(opened, sizeof opened);
	aead_close(aead);
	return status;
}
