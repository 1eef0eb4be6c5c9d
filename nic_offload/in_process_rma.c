/*
 * Endpoints of the provider `memory`, and the writes and reads through them: see in_process.c.
 */
#define _GNU_SOURCE
#include "in_process.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* The peer's memory, or NULL: no access. */
static char *remote_memory(const struct memory_endpoint *peer, const struct fi_rma_iov *range, uint64_t access)
{
	for (const struct memory_region *region = peer->domain->regions; region; region = region->next) {
		uint64_t base = (uintptr_t)region->address;
		if (region->mr.key != range->key || !(region->access & access))
			continue;
		int is_within = range->addr >= base && range->addr - base <= region->length &&
				range->len <= region->length - (range->addr - base);
		return is_within ? (char *)(uintptr_t)range->addr : NULL;
	}
	return NULL;
}

static const struct memory_endpoint *peer_of(const struct memory_endpoint *endpoint, fi_addr_t peer)
{
	if (peer >= endpoint->peers->count)
		return NULL;
	const struct location *location = &endpoint->peers->locations[peer];
	const struct memory_endpoint *other = location->endpoint ? memory_endpoints : NULL;
	for (; other && memcmp(&other->location, location, sizeof *location); other = other->next)
		;
	return other;
}

/* One range, from or to the next local bytes. */
static void copy(char *remote, size_t length, const struct iovec **local, size_t *at, int is_read)
{
	while (length) {
		size_t left = (*local)->iov_len - *at, part = left < length ? left : length;
		char *mine = (char *)(*local)->iov_base + *at;
		uint64_t word;
		if (is_read) {
			memcpy(mine, remote, part);
		} else if (part == sizeof word && !((uintptr_t)remote % sizeof word)) {
			memcpy(&word, mine, sizeof word);
			__atomic_store_n((uint64_t *)remote, word, __ATOMIC_RELEASE);
		} else {
			memcpy(remote, mine, part);
		}
		remote += part;
		length -= part;
		*at += part;
		if (*at == (*local)->iov_len) {
			(*local)++;
			*at = 0;
		}
	}
}

static int transfer(struct memory_endpoint *endpoint, const struct fi_msg_rma *message, int is_read)
{
	const struct memory_endpoint *peer = peer_of(endpoint, message->addr);
	if (!peer)
		return FI_ECONNREFUSED;
	uint64_t access = is_read ? FI_REMOTE_READ : FI_REMOTE_WRITE;
	for (size_t i = 0; i < message->rma_iov_count; i++)
		if (!remote_memory(peer, &message->rma_iov[i], access))
			return FI_EACCES;
	const struct iovec *local = message->msg_iov;
	size_t at = 0;
	for (size_t i = 0; i < message->rma_iov_count; i++)
		copy((char *)(uintptr_t)message->rma_iov[i].addr, message->rma_iov[i].len, &local, &at, is_read);
	if (!is_read && peer->domain->woken)
		fabric_wake(peer->domain->woken);
	return 0;
}

static ssize_t post(struct fid_ep *fid, const struct fi_msg_rma *message, int is_read, int is_reported)
{
	struct memory_endpoint *endpoint = (struct memory_endpoint *)fid;
	pthread_mutex_lock(&memory_lock);
	/* room for the completion first: a write can't be undone */
	ssize_t status = is_reported ? memory_complete(endpoint->queue, message->context, 0) : 0;
	if (!status) {
		int error = transfer(endpoint, message, is_read);
		if (is_reported)
			endpoint->queue->entries[endpoint->queue->end - 1].error = error;
	}
	pthread_mutex_unlock(&memory_lock);
	return status;
}

static ssize_t write_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
	return post(fid, message, 0, 1);
}

static ssize_t read_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags)
{
	return post(fid, message, 1, 1);
}

static ssize_t write_plain(struct fid_ep *fid, const void *bytes, size_t length, void *desc, fi_addr_t peer,
			   uint64_t target, uint64_t key, void *context)
{
	struct iovec local = {(void *)bytes, length};
	struct fi_rma_iov remote = {target, length, key};
	struct fi_msg_rma message = {&local, NULL, 1, peer, &remote, 1, context, 0};
	return post(fid, &message, 0, 1);
}

static ssize_t inject(struct fid_ep *fid, const void *bytes, size_t length, fi_addr_t peer, uint64_t target,
		      uint64_t key)
{
	struct iovec local = {(void *)bytes, length};
	struct fi_rma_iov remote = {target, length, key};
	struct fi_msg_rma message = {&local, NULL, 1, peer, &remote, 1, NULL, 0};
	return post(fid, &message, 0, 0);
}

/* --- memory_endpoints */

static int bind_endpoint(struct fid *fid, struct fid *other, uint64_t flags)
{
	struct memory_endpoint *endpoint = (struct memory_endpoint *)fid;
	if (other->fclass == FI_CLASS_AV)
		endpoint->peers = (struct memory_peers *)other;
	else
		endpoint->queue = (struct memory_queue *)other;
	return 0;
}

static int close_endpoint(struct fid *fid)
{
	pthread_mutex_lock(&memory_lock);
	for (struct memory_endpoint **link = &memory_endpoints; *link; link = &(*link)->next)
		if (*link == (struct memory_endpoint *)fid) {
			*link = (*link)->next;
			break;
		}
	pthread_mutex_unlock(&memory_lock);
	return memory_close_plain(fid);
}

static int name_of(fid_t fid, void *out, size_t *length)
{
	const struct location *location = &((struct memory_endpoint *)fid)->location;
	if (*length < sizeof *location)
		return -FI_ETOOSMALL;
	memcpy(out, location, sizeof *location);
	*length = sizeof *location;
	return 0;
}

static struct fi_ops endpoint_fid_ops = {
	.size = sizeof endpoint_fid_ops, .close = close_endpoint, .bind = bind_endpoint, .control = memory_control};
static struct fi_ops_cm name_ops = {.size = sizeof name_ops, .getname = name_of};
static struct fi_ops_rma rma_ops = {.size = sizeof rma_ops,
				    .readmsg = read_message,
				    .write = write_plain,
				    .writemsg = write_message,
				    .inject = inject};

int memory_open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context)
{
	struct memory_endpoint *endpoint = calloc(1, sizeof *endpoint);
	if (!endpoint)
		return -FI_ENOMEM;
	endpoint->fid = (struct fid_ep){
		.fid = {FI_CLASS_EP, context, &endpoint_fid_ops}, .cm = &name_ops, .rma = &rma_ops};
	endpoint->domain = (struct memory_domain *)domain;
	endpoint->location.process = getpid();
	uint64_t *number = &endpoint->location.endpoint; /* random, and long enough to be unique */
	while (!*number)
		if (getrandom(number, sizeof *number, 0) != sizeof *number) {
			free(endpoint);
			return -FI_EIO;
		}
	pthread_mutex_lock(&memory_lock);
	endpoint->next = memory_endpoints;
	memory_endpoints = endpoint;
	pthread_mutex_unlock(&memory_lock);
	*out = &endpoint->fid;
	return 0;
}

