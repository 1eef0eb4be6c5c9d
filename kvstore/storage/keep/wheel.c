/* A hierarchical timer wheel: which rows expire when. Insertion and removal are O(1) at any distance.
 *
 * It has eight levels of 64 buckets, each level 64 times as coarse as the one before. A row is in the level of the
 * highest digit (in base 64, of its tick) in which it differs from the wheel's own tick, in the bucket of that digit.
 * So the lowest bucket of the lowest occupied level is always the next, and the wheel jumps from one occupied bucket to
 * the next, whatever the time between them. When the time of a bucket begins, its rows are due or move to the levels
 * below.
 *
 * Always holds:
 *
 * - No row is returned before its time by the clock of that call, and none, if the steps suffice, later than the next
 *   call after the first complete tick since.
 * - A call makes a bounded number of steps; the next calls finish a jump forward.
 * - After a jump back, rows whose time is in between are held until the clock reaches it again.
 *
 * It doesn't read a clock: the time is passed in. Rows with an expiry more than 890,000 years ahead never expire.
 */
#include "inside.h"

enum { DIGIT_BITS = 6, HEADS = KEEP_WHEEL_PENDING + 1 };
static const uint64_t TICKS_MAX = (UINT64_C(1) << DIGIT_BITS * KEEP_WHEEL_LEVELS) - 1;

int keep_wheel_init(struct keep_wheel *wheel, uint64_t now_ms, uint64_t tick_ms)
{
	wheel->tick_ms = tick_ms;
	wheel->tick = now_ms / tick_ms;
	return keep_rings_reach(&wheel->rings, HEADS);
}

void keep_wheel_free(struct keep_wheel *wheel)
{
	free(wheel->rings.links);
	free(wheel->due);
}

int keep_wheel_reserve(struct keep_wheel *wheel, uint64_t rows)
{
	int error = keep_grow((void **)&wheel->due, &wheel->due_room, rows, sizeof *wheel->due);

	return error < 0 ? error : keep_rings_reach(&wheel->rings, HEADS + rows);
}

static void place(struct keep_wheel *wheel, uint32_t row)
{
	uint64_t due = wheel->due[row];
	uint32_t head = KEEP_WHEEL_PENDING;

	if (due > wheel->tick) {
		unsigned level = (unsigned)(63 - __builtin_clzll(due ^ wheel->tick)) / DIGIT_BITS;
		unsigned bucket = due >> level * DIGIT_BITS & (KEEP_WHEEL_BUCKETS - 1);

		keep_assert(level < KEEP_WHEEL_LEVELS);
		wheel->occupied[level] |= UINT64_C(1) << bucket;
		head = level * KEEP_WHEEL_BUCKETS + bucket;
	}
	keep_rings_push(&wheel->rings, head, HEADS + row);
}

/* Adds a row that is not in the wheel. Memory was reserved. 0: never. */
void keep_wheel_insert(struct keep_wheel *wheel, uint32_t row, uint64_t expires_ms)
{
	uint64_t due = expires_ms / wheel->tick_ms + (expires_ms % wheel->tick_ms != 0);

	if (expires_ms == 0 || due > TICKS_MAX)
		return;
	wheel->due[row] = due;
	keep_wheel_insert_again(wheel, row);
}

/* Puts back a row that was returned as expired, with its old time. */
void keep_wheel_insert_again(struct keep_wheel *wheel, uint32_t row)
{
	place(wheel, row);
	wheel->count++;
}

/* Removes a row from the wheel, if it is in it. */
void keep_wheel_cancel(struct keep_wheel *wheel, uint32_t row)
{
	uint32_t head, node = HEADS + row;

	if (!keep_rings_is_linked(&wheel->rings, node))
		return;
	head = wheel->rings.links[node].after;
	keep_rings_unlink(&wheel->rings, node);
	if (head < KEEP_WHEEL_PENDING && wheel->rings.links[head].after == head)
		wheel->occupied[head / KEEP_WHEEL_BUCKETS] &= ~(UINT64_C(1) << head % KEEP_WHEEL_BUCKETS);
	wheel->count--;
}

/* Advances to the next occupied bucket, if its time has begun; otherwise to the target, and returns 0. */
static int open_next_bucket(struct keep_wheel *wheel, uint64_t target)
{
	for (unsigned level = 0; level < KEEP_WHEEL_LEVELS; level++) {
		unsigned bucket, shift = level * DIGIT_BITS;
		uint64_t begin;

		if (wheel->occupied[level] == 0)
			continue;
		bucket = (unsigned)__builtin_ctzll(wheel->occupied[level]);
		begin = ((wheel->tick >> (shift + DIGIT_BITS)) << DIGIT_BITS | bucket) << shift;
		if (begin > target)
			break;
		wheel->tick = begin;
		wheel->occupied[level] ^= UINT64_C(1) << bucket;
		keep_rings_move_all(&wheel->rings, level * KEEP_WHEEL_BUCKETS + bucket, KEEP_WHEEL_PENDING);
		return 1;
	}
	if (wheel->tick < target)
		wheel->tick = target;
	return 0;
}

/* Restarts from an earlier tick, because a row is due between that and the wheel's own. It costs one step per row, but
 * only after a clock jumped back over a time at which a row expires. */
static void turn_back(struct keep_wheel *wheel, uint64_t target)
{
	wheel->tick = target;
	for (unsigned level = 0; level < KEEP_WHEEL_LEVELS; level++) {
		for (uint64_t left = wheel->occupied[level]; left != 0; left &= left - 1)
			keep_rings_move_all(&wheel->rings, level * KEEP_WHEEL_BUCKETS + (unsigned)__builtin_ctzll(left),
					    KEEP_WHEEL_PENDING);
		wheel->occupied[level] = 0;
	}
}

/* Returns expired rows, roughly in the order of their times, until a bound is reached; returns how many. */
uint32_t keep_wheel_advance(struct keep_wheel *wheel, uint64_t now_ms, uint32_t rows_max, uint64_t steps_max, uint32_t *out)
{
	uint64_t target = now_ms / wheel->tick_ms;
	uint32_t count = 0;

	wheel->lags = 1;
	for (; steps_max > 0; steps_max--) {
		uint32_t node = wheel->rings.links[KEEP_WHEEL_PENDING].after, row = node - HEADS;
		uint64_t due;

		if (node == KEEP_WHEEL_PENDING) {
			if (open_next_bucket(wheel, target))
				continue;
			wheel->lags = 0;
			break;
		}
		due = wheel->due[row];
		if (due <= target && due <= wheel->tick) {
			if (count == rows_max)
				break;
			keep_rings_unlink(&wheel->rings, node);
			wheel->count--;
			out[count++] = row;
		} else if (due <= wheel->tick) {
			turn_back(wheel, target);
		} else {
			keep_rings_unlink(&wheel->rings, node);
			place(wheel, row);
		}
	}
	return count;
}
