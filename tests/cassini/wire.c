/*
 * The wire: an endpoint of the real libfabric beneath each endpoint of the stand-in.
 *
 * What always holds: one wire domain for each endpoint, with its regions in it, so that a key reaches nothing through
 * another endpoint. Every write is acknowledged by the target once its bytes are there. Each write to a region that
 * counts carries its key, because the wire reports nothing else to a target.
 *
 * A wrong key breaks the wire's whole connection, and other operations with it. So every failed operation is
 * repeated alone, and only then counts as failed. A NIC would have failed just the one.
 */
#include "cassini.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define POSTED_MAX 64u
#define ENTRIES 1024
#define COMPLETIONS_A_TURN 32
#define MOVED_NS 5000u

static int refused(struct endpoint *endpoint, int status)
{
	wire_close(endpoint);
	return status;
}

int wire_open(struct endpoint *endpoint)
{
	struct domain *domain = endpoint->domain;
	struct wire *wire = &endpoint->wire;
	struct fi_cq_attr cq = {.size = ENTRIES, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
	struct fi_av_attr av = {.type = FI_AV_TABLE};
	int status = fi_domain(domain->wire_fabric, domain->wire_info, &wire->domain, NULL);
	if (status)
		return status;
	if ((status = fi_cq_open(wire->domain, &cq, &wire->cq, NULL)) ||
	    (status = fi_av_open(wire->domain, &av, &wire->av, NULL)) ||
	    (status = fi_endpoint(wire->domain, domain->wire_info, &wire->ep, NULL)) ||
	    (status = fi_ep_bind(wire->ep, &wire->cq->fid, FI_TRANSMIT | FI_RECV)) ||
	    (status = fi_ep_bind(wire->ep, &wire->av->fid, 0)) || (status = fi_enable(wire->ep)))
		return refused(endpoint, status);
	struct sockaddr_in name;
	size_t length = sizeof name;
	if ((status = fi_getname(&wire->ep->fid, &name, &length)))
		return refused(endpoint, status);
	endpoint->address = (struct address){.ip = name.sin_addr.s_addr, .port = name.sin_port};
	return 0;
}

static void close_fid(struct fid *fid)
{
	if (fid)
		fi_close(fid);
}

void wire_close(struct endpoint *endpoint)
{
	struct wire *wire = &endpoint->wire;
	close_fid(wire->ep ? &wire->ep->fid : NULL);
	close_fid(wire->cq ? &wire->cq->fid : NULL);
	close_fid(wire->av ? &wire->av->fid : NULL);
	close_fid(wire->domain ? &wire->domain->fid : NULL);
	free(wire->peers);
	*wire = (struct wire){0};
}

static struct peer *peer_of(struct wire *wire, const struct address *address)
{
	for (size_t i = 0; i < wire->peers_count; i++)
		if (!memcmp(&wire->peers[i].address, address, sizeof *address))
			return &wire->peers[i];
	if (wire->peers_count == wire->peers_capacity) {
		size_t wanted = wire->peers_capacity ? wire->peers_capacity * 2 : 16;
		struct peer *larger = realloc(wire->peers, wanted * sizeof *larger);
		if (!larger)
			return NULL;
		wire->peers = larger;
		wire->peers_capacity = wanted;
	}
	struct sockaddr_in name = {
		.sin_family = AF_INET, .sin_port = address->port, .sin_addr = {.s_addr = address->ip}};
	struct peer *peer = &wire->peers[wire->peers_count];
	*peer = (struct peer){.address = *address};
	if (fi_av_insert(wire->av, &name, 1, &peer->wire, 0, NULL) != 1)
		return NULL;
	wire->peers_count++;
	return peer;
}

static int post(struct op *op, const struct peer *peer)
{
	size_t half = op->length / 2, first = op->part == UPPER_HALF ? half : 0;
	size_t length = op->part == WHOLE && !op->doomed ? op->length : op->part == UPPER_HALF ? op->length - half : half;
	struct iovec local = {(char *)op->buffer + first, length};
	struct fi_rma_iov remote = {op->offset + first, length, op->key};
	struct fi_msg_rma message = {
		.msg_iov = &local,
		.iov_count = 1,
		.addr = peer->wire,
		.rma_iov = &remote,
		.rma_iov_count = 1,
		.context = &op->wire_context,
		.data = op->key,
	};
	struct fid_ep *ep = op->endpoint->wire.ep;
	if (op->kind == OP_READ)
		return (int)fi_readmsg(ep, &message, FI_COMPLETION);
	int is_last = op->part != UPPER_HALF;
	uint64_t counts = is_last && op->key & KEY_IS_PROVIDERS && op->key & KEY_COUNTS ? FI_REMOTE_CQ_DATA : 0;
	return (int)fi_writemsg(ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE | counts);
}

static int error_of(int wire_error)
{
	switch (wire_error) {
	case ECONNREFUSED:
	case EHOSTUNREACH:
	case ENETUNREACH:
	case ETIMEDOUT:
		return FI_EHOSTUNREACH;
	default:
		return FI_EIO;
	}
}

static void failed(struct op *op, int wire_error)
{
	if (op->suspected) {
		endpoint_finish(op, error_of(wire_error));
		return;
	}
	op->suspected = 1;
	op->refused_since_ns = 0;
	op_push(&op->endpoint->suspects, op);
}

/* 1: it has left its list, successful or not. */
static int try_to_post(struct op_list *list, struct op *op)
{
	struct endpoint *endpoint = op->endpoint;
	struct peer *peer = peer_of(&endpoint->wire, &op->peer);
	if (peer && peer->refuses)
		return 0;
	int status = peer ? post(op, peer) : -FI_ENOMEM;
	if (status == -FI_EAGAIN) {
		uint64_t now = now_ns();
		peer->refuses = 1;
		if (!op->refused_since_ns || endpoint->posted_count)
			op->refused_since_ns = now;
		if (now - op->refused_since_ns < endpoint->domain->unreachable_ns)
			return 0;
		op_remove(list, op);
		endpoint_finish(op, FI_EHOSTUNREACH);
		return 1;
	}
	op_remove(list, op);
	if (status) {
		failed(op, -status);
		return 1;
	}
	op_push(&endpoint->posted, op);
	endpoint->posted_count++;
	return 1;
}

/* As an endpoint without an order permits: any operation may overtake another, and a write's second half its first. */
void wire_shuffle(struct op *op)
{
	uint32_t *chance = &op->endpoint->domain->chance;
	*chance = *chance * 1664525u + 1013904223u;
	op->waits = (int)(*chance >> 24 & 15);
	if (op->kind == OP_WRITE && op->length > sizeof(uint64_t) && !op->doomed)
		op->part = UPPER_HALF;
}

static int post_some(struct endpoint *endpoint)
{
	int busy = 0, passed = 0;
	for (size_t i = 0; i < endpoint->wire.peers_count; i++)
		endpoint->wire.peers[i].refuses = 0;
	if (endpoint->posted.head && endpoint->posted.head->suspected)
		return 0;
	if (endpoint->suspects.head)
		return endpoint->posted_count ? 0 : try_to_post(&endpoint->suspects, endpoint->suspects.head);
	for (struct op *op = endpoint->ready.head, *next; op && endpoint->posted_count < POSTED_MAX; op = next) {
		next = op->next;
		if (op->flags & FI_FENCE && (endpoint->posted_count || passed))
			break;
		if (is_held(op)) {
			passed = 1;
			continue;
		}
		if (op->waits) {
			op->waits--;
			busy = passed = 1;
			continue;
		}
		busy |= try_to_post(&endpoint->ready, op);
	}
	return busy;
}

static void count_remote_write(struct endpoint *endpoint, uint64_t key)
{
	for (struct region *region = endpoint->regions; region; region = region->next)
		if (region->enabled && region->fid.key == key && region->counter)
			counter_add(region->counter, 1);
}

static void ended(struct endpoint *endpoint, struct op *op, int wire_error)
{
	op_remove(&endpoint->posted, op);
	endpoint->posted_count--;
	if (op->doomed)
		endpoint_finish(op, FI_EIO);
	else if (wire_error)
		failed(op, wire_error);
	else if (op->part == UPPER_HALF) {
		wire_shuffle(op);
		op->part = LOWER_HALF;
		op->suspected = 0;
		op_push(&endpoint->ready, op);
	}
	else
		endpoint_finish(op, 0);
}

static int drain(struct endpoint *endpoint)
{
	struct fi_cq_data_entry entries[COMPLETIONS_A_TURN];
	ssize_t count = fi_cq_read(endpoint->wire.cq, entries, COMPLETIONS_A_TURN);
	if (count == -FI_EAVAIL) {
		struct fi_cq_err_entry error = {0};
		/* An interrupted incoming write belongs to no operation of ours; its sender gets the error. */
		if (fi_cq_readerr(endpoint->wire.cq, &error, 0) == 1 && error.op_context)
			ended(endpoint, error.op_context, error.err ? error.err : EIO);
		return 1;
	}
	for (ssize_t i = 0; i < count; i++) {
		if (entries[i].flags & FI_REMOTE_CQ_DATA)
			count_remote_write(endpoint, entries[i].data);
		else if (entries[i].op_context)
			ended(endpoint, entries[i].op_context, 0);
	}
	return count > 0;
}

/* Bytes written by a peer cause no completion here. If reading the queue took long, it has moved some, and more are
 * likely to follow: a nap now would slow the peer down to one socket buffer per nap. */
int wire_turn(struct endpoint *endpoint)
{
	uint64_t before = now_ns();
	int busy = drain(endpoint) || now_ns() - before > MOVED_NS;
	return post_some(endpoint) | busy | (endpoint->posted_count != 0);
}
