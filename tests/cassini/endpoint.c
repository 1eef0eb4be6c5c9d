/*
 * Endpoints: what they are bound to, when they work, and the path of an operation through one.
 *
 * What always holds: an endpoint with regions bound to it doesn't close; one that closes drops what is still under
 * way, without entries and without counting. Until it is enabled, every operation is -FI_ENOSYS.
 */
#include "cassini.h"

#include <stdlib.h>
#include <string.h>

#define QUEUE_FLAGS (FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION)
#define COUNTER_FLAGS (FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)

static struct fi_ops fid_ops;
static struct fi_ops_ep endpoint_ops;
static struct fi_ops_cm cm_ops;

void op_push(struct op_list *list, struct op *op)
{
	op->next = NULL;
	if (list->tail)
		list->tail->next = op;
	else
		list->head = op;
	list->tail = op;
}

struct op *op_pop(struct op_list *list)
{
	struct op *op = list->head;
	if (op)
		op_remove(list, op);
	return op;
}

void op_remove(struct op_list *list, struct op *op)
{
	struct op *before = NULL, *at = list->head;
	for (; at != op; at = at->next)
		before = at;
	if (before)
		before->next = op->next;
	else
		list->head = op->next;
	if (list->tail == op)
		list->tail = before;
}

void op_free(struct op *op)
{
	op->endpoint->requests -= (size_t)op->holds_request;
	if (op->counter)
		op->counter->uses--;
	free(op->copy);
	free(op);
}

/* An operation for the bytes of a write whose completion doesn't wait for its arrival. */
static struct op *straggler(struct op *op)
{
	struct op *rest = calloc(1, sizeof *rest);
	void *copy = op->copy ? op->copy : malloc(op->length + 1);
	if (!rest || !copy)
		give_up("there is no memory for a write.");
	if (!op->copy)
		memcpy(copy, op->buffer, op->length);
	*rest = (struct op){.endpoint = op->endpoint, .context = op->endpoint->fid.fid.context, .buffer = copy,
			    .copy = copy, .length = op->length, .offset = op->offset, .key = op->key,
			    .flags = op->flags & ~FI_COMPLETION, .peer = op->peer, .kind = OP_WRITE};
	op->copy = NULL;
	return rest;
}

/* Every nth write of more than a word fails: alternately before its first byte, and after half of them. */
static int is_doomed(struct op *op)
{
	struct domain *domain = op->endpoint->domain;
	if (!domain->fails_every || op->kind != OP_WRITE || (long)op->length < domain->fails_from)
		return 0;
	if (++domain->writes % domain->fails_every)
		return 0;
	op->doomed = 1;
	return domain->writes / domain->fails_every % 2;
}

void endpoint_start(struct op *op)
{
	struct endpoint *endpoint = op->endpoint;
	if (is_doomed(op)) {
		endpoint_finish(op, FI_EIO);
		return;
	}
	if (endpoint->domain->reorders && !endpoint->ordered) {
		if (op->kind == OP_WRITE && !(op->flags & (FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE)) && !op->doomed) {
			struct op *rest = straggler(op);
			endpoint_finish(op, 0);
			op = rest;
		}
		wire_shuffle(op);
	}
	hold_write(op);
	op_push(&endpoint->ready, op);
	nic_wake(endpoint->domain);
}

/* The NIC's part of a completion: the counter. The entry waits until software reads the queue. */
void endpoint_finish(struct op *op, int error)
{
	if (op->counter && error)
		counter_add_failure(op->counter, 1);
	else if (op->counter)
		counter_add(op->counter, 1);
	op->error = error;
	if (op->holds_request || error)
		op_push(&op->endpoint->done, op);
	else
		op_free(op);
}

/* Software's part: the entry, and the request is free again. */
void endpoint_progress(struct endpoint *endpoint)
{
	for (struct op *op; (op = op_pop(&endpoint->done));) {
		uint64_t flags = FI_RMA | (op->kind == OP_WRITE ? FI_WRITE : FI_READ);
		if (op->error || op->flags & FI_COMPLETION)
			queue_push(endpoint->transmit_queue, op->context, flags, op->error);
		op_free(op);
	}
}

static struct endpoint *endpoint_of(struct fid *fid)
{
	return (struct endpoint *)fid;
}

static int bind_queue(struct endpoint *endpoint, struct completion_queue *queue, uint64_t flags)
{
	if (flags & ~QUEUE_FLAGS)
		return -FI_EBADFLAGS;
	if (queue->domain != endpoint->domain || (flags & FI_TRANSMIT && endpoint->transmit_queue))
		return -FI_EINVAL;
	if (flags & FI_RECV && endpoint->receive_queue)
		return -FI_EINVAL;
	if (flags & FI_TRANSMIT) {
		endpoint->transmit_queue = queue;
		endpoint->selective = !!(flags & FI_SELECTIVE_COMPLETION);
		if (!endpoint->selective)
			endpoint->op_flags |= FI_COMPLETION;
		queue->users++;
	}
	if (flags & FI_RECV) {
		endpoint->receive_queue = queue;
		queue->users++;
	}
	return 0;
}

/* A counter of remote writes is accepted here and counts nothing: only a region's does. */
static int bind_counter(struct endpoint *endpoint, struct counter *counter, uint64_t flags)
{
	struct {
		uint64_t flag;
		struct counter **place;
	} kinds[] = {
		{FI_SEND, &endpoint->send_counter},
		{FI_RECV, &endpoint->receive_counter},
		{FI_READ, &endpoint->read_counter},
		{FI_WRITE, &endpoint->write_counter},
	};
	if (flags & ~COUNTER_FLAGS)
		return -FI_EBADFLAGS;
	if (counter->domain != endpoint->domain)
		return -FI_EINVAL;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if (flags & kinds[i].flag && *kinds[i].place)
			return -FI_EINVAL;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		if (!(flags & kinds[i].flag))
			continue;
		*kinds[i].place = counter;
		counter->bound++;
	}
	return 0;
}

static int bind_addresses(struct endpoint *endpoint, struct address_vector *addresses, uint64_t flags)
{
	if (flags)
		return -FI_EBADFLAGS;
	if (addresses->domain != endpoint->domain)
		return -FI_EINVAL;
	if (endpoint->addresses)
		return say(-FI_EINVAL, "an endpoint was bound to a second address vector.");
	endpoint->addresses = addresses;
	addresses->users++;
	return 0;
}

static int endpoint_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
	struct endpoint *endpoint = endpoint_of(fid);
	int status = -FI_EINVAL;
	if (!other)
		return -FI_EINVAL;
	domain_lock(endpoint->domain);
	if (other->fclass == FI_CLASS_CQ)
		status = bind_queue(endpoint, (struct completion_queue *)other, flags);
	else if (other->fclass == FI_CLASS_CNTR)
		status = bind_counter(endpoint, (struct counter *)other, flags);
	else if (other->fclass == FI_CLASS_AV)
		status = bind_addresses(endpoint, (struct address_vector *)other, flags);
	domain_unlock(endpoint->domain);
	return status;
}

static int enable(struct endpoint *endpoint)
{
	if (endpoint->enabled)
		return 0;
	if (!endpoint->addresses)
		return -FI_ENOAV;
	if (!endpoint->transmit_queue)
		return -FI_ENOCQ;
	int status = wire_open(endpoint);
	if (status)
		return status;
	if (endpoint->caps & (FI_READ | FI_WRITE))
		endpoint->fid.rma = &rma_ops;
	endpoint->enabled = 1;
	return 0;
}

static int control(struct fid *fid, int command, void *argument)
{
	struct endpoint *endpoint = endpoint_of(fid);
	(void)argument;
	if (command == FI_ALIAS || command == FI_GETOPSFLAG || command == FI_SETOPSFLAG)
		return say(-FI_ENOSYS, "cxi has aliases of endpoints and flags to set on them, the stand-in hasn't.");
	if (command != FI_ENABLE)
		return -FI_EINVAL;
	domain_lock(endpoint->domain);
	int status = enable(endpoint);
	domain_unlock(endpoint->domain);
	return status;
}

static int getname(fid_t fid, void *out, size_t *length)
{
	struct endpoint *endpoint = endpoint_of(fid);
	size_t room = *length;
	if (!endpoint->enabled)
		return -FI_EOPBADSTATE;
	memcpy(out, &endpoint->address, room < ADDRESS_BYTES ? room : ADDRESS_BYTES);
	*length = ADDRESS_BYTES;
	return room < ADDRESS_BYTES ? -FI_ETOOSMALL : 0;
}

static ssize_t cancel(fid_t fid, void *context)
{
	(void)fid, (void)context;
	return -FI_ENOENT; /* only receives can be cancelled, and there are none */
}

static int getopt(fid_t fid, int level, int name, void *value, size_t *length)
{
	(void)fid, (void)level, (void)name, (void)value, (void)length;
	return -FI_ENOPROTOOPT;
}

static int setopt(fid_t fid, int level, int name, const void *value, size_t length)
{
	(void)fid, (void)level, (void)name, (void)value, (void)length;
	return -FI_ENOPROTOOPT;
}

static void unbind(struct endpoint *endpoint)
{
	struct counter *counters[] = {endpoint->send_counter, endpoint->receive_counter, endpoint->read_counter,
				      endpoint->write_counter};
	for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
		if (counters[i])
			counters[i]->bound--;
	if (endpoint->transmit_queue)
		endpoint->transmit_queue->users--;
	if (endpoint->receive_queue)
		endpoint->receive_queue->users--;
	if (endpoint->addresses)
		endpoint->addresses->users--;
}

static int endpoint_close(struct fid *fid)
{
	struct endpoint *endpoint = endpoint_of(fid);
	struct domain *domain = endpoint->domain;
	int status = 0;
	domain_lock(domain);
	if (endpoint->bound) {
		status = -FI_EBUSY;
	} else if (endpoint->triggered) {
		status = say(-FI_EBUSY, "an endpoint was closed whose deferred work neither fired nor was flushed.");
	} else {
		struct op_list *lists[] = {&endpoint->ready, &endpoint->suspects, &endpoint->posted, &endpoint->done};
		wire_close(endpoint);
		for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
			for (struct op *op; (op = op_pop(lists[i]));)
				op_free(op);
		unbind(endpoint);
		struct endpoint **at = &domain->endpoints;
		while (*at != endpoint)
			at = &(*at)->next;
		*at = endpoint->next;
		domain->users--;
	}
	domain_unlock(domain);
	if (!status)
		free(endpoint);
	return status;
}

int endpoint_open(struct fid_domain *fid, struct fi_info *info, struct fid_ep **out, void *context)
{
	struct domain *domain = (struct domain *)fid;
	if (!out || !info || !info->ep_attr || !info->tx_attr || !info->rx_attr)
		return -FI_EINVAL;
	if (info->tx_attr->size > REQUESTS_MAX)
		return -FI_EINVAL;
	struct endpoint *endpoint = calloc(1, sizeof *endpoint);
	if (!endpoint)
		return -FI_ENOMEM;
	endpoint->fid.fid = (struct fid){.fclass = FI_CLASS_EP, .context = context, .ops = &fid_ops};
	endpoint->fid.ops = &endpoint_ops;
	endpoint->fid.cm = &cm_ops;
	endpoint->fid.msg = &no_messages;
	endpoint->fid.rma = &no_rma;
	endpoint->fid.tagged = &no_tagged;
	endpoint->fid.atomic = &no_atomics;
	endpoint->fid.collective = &no_collectives;
	endpoint->domain = domain;
	endpoint->caps = info->caps;
	endpoint->op_flags = info->tx_attr->op_flags;
	endpoint->ordered = !!(info->tx_attr->msg_order & (FI_ORDER_WAW | FI_ORDER_RMA_WAW));
	endpoint->requests_max = info->tx_attr->size ? info->tx_attr->size : REQUESTS_DEFAULT;
	domain_lock(domain);
	endpoint->next = domain->endpoints;
	domain->endpoints = endpoint;
	domain->users++;
	domain_unlock(domain);
	*out = &endpoint->fid;
	return 0;
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = endpoint_close;
	fid_ops.bind = endpoint_bind;
	fid_ops.control = control;
	refuse_all(&endpoint_ops, sizeof endpoint_ops);
	endpoint_ops.cancel = cancel;
	endpoint_ops.getopt = getopt;
	endpoint_ops.setopt = setopt;
	refuse_all(&cm_ops, sizeof cm_ops);
	cm_ops.getname = getname;
}
