/*
 * The set of stored names, as keyed hashes. With it the receiver knows, without Python, which blocks it can't judge
 * itself.
 *
 * What always holds: a name that was added is found until it is removed. A name that was not added may be found too,
 * by collision (one in 2^64 for each stored name) or when memory runs out. So a name that is not found is not stored,
 * and one that is found has to be looked up. To grow the set never takes longer than moving a 256th of it.
 */
#define _GNU_SOURCE
#include "names.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#define SLOTS_MIN 64u

static uint64_t hash_of(const struct names *names, const uint8_t *name)
{
	uint64_t hash = tk_siphash(names->secret, name, NAME_BYTES);
	return hash ? hash : 1; /* 0 is an empty slot */
}

static struct names_part *part_of(struct names *names, uint64_t hash)
{
	return &names->parts[hash >> 56];
}

/* The slot of a name, or where it would be inserted. */
static uint32_t place(const struct names_part *part, uint64_t hash)
{
	uint32_t at = (uint32_t)hash & (part->slots - 1);
	while (part->hashes[at] && part->hashes[at] != hash)
		at = (at + 1) & (part->slots - 1);
	return at;
}

static int widen(struct names_part *part)
{
	struct names_part wider = {.slots = part->slots ? part->slots * 2 : SLOTS_MIN, .used = part->used};
	wider.hashes = calloc(wider.slots, sizeof *wider.hashes);
	if (!wider.hashes)
		return -ENOMEM;
	for (uint32_t at = 0; at < part->slots; at++)
		if (part->hashes[at])
			wider.hashes[place(&wider, part->hashes[at])] = part->hashes[at];
	free(part->hashes);
	*part = wider;
	return 0;
}

static void add(struct names *names, uint64_t hash)
{
	struct names_part *part = part_of(names, hash);
	if ((!part->slots || part->used > part->slots / 4 * 3) && widen(part)) {
		names->is_blind = 1;
		return;
	}
	uint32_t at = place(part, hash);
	part->used += !part->hashes[at];
	part->hashes[at] = hash;
}

static void take_out(struct names *names, uint64_t hash)
{
	struct names_part *part = part_of(names, hash);
	uint32_t hole = part->slots ? place(part, hash) : 0, last = part->slots - 1;
	if (!part->slots || !part->hashes[hole])
		return;
	part->used--;
	/* Later entries move up, unless that were before their own slot. */
	for (uint32_t at = (hole + 1) & last; part->hashes[at]; at = (at + 1) & last) {
		uint32_t own = (uint32_t)part->hashes[at] & last;
		if (((at - own) & last) >= ((at - hole) & last)) {
			part->hashes[hole] = part->hashes[at];
			hole = at;
		}
	}
	part->hashes[hole] = 0;
}

int names_init(struct names *names)
{
	return getrandom(names->secret, sizeof names->secret, 0) == sizeof names->secret ? 0 : -EIO;
}

void names_free(struct names *names)
{
	for (int i = 0; i < NAMES_PARTS; i++)
		free(names->parts[i].hashes);
}

int names_have(struct names *names, const uint8_t *name)
{
	uint64_t hash = hash_of(names, name);
	const struct names_part *part = part_of(names, hash);
	return names->is_blind || (part->slots && part->hashes[place(part, hash)]);
}

void names_change(struct names *names, const uint8_t *all, size_t count, int are_stored)
{
	for (size_t i = 0; i < count; i++) {
		uint64_t hash = hash_of(names, all + i * NAME_BYTES);
		if (are_stored)
			add(names, hash);
		else
			take_out(names, hash);
	}
}
