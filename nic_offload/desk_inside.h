/*
 * Shared by the two files of a desk: desk.c and desk_where.c. All but the last two are called under the shelf's lock.
 */
#ifndef TRIGGERKV_DESK_INSIDE_H
#define TRIGGERKV_DESK_INSIDE_H

#include "call.h"
#include "progress.h"
#include "shelf.h"

/* Finds all blocks of a call and marks them in use; returns their bytes, 0 if one is missing. */
uint64_t desk_find_all(struct tk_desk *desk, const struct call_head *head, uint64_t *sent_bytes);
void desk_give_back(struct tk_shelf *shelf, uint32_t count); /* those that were found */

/* The application's record of an answered call. */
struct served *desk_note(struct tk_shelf *shelf, const struct tk_desk *desk, const struct call_head *head, uint64_t bytes);
void desk_forget_note(struct tk_shelf *shelf, struct served *served);
void desk_list_served(struct tk_shelf *shelf, struct served *served);

void desk_let_go(struct tk_desk *desk, uint32_t place); /* blocks whose locations its peer had */

void desk_called_again(struct tk_desk *desk, const struct tk_landing *landing); /* in the same place */
int desk_answer_where(struct tk_fabric *fabric, struct tk_desk *desk, const struct tk_landing *landing,
		      const struct call_head *head);

#endif
