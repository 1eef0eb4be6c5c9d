/*
 * The set of stored names, as keyed hashes, with the place of each on its drive. Without Python, the receiver uses it
 * to recognise blocks that it can't judge itself, and a desk uses it to locate blocks that are not in memory.
 *
 * What always holds: a name that was added is found until it is removed. A name that was not added may be found too,
 * by collision (one in 2^64 for each stored name) or when memory runs out. So a name that is not found is not stored,
 * and one that is found must be looked up, and compared with the header at its place. Growing the set never takes
 * longer than moving a 256th of it.
 */
#define _GNU_SOURCE
#include "names.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#define SLOTS_MIN 64u

uint64_t names_hash(const struct names *names, const uint8_t *name)
{
	uint64_t hash = tk_siphash(names->secret, name, NAME_BYTES);
	return hash ? hash : 1; /* 0 is an empty slot */
}

static struct names_part *part_of(struct names *names, uint64_t hash)
{
	return &names->parts[hash >> 56];
}

/* The slot of a name, or where it would be inserted. */
static uint32_t slot_of(const struct names_part *part, uint64_t hash)
{
	uint32_t at = (uint32_t)hash & (part->slots - 1);
	while (part->entries[at].hash && part->entries[at].hash != hash)
		at = (at + 1) & (part->slots - 1);
	return at;
}

static int widen(struct names_part *part)
{
	struct names_part wider = {.slots = part->slots ? part->slots * 2 : SLOTS_MIN, .used = part->used};
	wider.entries = calloc(wider.slots, sizeof *wider.entries);
	if (!wider.entries)
		return -ENOMEM;
	for (uint32_t at = 0; at < part->slots; at++)
		if (part->entries[at].hash)
			wider.entries[slot_of(&wider, part->entries[at].hash)] = part->entries[at];
	free(part->entries);
	*part = wider;
	return 0;
}

/* Returns NULL if there is no memory. */
static struct names_entry *add(struct names *names, uint64_t hash)
{
	struct names_part *part = part_of(names, hash);
	if ((!part->slots || part->used > part->slots / 4 * 3) && widen(part)) {
		names->is_blind = 1;
		return NULL;
	}
	struct names_entry *entry = &part->entries[slot_of(part, hash)];
	part->used += !entry->hash;
	entry->hash = hash;
	return entry;
}

static void take_out(struct names *names, uint64_t hash)
{
	struct names_part *part = part_of(names, hash);
	uint32_t hole = part->slots ? slot_of(part, hash) : 0, last = part->slots - 1;
	if (!part->slots || !part->entries[hole].hash)
		return;
	part->used--;
	/* Later entries move up, unless that were before their own slot. */
	for (uint32_t at = (hole + 1) & last; part->entries[at].hash; at = (at + 1) & last) {
		uint32_t own = (uint32_t)part->entries[at].hash & last;
		if (((at - own) & last) >= ((at - hole) & last)) {
			part->entries[hole] = part->entries[at];
			hole = at;
		}
	}
	part->entries[hole] = (struct names_entry){0};
}

int names_init(struct names *names)
{
	return getrandom(names->secret, sizeof names->secret, 0) == sizeof names->secret ? 0 : -EIO;
}

void names_free(struct names *names)
{
	for (int i = 0; i < NAMES_PARTS; i++)
		free(names->parts[i].entries);
}

static struct names_entry *find_hash(struct names *names, uint64_t hash)
{
	struct names_part *part = part_of(names, hash);
	struct names_entry *entry = part->slots ? &part->entries[slot_of(part, hash)] : NULL;
	return entry && entry->hash ? entry : NULL;
}

/* Returns NULL if there is none. */
static struct names_entry *find(struct names *names, const uint8_t *name)
{
	return find_hash(names, names_hash(names, name));
}

void names_warm(const struct names *names, const uint64_t *hashes, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const struct names_part *part = &names->parts[hashes[i] >> 56];
		if (part->slots)
			__builtin_prefetch(&part->entries[(uint32_t)hashes[i] & (part->slots - 1)], 1);
	}
}

int names_have(struct names *names, const uint8_t *name)
{
	return names->is_blind || find(names, name);
}

uint64_t names_place(struct names *names, const uint8_t *name)
{
	const struct names_entry *entry = find(names, name);
	return entry ? entry->place : 0;
}

void names_put_place(struct names *names, uint64_t hash, uint64_t place)
{
	struct names_entry *entry = add(names, hash);
	if (!entry && (entry = find_hash(names, hash)))
		place = 0; /* there was no memory, and it must not keep an old place */
	if (entry)
		entry->place = place;
}

void names_forget_place(struct names *names, const uint8_t *name)
{
	struct names_entry *entry = find(names, name);
	if (entry)
		entry->place = 0;
}

void names_change(struct names *names, const uint8_t *all, size_t count, int are_stored)
{
	for (size_t i = 0; i < count; i++) {
		uint64_t hash = names_hash(names, all + i * NAME_BYTES);
		if (are_stored)
			add(names, hash);
		else
			take_out(names, hash);
	}
}
