/*
 * Shared by the two files of a caller: caller.c and caller_places.c.
 */
#ifndef TRIGGERKV_CALLER_INSIDE_H
#define TRIGGERKV_CALLER_INSIDE_H

#include "call.h"
#include "progress.h"

enum place_state { PLACE_FREE, PLACE_CALLED, PLACE_ANSWERED /* with an answer that has not been read yet */ };

struct place {
	enum place_state state;
	uint64_t tag;	     /* of the call that is in it */
	uint64_t generation; /* of that call; if it is free, of the next one */
};

/* A call, until its put is over. */
struct called {
	struct tk_caller *caller;
	struct work *watch; /* for its answer; in no list until the call has a place */
	uint64_t tag;
	uint64_t answer_ns; /* deadline of the answer, counted from when the call has a place; 0: none */
	uint32_t good_code;
	uint32_t length; /* without a tag */
	char bytes[];	 /* a `call_head` and what follows it, without the fields that depend on the place */
};

struct tk_caller {
	struct tk_caller_setup setup;
	struct tk_fabric *fabric;

	pthread_mutex_t lock;
	struct place places[TK_CALL_PLACES];
	uint32_t waiting; /* calls without a place */
	uint64_t waiting_bytes;

	/* Used only by the thread that runs the rounds. */
	struct tk_caller *next;
	struct queue unplaced;

	struct tk_shared shared; /* length 0: the node's memory is not mapped here */
	uint32_t rows;		 /* atomic: how many of its words have rows */
	uint64_t words_seen;	 /* by the thread that runs the rounds: how many words were stored in these */
	int shares;		 /* atomic: blocks may be read from there */
	uint64_t shared_blocks;	 /* atomic: number of blocks read from there */
};

/* Under the lock; after its call was answered. */
static inline void free_place(struct place *place)
{
	place->state = PLACE_FREE;
	place->generation++;
}

#endif
