/*
 * Reads and writes: what is refused at once and with which errno, and what becomes an operation for the NIC.
 *
 * What always holds: the address of the peer and the bytes of an inject are taken in the call; one local and one
 * remote range; a request is held from the call until software reads the queue, whenever the end of the operation
 * has to be seen by software. Small writes without a requested completion need none.
 */
#include "cassini.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define COMPLETE_ANYHOW (FI_INJECT_COMPLETE | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE)
#define READ_FLAGS (FI_COMPLETION | FI_MORE | FI_FENCE | COMPLETE_ANYHOW)
#define WRITE_FLAGS (READ_FLAGS | FI_INJECT | FI_CXI_HRP | FI_CXI_WEAK_FENCE_BIT)

struct fi_ops_rma rma_ops;

static int needs_request(const struct endpoint *endpoint, const struct rma *rma)
{
	if (rma->flags & FI_COMPLETION)
		return 1;
	int rides_in_the_command = rma->kind == OP_WRITE && !rma->deferred && rma->length <= INJECT_BYTES_MAX;
	int has_descriptor = endpoint->domain->hybrid_descriptors && rma->descriptor;
	return rma->length && !rides_in_the_command && !has_descriptor;
}

/* With the lock held; the checks are in the provider's order. */
int rma_prepare(struct endpoint *endpoint, const struct rma *rma, struct op **out)
{
	struct address peer;
	if (rma->length && !rma->buffer)
		return -FI_EINVAL;
	if (rma->flags & FI_INJECT && rma->length > INJECT_BYTES_MAX)
		return -FI_EMSGSIZE;
	if (rma->length > MESSAGE_BYTES_MAX)
		return -FI_EMSGSIZE;
	if (!(rma->key & KEY_IS_PROVIDERS) && rma->key > KEY_CLIENTS_MAX)
		return -FI_EKEYREJECTED;
	if (rma->flags & FI_REMOTE_CQ_DATA)
		return -FI_EINVAL;
	int status = addresses_find(endpoint->addresses, rma->peer, &peer);
	if (status)
		return status;
	int holds_request = needs_request(endpoint, rma);
	if (holds_request && endpoint->requests >= endpoint->requests_max)
		return -FI_EAGAIN;

	struct op *op = calloc(1, sizeof *op);
	if (!op)
		return -FI_ENOMEM;
	op->endpoint = endpoint;
	op->kind = rma->kind;
	op->buffer = (void *)rma->buffer;
	op->length = rma->length;
	op->peer = peer;
	op->offset = rma->offset;
	op->key = rma->key;
	op->flags = rma->flags;
	op->holds_request = holds_request;
	/* An operation without a request can fail too; the error then has the endpoint's context. */
	op->context = holds_request ? rma->context : endpoint->fid.fid.context;
	op->counter = rma->counter;
	if (!rma->deferred)
		op->counter = rma->kind == OP_WRITE ? endpoint->write_counter : endpoint->read_counter;
	if (rma->length && (rma->flags & FI_INJECT || !holds_request) && rma->kind == OP_WRITE && !rma->deferred) {
		op->copy = malloc(rma->length);
		if (!op->copy) {
			free(op);
			return -FI_ENOMEM;
		}
		memcpy(op->copy, rma->buffer, rma->length);
		op->buffer = op->copy;
	}
	if (op->counter)
		op->counter->uses++;
	endpoint->requests += (size_t)holds_request;
	*out = op;
	return 0;
}

static ssize_t start(struct endpoint *endpoint, const struct rma *rma)
{
	struct op *op;
	domain_lock(endpoint->domain);
	int status = rma_prepare(endpoint, rma, &op);
	if (!status)
		endpoint_start(op);
	domain_unlock(endpoint->domain);
	return status;
}

static struct endpoint *endpoint_of(struct fid_ep *fid)
{
	return (struct endpoint *)fid;
}

static ssize_t plain(struct fid_ep *fid, enum op_kind kind, const void *buffer, size_t length, void *descriptor,
		     fi_addr_t peer, uint64_t offset, uint64_t key, void *context)
{
	struct rma rma = {
		.kind = kind,
		.buffer = buffer,
		.length = length,
		.descriptor = descriptor,
		.peer = peer,
		.offset = offset,
		.key = key,
		.flags = endpoint_of(fid)->op_flags,
		.context = context,
	};
	return start(endpoint_of(fid), &rma);
}

static ssize_t vector(struct fid_ep *fid, enum op_kind kind, const struct iovec *ranges, void **descriptors,
		      size_t count, fi_addr_t peer, uint64_t offset, uint64_t key, void *context)
{
	if (count > 1 || (count && !ranges))
		return -FI_EINVAL;
	if (!count)
		return plain(fid, kind, NULL, 0, NULL, peer, offset, key, context);
	return plain(fid, kind, ranges->iov_base, ranges->iov_len, descriptors ? *descriptors : NULL, peer, offset, key,
		     context);
}

static ssize_t message(struct fid_ep *fid, enum op_kind kind, const struct fi_msg_rma *message, uint64_t flags,
		       uint64_t flags_allowed)
{
	struct endpoint *endpoint = endpoint_of(fid);
	if (!message || message->rma_iov_count != 1)
		return -FI_EINVAL;
	if (message->iov_count > 1 || (message->iov_count && !message->msg_iov))
		return -FI_EINVAL;
	if (flags & ~flags_allowed)
		return -FI_EBADFLAGS;
	if (flags & FI_FENCE && !(endpoint->caps & FI_FENCE))
		return -FI_EINVAL;
	if (!endpoint->selective)
		flags |= FI_COMPLETION;
	struct rma rma = {
		.kind = kind,
		.buffer = message->iov_count ? message->msg_iov->iov_base : NULL,
		.length = message->iov_count ? message->msg_iov->iov_len : 0,
		.descriptor = message->iov_count && message->desc ? *message->desc : NULL,
		.peer = message->addr,
		.offset = message->rma_iov->addr,
		.key = message->rma_iov->key,
		.flags = flags,
		.context = message->context,
	};
	return start(endpoint, &rma);
}

static ssize_t rma_read(struct fid_ep *fid, void *buffer, size_t length, void *descriptor, fi_addr_t peer,
			uint64_t offset, uint64_t key, void *context)
{
	return plain(fid, OP_READ, buffer, length, descriptor, peer, offset, key, context);
}

static ssize_t rma_readv(struct fid_ep *fid, const struct iovec *ranges, void **descriptors, size_t count,
			 fi_addr_t peer, uint64_t offset, uint64_t key, void *context)
{
	return vector(fid, OP_READ, ranges, descriptors, count, peer, offset, key, context);
}

static ssize_t rma_readmsg(struct fid_ep *fid, const struct fi_msg_rma *wanted, uint64_t flags)
{
	return message(fid, OP_READ, wanted, flags, READ_FLAGS);
}

static ssize_t rma_write(struct fid_ep *fid, const void *buffer, size_t length, void *descriptor, fi_addr_t peer,
			 uint64_t offset, uint64_t key, void *context)
{
	return plain(fid, OP_WRITE, buffer, length, descriptor, peer, offset, key, context);
}

static ssize_t rma_writev(struct fid_ep *fid, const struct iovec *ranges, void **descriptors, size_t count,
			  fi_addr_t peer, uint64_t offset, uint64_t key, void *context)
{
	return vector(fid, OP_WRITE, ranges, descriptors, count, peer, offset, key, context);
}

static ssize_t rma_writemsg(struct fid_ep *fid, const struct fi_msg_rma *wanted, uint64_t flags)
{
	return message(fid, OP_WRITE, wanted, flags, WRITE_FLAGS);
}

static ssize_t rma_inject(struct fid_ep *fid, const void *buffer, size_t length, fi_addr_t peer, uint64_t offset,
			  uint64_t key)
{
	struct rma rma = {
		.kind = OP_WRITE,
		.buffer = buffer,
		.length = length,
		.peer = peer,
		.offset = offset,
		.key = key,
		.flags = FI_INJECT,
	};
	return start(endpoint_of(fid), &rma);
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&rma_ops, sizeof rma_ops);
	rma_ops.read = rma_read;
	rma_ops.readv = rma_readv;
	rma_ops.readmsg = rma_readmsg;
	rma_ops.write = rma_write;
	rma_ops.writev = rma_writev;
	rma_ops.writemsg = rma_writemsg;
	rma_ops.inject = rma_inject;
}
