/*
 * Words to one place of a peer, in their order, where the provider keeps none.
 *
 * A put has two acknowledgements, `landed` and `written`, which are written to the same word. If the second overtakes
 * the first, the first stays there, and the peer may never see the second: it waits until its deadline.
 *
 * What always holds: at most one word is on its way to a place. The next one for that place waits until it was delivered
 * or has failed; of several that wait only the last is sent, because it says more. Words to other places do not wait.
 * What it doesn't do: keep the order of a word and of bytes elsewhere; flags that are chained to their bytes do. Nor hold
 * back a third word for a place while the second one waits for room at the provider: a put has two.
 */
#include "progress.h"

#include <errno.h>

static struct work *on_its_way(const struct tk_endpoint *endpoint, uint64_t peer, struct spot spot)
{
	struct work *work = endpoint->words;
	while (work && (work->op.peer != peer || work->op.flag_target != spot.address || work->op.flag_key != spot.key))
		work = work->next;
	return work;
}

int post_word_in_order(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
		       struct spot spot)
{
	struct work *work = on_its_way(endpoint, peer, spot);
	if (work) {
		work->later = word;
		work->follows = 1;
		return 0;
	}
	work = take_free_work(fabric, 1);
	if (!work)
		return -FI_EAGAIN;
	work->op = (struct tk_operation){
		.endpoint = endpoint,
		.peer = peer,
		.flag_target = spot.address,
		.flag_key = spot.key,
		.flags = TK_QUIET,
	};
	work->flag_word = word;
	work->is_word = 1;
	int status = note_taken(endpoint, post_confirmed_flag(work));
	if (status) {
		recycle(fabric, work);
		return status;
	}
	adopt(fabric, work);
	work->state = WORK_FLAG_POSTED;
	endpoint->in_flight++;
	fabric->in_flight++;
	word_is_posted(work);
	return 0;
}

void word_is_posted(struct work *work)
{
	work->next = work->op.endpoint->words;
	work->op.endpoint->words = work;
}

/* Also after a failure: the next one may come through. */
void word_is_over(struct tk_fabric *fabric, struct work *work)
{
	struct work **link = &work->op.endpoint->words;
	while (*link && *link != work)
		link = &(*link)->next;
	if (*link)
		*link = work->next;
	if (!work->follows) {
		release(fabric, work);
		return;
	}
	work->follows = 0;
	work->flag_word = work->later;
	get_ready(fabric, work, WORK_FLAG_READY);
}
