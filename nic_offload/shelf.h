/*
 * Shared by the shelf and the progress thread.
 */
#ifndef TRIGGERKV_SHELF_H
#define TRIGGERKV_SHELF_H

#include "cold.h"
#include "fabric.h"
#include "names.h"

/* Rows for which unlist, rename, stored and place hold the lock at once: the progress thread waits for no more. */
#define SHELF_HELD_FOR 32u

static inline size_t shelf_rows_at_once(size_t left)
{
	return left < SHELF_HELD_FOR ? left : SHELF_HELD_FOR;
}

#define LANDED_ID (UINT64_C(1) << 63) /* of blocks that came by grants, until they are renamed */

/* A block on the shelf. It is found by name while it is listed, and by id as long as it is listed or being sent. */
struct shelved {
	struct tk_shelved block;
	struct shelved *next_named, *next_known; /* in their chains */
	uint32_t sending, slot; /* 1 more than the number of its slot in the directory; 0: it has none */
	int listed, was_used; /* answered while its id was one of those that blocks land with */
};

/* A call that was answered from the shelf, reported once all of its blocks are over. */
struct served {
	struct served *next;
	uint32_t left;
	int has_unsent; /* blocks that the application has to send */
	struct tk_served head;
	uint64_t rest[]; /* ids, then metadata, then rows of cold blocks */
};

/* Blocks whose locations a peer has. */
struct held {
	struct shelved **blocks;
	uint32_t count;
	uint64_t bytes, until_ns;
};

struct tk_desk {
	struct tk_desk *next;
	struct tk_shelf *shelf;
	struct tk_desk_setup setup;
	int answers;	     /* atomic */
	struct held held[TK_CALL_PLACES]; /* by the place of the call; under the shelf's lock */
	uint64_t held_bytes;
	struct read_log *log;	  /* of its peer's direct reads; NULL: it makes none. Under the shelf's lock */
	struct tk_desk *next_logged;
	uint64_t log_taken, log_until;
	uint64_t under_way_bytes; /* used only by the thread that runs the rounds */
};

#define COLD_SHARES 256 /* by the first byte of the owner: tenants' ids are digests */

/* For calls that are answered from drives. */
struct cold {
	struct tk_cold_setup setup;
	struct tk_room *rooms;
	uint32_t rooms_count, rooms_capacity;
	uint32_t wanted_pages;
	uint64_t bytes, bytes_of[COLD_SHARES]; /* being read: in total, and by owner */
	int is_notified;   /* reported: there is something to take */
	int is_due; /* it will be reported at the fabric's `cold_notify_ns` */
};

struct tk_shelf {
	struct tk_fabric *fabric;
	struct tk_shelf *next;
	struct tk_region *region;
	uint64_t secret[2];
	uint8_t *call;		/* the progress thread's copy of the call that it examines */
	struct shelved **found; /* the call's blocks; NULL: the block is not in memory */
	uint64_t *places;	/* and then its place on a drive, */
	struct tk_room *into;	/* and the room it is read into */

	pthread_mutex_t lock; /* for all that follows */
	struct names stored; /* on drives, or on their way there */
	struct shelved **named, **known;
	uint32_t chains, count;
	uint64_t landed; /* ids given to blocks that have landed */
	uint64_t came;	 /* atomic: rows that receivers have noted for the application */
	struct tk_desk *desks, *logged;
	struct directory *directory; /* NULL: clients can't read blocks by themselves */
	struct served *first, *last; /* calls that are over, and not taken yet */
	uint64_t served_listed, served_taken; /* how many calls were ever in this list, and left it */
	uint64_t served_until;	     /* how many will have left it when the application has taken all that it came for */
	size_t served_bytes;	     /* of these calls, and of those under way */
	struct cold cold;
};

/* Under the lock; all but `shelf_list` on the progress thread. */
int shelf_list(struct tk_shelf *shelf, const struct tk_shelved *block);
struct shelved *shelf_find(struct tk_shelf *shelf, const uint8_t *owner, const uint8_t *key);
void shelf_unlist(struct tk_shelf *shelf, struct shelved *block);
void shelf_release(struct tk_shelf *shelf, struct shelved *block);

/* directory.c */
void directory_list(struct tk_shelf *shelf, struct shelved *block);
void directory_unlist(struct tk_shelf *shelf, struct shelved *block);
void directory_free(struct tk_shelf *shelf);
/* The block that is in a slot whose `seq` is this; NULL: none any more. */
struct shelved *directory_block(struct tk_shelf *shelf, uint32_t slot, uint64_t seq);

#endif
