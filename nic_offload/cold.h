/*
 * Answers to calls for blocks that are not in memory, from the drives and without the application; see desk_cold.c. A
 * part of the public header, after core.h.
 */
#ifndef TRIGGERKV_COLD_H
#define TRIGGERKV_COLD_H

#include "core.h"

/* Shared with the cffi build, as in core.h. */
/* cdef begin */
/* The location of a name's record: its first page, from bit 0 on, the number of its drive, and the lowest bits of its
 * generation, so that a later record at the same place isn't mistaken for it. 0: unknown. */
#define TK_PLACE_DRIVE_BIT 36
#define TK_PLACE_GENERATION_BIT 41
struct tk_place {
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t key[TK_KEY_BYTES];
	uint64_t place;
};
struct tk_cold_setup {
	struct tk_reader *readers[TK_DRIVES_MAX]; /* NULL: the application reads that drive */
	uint64_t tag;	    /* of TK_CAME: there are answered calls to take */
	uint64_t bytes_max; /* being read at a time; 0: nothing is read */
};
/* From now on calls are answered from these drives, if places are known and rooms are available. */
void tk_shelf_use_readers(struct tk_shelf *shelf, const struct tk_cold_setup *setup);
void tk_shelf_place(struct tk_shelf *shelf, const struct tk_place *places, size_t count); /* unlisting forgets it */
struct tk_cold_state {
	uint32_t rooms;	       /* number of rooms, of the size last requested */
	uint32_t wanted_pages; /* that size; 0: none yet */
};
/* Rooms for blocks that are read. Used ones return with the calls; unused ones are taken back here. */
int tk_shelf_feed(struct tk_shelf *shelf, const struct tk_room *rooms, int count);
int tk_shelf_rooms(struct tk_shelf *shelf, struct tk_room *out, int out_max);
void tk_shelf_cold_state(struct tk_shelf *shelf, struct tk_cold_state *state);

/* Follows the metadata of a call (`tk_served`) of which some blocks were cold: one head, and a row for each block. */
struct tk_cold_head {
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint32_t shares, zero; /* the caller accepts locations of single blocks */
};
struct tk_cold_row {
	uint8_t key[TK_KEY_BYTES];
	uint32_t length, ack_word;
	uint64_t ack_generation, target, target_key;
	uint32_t skip, part;
	uint32_t room;	/* UINT32_MAX: it was in memory */
	int32_t status; /* 0, or why nothing was sent: then the application has to send it, unless it was cancelled */
};
/* Stops sending blocks that a desk reads, by the generations of their words; returns how many had not gone out. */
int tk_desk_cancel(struct tk_fabric *fabric, struct tk_desk *desk, const uint64_t *generations, int count);
/* cdef end */

#endif
