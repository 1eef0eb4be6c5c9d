/*
 * Posts puts and gets, their chained flags and acknowledgements, and takes their completions.
 *
 * What always holds: where the provider keeps writes of that size in order, and accepts two target ranges, a flag put
 * goes out in the same message as its bytes; otherwise only after the bytes were delivered. A counter is moved only
 * after both were delivered. Each endpoint has its own share of the wire.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <sys/uio.h>

#define COMPLETIONS_A_ROUND 64
#define STALL_SHARE 8 /* a stalled endpoint is retried after an eighth of the time it has been stalled, */
#define STALL_PAUSE_NS_MAX 1000000000u /* at most a second: each attempt at a lost peer costs a connection */
#define MOVED_NS 5000u /* a read of an idle queue takes about one microsecond */
#define MOVED_RESTED_NS 25000u /* up to 20 us after a nap */
#define LONG_READS 1000u       /* so many in a row that complete nothing: system calls are slow here */
#define TOO_LATE 2 /* result of posting a put after its deadline */
#define TOLD 3	   /* result of posting a put that the peer reads itself */

/* Whether its completion means arrival, confirmed by the peer's side. Otherwise arrival is known elsewhere, or not
 * needed. */
static int is_to_be_confirmed(const struct tk_fabric *fabric, const struct tk_operation *op)
{
	return op->completion || (fabric->confirms && !(op->flags & (TK_QUIET | TK_ACKED_PUT | TK_SENT_PUT)));
}

static void set_flag_word(struct work *work)
{
	const struct tk_operation *op = &work->op;
	work->flag_word = word_out(op->endpoint, (struct spot){op->flag_target, op->flag_key}, op->flag_value);
}

int post_confirmed_flag(struct work *work)
{
	struct tk_operation *op = &work->op;
	struct iovec local = {&work->flag_word, sizeof work->flag_word};
	struct fi_rma_iov remote = {op->flag_target, sizeof work->flag_word, op->flag_key};
	struct fi_msg_rma message = {
		.msg_iov = &local,
		.iov_count = 1,
		.addr = op->peer,
		.rma_iov = &remote,
		.rma_iov_count = 1,
		.context = &work->context,
	};
	return (int)fi_writemsg(op->endpoint->fid, &message, FI_INJECT | FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

int note_taken(struct tk_endpoint *endpoint, int status)
{
	if (!status)
		endpoint->has_sent = 1;
	else if (status == -FI_EAGAIN && endpoint->has_sent && endpoint->fabric->shows_breaks)
		__atomic_store_n(&endpoint->has_broken, 1, __ATOMIC_RELAXED);
	return status;
}

int post_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer, uint64_t target,
	      uint64_t key)
{
	if (put_shared_word(fabric, endpoint, word, (struct spot){target, key}))
		return 0;
	word = word_out(endpoint, (struct spot){target, key}, word);
	if (word_follows(endpoint, word, peer, (struct spot){target, key}))
		return 0;
	if (!fabric->keeps_order)
		return post_word_in_order(fabric, endpoint, word, peer, (struct spot){target, key});
	if (!fabric->loses_context)
		return note_taken(endpoint, (int)fi_inject_write(endpoint->fid, &word, sizeof word, peer, target, key));
	struct iovec local = {&word, sizeof word};
	struct fi_rma_iov remote = {target, sizeof word, key};
	struct fi_msg_rma message = {
		.msg_iov = &local,
		.iov_count = 1,
		.addr = peer,
		.rma_iov = &remote,
		.rma_iov_count = 1,
		.context = &fabric->word_context,
	};
	return note_taken(endpoint, (int)fi_writemsg(endpoint->fid, &message, FI_INJECT | FI_COMPLETION));
}

/* Returns 1 if it was sent and no completion follows. */
static int post_flag(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_operation *op = &work->op;
	if (put_shared_word(fabric, op->endpoint, op->flag_value, (struct spot){op->flag_target, op->flag_key}))
		return 1;
	set_flag_word(work);
	if (is_to_be_confirmed(fabric, op))
		return post_confirmed_flag(work);
	if (op->flags & TK_QUIET || fabric->info->domain_attr->mr_mode & FI_MR_LOCAL) {
		int status = post_word(fabric, op->endpoint, op->flag_value, op->peer, op->flag_target, op->flag_key);
		return status ? status : 1;
	}
	return (int)fi_write(op->endpoint->fid, &work->flag_word, sizeof work->flag_word, NULL, op->peer,
			     op->flag_target, op->flag_key, &work->context);
}

static int flag_travels_along(const struct tk_fabric *fabric, const struct tk_operation *op)
{
	size_t whole = TK_HEAD_PAGE + op->length + sizeof(uint64_t); /* with the most that may be before them */
	return whole <= fabric->order_max && op->length && (op->flags & (TK_FLAG_PUT | TK_GET)) == TK_FLAG_PUT;
}

/* The bytes and, where the provider carries a message as one stream, the flag in the same message: then
 * the flag can't arrive on a new connection after the bytes were lost with the old one. */
static int post_bytes(struct tk_fabric *fabric, struct work *work)
{
	struct tk_operation *op = &work->op;
	int get = !!(op->flags & TK_GET), chained = !!(op->flags & TK_FLAG_PUT);
	int with_flag = flag_travels_along(fabric, op);
	struct iovec local[3];
	void *desc[3];
	size_t parts = 0, head_bytes = 0;
	if (op->sender) { /* the block's head, right before it */
		const void *head;
		head_bytes = sender_head(work, &head);
		desc[parts] = sender_head_desc(work);
		local[parts++] = (struct iovec){(void *)head, head_bytes};
	}
	desc[parts] = op->region->desc;
	local[parts++] = (struct iovec){(void *)op->local, op->length};
	if (with_flag) {
		set_flag_word(work);
		desc[parts] = NULL;
		local[parts++] = (struct iovec){&work->flag_word, sizeof work->flag_word};
	}
	struct fi_rma_iov remote[2] = {{op->remote - head_bytes, head_bytes + op->length, op->remote_key},
				       {op->flag_target, sizeof work->flag_word, op->flag_key}};
	struct fi_msg_rma message = {
		.msg_iov = local,
		.desc = desc,
		.iov_count = parts,
		.addr = op->peer,
		.rma_iov = remote,
		.rma_iov_count = with_flag ? 2 : 1,
		.context = &work->context,
	};
	if (get)
		return (int)fi_readmsg(op->endpoint->fid, &message, FI_COMPLETION);
	/* Later steps are chained to the arrival of the bytes. */
	int confirmed = (chained && !with_flag) || is_to_be_confirmed(fabric, op);
	return (int)fi_writemsg(op->endpoint->fid, &message, FI_COMPLETION | (confirmed ? FI_DELIVERY_COMPLETE : 0));
}

/* Sends `landed` to the peer, once. -FI_EAGAIN: not yet. If the peer is gone or gave an invalid word, nothing is sent;
 * the block has landed all the same. */
int post_landed(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_landing *landing = &work->landing;
	if (work->acked || landing->quiet)
		return 0;
	int status = post_word(fabric, landing->endpoint, landing->ack_value, landing->peer, landing->ack_target,
			       landing->ack_key);
	if (status == -FI_EAGAIN)
		return -FI_EAGAIN;
	work->acked = 1;
	fabric->statistics.acks_sent++;
	return 0;
}

static int post_one(struct tk_fabric *fabric, struct work *work)
{
	if (work->kind == WORK_LANDING)
		return post_landed(fabric, work);
	if (work->is_word)
		return post_confirmed_flag(work);
	if (work->state == WORK_READY && work->op.deadline_ns && tk_now_ns() >= work->op.deadline_ns)
		return TOO_LATE;
	if (sender_shares(work)) {
		sender_put(fabric, work);
		return 1;
	}
	if (may_share(work)) {
		int status = send_location(fabric, work);
		return status ? status : TOLD;
	}
	int only_flag = !work->op.length || work->state == WORK_FLAG_READY;
	return only_flag ? post_flag(fabric, work) : post_bytes(fabric, work);
}

/* A provider's error doesn't show whether bytes went out. Only our own codes do: cancelled, too late, a differing CRC
 * and a record that was not read all mean that nothing went out, and callers rely on it. */
int status_of_provider(int error)
{
	switch (error) {
	case 0:
		return -EIO;
	case FI_ECANCELED:
	case FI_ETIMEDOUT:
		return -ECONNABORTED;
	case EBADMSG:
	case ENODATA:
		return -EIO;
	default:
		return error > 0 ? -error : error;
	}
}

/* Handles the result of posting the first item of an endpoint's queue. */
static void posted(struct tk_fabric *fabric, struct work *work, int status)
{
	if (work->kind == WORK_LANDING) {
		landed(fabric, work);
		return;
	}
	if (status == TOO_LATE) {
		finish(fabric, work, -ETIMEDOUT);
		return;
	}
	if (!work->posted_ns)
		work->posted_ns = tk_now_ns();
	if (status == TOLD) {
		await_copy(fabric, work);
		return;
	}
	if (status < 0) {
		finish(fabric, work, status_of_provider(-status));
	} else if (status == 1) {
		finish(fabric, work, 0);
	} else {
		work->state = work->state == WORK_READY ? WORK_POSTED : WORK_FLAG_POSTED;
		work->op.endpoint->in_flight++;
		fabric->in_flight++;
	}
}

static void pause_stalled(struct tk_endpoint *endpoint, uint64_t now_ns)
{
	if (!endpoint->stalled_ns)
		__atomic_store_n(&endpoint->stalled_ns, now_ns, __ATOMIC_RELAXED);
	uint64_t pause_ns = (now_ns - endpoint->stalled_ns) / STALL_SHARE;
	endpoint->again_ns = now_ns + (pause_ns < STALL_PAUSE_NS_MAX ? pause_ns : STALL_PAUSE_NS_MAX);
}

static void end_stall(struct tk_endpoint *endpoint)
{
	endpoint->stalled = 0;
	if (endpoint->stalled_ns)
		__atomic_store_n(&endpoint->stalled_ns, 0, __ATOMIC_RELAXED);
}

static int post_ready_of(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	int busy = 0;
	if (!endpoint->ready.head) /* everything was taken back: nothing waits for the peer */
		end_stall(endpoint);
	if (endpoint->stalled && fabric->now_ns < endpoint->again_ns)
		return 0;
	for (uint32_t count = 0; count < fabric->posted_max && endpoint->ready.head; count++) {
		if (endpoint->in_flight >= fabric->posted_max)
			break;
		struct work *work = endpoint->ready.head;
		int status = note_taken(endpoint, post_one(fabric, work));
		endpoint->stalled = status == -FI_EAGAIN;
		if (endpoint->stalled) {
			pause_stalled(endpoint, tk_now_ns());
			break;
		}
		end_stall(endpoint);
		queue_pop(&endpoint->ready);
		posted(fabric, work, status);
		busy = 1;
	}
	return busy;
}

/* Each endpoint is served in each round. */
int post_ready(struct tk_fabric *fabric)
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

/* The bytes have arrived. Those of a get may have to be checksummed first, and a flag may have to follow. */
static void moved(struct tk_fabric *fabric, struct work *work)
{
	const struct tk_operation *op = &work->op;
	if (op->flags & TK_GET && op->flags & TK_VERIFY_CRC) {
		work->state = WORK_SUMMING;
		queue_push(&fabric->summing, work);
	} else if (op->length && op->flags & TK_FLAG_PUT && !flag_travels_along(fabric, op)) {
		get_ready(fabric, work, WORK_FLAG_READY);
	} else {
		finish(fabric, work, 0);
	}
}

static void completed(struct tk_fabric *fabric, void *context, int status)
{
	if (context == &fabric->word_context || nic_completed(fabric, context, status))
		return;
	struct work *work = context;
	if (work->state == WORK_STRANDED) {
		recycle(fabric, work);
		return;
	}
	fabric->in_flight--;
	work->op.endpoint->in_flight--;
	if (work->is_word)
		word_is_over(fabric, work);
	else if (!status && work->state == WORK_POSTED)
		moved(fabric, work);
	else
		finish(fabric, work, status);
}

static int drain(struct tk_fabric *fabric, struct fid_cq *cq)
{
	struct fi_cq_entry entries[COMPLETIONS_A_ROUND];
	ssize_t count = fi_cq_read(cq, entries, COMPLETIONS_A_ROUND);
	if (count == -FI_EAVAIL) {
		struct fi_cq_err_entry error = {0};
		if (fi_cq_readerr(cq, &error, 0) == 1 && error.op_context)
			completed(fabric, error.op_context, status_of_provider(error.err));
		return 1;
	}
	for (ssize_t i = 0; i < count; i++)
		if (entries[i].op_context)
			completed(fabric, entries[i].op_context, 0);
	return count > 0;
}

int drain_completions(struct tk_fabric *fabric)
{
	int drained = 0;
	for (uint32_t i = 0; i < fabric->domains_end; i++)
		if (fabric->domains[i].cq)
			drained |= drain(fabric, fabric->domains[i].cq);
	return drained;
}

/* Bytes that a peer writes cause no completion here, but the provider takes them out of its sockets only while its
 * queue is read. A read that took long has moved some, and more are likely to follow: the thread must not nap now, or
 * the peer's writes would advance by one socket buffer per nap. The first read after a nap takes longer in any case,
 * because its caches are cold. Under gVisor, or a tracer, each read takes long, and the thread would never nap: what a
 * read of an idle queue takes there is the least of many long reads. */
int progress_wire(struct tk_fabric *fabric)
{
	struct idle_read *idle = &fabric->idle_read;
	uint64_t limit_ns = fabric->rested ? MOVED_RESTED_NS : MOVED_NS, before_ns = fabric->now_ns;
	fabric->rested = 0;
	int drained = drain_completions(fabric);
	fabric->now_ns = tk_now_ns();
	uint64_t took_ns = fabric->now_ns - before_ns;
	if (took_ns < idle->ns)
		idle->ns = took_ns;
	if (drained || took_ns <= (limit_ns > 2 * idle->ns ? limit_ns : 2 * idle->ns)) {
		idle->long_reads = 0;
		return drained;
	}
	if (!idle->long_reads++ || took_ns < idle->least_ns)
		idle->least_ns = took_ns;
	if (idle->long_reads == LONG_READS) {
		idle->ns = idle->least_ns;
		idle->long_reads = 0;
	}
	return 1;
}
