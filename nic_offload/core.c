/*
 * The progress thread: the trigger agent, the poller of watched words, the completion queue.
 *
 * One round: take the inbox, drain completions, look at flag words and watched words, make a bounded
 * piece of CRC, post what is ready, report. A round that found nothing to do spins a little while and
 * then sleeps ever longer, up to a millisecond, on an eventfd that callers write to.
 */
#define _GNU_SOURCE
#include "fabric.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define POSTED_MAX 64u		 /* puts of one endpoint on the wire at a time */
#define COMPLETIONS_A_ROUND 64
#define CRC_BYTES_A_ROUND (256u << 10) /* so that the wire is not kept waiting by arithmetic */
#define SPIN_NS 50000u
#define MOVED_NS 5000u /* a read of an idle queue takes about one microsecond */
#define NAP_SHARE 16   /* a nap is this part of the idleness before it */
#define SPIN_WORKING_NS 10000000u /* with puts on the wire: longer, but not for a peer that stands still */
#define DRAIN_NS 20000000u	  /* for what is on the wire when an endpoint is closed */
#define EVENTS_A_BATCH 32
#define EVENTS_WAIT_NS 100000u
#define NAP_NS_MIN 30000u
#define NAP_NS_MAX 1000000u
#define ACK_CODE_BITS 8
#define TOO_LATE 2 /* what posting gives for a put whose deadline is over */

/* --- lists ------------------------------------------------------------------------------------------ */

static void queue_push(struct queue *queue, struct work *work)
{
	work->next = NULL;
	if (queue->tail)
		queue->tail->next = work;
	else
		queue->head = work;
	queue->tail = work;
}

static struct work *queue_pop(struct queue *queue)
{
	struct work *work = queue->head;
	queue->head = work->next;
	if (!queue->head)
		queue->tail = NULL;
	return work;
}

static void queue_remove(struct queue *queue, struct work *work)
{
	struct work *before = NULL;
	for (struct work *at = queue->head; at; before = at, at = at->next) {
		if (at != work)
			continue;
		if (before)
			before->next = at->next;
		else
			queue->head = at->next;
		if (queue->tail == at)
			queue->tail = before;
		return;
	}
}

static int grow(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes)
{
	if (count < *capacity)
		return 0;
	uint32_t wanted = *capacity ? *capacity * 2 : 64;
	void *larger = realloc(*items, wanted * item_bytes);
	if (!larger)
		return -ENOMEM;
	*items = larger;
	*capacity = wanted;
	return 0;
}

/* --- events ----------------------------------------------------------------------------------------- */

static void report(struct tk_fabric *fabric, enum tk_event_kind kind, uint64_t tag, uint64_t value, int status,
		   uint64_t time_ns)
{
	/* Outstanding work is bounded, and so is this. Without memory for a report nobody could be told the
	 * truth any more, and the process had better end. */
	if (grow((void **)&fabric->pending, &fabric->pending_capacity, fabric->pending_count,
		 sizeof *fabric->pending))
		abort();
	if (!fabric->pending_count)
		fabric->pending_since_ns = tk_now_ns();
	fabric->pending[fabric->pending_count++] =
		(struct tk_event){.tag = tag, .value = value, .time_ns = time_ns, .kind = kind, .status = status};
}

/* Word by word, so that readers need no lock; before the events, so that who has one finds it counted. */
static void show_statistics(struct tk_fabric *fabric)
{
	fabric->statistics.puts_in_flight = fabric->in_flight;
	fabric->statistics.watches = fabric->landings.count + fabric->acks.count;
	const uint64_t *from = (const uint64_t *)&fabric->statistics;
	uint64_t *to = (uint64_t *)&fabric->shown;
	for (size_t i = 0; i < sizeof fabric->shown / sizeof *to; i++)
		__atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
}

static void publish(struct tk_fabric *fabric)
{
	show_statistics(fabric);
	if (!fabric->pending_count)
		return;
	pthread_mutex_lock(&fabric->event_lock);
	if (fabric->events_first) {
		memmove(fabric->events, fabric->events + fabric->events_first,
			fabric->events_count * sizeof *fabric->events);
		fabric->events_first = 0;
	}
	uint32_t wanted = fabric->events_count + fabric->pending_count;
	while (fabric->events_capacity < wanted)
		if (grow((void **)&fabric->events, &fabric->events_capacity, fabric->events_capacity,
			 sizeof *fabric->events))
			abort();
	memcpy(fabric->events + fabric->events_count, fabric->pending,
	       fabric->pending_count * sizeof *fabric->pending);
	__atomic_store_n(&fabric->events_count, wanted, __ATOMIC_RELAXED);
	fabric->pending_count = 0;
	if (!fabric->signalled) {
		uint64_t one = 1;
		fabric->signalled = write(fabric->event_fd, &one, sizeof one) == sizeof one;
	}
	pthread_mutex_unlock(&fabric->event_lock);
}

/* While the wire is busy events wait for each other, not long: the reader's work a wake-up is several times its
 * work an event, and on few cores it is taken from the wire. A round that found nothing to do reports at once. */
static void publish_soon(struct tk_fabric *fabric, int busy)
{
	if (!busy || fabric->pending_count >= EVENTS_A_BATCH ||
	    tk_now_ns() - fabric->pending_since_ns > EVENTS_WAIT_NS)
		publish(fabric);
}

/* --- the life of an item ---------------------------------------------------------------------------- */

static uint64_t deadline_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_PUT:
		return work->put.deadline_ns;
	case WORK_LANDING:
		return work->landing.deadline_ns;
	default:
		return work->ack.deadline_ns;
	}
}

static uint64_t tag_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_PUT:
		return work->put.tag;
	case WORK_LANDING:
		return work->landing.tag;
	default:
		return work->ack.tag;
	}
}

static struct tk_endpoint *endpoint_of(const struct work *work)
{
	switch (work->kind) {
	case WORK_PUT:
		return work->put.endpoint;
	case WORK_LANDING:
		return work->landing.endpoint;
	default:
		return work->ack.endpoint;
	}
}

static void adopt(struct tk_fabric *fabric, struct work *work)
{
	work->before = NULL;
	work->after = fabric->all;
	if (fabric->all)
		fabric->all->before = work;
	fabric->all = work;
	uint64_t deadline_ns = deadline_of(work);
	if (deadline_ns && deadline_ns < fabric->next_deadline_ns)
		fabric->next_deadline_ns = deadline_ns;
}

static void disown(struct tk_fabric *fabric, struct work *work)
{
	if (work->before)
		work->before->after = work->after;
	else
		fabric->all = work->after;
	if (work->after)
		work->after->before = work->before;
	if (work->kind == WORK_PUT && work->put.region)
		__atomic_sub_fetch(&work->put.region->uses, 1, __ATOMIC_RELEASE);
}

/* An item returns to the free list after the round, so nothing else in the round that still holds its address
 * can meet it in a new life. */
static void recycle(struct tk_fabric *fabric, struct work *work)
{
	work->next = fabric->finished;
	fabric->finished = work;
}

static void release(struct tk_fabric *fabric, struct work *work)
{
	disown(fabric, work);
	recycle(fabric, work);
}

static void finish_put(struct tk_fabric *fabric, struct work *work, int status)
{
	if (!status) {
		fabric->statistics.done++;
		fabric->statistics.acks_sent += !work->put.length && work->put.flags & TK_QUIET;
		fabric->statistics.put_bytes += work->put.length;
	} else if (status == -ECANCELED) {
		fabric->statistics.cancelled++;
	} else {
		fabric->statistics.failed++;
		fabric->statistics.expired += status == -ETIMEDOUT;
	}
	if (!(work->put.flags & (status ? TK_QUIET : TK_QUIET | TK_ACKED_PUT)))
		report(fabric, status ? TK_PUT_FAILED : TK_PUT_DONE, work->put.tag, work->posted_ns, status,
		       tk_now_ns());
	release(fabric, work);
}

static void fail(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->kind == WORK_PUT) {
		finish_put(fabric, work, status);
		return;
	}
	report(fabric, TK_WATCH_FAILED, tag_of(work), 0, status, tk_now_ns());
	release(fabric, work);
}

static void landed(struct tk_fabric *fabric, struct work *work)
{
	report(fabric, TK_LANDED, work->landing.tag, work->crc, 0, work->fired_ns);
	release(fabric, work);
}

static void list_ready(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	if (endpoint->is_ready)
		return;
	endpoint->is_ready = 1;
	endpoint->next_ready = NULL;
	if (fabric->ready_last)
		fabric->ready_last->next_ready = endpoint;
	else
		fabric->ready_first = endpoint;
	fabric->ready_last = endpoint;
}

static void get_ready(struct tk_fabric *fabric, struct work *work, enum work_state state)
{
	struct tk_endpoint *endpoint = endpoint_of(work);
	work->state = state;
	queue_push(&endpoint->ready, work);
	list_ready(fabric, endpoint);
}

/* --- triggers --------------------------------------------------------------------------------------- */

static int fires_before(const struct work *a, const struct work *b)
{
	if (a->put.threshold != b->put.threshold)
		return a->put.threshold < b->put.threshold;
	return a->sequence < b->sequence;
}

static void sift_up(struct trigger *trigger, uint32_t at)
{
	struct work *work = trigger->heap[at];
	for (uint32_t parent; at; at = parent) {
		parent = (at - 1) / 2;
		if (!fires_before(work, trigger->heap[parent]))
			break;
		trigger->heap[at] = trigger->heap[parent];
	}
	trigger->heap[at] = work;
}

static void sift_down(struct trigger *trigger, uint32_t at)
{
	struct work *work = trigger->heap[at];
	for (;;) {
		uint32_t child = 2 * at + 1;
		if (child >= trigger->count)
			break;
		if (child + 1 < trigger->count && fires_before(trigger->heap[child + 1], trigger->heap[child]))
			child++;
		if (!fires_before(trigger->heap[child], work))
			break;
		trigger->heap[at] = trigger->heap[child];
		at = child;
	}
	trigger->heap[at] = work;
}

static void heap_remove(struct trigger *trigger, uint32_t at)
{
	struct work *last = trigger->heap[--trigger->count];
	if (at == trigger->count)
		return;
	trigger->heap[at] = last;
	sift_up(trigger, at);
	sift_down(trigger, at);
}

static int wait_for_flag(struct tk_fabric *fabric, struct work *work)
{
	const uint64_t *word = (const uint64_t *)work->put.trigger;
	uint32_t at = fabric->triggers_count;
	while (at && fabric->triggers[at - 1].word != word)
		at--;
	struct trigger *trigger;
	if (at) {
		trigger = &fabric->triggers[at - 1];
	} else {
		if (grow((void **)&fabric->triggers, &fabric->triggers_capacity, fabric->triggers_count,
			 sizeof *fabric->triggers))
			return -ENOMEM;
		trigger = &fabric->triggers[fabric->triggers_count++];
		*trigger = (struct trigger){.word = word};
	}
	if (grow((void **)&trigger->heap, &trigger->capacity, trigger->count, sizeof *trigger->heap))
		return -ENOMEM;
	trigger->heap[trigger->count] = work;
	sift_up(trigger, trigger->count++);
	fabric->statistics.puts_waiting++;
	return 0;
}

static void stop_waiting(struct tk_fabric *fabric, struct work *work)
{
	for (uint32_t t = 0; t < fabric->triggers_count; t++) {
		struct trigger *trigger = &fabric->triggers[t];
		if (trigger->word != (const uint64_t *)work->put.trigger)
			continue;
		for (uint32_t at = 0; at < trigger->count; at++)
			if (trigger->heap[at] == work) {
				heap_remove(trigger, at);
				fabric->statistics.puts_waiting--;
				return;
			}
	}
}

static void fire(struct tk_fabric *fabric, struct work *work, uint64_t now_ns)
{
	uint64_t deadline_ns = work->put.deadline_ns;
	if (deadline_ns && now_ns >= deadline_ns) {
		finish_put(fabric, work, -ETIMEDOUT);
		return;
	}
	fabric->statistics.fired++;
	work->fired_ns = now_ns;
	if (work->put.flags & TK_REPORT_FIRED)
		report(fabric, TK_PUT_FIRED, work->put.tag, now_ns, 0, now_ns);
	if (work->put.flags & TK_VERIFY_CRC && work->put.length) {
		work->state = WORK_SUMMING;
		queue_push(&fabric->summing, work);
	} else {
		get_ready(fabric, work, WORK_READY);
	}
}

static void fire_reached(struct tk_fabric *fabric, struct trigger *trigger, uint64_t value)
{
	uint64_t now_ns = tk_now_ns();
	do {
		struct work *work = trigger->heap[0];
		heap_remove(trigger, 0);
		fabric->statistics.puts_waiting--;
		fire(fabric, work, now_ns);
	} while (trigger->count && trigger->heap[0]->put.threshold <= value);
}

/* A word for which no put waits is not even read: its owner may have unmapped it. */
static int poll_flags(struct tk_fabric *fabric)
{
	int busy = 0;
	for (uint32_t t = 0; t < fabric->triggers_count; t++) {
		struct trigger *trigger = &fabric->triggers[t];
		if (trigger->count) {
			uint64_t value = tk_word_load(trigger->word);
			if (trigger->heap[0]->put.threshold <= value) {
				fire_reached(fabric, trigger, value);
				busy = 1;
			}
		}
		if (!trigger->count) {
			free(trigger->heap);
			*trigger = fabric->triggers[--fabric->triggers_count];
			t--;
		}
	}
	return busy;
}

/* --- posting ---------------------------------------------------------------------------------------- */

/* 1: it is out, and no completion follows. */
static int post_flag(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_put *put = &work->put;
	if (put->flags & TK_QUIET || fabric->info->domain_attr->mr_mode & FI_MR_LOCAL) {
		int status = (int)fi_inject_write(put->endpoint->fid, &put->flag_value, sizeof put->flag_value, put->peer,
						  put->flag_target, put->flag_key);
		return status ? status : 1;
	}
	return (int)fi_write(put->endpoint->fid, &put->flag_value, sizeof put->flag_value, NULL, put->peer,
			     put->flag_target, put->flag_key, &work->context);
}

/* The bytes and, where the provider carries a message as one stream, the flag in the same message: then
 * the flag can't arrive on a new connection after the bytes were lost with the old one. */
static int post_bytes(struct tk_fabric *fabric, struct work *work)
{
	struct tk_put *put = &work->put;
	int with_flag = fabric->ordered && put->flags & TK_FLAG_PUT;
	struct iovec local[2] = {{(void *)put->source, put->length}, {&put->flag_value, sizeof put->flag_value}};
	struct fi_rma_iov remote[2] = {{put->target, put->length, put->target_key},
				       {put->flag_target, sizeof put->flag_value, put->flag_key}};
	void *desc[2] = {put->region->desc, NULL};
	struct fi_msg_rma message = {
		.msg_iov = local,
		.desc = desc,
		.iov_count = with_flag ? 2 : 1,
		.addr = put->peer,
		.rma_iov = remote,
		.rma_iov_count = with_flag ? 2 : 1,
		.context = &work->context,
	};
	uint64_t flags = FI_COMPLETION;
	if (put->flags & TK_FLAG_PUT && !with_flag)
		flags |= FI_DELIVERY_COMPLETE; /* the flag is chained to the arrival of the bytes */
	return (int)fi_writemsg(put->endpoint->fid, &message, flags);
}

static int post_landed(struct tk_fabric *fabric, struct work *work);

static int post_one(struct tk_fabric *fabric, struct work *work)
{
	if (work->kind == WORK_LANDING)
		return post_landed(fabric, work);
	if (work->state == WORK_READY && work->put.deadline_ns && tk_now_ns() >= work->put.deadline_ns)
		return TOO_LATE;
	int only_flag = !work->put.length || work->state == WORK_FLAG_READY;
	return only_flag ? post_flag(fabric, work) : post_bytes(fabric, work);
}

/* A provider's error says nothing of whether bytes went out. The codes that do are ours alone: cancelled, too late
 * and a differing CRC all mean that nothing did, and callers build upon that. */
static int status_of_provider(int error)
{
	switch (error) {
	case 0:
		return -EIO;
	case FI_ECANCELED:
	case FI_ETIMEDOUT:
		return -ECONNABORTED;
	case EBADMSG:
		return -EIO;
	default:
		return error > 0 ? -error : error;
	}
}

/* What became of the first item of an endpoint's queue. */
static void posted(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->kind == WORK_LANDING) {
		landed(fabric, work);
		return;
	}
	if (status == TOO_LATE) {
		finish_put(fabric, work, -ETIMEDOUT);
		return;
	}
	if (!work->posted_ns)
		work->posted_ns = tk_now_ns();
	if (status < 0) {
		finish_put(fabric, work, status_of_provider(-status));
	} else if (status == 1) {
		finish_put(fabric, work, 0);
	} else {
		work->state = work->state == WORK_READY ? WORK_POSTED : WORK_FLAG_POSTED;
		work->put.endpoint->in_flight++;
		fabric->in_flight++;
	}
}

static int post_ready_of(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	int busy = 0;
	for (uint32_t count = 0; count < POSTED_MAX && endpoint->ready.head; count++) {
		if (endpoint->in_flight == POSTED_MAX)
			break;
		struct work *work = endpoint->ready.head;
		int status = post_one(fabric, work);
		endpoint->stalled = status == -FI_EAGAIN;
		if (endpoint->stalled)
			break;
		queue_pop(&endpoint->ready);
		posted(fabric, work, status);
		busy = 1;
	}
	return busy;
}

/* Every endpoint has its turn in every round. */
static int post_ready(struct tk_fabric *fabric)
{
	int busy = 0;
	struct tk_endpoint *endpoint = fabric->ready_first;
	fabric->ready_first = fabric->ready_last = NULL;
	for (struct tk_endpoint *next; endpoint; endpoint = next) {
		next = endpoint->next_ready;
		endpoint->is_ready = 0;
		busy |= post_ready_of(fabric, endpoint);
		if (endpoint->ready.head)
			list_ready(fabric, endpoint);
	}
	return busy;
}

static void completed(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->state == WORK_STRANDED) {
		recycle(fabric, work);
		return;
	}
	fabric->in_flight--;
	work->put.endpoint->in_flight--;
	int chained = work->put.length && work->put.flags & TK_FLAG_PUT && !fabric->ordered;
	if (!status && chained && work->state == WORK_POSTED) {
		get_ready(fabric, work, WORK_FLAG_READY);
		return;
	}
	finish_put(fabric, work, status);
}

static int drain_completions(struct tk_fabric *fabric)
{
	struct fi_cq_entry entries[COMPLETIONS_A_ROUND];
	ssize_t count = fi_cq_read(fabric->cq, entries, COMPLETIONS_A_ROUND);
	if (count == -FI_EAVAIL) {
		struct fi_cq_err_entry error = {0};
		if (fi_cq_readerr(fabric->cq, &error, 0) == 1 && error.op_context)
			completed(fabric, error.op_context, status_of_provider(error.err));
		return 1;
	}
	for (ssize_t i = 0; i < count; i++)
		if (entries[i].op_context)
			completed(fabric, entries[i].op_context, 0);
	return count > 0;
}

/* Bytes that a peer writes give no completion here, yet the provider only takes them out of its sockets while
 * its queue is read. A read that took long has moved some, and more are likely behind them: the thread must
 * not nap now, or the peer's writes would advance by one socket buffer a nap. */
static int progress_wire(struct tk_fabric *fabric)
{
	uint64_t before_ns = tk_now_ns();
	int drained = drain_completions(fabric);
	return drained || tk_now_ns() - before_ns > MOVED_NS;
}

/* --- watches ---------------------------------------------------------------------------------------- */

static int watch_add(struct watches *watches, const uint64_t *word, uint64_t expected, struct work *work)
{
	if (grow((void **)&watches->items, &watches->capacity, watches->count, sizeof *watches->items))
		return -ENOMEM;
	watches->items[watches->count++] =
		(struct watch){.word = word, .expected = expected, .before = tk_word_load(word), .work = work};
	return 0;
}

static void watch_remove(struct watches *watches, const struct work *work)
{
	for (uint32_t i = 0; i < watches->count; i++)
		if (watches->items[i].work == work) {
			watches->items[i] = watches->items[--watches->count];
			return;
		}
}

/* Says `landed` to the peer, once. -FI_EAGAIN: not yet. A peer that gave a word it has no right to, or is gone,
 * is told nothing: the block has landed all the same. */
static int post_landed(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_landing *landing = &work->landing;
	if (work->acked)
		return 0;
	ssize_t status = fi_inject_write(landing->endpoint->fid, &landing->ack_value, sizeof landing->ack_value,
					 landing->peer, landing->ack_target, landing->ack_key);
	if (status == -FI_EAGAIN)
		return -FI_EAGAIN;
	work->acked = 1;
	fabric->statistics.acks_sent++;
	return 0;
}

static int poll_landings(struct tk_fabric *fabric)
{
	int busy = 0;
	struct watches *watches = &fabric->landings;
	for (uint32_t i = 0; i < watches->count; i++) {
		struct watch *watch = &watches->items[i];
		uint64_t value = tk_word_load(watch->word);
		if (value != watch->expected) {
			if (value != watch->before) {
				watch->before = value;
				fabric->statistics.stale_words++;
			}
			continue;
		}
		struct work *work = watch->work;
		*watch = watches->items[--watches->count];
		i--;
		work->fired_ns = tk_now_ns();
		fabric->statistics.landed++;
		post_landed(fabric, work);
		work->state = WORK_SUMMING;
		queue_push(&fabric->summing, work);
		busy = 1;
	}
	return busy;
}

static int poll_acks(struct tk_fabric *fabric)
{
	int busy = 0;
	struct watches *watches = &fabric->acks;
	for (uint32_t i = 0; i < watches->count; i++) {
		struct watch *watch = &watches->items[i];
		uint64_t value = tk_word_load(watch->word);
		if (value == watch->before || value >> ACK_CODE_BITS != watch->expected)
			continue;
		struct work *work = watch->work;
		watch->before = value;
		report(fabric, TK_ACKED, work->ack.tag, value, 0, tk_now_ns());
		busy = 1;
		if ((value & ((1u << ACK_CODE_BITS) - 1)) >= work->ack.final_code) {
			*watch = watches->items[--watches->count];
			i--;
			release(fabric, work);
		}
	}
	return busy;
}

/* --- checksums -------------------------------------------------------------------------------------- */

/* `landed` goes to the peer before the event that lets the application say more. */
static void summed_landing(struct tk_fabric *fabric, struct work *work)
{
	queue_pop(&fabric->summing);
	if (post_landed(fabric, work))
		get_ready(fabric, work, WORK_READY);
	else
		landed(fabric, work);
}

static void summed_put(struct tk_fabric *fabric, struct work *work)
{
	queue_pop(&fabric->summing);
	if (work->crc != work->put.crc32c) {
		finish_put(fabric, work, -EBADMSG);
		return;
	}
	get_ready(fabric, work, WORK_READY);
}

static int make_checksums(struct tk_fabric *fabric)
{
	uint32_t budget = CRC_BYTES_A_ROUND;
	int busy = 0;
	while (budget && fabric->summing.head) {
		struct work *work = fabric->summing.head;
		int landing = work->kind == WORK_LANDING;
		uint64_t bytes = landing ? work->landing.payload : work->put.source;
		uint32_t length = landing ? work->landing.length : work->put.length;
		uint32_t piece = length - work->summed < budget ? length - work->summed : budget;
		work->crc = tk_crc32c((const char *)bytes + work->summed, piece, work->crc);
		work->summed += piece;
		budget -= piece;
		busy = 1;
		if (work->summed < length)
			continue;
		if (landing)
			summed_landing(fabric, work);
		else
			summed_put(fabric, work);
	}
	return busy;
}

/* --- what callers ask for --------------------------------------------------------------------------- */

static void accept(struct tk_fabric *fabric, struct work *work)
{
	int status = 0;
	adopt(fabric, work);
	switch (work->kind) {
	case WORK_PUT:
		fabric->statistics.armed++;
		if (work->put.trigger)
			status = wait_for_flag(fabric, work);
		else
			fire(fabric, work, tk_now_ns());
		break;
	case WORK_LANDING:
		status = watch_add(&fabric->landings, (const uint64_t *)work->landing.word,
				   work->landing.generation, work);
		break;
	case WORK_ACK:
		status = watch_add(&fabric->acks, (const uint64_t *)work->ack.word, work->ack.generation, work);
		if (!status) /* an acknowledgement may have come before its watch */
			fabric->acks.items[fabric->acks.count - 1].before = 0;
		break;
	}
	if (status)
		fail(fabric, work, status);
}

/* Takes an item out of whatever it waits in. False when its bytes are on the wire already. */
static int withdraw(struct tk_fabric *fabric, struct work *work)
{
	switch (work->state) {
	case WORK_WAITING:
		if (work->kind == WORK_PUT)
			stop_waiting(fabric, work);
		else
			watch_remove(work->kind == WORK_LANDING ? &fabric->landings : &fabric->acks, work);
		return 1;
	case WORK_SUMMING:
		queue_remove(&fabric->summing, work);
		return 1;
	case WORK_READY:
	case WORK_FLAG_READY:
		queue_remove(&endpoint_of(work)->ready, work);
		return 1;
	default:
		return 0;
	}
}

int core_cancel(struct tk_fabric *fabric, void *argument)
{
	const struct cancellation *wanted = argument;
	int cancelled = 0;
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		for (int i = 0; i < wanted->count; i++)
			if (wanted->tags[i] == tag_of(work) && withdraw(fabric, work)) {
				fail(fabric, work, -ECANCELED);
				cancelled++;
				break;
			}
	}
	return cancelled;
}

/* What the endpoint still has to do is dropped. Landed blocks are in our memory and stay landed. */
static void withdraw_all(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		if (endpoint_of(work) != endpoint)
			continue;
		if (work->kind == WORK_LANDING && work->state == WORK_SUMMING) {
			work->landing.endpoint = NULL;
			work->acked = 1; /* or nobody is there to be told */
		} else if (work->kind == WORK_LANDING && work->state == WORK_READY) {
			landed(fabric, work);
		} else if (work->state == WORK_READY || work->state == WORK_FLAG_READY) {
			release(fabric, work);
		} else if (withdraw(fabric, work)) {
			if (work->kind == WORK_LANDING)
				fail(fabric, work, -ECANCELED);
			else
				release(fabric, work);
		}
	}
	endpoint->ready = (struct queue){0};
}

static void unlist_ready(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	struct tk_endpoint *at = fabric->ready_first;
	fabric->ready_first = fabric->ready_last = NULL;
	for (struct tk_endpoint *next; at; at = next) {
		next = at->next_ready;
		at->is_ready = 0;
		if (at != endpoint)
			list_ready(fabric, at);
	}
}

/* What is on the wire gets a moment to arrive. Not every provider takes back what it was given when its endpoint
 * is closed: a peer of shm may read it later, and crashes if it can't find who introduced himself; one of sockets
 * is left with half a message. */
static void drain_endpoint(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	uint64_t until_ns = tk_now_ns() + DRAIN_NS;
	while ((endpoint->in_flight || endpoint->stalled) && tk_now_ns() < until_ns) {
		if (!drain_completions(fabric))
			sched_yield();
	}
}

/* Of the endpoint's puts nothing is reported: who closes it knows that all of them are over. The provider may have
 * put completions into the queue before the endpoint went, and those are taken before the items go; one whose
 * completions may come later still (it has a thread of its own) keeps the items until they come. */
int core_close_endpoint(struct tk_fabric *fabric, void *argument)
{
	struct tk_endpoint *endpoint = argument;
	withdraw_all(fabric, endpoint);
	if (!fabric->ordered)
		drain_endpoint(fabric, endpoint);
	int status = fi_close(&endpoint->fid->fid);
	while (drain_completions(fabric))
		;
	withdraw_all(fabric, endpoint);
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		if (endpoint_of(work) != endpoint)
			continue;
		fabric->in_flight--;
		disown(fabric, work);
		if (fabric->ordered)
			recycle(fabric, work);
		else
			work->state = WORK_STRANDED;
	}
	unlist_ready(fabric, endpoint);
	return status;
}

/* Bytes on the wire can't be called back, and landed bytes are only being summed. */
static int may_expire(const struct work *work)
{
	return work->state == WORK_WAITING ||
	       (work->kind == WORK_PUT && (work->state == WORK_SUMMING || work->state == WORK_READY));
}

static int expire(struct tk_fabric *fabric)
{
	uint64_t now_ns = tk_now_ns();
	if (now_ns < fabric->next_deadline_ns)
		return 0;
	fabric->next_deadline_ns = UINT64_MAX;
	for (struct work *work = fabric->all, *after; work; work = after) {
		after = work->after;
		uint64_t deadline_ns = deadline_of(work);
		if (!deadline_ns)
			continue;
		if (now_ns < deadline_ns) {
			if (deadline_ns < fabric->next_deadline_ns)
				fabric->next_deadline_ns = deadline_ns;
		} else if (may_expire(work)) {
			withdraw(fabric, work);
			fail(fabric, work, -ETIMEDOUT);
		}
	}
	return 1;
}

/* Returns whether there was anything; -1 when the fabric is being closed. */
static int take_inbox(struct tk_fabric *fabric)
{
	if (!__atomic_exchange_n(&fabric->posted_something, 0, __ATOMIC_SEQ_CST))
		return 0;
	pthread_mutex_lock(&fabric->inbox_lock);
	struct work *work = fabric->inbox.head;
	fabric->inbox = (struct queue){0};
	struct command *command = fabric->command;
	int stop = fabric->stop;
	pthread_mutex_unlock(&fabric->inbox_lock);

	for (struct work *next; work; work = next) {
		next = work->next;
		accept(fabric, work);
	}
	if (command) {
		command->result = command->run(fabric, command->argument);
		publish(fabric);
		pthread_mutex_lock(&fabric->inbox_lock);
		command->done = 1;
		fabric->command = NULL;
		pthread_cond_broadcast(&fabric->command_done);
		pthread_mutex_unlock(&fabric->inbox_lock);
	}
	return stop ? -1 : 1;
}

static void give_back_finished(struct tk_fabric *fabric)
{
	if (!fabric->finished)
		return;
	pthread_mutex_lock(&fabric->inbox_lock);
	for (struct work *work = fabric->finished, *next; work; work = next) {
		next = work->next;
		work->next = fabric->free;
		fabric->free = work;
		fabric->free_count++;
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	fabric->finished = NULL;
}

/* --- the thread ------------------------------------------------------------------------------------- */

static int is_working(const struct tk_fabric *fabric)
{
	return fabric->in_flight || fabric->ready_first || fabric->summing.head;
}

static void rest(struct tk_fabric *fabric, uint64_t idle_ns)
{
	int working = is_working(fabric);
	if (idle_ns < (working ? SPIN_WORKING_NS : SPIN_NS)) {
		sched_yield(); /* a spin that does not yield starves the application on few cores */
		return;
	}
	uint64_t nap_ns = idle_ns / NAP_SHARE;
	if (nap_ns < NAP_NS_MIN || working)
		nap_ns = NAP_NS_MIN;
	if (nap_ns > NAP_NS_MAX)
		nap_ns = NAP_NS_MAX;
	uint64_t before_ns = tk_now_ns();
	__atomic_store_n(&fabric->sleeping, 1, __ATOMIC_SEQ_CST);
	if (!__atomic_load_n(&fabric->posted_something, __ATOMIC_SEQ_CST)) {
		struct pollfd wait = {.fd = fabric->wake_fd, .events = POLLIN};
		struct timespec timeout = {.tv_nsec = (long)nap_ns};
		ppoll(&wait, 1, &timeout, NULL);
	}
	__atomic_store_n(&fabric->sleeping, 0, __ATOMIC_SEQ_CST);
	uint64_t ignored;
	ssize_t got = read(fabric->wake_fd, &ignored, sizeof ignored);
	(void)got;
	fabric->statistics.sleeps++;
	fabric->statistics.asleep_ns += tk_now_ns() - before_ns;
}

void *core_progress(void *argument)
{
	struct tk_fabric *fabric = argument;
	prctl(PR_SET_TIMERSLACK, 1000UL); /* naps as short as they are meant to be */
	uint64_t busy_ns = tk_now_ns();
	for (;;) {
		int busy = take_inbox(fabric);
		if (busy < 0)
			break;
		busy |= progress_wire(fabric);
		busy |= poll_flags(fabric);
		busy |= post_ready(fabric);
		busy |= poll_landings(fabric);
		busy |= poll_acks(fabric);
		busy |= make_checksums(fabric);
		busy |= expire(fabric);
		publish_soon(fabric, busy);
		give_back_finished(fabric);
		fabric->statistics.loops++;
		if (busy)
			busy_ns = tk_now_ns();
		else
			rest(fabric, tk_now_ns() - busy_ns);
	}
	for (struct tk_endpoint *endpoint = fabric->endpoints; endpoint; endpoint = endpoint->next)
		core_close_endpoint(fabric, endpoint);
	return NULL;
}
