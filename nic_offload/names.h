/*
 * The set of stored names: whether a block may be stored under a name, and where. The caller holds a lock for it.
 */
#ifndef TRIGGERKV_NAMES_H
#define TRIGGERKV_NAMES_H

#include "core.h"

#include <string.h>

#define NAME_BYTES (TK_OWNER_BYTES + TK_KEY_BYTES)
#define NAMES_PARTS 256

struct names_entry {
	uint64_t hash;	/* 0: none */
	uint64_t place; /* on a drive, see cold.h; 0: not known */
};

struct names_part {
	struct names_entry *entries;
	uint32_t slots, used;
};

struct names {
	uint64_t secret[2];
	struct names_part parts[NAMES_PARTS];
	int is_blind; /* there was no memory for a name: any name may be stored */
};

static inline void names_join(uint8_t *name, const uint8_t *owner, const uint8_t *key)
{
	memcpy(name, owner, TK_OWNER_BYTES);
	memcpy(name + TK_OWNER_BYTES, key, TK_KEY_BYTES);
}

int names_init(struct names *names);
void names_free(struct names *names);
int names_have(struct names *names, const uint8_t *name);
void names_change(struct names *names, const uint8_t *all, size_t count, int are_stored);
uint64_t names_place(struct names *names, const uint8_t *name); /* 0: not known */
/* For many names: their hashes, which need no lock, prefetched into the cache, and where each is stored; 0: not known. */
uint64_t names_hash(const struct names *names, const uint8_t *name);
void names_warm(const struct names *names, const uint64_t *hashes, size_t count);
void names_put_place(struct names *names, uint64_t hash, uint64_t place);
void names_forget_place(struct names *names, const uint8_t *name); /* the name stays in the set if it is in it */

#endif
