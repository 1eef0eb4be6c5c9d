/*
 * Memory that both ends of a connection on one machine have mapped, and their doorbells.
 *
 * A client on its node's machine maps the slots that it was granted. It copies each put into a slot and stores the flag
 * (sender.c). The node reads the slot as if the put had arrived over the fabric (receiver.c), and stores the outcome in
 * a word of the same memory. Nothing goes over the fabric. Each end has a doorbell that wakes its progress thread; the
 * other end rings it once in each round in which it has stored something. The node's doorbell is an eventfd, which it
 * neither reads nor writes; the client's is a pipe, whose other end only the node has. So whatever a client does with
 * its descriptors, no system call of the node blocks.
 *
 * What always holds: the memory belongs to the node, and its size can't be changed; it holds the slots and words of one
 * connection and nothing else. The node reads nothing there twice. The client relies on nothing there but its words,
 * and of these only on the expected generation. A lost ring delays an idle thread by one sleep, and has no other
 * effect.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <unistd.h>

int tk_fabric_listen(struct tk_fabric *fabric, int doorbell, int is_pipe)
{
	return is_pipe ? rest_listen(fabric, doorbell) : rest_listen_writes(fabric, doorbell);
}

static int ignore(struct tk_fabric *fabric, void *doorbell)
{
	return rest_ignore(fabric, *(const int *)doorbell);
}

/* Runs on the progress thread, which may have noticed a ring and be about to read it: when this returns the read is
 * over, and the descriptor can be closed. Otherwise the thread might read from a file opened next under the same
 * number. */
int tk_fabric_ignore(struct tk_fabric *fabric, int doorbell)
{
	return on_the_thread(fabric, ignore, &doorbell, sizeof doorbell);
}

void ring_later(struct tk_fabric *fabric, struct tk_endpoint *endpoint)
{
	if (endpoint->is_due)
		return;
	endpoint->is_due = 1;
	endpoint->next_due = fabric->due;
	fabric->due = endpoint;
}

/* If a pipe has no room for another ring, its owner was woken, or will be. */
void ring_doorbells(struct tk_fabric *fabric)
{
	static const uint64_t once = 1;
	for (struct tk_endpoint *endpoint; (endpoint = fabric->due);) {
		fabric->due = endpoint->next_due;
		endpoint->is_due = 0;
		ssize_t written = write(endpoint->doorbell, &once, sizeof once);
		(void)written;
	}
}

int put_shared_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, struct spot spot)
{
	const struct shared_words *words = &endpoint->shared_words;
	uint64_t offset = spot.address - words->first.address;
	if (spot.key != words->first.key || offset % 8 || offset / 8 >= words->count)
		return 0;
	tk_word_store((uint64_t *)(words->address + offset), word);
	ring_later(fabric, endpoint);
	return 1;
}

struct sharing {
	struct tk_endpoint *endpoint;
	struct shared_words words;
	int doorbell;
};

static int share_words(struct tk_fabric *fabric, void *argument)
{
	(void)fabric;
	const struct sharing *sharing = argument;
	sharing->endpoint->doorbell = sharing->doorbell;
	sharing->endpoint->shared_words = sharing->words;
	return 0;
}

int tk_endpoint_share_words(struct tk_endpoint *endpoint, uint64_t target, uint64_t key, uint64_t words, uint32_t count,
			    int doorbell)
{
	if (!endpoint || words % 8 || doorbell < 0)
		return -EINVAL;
	struct sharing sharing = {endpoint, {{target, key}, words, count}, doorbell};
	return on_the_thread(endpoint->fabric, share_words, &sharing, sizeof sharing);
}
