/*
 * A group: the operations that one caller waits for, with a row for each.
 *
 * The progress thread writes into the rows when puts fire and when the peer acknowledges them. A caller sleeps
 * here until enough rows are over, and is woken at once. So a successful batch, of any number of blocks, costs no
 * event, or one (TK_OVER) if no caller is waiting when its last row ends. If it is a batch of puts, the event is
 * OVER_NS late, and is not reported if a caller has seen the end by then: one that keeps several puts under way waits
 * for each after its end, and would pay for a second thread of its process that handles the event. An acknowledgement
 * above `good_max` of the row's watch, and every failure, is reported as an event; the application decides, and ends
 * the row itself.
 *
 * What always holds: a row ends once and doesn't change afterwards. A group is freed when its owner has closed it and
 * no work item refers to it. Rows are read and written under the lock, so a reader never sees half of an update. In a
 * child after fork every call is refused: a thread that the child doesn't have may hold the lock.
 */
#define _GNU_SOURCE
#include "progress.h"
#include "turn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define OVER_NS 5000000u

struct tk_group {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	uint64_t tag;
	uint32_t count;
	uint32_t users; /* atomic: references, by its owner and each work item */
	uint32_t open;	/* rows that are not over */
	uint32_t unlanded; /* of these, those without any word yet */
	uint32_t prefix; /* number of leading rows that are over */
	uint32_t waiters;
	uint32_t wanted_prefix; /* the smallest number that a waiter waits for */
	int is_reported;	/* TK_OVER was reported, or a waiter has seen the end */
	struct tk_group *next_over; /* of those to be reported, */
	uint64_t over_at_ns;	    /* and when */
	struct turn *turn;
	uint8_t *copies; /* of each row: its block is being read from the node's memory */
	char *heads;	 /* heads of the blocks of puts, each preceded by its metadata */
	size_t head_bytes; /* of each, with its metadata; 0: there are none */
	struct tk_row rows[];
};

int group_open(struct tk_fabric *fabric, uint64_t tag, uint32_t count, int awaited, size_t head_bytes,
	       struct tk_group **out)
{
	struct tk_group *group;
	group = calloc(1, sizeof *group + count * (sizeof *group->rows + head_bytes + sizeof *group->copies));
	if (!group)
		return -ENOMEM;
	group->heads = (char *)(group->rows + count);
	group->head_bytes = head_bytes;
	group->copies = (uint8_t *)group->heads + count * head_bytes;
	pthread_mutex_init(&group->lock, NULL);
	init_condition(&group->changed);
	turn_use(group->turn = fabric->turn);
	group->tag = tag;
	group->users = 1;
	group->is_reported = awaited;
	group->count = group->open = group->unlanded = count;
	group->wanted_prefix = UINT32_MAX;
	*out = group;
	return 0;
}

int tk_group_open(struct tk_fabric *fabric, uint64_t tag, uint32_t count, int awaited, struct tk_group **out)
{
	return group_open(fabric, tag, count, awaited, 0, out);
}

struct tk_put_head *group_head(struct tk_group *group, uint32_t row)
{
	if (!group->head_bytes || row >= group->count)
		return NULL;
	return (struct tk_put_head *)(group->heads + (row + 1) * group->head_bytes) - 1;
}

int tk_group_read(struct tk_group *group, uint32_t first, uint32_t count, struct tk_row *out)
{
	if (first > group->count || count > group->count - first)
		return -EINVAL;
	if (!turn_is_ours(group->turn))
		return -ECHILD;
	pthread_mutex_lock(&group->lock);
	memcpy(out, group->rows + first, count * sizeof *out);
	pthread_mutex_unlock(&group->lock);
	return 0;
}

void group_use(struct tk_group *group)
{
	__atomic_add_fetch(&group->users, 1, __ATOMIC_RELAXED);
}

void group_release(struct tk_group *group)
{
	if (__atomic_sub_fetch(&group->users, 1, __ATOMIC_ACQ_REL))
		return;
	pthread_mutex_destroy(&group->lock);
	pthread_cond_destroy(&group->changed);
	turn_release(group->turn);
	free(group);
}

void tk_group_close(struct tk_group *group)
{
	if (turn_is_ours(group->turn))
		group_release(group);
}

/* Under the lock. Returns whether the last row ended, and no caller was waiting. */
static int end_row(struct tk_group *group, struct tk_row *row, uint32_t code)
{
	if (row->over)
		return 0;
	if (code)
		row->code = code;
	if (!row->landed_ns)
		group->unlanded--;
	row->over = 1;
	group->open--;
	while (group->prefix < group->count && group->rows[group->prefix].over)
		group->prefix++;
	if (group->waiters && (!group->open || !group->unlanded || group->prefix >= group->wanted_prefix))
		pthread_cond_broadcast(&group->changed);
	return !group->open && !group->waiters && !group->is_reported;
}

void group_fired(struct tk_group *group, uint32_t row, uint64_t now_ns)
{
	pthread_mutex_lock(&group->lock);
	group->rows[row].fired_ns = now_ns;
	pthread_mutex_unlock(&group->lock);
}

/* Under the lock. */
static void land_row(struct tk_group *group, struct tk_row *row, uint64_t now_ns)
{
	if (row->over || row->landed_ns)
		return;
	row->landed_ns = now_ns;
	if (!--group->unlanded && group->waiters)
		pthread_cond_broadcast(&group->changed);
}

int tk_group_land(struct tk_group *group, uint32_t row, uint64_t now_ns)
{
	if (row >= group->count)
		return -EINVAL;
	if (!turn_is_ours(group->turn))
		return -ECHILD;
	pthread_mutex_lock(&group->lock);
	land_row(group, &group->rows[row], now_ns);
	pthread_mutex_unlock(&group->lock);
	turn_rouse(group->turn);
	return 0;
}

static void report_later(struct tk_fabric *fabric, struct tk_group *group, uint64_t at_ns)
{
	group_use(group);
	group->over_at_ns = at_ns;
	if (fabric->over)
		fabric->last_over->next_over = group;
	else
		fabric->over = group;
	fabric->last_over = group;
	fabric->over_at_ns = fabric->over->over_at_ns;
}

static void remove_first_over(struct tk_fabric *fabric)
{
	struct tk_group *group = fabric->over;
	fabric->over = group->next_over;
	fabric->over_at_ns = fabric->over ? fabric->over->over_at_ns : UINT64_MAX;
	group_release(group);
}

void report_over(struct tk_fabric *fabric)
{
	for (struct tk_group *group; fabric->over_at_ns <= fabric->now_ns; remove_first_over(fabric)) {
		group = fabric->over;
		pthread_mutex_lock(&group->lock);
		int was_reported = group->is_reported;
		group->is_reported = 1;
		pthread_mutex_unlock(&group->lock);
		if (!was_reported)
			report(fabric, TK_OVER, group->tag, 0, 0, fabric->now_ns);
	}
}

void groups_end(struct tk_fabric *fabric)
{
	while (fabric->over)
		remove_first_over(fabric);
}

void group_acked(struct tk_fabric *fabric, const struct tk_ack_watch *watch, uint32_t code)
{
	struct tk_group *group = watch->group;
	struct tk_row *row = &group->rows[watch->row];
	uint64_t now_ns = tk_now_ns();
	int over = 0, is_soon = !group->head_bytes;
	pthread_mutex_lock(&group->lock);
	if (!row->over && !group->copies[watch->row]) {
		row->over_ns = now_ns;
		land_row(group, row, now_ns);
		row->code = code;
		if (code >= watch->final_code)
			over = end_row(group, row, code);
		group->is_reported |= over && is_soon;
	}
	pthread_mutex_unlock(&group->lock);
	if (over && is_soon)
		report(fabric, TK_OVER, group->tag, 0, 0, now_ns);
	else if (over)
		report_later(fabric, group, now_ns + OVER_NS);
}

void group_copies(struct tk_group *group, uint32_t row, int copies)
{
	pthread_mutex_lock(&group->lock);
	group->copies[row] = !!copies;
	pthread_mutex_unlock(&group->lock);
}

int tk_group_end(struct tk_group *group, uint32_t row, uint32_t code)
{
	if (row >= group->count)
		return -EINVAL;
	if (!turn_is_ours(group->turn))
		return -ECHILD;
	pthread_mutex_lock(&group->lock);
	end_row(group, &group->rows[row], code);
	group->is_reported |= !group->open; /* its owner has ended it: TK_OVER is not reported */
	int open = (int)group->open;
	pthread_mutex_unlock(&group->lock);
	turn_rouse(group->turn);
	return open;
}

static int has_come(const struct tk_group *group, uint32_t first, int landed)
{
	return landed ? !group->unlanded : group->prefix >= first;
}

struct awaited {
	struct tk_group *group;
	uint32_t first;
	int landed;
};

static int has_come_meanwhile(void *argument)
{
	struct awaited *awaited = argument;
	pthread_mutex_lock(&awaited->group->lock);
	int come = has_come(awaited->group, awaited->first, awaited->landed);
	pthread_mutex_unlock(&awaited->group->lock);
	return come;
}

/* Under the lock. */
static void sleep_until(struct tk_group *group, uint32_t first, int landed, uint64_t until_ns)
{
	int status = 0;
	while (!has_come(group, first, landed) && status != ETIMEDOUT) {
		if (!landed && first < group->wanted_prefix)
			group->wanted_prefix = first;
		status = wait_for_condition(&group->changed, &group->lock, until_ns);
	}
}

int tk_group_wait(struct tk_group *group, uint32_t first, int landed, uint64_t timeout_ns)
{
	uint64_t until_ns = tk_now_ns() + timeout_ns;
	struct awaited awaited = {group, first, landed};
	if (!turn_is_ours(group->turn))
		return -ECHILD;
	pthread_mutex_lock(&group->lock);
	group->waiters++;
	int come = has_come(group, first, landed), had_come = come;
	if (!come && timeout_ns) {
		pthread_mutex_unlock(&group->lock);
		turn_run(group->turn, has_come_meanwhile, &awaited, until_ns);
		pthread_mutex_lock(&group->lock);
		turn_waits(group->turn, 1);
		sleep_until(group, first, landed, until_ns);
		turn_waits(group->turn, -1);
		come = has_come(group, first, landed);
	}
	if (!--group->waiters)
		group->wanted_prefix = UINT32_MAX;
	group->is_reported |= !group->open;
	pthread_mutex_unlock(&group->lock);
	if (had_come)
		turn_step(group->turn);
	return come;
}

int tk_group_open_rows(struct tk_group *group)
{
	if (!turn_is_ours(group->turn))
		return -ECHILD;
	pthread_mutex_lock(&group->lock);
	int open = (int)group->open;
	pthread_mutex_unlock(&group->lock);
	return open;
}
