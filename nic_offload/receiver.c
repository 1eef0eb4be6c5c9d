/*
 * The receiver: takes the blocks that one peer puts by grants. Each is read once, from its slot into our own memory.
 *
 * The peer may write to all slots, one put per generation. When a slot's flag has the expected generation, the head
 * is copied and checked, and the payload is copied into a room that the application has provided, with its checksum
 * computed from the copy. Then the block is listed on the shelf, where it can be read at once, the peer gets
 * `landed`, and the slot waits for its next put.
 *
 * What always holds: nothing that the peer writes into a slot after its flag has any effect, because nothing there is
 * read twice. A block's bytes are overwritten there after they are copied. A block is on the shelf before its peer gets
 * `landed`, and only if its bytes have the checksum in its head, if there is one. If a block may be stored under its
 * name already, it is not listed, and the application, which knows the stored bytes, answers. A room holds one block.
 * An invalid put ends the connection: no more puts are taken from that peer. Without a free room a put waits in its
 * slot.
 *
 * What it doesn't do: decide whether a block may stay. The application gets each block from `tk_receiver_take`, and
 * decides.
 */
#define _GNU_SOURCE
#include "call.h"
#include "receiver_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BYTES_A_ROUND (256u << 10) /* small, so that the network doesn't wait */
#define REPORT_COUNT 64u /* blocks are reported to the application when there are so many, */
#define REPORT_NS 1000000u /* or after this time, if no peer waits for a word, */
#define REPORT_AWAITED_NS 300000u /* and if one does, this time after the last report, */

static void free_receiver(struct tk_receiver *receiver)
{
	pthread_mutex_destroy(&receiver->lock);
	free(receiver->awaited);
	free(receiver->queue);
	free(receiver->rooms);
	free(receiver->came);
	free(receiver);
}

static int add_receiver(struct tk_fabric *fabric, void *argument)
{
	struct tk_receiver *receiver = *(struct tk_receiver **)argument;
	receiver->next = fabric->receivers;
	fabric->receivers = receiver;
	__atomic_store_n(&fabric->is_serving, 1, __ATOMIC_RELAXED);
	return 0;
}

static int remove_receiver(struct tk_fabric *fabric, void *argument)
{
	struct tk_receiver *receiver = *(struct tk_receiver **)argument, **link = &fabric->receivers;
	while (*link && *link != receiver)
		link = &(*link)->next;
	if (*link)
		*link = receiver->next;
	return 0;
}

void await_put(struct tk_receiver *receiver, uint32_t slot, uint64_t generation)
{
	const struct tk_receiver_setup *setup = &receiver->setup;
	struct spot flag = word_spot(setup->remote_flags, setup->remote_key, slot);
	receiver->awaited[slot].generation = generation;
	receiver->awaited[slot].due = word_in(setup->endpoint, flag, generation);
}

int tk_receiver_open(struct tk_shelf *shelf, const struct tk_receiver_setup *setup, struct tk_receiver **out)
{
	if (!setup->endpoint || setup->endpoint->fabric != shelf->fabric || !setup->slots_count || setup->flags % 8 ||
	    setup->ack_base % 8 || !setup->first_generation ||
	    setup->slot_bytes < TK_HEAD_PAGE + (uint64_t)setup->length_max)
		return -EINVAL;
	struct tk_receiver *receiver = calloc(1, sizeof *receiver);
	if (!receiver)
		return -ENOMEM;
	pthread_mutex_init(&receiver->lock, NULL);
	receiver->setup = *setup;
	receiver->fabric = shelf->fabric;
	receiver->shelf = shelf;
	receiver->endpoint = setup->endpoint;
	receiver->awaited = calloc(setup->slots_count, sizeof *receiver->awaited);
	receiver->queue = calloc(setup->slots_count, sizeof *receiver->queue);
	if (!receiver->awaited || !receiver->queue) {
		free_receiver(receiver);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < setup->slots_count; i++)
		await_put(receiver, i, setup->first_generation);
	int status = on_the_thread(receiver->fabric, add_receiver, &receiver, sizeof receiver);
	if (status) {
		if (status != TK_STUCK)
			free_receiver(receiver);
		return status;
	}
	*out = receiver;
	return 0;
}

int tk_receiver_close(struct tk_receiver *receiver)
{
	int status = on_the_thread(receiver->fabric, remove_receiver, &receiver, sizeof receiver);
	if (status != TK_STUCK)
		free_receiver(receiver);
	return status;
}

/* --- the application's side; any thread */

void tk_receiver_use(struct tk_receiver *receiver, const struct tk_lanes *lanes, int is_limited)
{
	pthread_mutex_lock(&receiver->lock);
	receiver->lanes = lanes;
	receiver->is_limited = is_limited;
	pthread_mutex_unlock(&receiver->lock);
}

void tk_receiver_lend(struct tk_receiver *receiver, uint64_t pages)
{
	pthread_mutex_lock(&receiver->lock);
	receiver->lent_pages += pages;
	pthread_mutex_unlock(&receiver->lock);
}

uint64_t tk_receiver_recall(struct tk_receiver *receiver)
{
	pthread_mutex_lock(&receiver->lock);
	uint64_t left = receiver->lent_pages;
	receiver->lent_pages = 0;
	pthread_mutex_unlock(&receiver->lock);
	return left;
}

int tk_receiver_feed(struct tk_receiver *receiver, const struct tk_room *rooms, int count)
{
	int status = 0;
	pthread_mutex_lock(&receiver->lock);
	for (int i = 0; !status && i < count; i++) {
		status = grow((void **)&receiver->rooms, &receiver->rooms_capacity, receiver->rooms_count,
			      sizeof *receiver->rooms);
		if (!status)
			receiver->rooms[receiver->rooms_count++] = rooms[i];
		else
			receiver->rooms_count -= (uint32_t)i; /* all or none */
	}
	receiver->starved = receiver->starved && status;
	pthread_mutex_unlock(&receiver->lock);
	if (!status)
		fabric_wake(receiver->fabric);
	return status;
}

int tk_receiver_rooms(struct tk_receiver *receiver, struct tk_room *out, int out_max)
{
	int count = 0;
	pthread_mutex_lock(&receiver->lock);
	while (receiver->rooms_count && count < out_max)
		out[count++] = receiver->rooms[--receiver->rooms_count];
	pthread_mutex_unlock(&receiver->lock);
	return count;
}

/* Under the lock. */
void count_later(struct tk_receiver *receiver, int change)
{
	__atomic_store_n(&receiver->later_count, receiver->later_count + (uint32_t)change, __ATOMIC_RELAXED);
}

/* Under the lock. Shortens the list of blocks by those that lanes or the application took. */
void remove_gone(struct tk_receiver *receiver)
{
	uint32_t left = 0, later_at = 0;
	for (uint32_t i = 0; i < receiver->came_count; i++) {
		if (i == receiver->later_at)
			later_at = left;
		if (receiver->came[i].under_way != GONE)
			receiver->came[left++] = receiver->came[i];
	}
	receiver->later_at = receiver->later_at < receiver->came_count ? later_at : left;
	receiver->gone_count = 0;
	__atomic_store_n(&receiver->came_count, left, __ATOMIC_RELAXED);
}

static void set_time(struct tk_receiver *receiver, uint64_t at_ns)
{
	__atomic_store_n(&receiver->notify_at_ns, at_ns, __ATOMIC_RELAXED);
}

int tk_receiver_take(struct tk_receiver *receiver, int all, struct tk_came *out, int out_max,
		     struct tk_receiver_state *state)
{
	int count = 0;
	pthread_mutex_lock(&receiver->lock);
	for (uint32_t i = 0; i < receiver->came_count && count < out_max; i++) {
		struct tk_came *came = &receiver->came[i];
		int is_later = came->under_way == LATER;
		if (came->under_way == GONE || (is_later && !all && !receiver->is_call_next))
			continue;
		out[count] = *came;
		if (is_later) {
			out[count].under_way = 0;
			count_later(receiver, -1);
		}
		came->under_way = GONE;
		count++;
	}
	remove_gone(receiver);
	receiver->later_at = 0;
	uint32_t left = receiver->came_count;
	receiver->on_lanes = 0;
	receiver->is_notified = left > receiver->later_count || (left && receiver->is_call_next);
	receiver->is_call_next = receiver->is_notified && receiver->is_call_next;
	set_time(receiver, 0);
	*state = (struct tk_receiver_state){
		.wanted_pages = receiver->wanted_pages,
		.starved = receiver->starved,
		.differed = receiver->differed,
		.taken = receiver->taken,
		.expired = receiver->expired,
		.unsaid = receiver->unsaid,
		.broken = receiver->broken,
	};
	for (uint32_t i = 0; i < receiver->rooms_count; i++)
		state->rooms += receiver->rooms[i].pages == receiver->wanted_pages;
	receiver->differed = receiver->taken = receiver->expired = receiver->unsaid = 0;
	pthread_mutex_unlock(&receiver->lock);
	return count;
}

/* Called by the thread that opens and closes receivers, and waits for both: so the list does not change during the
 * call. */
int tk_shelf_waiting(struct tk_shelf *shelf, uint64_t *tags, int tags_max)
{
	int count = 0;
	for (const struct tk_receiver *one = shelf->fabric->receivers; one && count < tags_max; one = one->next)
		if (one->shelf == shelf && __atomic_load_n(&one->came_count, __ATOMIC_RELAXED))
			tags[count++] = one->setup.tag;
	return count;
}

/* --- the progress thread */

/* Under the lock. */
void notify_puts(struct tk_receiver *receiver)
{
	set_time(receiver, 0);
	if (receiver->is_notified)
		return;
	receiver->is_notified = 1;
	receiver->reported_ns = tk_now_ns();
	report(receiver->fabric, TK_CAME, receiver->setup.tag, 0, 0, receiver->reported_ns);
}

/* Under the lock. The application is not woken for each block: that would take the core from the network, and many
 * blocks cost the application little more than one. After a quiet time a block whose peer waits for more than `landed`
 * is reported at once. */
void notify_arrival(struct tk_receiver *receiver, const struct tk_came *came)
{
	uint64_t now_ns = tk_now_ns(), at_ns = now_ns + REPORT_NS;
	if (came->durability > receiver->setup.landed_code || came->is_stored)
		at_ns = receiver->reported_ns + REPORT_AWAITED_NS;
	uint32_t count = receiver->came_count - receiver->gone_count - receiver->later_count;
	if (at_ns <= now_ns || count >= REPORT_COUNT || receiver->rooms_count <= count + receiver->on_lanes)
		notify_puts(receiver);
	else if (!receiver->is_notified && (!receiver->notify_at_ns || at_ns < receiver->notify_at_ns))
		set_time(receiver, at_ns);
}

/* Under the lock. A lane has or will have the block, and reports it; the application only has to provide rooms in
 * time. */
void notify_lane(struct tk_receiver *receiver)
{
	receiver->on_lanes++;
	if (receiver->rooms_count <= receiver->on_lanes)
		notify_puts(receiver);
}

/* Under the lock. */
int give_room_back(struct tk_receiver *receiver)
{
	int status = grow((void **)&receiver->rooms, &receiver->rooms_capacity, receiver->rooms_count,
			  sizeof *receiver->rooms);
	if (!status)
		receiver->rooms[receiver->rooms_count++] = receiver->reading.room;
	return status;
}

void break_off(struct tk_receiver *receiver, int status)
{
	receiver->endpoint = NULL;
	receiver->queue_count = 0;
	pthread_mutex_lock(&receiver->lock);
	receiver->broken = status;
	if (receiver->reading.is_open)
		give_room_back(receiver);
	receiver->reading.is_open = 0;
	notify_puts(receiver);
	pthread_mutex_unlock(&receiver->lock);
}

static void notify_if_due(struct tk_fabric *fabric, struct tk_receiver *receiver)
{
	pthread_mutex_lock(&receiver->lock);
	uint64_t at_ns = receiver->notify_at_ns;
	if (at_ns && fabric->now_ns >= at_ns)
		notify_puts(receiver);
	else if (at_ns && at_ns < fabric->next_deadline_ns)
		fabric->next_deadline_ns = at_ns; /* the thread sleeps no longer than that */
	pthread_mutex_unlock(&receiver->lock);
}

int poll_receivers(struct tk_fabric *fabric)
{
	int busy = 0;
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (!receiver->endpoint)
			continue;
		uint32_t budget = BYTES_A_ROUND;
		scan_flags(receiver);
		if (__atomic_load_n(&receiver->later_count, __ATOMIC_RELAXED))
			hand_over_later(receiver);
		if (receiver->queue_count || receiver->reading.is_open)
			busy |= take_puts(receiver, &budget);
		if (__atomic_load_n(&receiver->notify_at_ns, __ATOMIC_RELAXED))
			notify_if_due(fabric, receiver);
	}
	return busy;
}

/* The application is about to get a call: it must first get all blocks that arrived before it. */
void receivers_notify(struct tk_fabric *fabric)
{
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (!__atomic_load_n(&receiver->notify_at_ns, __ATOMIC_RELAXED) &&
		    !__atomic_load_n(&receiver->later_count, __ATOMIC_RELAXED))
			continue;
		pthread_mutex_lock(&receiver->lock);
		receiver->is_call_next = 1;
		notify_puts(receiver);
		pthread_mutex_unlock(&receiver->lock);
	}
}

/* The endpoint is about to be closed. Blocks that have arrived are taken if there are rooms; nothing is
 * acknowledged. */
void receivers_end(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	for (struct tk_receiver *receiver = fabric->receivers; receiver; receiver = receiver->next) {
		if (receiver->endpoint != endpoint)
			continue;
		take_rest(receiver);
		receiver->endpoint = NULL;
	}
}
