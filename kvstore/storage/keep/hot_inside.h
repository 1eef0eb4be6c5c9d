/* Shared by hot.c and hot_room.c. */
#ifndef KEEP_HOT_INSIDE_H
#define KEEP_HOT_INSIDE_H

#include "hot.h"
#include "inside.h"
#include "siphash.h"

enum { KEEP_PAGE_BYTES = 4096, KEEP_HOT_NAME_BYTES = 48 };

/* The heads of rings; the pieces follow. A piece that is in use and neither kept nor gone is in no ring. */
enum { KEEP_HOT_UNUSED, KEEP_HOT_PROBATION, KEEP_HOT_PROTECTED, KEEP_HOT_GONE, KEEP_HOT_RINGS };

struct keep_piece {
	uint64_t generation; /* of the record that it is kept as; 0: none */
	uint64_t name;	     /* a digest of that record's name; 0: none, or another piece has it */
	uint64_t known_as;   /* its number in `keep_uses` while such uses go on, though it isn't kept; 0: none */
	uint32_t start, pages; /* `pages` 0: not in use */
	uint32_t users;
	uint32_t owner;
	uint32_t wipes; /* `wipes` of the memory when it was last known not to have an erased record */
	uint8_t is_protected, is_erased;
};

struct keep_hot {
	char *memory;
	uint64_t pages, protected_max, used_until;
	keep_extents *unused;
	uint64_t unwiped; /* the next page of the pass in progress; UINT64_MAX: none */
	uint64_t secret[2];
	struct keep_piece *pieces;
	uint32_t room, made, wipes;
	struct keep_rings rings; /* each in the order of last uses */
	struct keep_map by_generation, by_name;
	uint64_t *owned; /* pages kept, by owner; owner 0: none */
	uint32_t owners, owners_room;
	int has_refused;
	struct keep_hot_said said;
};

/* hot.c */

int keep_hot_reserve(keep_hot *h);
uint32_t keep_hot_taken(keep_hot *h, uint64_t start, uint64_t pages);
struct keep_piece *keep_hot_piece(const keep_hot *h, uint32_t id);
void keep_hot_wipe(keep_hot *h, uint64_t start, uint64_t pages);
void keep_hot_release_pages(keep_hot *h, uint32_t id);
void keep_hot_lose(keep_hot *h, uint32_t id);
uint64_t keep_hot_name(const keep_hot *h, const uint8_t *name);
void keep_hot_warm_names(const keep_hot *h, const uint8_t *names, uint64_t count, uint64_t *hashes);

/* hot_room.c */

int keep_hot_release_gone(keep_hot *h, const struct keep_uses *uses);

#endif
