/*
 * The part of lanes that receivers and the progress thread use.
 */
#ifndef TRIGGERKV_LANE_H
#define TRIGGERKV_LANE_H

#include "fabric.h"

/* The acknowledgement that a peer gets when its record is on the drive. */
struct lane_word {
	struct tk_endpoint *endpoint;
	uint64_t peer, target, key;
	uint64_t word; /* 0: nothing */
	uint64_t tag;  /* of its receiver */
};

/* The drive that a name belongs to. */
uint32_t lanes_home(const struct tk_lanes *lanes, const uint8_t *name);
/* Whether it is full for a block of this length, and has records of the same owner only: then waiting for them delays
 * no other owner. */
int lane_is_full_of(const struct tk_lane *lane, uint32_t length, const uint8_t *owner);
/* Whether it has too little ground for a block of this length, but expects more. If so the application is notified. */
int lane_awaits_ground(struct tk_lane *lane, uint32_t length);
/* Begins to write a block. Its room must not change until the record is reported, which happens after the peer got
 * `landed` or is gone. NULL: the lane doesn't take it. */
struct record *lane_begin(struct tk_lane *lane, const struct tk_came *came, const uint8_t *owner,
			  const struct lane_word *word);
void lane_landed(struct record *record);
int poll_lanes(struct tk_fabric *fabric);
void lanes_forget(struct tk_fabric *fabric, const struct tk_endpoint *endpoint);
void lanes_end(struct tk_fabric *fabric);
void free_lanes(struct tk_fabric *fabric); /* with the fabric */

#endif
