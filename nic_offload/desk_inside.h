/*
 * Shared by the files of a desk: desk.c, desk_cold.c, desk_where.c and desk_log.c. Called under the shelf's lock, unless marked.
 */
#ifndef TRIGGERKV_DESK_INSIDE_H
#define TRIGGERKV_DESK_INSIDE_H

#include "call.h"
#include "progress.h"
#include "shelf.h"

/* Finds all blocks of a call and marks them in use; returns their bytes, 0 if one is missing. */
uint64_t desk_find_all(struct tk_desk *desk, const struct call_head *head, uint64_t *sent_bytes);
void desk_give_back(struct tk_shelf *shelf, uint32_t count); /* releases blocks that were found */

/* The application's record of an answered call, with a row for each block if some are cold. */
struct served *served_new(struct tk_shelf *shelf, const struct tk_desk *desk, const struct call_head *head, uint64_t bytes,
			 uint32_t cold);
struct served *served_alloc(struct tk_shelf *shelf, size_t rest_bytes); /* without anything but its length */
void served_append(struct tk_shelf *shelf, struct served *served);
uint64_t note_use(struct shelved *block); /* the id by which a use is reported */
void served_discard(struct tk_shelf *shelf, struct served *served);
void desk_list_served(struct tk_shelf *shelf, struct served *served);

void desk_release(struct tk_desk *desk, uint32_t place); /* releases the blocks whose locations the peer had */

/* A call's rows and its answers, without the lock. */
struct call_part_row desk_row(const struct call_head *head, uint32_t number);
/* Whether the part lies in the block, and the peer has the word. */
int desk_may_send(const struct tk_desk *desk, const struct call_part_row *row);
void desk_send_block(struct tk_fabric *fabric, struct work *work, struct tk_desk *desk, const struct call_part_row *wanted,
		     struct shelved *block, struct served *served);
void desk_send_word(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk, uint32_t word,
		    uint64_t generation, uint32_t code);
/* Answers a call with DONE, before or after its blocks. */
void desk_tell(struct tk_fabric *fabric, struct work *work, const struct tk_desk *desk, const struct call_head *head);

/* desk_cold.c; the first without the lock */
int desk_answer_cold(struct tk_fabric *fabric, struct tk_desk *desk, const struct call_head *head);
void cold_notify(struct tk_shelf *shelf, const struct served *served);
void served_notify(struct tk_shelf *shelf); /* reports that there are records */

/* desk_log.c */
void desk_open_log(struct tk_desk *desk, int is_open);
void desk_close_log(struct tk_desk *desk);
void desk_drain_log(struct tk_desk *desk);
int desk_log_has_more(const struct tk_desk *desk); /* that could not be taken */
/* Of all desks, those written when this last began. Returns whether there were any. */
int shelf_drain_logs(struct tk_shelf *shelf, int begins);

/* desk_where.c; without the lock */
void desk_called_again(struct tk_desk *desk, const struct tk_landing *landing); /* in the same place */
int desk_answer_where(struct tk_fabric *fabric, struct tk_desk *desk, const struct tk_landing *landing,
		      const struct call_head *head);

#endif
