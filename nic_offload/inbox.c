/*
 * Queues work and takes events. Any thread.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EVENTS_FOR_EACH 4u /* events that may wait, per work item that may be queued */

/* Under inbox_lock. */
static void put_free(struct tk_fabric *fabric, struct work *work)
{
	struct work_chunk *chunk = &fabric->chunks[work->chunk];
	work->next = chunk->free;
	chunk->free = work;
	chunk->free_count++;
	fabric->free_count++;
	if (work->chunk < fabric->first_free)
		fabric->first_free = work->chunk;
}

/* Under inbox_lock. */
static int add_chunk(struct tk_fabric *fabric)
{
	uint32_t left = fabric->work_max - fabric->work_count, number = 0;
	while (fabric->chunks[number].items)
		number++;
	struct work_chunk *chunk = &fabric->chunks[number];
	*chunk = (struct work_chunk){.count = left < WORK_CHUNK ? left : WORK_CHUNK};
	chunk->items = calloc(chunk->count, sizeof *chunk->items);
	if (!chunk->items)
		return -ENOMEM;
	fabric->work_count += chunk->count;
	for (uint32_t i = 0; i < chunk->count; i++) {
		chunk->items[i].chunk = number;
		put_free(fabric, &chunk->items[i]);
	}
	return 0;
}

/* Under inbox_lock. All or none: -EAGAIN if the limit of queued work would be exceeded. */
int reserve_work(struct tk_fabric *fabric, uint32_t count)
{
	if (fabric->stop)
		return -ESHUTDOWN;
	if (count > fabric->free_count + (fabric->work_max - fabric->work_count))
		return -EAGAIN;
	if (__atomic_load_n(&fabric->events_count, __ATOMIC_RELAXED) > EVENTS_FOR_EACH * fabric->work_max)
		return -EAGAIN; /* the application doesn't take its events */
	while (fabric->free_count < count)
		if (add_chunk(fabric))
			return -ENOMEM;
	return 0;
}

/* Under inbox_lock, after reserve_work. Items of the first chunks first, so that the last ones can be given back. */
struct work *take_free(struct tk_fabric *fabric, enum work_kind kind)
{
	while (!fabric->chunks[fabric->first_free].free)
		fabric->first_free++;
	struct work_chunk *chunk = &fabric->chunks[fabric->first_free];
	struct work *work = chunk->free;
	chunk->free = work->next;
	chunk->free_count--;
	if (--fabric->free_count < fabric->free_least)
		fabric->free_least = fabric->free_count;
	memset(work, 0, sizeof *work);
	work->chunk = fabric->first_free;
	work->kind = kind;
	work->sequence = fabric->sequence++;
	return work;
}

/* At the end of a round; see recycle. */
void give_back_finished(struct tk_fabric *fabric)
{
	if (!fabric->finished)
		return;
	pthread_mutex_lock(&fabric->inbox_lock);
	for (struct work *work = fabric->finished, *next; work; work = next) {
		next = work->next;
		put_free(fabric, work);
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	fabric->finished = NULL;
}

/* Takes a free item, and queues it for the thread. */
static struct work *enqueue(struct tk_fabric *fabric, enum work_kind kind)
{
	struct work *work = take_free(fabric, kind);
	if (fabric->inbox.tail)
		fabric->inbox.tail->next = work;
	else
		fabric->inbox.head = work;
	fabric->inbox.tail = work;
	return work;
}

/* Operations of the progress thread, linked by `next`; NULL if there is no room for them. Half of the room is reserved
 * for the application, whose work must not be refused because of these. */
struct work *take_free_work(struct tk_fabric *fabric, uint32_t count)
{
	struct work *first = NULL;
	pthread_mutex_lock(&fabric->inbox_lock);
	uint32_t room = fabric->free_count + (fabric->work_max - fabric->work_count);
	if (room >= count + fabric->work_max / 2 && !reserve_work(fabric, count))
		for (uint32_t i = 0; i < count; i++) {
			struct work *work = take_free(fabric, WORK_OPERATION);
			work->next = first;
			first = work;
		}
	pthread_mutex_unlock(&fabric->inbox_lock);
	return first;
}

static int is_of(const struct tk_counter *counter, const struct tk_fabric *fabric)
{
	return !counter || counter->fabric == fabric;
}

int check_operation(const struct tk_fabric *fabric, const struct tk_operation *op)
{
	int transfers = op->length || op->flags & TK_FLAG_PUT;
	if (!transfers && !op->completion)
		return -EINVAL;
	if (transfers ? !op->endpoint || op->endpoint->fabric != fabric : !!op->endpoint)
		return -EINVAL;
	if (!is_of(op->trigger, fabric) || !is_of(op->completion, fabric) || op->flag_target % 8)
		return -EINVAL;
	if (op->trigger && op->trigger == op->completion)
		return -EINVAL; /* its own completion would fire it */
	if (op->sender && (!op->head || !op->length))
		return -EINVAL;
	if (!op->length)
		return op->pieces || op->part ? -EINVAL : 0;
	const struct tk_region *region = op->region;
	if (op->pieces && (op->flags & TK_GET || tk_pieces_bytes(op->pieces) != op->length))
		return -EINVAL;
	if (op->part && (!(op->flags & TK_VERIFY_CRC) || op->flags & TK_GET || op->part > op->length ||
			 op->skip > op->length - op->part))
		return -EINVAL;
	if (op->pieces && op->sender)
		return op->length > sender_gathers(op->sender, region) ? -ERANGE : 0;
	if (!region || region->fabric != fabric || op->local < region->address || op->length > region->length ||
	    op->local - region->address > region->length - op->length)
		return -ERANGE;
	return 0;
}

static void start_using(uint64_t *uses)
{
	__atomic_add_fetch(uses, 1, __ATOMIC_RELAXED);
}

struct work *enqueue_operation(struct tk_fabric *fabric, const struct tk_operation *op)
{
	struct work *work = enqueue(fabric, WORK_OPERATION);
	work->op = *op;
	if (op->group)
		group_use(op->group);
	if (op->region)
		start_using(&op->region->uses);
	if (op->pieces)
		pieces_use(op->pieces);
	if (op->trigger)
		start_using(&op->trigger->uses);
	if (op->completion)
		start_using(&op->completion->uses);
	return work;
}

struct work *enqueue_ack(struct tk_fabric *fabric, const struct tk_ack_watch *watch)
{
	struct work *work = enqueue(fabric, WORK_ACK);
	work->ack = *watch;
	if (watch->group)
		group_use(watch->group);
	return work;
}

int tk_arm(struct tk_fabric *fabric, const struct tk_operation *operations, int count)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	for (int i = 0; i < count; i++) {
		status = check_operation(fabric, &operations[i]);
		if (status)
			return status;
	}
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++)
		enqueue_operation(fabric, &operations[i]);
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		fabric_wake(fabric);
	return status;
}

int tk_watch_landings(struct tk_fabric *fabric, const struct tk_landing *landings, int count)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	for (int i = 0; i < count; i++)
		if (!landings[i].endpoint || !landings[i].word || landings[i].word % 8 || landings[i].ack_target % 8 ||
		    !may_watch(landings[i].endpoint, landings[i].region, landings[i].word))
			return -EINVAL;
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++)
		enqueue(fabric, WORK_LANDING)->landing = landings[i];
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		fabric_wake(fabric);
	return status;
}

int tk_watch_acks(struct tk_fabric *fabric, const struct tk_ack_watch *watches, int count)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	for (int i = 0; i < count; i++)
		if (!watches[i].endpoint || !watches[i].word || watches[i].word % 8 ||
		    !may_watch_ack(watches[i].endpoint, watches[i].word))
			return -EINVAL;
	pthread_mutex_lock(&fabric->inbox_lock);
	status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++)
		enqueue_ack(fabric, &watches[i]);
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		fabric_wake(fabric);
	return status;
}

static int compare_tags(const void *a, const void *b)
{
	uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
	return (first > second) - (first < second);
}

static int cancel(struct tk_fabric *fabric, struct tk_desk *desk, const uint64_t *tags, int count)
{
	if (count <= 0)
		return 0;
	size_t tags_bytes = (size_t)count * sizeof *tags;
	struct cancellation *wanted = malloc(sizeof *wanted + tags_bytes);
	if (!wanted)
		return -ENOMEM;
	wanted->desk = desk;
	wanted->count = (uint64_t)count;
	memcpy(wanted->tags, tags, tags_bytes);
	qsort(wanted->tags, (size_t)count, sizeof *tags, compare_tags);
	int cancelled = on_the_thread(fabric, core_cancel, wanted, sizeof *wanted + tags_bytes);
	free(wanted);
	return cancelled;
}

int tk_cancel(struct tk_fabric *fabric, const uint64_t *tags, int count)
{
	return cancel(fabric, NULL, tags, count);
}

int tk_desk_cancel(struct tk_fabric *fabric, struct tk_desk *desk, const uint64_t *generations, int count)
{
	return cancel(fabric, desk, generations, count);
}

void tk_fabric_shrink(struct tk_fabric *fabric)
{
	if (!fabric_is_ours(fabric))
		return;
	pthread_mutex_lock(&fabric->inbox_lock);
	uint32_t unneeded = fabric->free_least;
	for (uint32_t number = fabric->chunks_max; number--;) {
		struct work_chunk *chunk = &fabric->chunks[number];
		if (!chunk->items || chunk->free_count < chunk->count || unneeded < WORK_CHUNK + chunk->count)
			continue;
		unneeded -= chunk->count;
		fabric->free_count -= chunk->count;
		fabric->work_count -= chunk->count;
		free(chunk->items);
		*chunk = (struct work_chunk){0};
	}
	fabric->free_least = fabric->free_count;
	pthread_mutex_unlock(&fabric->inbox_lock);
}

int tk_flush(struct tk_fabric *fabric)
{
	return on_the_thread(fabric, core_flush, NULL, 0);
}

int tk_fabric_reap(struct tk_fabric *fabric, struct tk_event *out, int out_max)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->event_lock);
	uint32_t count = fabric->events_count;
	if (count > (uint32_t)out_max)
		count = (uint32_t)out_max;
	if (count)
		memcpy(out, fabric->events + fabric->events_first, count * sizeof *out);
	fabric->events_first += count;
	__atomic_store_n(&fabric->events_count, fabric->events_count - count, __ATOMIC_RELAXED);
	if (!fabric->events_count) {
		fabric->events_first = 0;
		if (fabric->signalled) {
			uint64_t ignored;
			ssize_t got = read(fabric->event_fd, &ignored, sizeof ignored);
			(void)got;
			fabric->signalled = 0;
		}
	}
	pthread_mutex_unlock(&fabric->event_lock);
	return (int)count;
}
