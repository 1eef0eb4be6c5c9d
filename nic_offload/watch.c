/*
 * Watched words: flags of landing slots, and acknowledgements; and checksums of blocks that landed or are to be sent.
 *
 * What always holds: a landing is accepted at exactly the expected generation, and `landed` is sent before the
 * checksum is computed. A word that is not from the peer, or is for another use of its place, has no effect.
 */
#define _GNU_SOURCE
#include "call.h"
#include "progress.h"

#include <errno.h>

#define CRC_BYTES_A_ROUND (256u << 10) /* so that checksums don't delay the wire */

int watch_add(struct watches *watches, const uint64_t *word, uint64_t expected, struct work *work)
{
	if (grow((void **)&watches->items, &watches->capacity, watches->count, sizeof *watches->items))
		return -ENOMEM;
	work->place = watches->count;
	watches->has_new = 1;
	watches->items[watches->count++] =
		(struct watch){.word = word, .expected = expected, .before = tk_word_load(word), .work = work};
	return 0;
}

void watch_remove(struct watches *watches, const struct work *work)
{
	struct watch last = watches->items[--watches->count];
	watches->items[work->place] = last;
	last.work->place = work->place;
}

/* The value of its flag when the put has arrived. */
uint64_t flag_awaited(const struct tk_landing *landing)
{
	struct spot spot = landing->region ? spot_of(landing->region, landing->word) : (struct spot){0};
	return word_in(landing->endpoint, spot, landing->generation);
}

int poll_landings(struct tk_fabric *fabric)
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
		if (answer_at_desk(fabric, &work->landing)) {
			watch->before = value;
			work->landing.generation++;
			watch->expected = flag_awaited(&work->landing);
			busy = 1;
			continue;
		}
		watch_remove(watches, work);
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

int poll_acks(struct tk_fabric *fabric)
{
	struct watches *watches = &fabric->acks;
	int busy = 0, in_rows = shared_words_came(fabric);
	for (uint32_t i = 0; i < watches->count; i++) {
		struct watch *watch = &watches->items[i];
		struct work *work = watch->work;
		uint64_t before = watch->before, value = tk_word_load(watch->word);
		watch->before = value;
		value = value != before ? ack_in(&work->ack, value) : in_rows ? shared_word(fabric, work) : 0;
		if (!value && watch->before == before)
			continue;
		uint32_t code = value & ((1u << ACK_CODE_BITS) - 1);
		if (work->partner && !work->partner->posted_ns) /* the peer can't have got what this is the answer to */
			code = 0;
		if (code <= work->code) { /* codes only rise: this word has arrived before */
			fabric->statistics.stale_words++;
			continue;
		}
		work->code = code;
		if (code == BLOCK_WHERE && shared_located(fabric, work)) {
			i--;
			busy = 1;
			continue;
		}
		if (work->caller)
			code = caller_answered(fabric, work, code);
		if (code >= work->ack.final_code) /* before its caller is notified, which may reuse the place or the memory */
			shared_over(work);
		if (work->ack.group && code <= work->ack.good_max)
			group_acked(fabric, &work->ack, code);
		else
			report(fabric, TK_ACKED, work->ack.tag, value, 0, tk_now_ns());
		busy = 1;
		if (work->sender)
			sender_acked(work, code >= work->ack.final_code);
		if (code >= work->ack.final_code) {
			watch_remove(watches, work);
			i--;
			release(fabric, work);
		}
	}
	return busy;
}

/* Sends `landed` before the event, after which the application may send a higher code. */
static void summed_landing(struct tk_fabric *fabric, struct work *work)
{
	queue_pop(&fabric->summing);
	if (post_landed(fabric, work))
		get_ready(fabric, work, WORK_READY);
	else
		landed(fabric, work);
}

static void summed_operation(struct tk_fabric *fabric, struct work *work)
{
	struct tk_operation *op = &work->op;
	queue_pop(&fabric->summing);
	if (op->sender) {
		sender_summed(work);
		get_ready(fabric, work, WORK_READY);
	} else if (!(op->flags & TK_VERIFY_CRC)) { /* its pieces were gathered */
		get_ready(fabric, work, WORK_READY);
	} else if (work->crc != op->crc32c && work->shelved) {
		miss_at_desk(work);
		get_ready(fabric, work, WORK_READY);
	} else if (work->crc != op->crc32c) {
		finish(fabric, work, -EBADMSG);
	} else if (!(op->flags & TK_GET)) {
		if (op->part) { /* all of it is unchanged, but only a part is wanted */
			op->local += op->skip;
			op->length = op->part;
		}
		get_ready(fabric, work, WORK_READY);
	} else if (op->flags & TK_FLAG_PUT) {
		get_ready(fabric, work, WORK_FLAG_READY);
	} else {
		finish(fabric, work, 0);
	}
}

int make_checksums(struct tk_fabric *fabric)
{
	uint32_t budget = CRC_BYTES_A_ROUND;
	int busy = 0;
	while (budget && fabric->summing.head) {
		struct work *work = fabric->summing.head;
		int landing = work->kind == WORK_LANDING;
		uint64_t bytes = landing ? work->landing.payload : work->op.local;
		uint32_t length = landing ? work->landing.length : work->op.length;
		uint32_t piece = length - work->summed < budget ? length - work->summed : budget;
		if (work->kind == WORK_ACK) {
			piece = shared_copy(fabric, work, budget);
			budget -= piece < budget ? piece : budget;
			busy = 1;
			continue;
		} else if (!landing && work->op.pieces) {
			piece = gather_some(work, piece);
		} else if (!landing && sender_shares(work)) {
			piece = sender_copies(work, piece);
		} else {
			work->crc = tk_crc32c((const char *)bytes + work->summed, piece, work->crc);
			work->summed += piece;
		}
		budget -= piece;
		busy = 1;
		if (work->summed < length)
			continue;
		if (landing)
			summed_landing(fabric, work);
		else
			summed_operation(fabric, work);
	}
	return busy;
}
