/*
 * Shared by the two files of a receiver: receiver.c and receiver_puts.c.
 */
#ifndef TRIGGERKV_RECEIVER_INSIDE_H
#define TRIGGERKV_RECEIVER_INSIDE_H

#include "progress.h"
#include "shelf.h"

/* A put that is being read. */
struct reading {
	int is_open;
	int is_whole; /* completely read; `code` is to be sent to the peer, unless it is 0 */
	uint32_t slot, code, copied;
	struct record *record; /* the lane's record of it; NULL: no lane writes it */
	struct tk_room room;
	struct tk_put_head head;
	uint32_t crc;
	uint64_t began_ns, id; /* id: set once it is whole */
};

#define LATER 0xff /* instead of a lane's number: the block waits for a full lane, or for ground */
#define GONE 0xfe  /* the same: a lane or the application has it */
_Static_assert(TK_DRIVES_MAX < GONE, "no lane has this number");

/* A slot: the generation of its current or next put; the flag value that announces it, 0 once it has arrived; the last
 * value. */
struct flag {
	uint64_t generation, due, before;
};

struct tk_receiver {
	struct tk_receiver_setup setup;
	struct tk_fabric *fabric;
	struct tk_shelf *shelf;

	/* Used only by the thread that runs the rounds. */
	struct tk_receiver *next;
	struct tk_endpoint *endpoint; /* NULL: it is closed, or the peer has broken the protocol */
	struct flag *awaited; /* by slot */
	uint32_t *queue; /* slots whose flags have arrived, a ring */
	uint32_t queue_first, queue_count;
	struct reading reading;

	pthread_mutex_t lock; /* for all that follows */
	const struct tk_lanes *lanes;
	int is_limited;	     /* blocks may take only `lent_pages` on lanes */
	uint64_t lent_pages; /* pages that blocks may still take on lanes */
	struct tk_room *rooms;
	uint32_t rooms_count, rooms_capacity;
	struct tk_came *came;
	uint32_t came_count, came_capacity; /* the count is atomic, because it is read without the lock */
	uint32_t later_count; /* how many of them wait for a lane; atomic, because it is read without the lock */
	uint32_t gone_count;  /* how many of them a lane has taken since */
	uint32_t later_at;    /* none before this one waits for a lane */
	int is_call_next;     /* the application is about to get a call, and takes these with it */
	uint32_t on_lanes; /* blocks handed to lanes since the application last took some */
	uint32_t wanted_pages, starved;
	uint32_t differed, taken, expired, unsaid;
	int broken;
	int is_notified;	     /* reported: there is something to take */
	uint64_t reported_ns;    /* when it was last reported */
	uint64_t notify_at_ns; /* when to report it; atomic, because it is read without the lock; 0: nothing to report */
};

/* receiver.c */
void await_put(struct tk_receiver *receiver, uint32_t slot, uint64_t generation);
void count_later(struct tk_receiver *receiver, int change); /* under the lock */
void remove_gone(struct tk_receiver *receiver); /* under the lock */
void notify_puts(struct tk_receiver *receiver); /* under the lock */
void notify_arrival(struct tk_receiver *receiver, const struct tk_came *came); /* under the lock */
void notify_lane(struct tk_receiver *receiver); /* a block that a lane writes now; under the lock */
int give_room_back(struct tk_receiver *receiver); /* under the lock */
void break_off(struct tk_receiver *receiver, int status);

/* receiver_puts.c */
void scan_flags(struct tk_receiver *receiver);
void hand_over_later(struct tk_receiver *receiver);
int take_puts(struct tk_receiver *receiver, uint32_t *budget); /* whether it made progress */
void take_rest(struct tk_receiver *receiver);

#endif
