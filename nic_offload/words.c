/*
 * Words for a peer that can't be sent at once, or might be overtaken.
 *
 * A put has two acknowledgements, `landed` and `written`, which are written to the same word. If the second overtakes
 * the first, the first remains in the word, and the peer may never see the second: it waits until its deadline. And a
 * peer that accepts nothing at the moment must not hold up words for other peers.
 *
 * What always holds: where the provider doesn't keep writes in order, at most one word is on its way to a place. The
 * next one for that place waits until it was delivered or has failed; of several that wait only the last is sent,
 * because it supersedes the others. A word for which the provider has no room waits in the endpoint's queue, with the
 * same rule for its place. Words to other places do not wait.
 * What it doesn't do: keep the order of a word and of bytes elsewhere; flags that are chained to their bytes do.
 */
#include "progress.h"

#include <errno.h>

static struct work *word_to(const struct tk_endpoint *endpoint, uint64_t peer, struct spot spot)
{
	struct work *work = endpoint->words;
	while (work && (work->op.peer != peer || work->op.flag_target != spot.address || work->op.flag_key != spot.key))
		work = work->next_word;
	return work;
}

static struct work *new_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
			     struct spot spot)
{
	struct work *work = take_free_work(fabric, 1);
	if (!work)
		return NULL;
	work->op = (struct tk_operation){
		.endpoint = endpoint,
		.peer = peer,
		.flag_target = spot.address,
		.flag_key = spot.key,
		.flags = TK_QUIET,
	};
	work->flag_word = word;
	work->is_word = 1;
	work->next_word = endpoint->words;
	endpoint->words = work;
	adopt(fabric, work);
	return work;
}

int word_follows(struct tk_endpoint *endpoint, uint64_t word, uint64_t peer, struct spot spot)
{
	struct work *work = endpoint->words ? word_to(endpoint, peer, spot) : NULL;
	if (!work)
		return 0;
	if (work->state == WORK_FLAG_READY) {
		work->flag_word = word;
	} else {
		work->later = word;
		work->follows = 1;
	}
	return 1;
}

int post_word_in_order(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
		       struct spot spot)
{
	struct work *work = new_word(fabric, endpoint, word, peer, spot);
	if (!work)
		return -FI_EAGAIN;
	int status = note_taken(endpoint, post_confirmed_flag(work));
	if (status) {
		release(fabric, work);
		return status;
	}
	work->state = WORK_FLAG_POSTED;
	endpoint->in_flight++;
	fabric->in_flight++;
	return 0;
}

int post_or_queue_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
		       uint64_t target, uint64_t key)
{
	int status = post_word(fabric, endpoint, word, peer, target, key);
	if (status != -FI_EAGAIN)
		return status;
	struct spot spot = {target, key};
	struct work *work = new_word(fabric, endpoint, word_out(endpoint, spot, word), peer, spot);
	if (!work)
		return -FI_EAGAIN;
	get_ready(fabric, work, WORK_FLAG_READY);
	return 0;
}

/* Also after a failure: the next one may succeed. */
void word_is_over(struct tk_fabric *fabric, struct work *work)
{
	if (!work->follows) {
		release(fabric, work);
		return;
	}
	work->follows = 0;
	work->flag_word = work->later;
	get_ready(fabric, work, WORK_FLAG_READY);
}

void forget_word(struct work *work)
{
	struct work **link = &work->op.endpoint->words;
	while (*link && *link != work)
		link = &(*link)->next_word;
	if (*link)
		*link = work->next_word;
}
