/*
 * The provider `memory`: a fabric between endpoints of one process, without libfabric, sockets or a NIC.
 *
 * It implements the part of libfabric's provider interface that this core uses, so all other code is the same as over a
 * network. A write is a copy into the peer's memory, complete when the call returns; an aligned 8-byte range is stored
 * at once, after all bytes before it.
 *
 * What always holds: a write goes only into an open region, within its bounds, with its key and the right to write,
 * through an open endpoint; once a region or an endpoint is closed, nothing more is written through it. An
 * endpoint of another process, or of this one before a fork, is not reached.
 * What it doesn't do: triggered operations (our agent fires them), messages, atomics, or high throughput: each copy
 * holds one lock.
 */
#define _GNU_SOURCE
#include "in_process.h"

#include "library.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
struct memory_endpoint *memory_endpoints;
static pthread_once_t fork_handled = PTHREAD_ONCE_INIT;

int memory_close_plain(struct fid *fid)
{
	free(fid);
	return 0;
}

int memory_control(struct fid *fid, int command, void *argument)
{
	return fid->fclass == FI_CLASS_EP && command == FI_ENABLE ? 0 : -FI_ENOSYS;
}

/* --- queues */

int memory_complete(struct memory_queue *queue, void *context, int error)
{
	if (queue->end == queue->capacity) {
		size_t capacity = queue->capacity ? 2 * queue->capacity : 64;
		struct completion *entries = realloc(queue->entries, capacity * sizeof *entries);
		if (!entries)
			return -FI_EAGAIN;
		queue->entries = entries;
		queue->capacity = capacity;
	}
	queue->entries[queue->end++] = (struct completion){context, error};
	return 0;
}

static const struct completion *take(struct memory_queue *queue)
{
	const struct completion *taken = &queue->entries[queue->first++];
	if (queue->first == queue->end)
		queue->first = queue->end = 0;
	return taken;
}

static ssize_t read_queue(struct fid_cq *fid, void *out, size_t count)
{
	struct memory_queue *queue = (struct memory_queue *)fid;
	struct fi_cq_entry *entries = out;
	ssize_t taken = 0;
	pthread_mutex_lock(&memory_lock);
	for (; (size_t)taken < count && queue->first < queue->end && !queue->entries[queue->first].error; taken++)
		entries[taken].op_context = take(queue)->context;
	if (!taken)
		taken = queue->first < queue->end ? -FI_EAVAIL : -FI_EAGAIN;
	pthread_mutex_unlock(&memory_lock);
	return taken;
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags)
{
	struct memory_queue *queue = (struct memory_queue *)fid;
	ssize_t status = -FI_EAGAIN;
	pthread_mutex_lock(&memory_lock);
	if (queue->first < queue->end && queue->entries[queue->first].error) {
		const struct completion *failed = take(queue);
		out->op_context = failed->context;
		out->err = failed->error;
		status = 1;
	}
	pthread_mutex_unlock(&memory_lock);
	return status;
}

static int close_queue(struct fid *fid)
{
	free(((struct memory_queue *)fid)->entries);
	return memory_close_plain(fid);
}

static struct fi_ops queue_fid_ops = {.size = sizeof queue_fid_ops, .close = close_queue, .control = memory_control};
static struct fi_ops_cq queue_ops = {.size = sizeof queue_ops, .read = read_queue, .readerr = read_error};

static int open_queue(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
	struct memory_queue *queue = calloc(1, sizeof *queue);
	if (!queue)
		return -FI_ENOMEM;
	queue->fid = (struct fid_cq){{FI_CLASS_CQ, context, &queue_fid_ops}, &queue_ops};
	*out = &queue->fid;
	return 0;
}

/* --- peers */

static int insert_peer(struct fid_av *fid, const void *address, size_t count, fi_addr_t *out, uint64_t flags,
		       void *context)
{
	struct memory_peers *peers = (struct memory_peers *)fid;
	struct location location;
	memcpy(&location, address, sizeof location);
	if (count != 1 || location.no_family || location.process != getpid() || !location.endpoint)
		return -FI_EINVAL;
	int status = 1;
	pthread_mutex_lock(&memory_lock);
	size_t at = 0;
	for (; at < peers->count && peers->locations[at].endpoint; at++)
		;
	if (at == peers->count) {
		struct location *locations = realloc(peers->locations, (at + 1) * sizeof *locations);
		if (locations) {
			peers->locations = locations;
			peers->count++;
		} else {
			status = -FI_ENOMEM;
		}
	}
	if (status == 1) {
		peers->locations[at] = location;
		*out = at;
	}
	pthread_mutex_unlock(&memory_lock);
	return status;
}

static int remove_peer(struct fid_av *fid, fi_addr_t *peer, size_t count, uint64_t flags)
{
	struct memory_peers *peers = (struct memory_peers *)fid;
	pthread_mutex_lock(&memory_lock);
	int is_known = count == 1 && *peer < peers->count;
	if (is_known)
		peers->locations[*peer].endpoint = 0;
	pthread_mutex_unlock(&memory_lock);
	return is_known ? 0 : -FI_EINVAL;
}

static int close_peers(struct fid *fid)
{
	free(((struct memory_peers *)fid)->locations);
	return memory_close_plain(fid);
}

static struct fi_ops peers_fid_ops = {.size = sizeof peers_fid_ops, .close = close_peers, .control = memory_control};
static struct fi_ops_av peers_ops = {.size = sizeof peers_ops, .insert = insert_peer, .remove = remove_peer};

static int open_peers(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
	struct memory_peers *peers = calloc(1, sizeof *peers);
	if (!peers)
		return -FI_ENOMEM;
	peers->fid = (struct fid_av){{FI_CLASS_AV, context, &peers_fid_ops}, &peers_ops};
	*out = &peers->fid;
	return 0;
}

/* --- regions */

static int close_region(struct fid *fid)
{
	struct memory_region *region = (struct memory_region *)fid;
	pthread_mutex_lock(&memory_lock);
	for (struct memory_region **link = &region->domain->regions; *link; link = &(*link)->next)
		if (*link == region) {
			*link = region->next;
			break;
		}
	pthread_mutex_unlock(&memory_lock);
	return memory_close_plain(fid);
}

static struct fi_ops region_fid_ops = {.size = sizeof region_fid_ops, .close = close_region, .control = memory_control};

static int open_region(struct fid *fid, const void *address, size_t length, uint64_t access, uint64_t offset,
		       uint64_t key, uint64_t flags, struct fid_mr **out, void *context)
{
	struct memory_domain *domain = (struct memory_domain *)fid;
	struct memory_region *region = calloc(1, sizeof *region);
	if (!region)
		return -FI_ENOMEM;
	region->mr = (struct fid_mr){{FI_CLASS_MR, context, &region_fid_ops}, NULL, key};
	region->domain = domain;
	region->address = (char *)address;
	region->length = length;
	region->access = access;
	pthread_mutex_lock(&memory_lock);
	for (const struct memory_region *other = domain->regions; other; other = other->next)
		if (other->mr.key == key) {
			pthread_mutex_unlock(&memory_lock);
			free(region);
			return -FI_ENOKEY;
		}
	region->next = domain->regions;
	domain->regions = region;
	pthread_mutex_unlock(&memory_lock);
	*out = &region->mr;
	return 0;
}

static struct fi_ops_mr region_ops = {.size = sizeof region_ops, .reg = open_region};

/* --- the library */

struct fi_ops memory_plain_ops = {.size = sizeof memory_plain_ops, .close = memory_close_plain, .control = memory_control};
static struct fi_ops_domain domain_ops = {
	.size = sizeof domain_ops, .av_open = open_peers, .cq_open = open_queue, .endpoint = memory_open_endpoint};

/* `context`: the fabric whose thread will be woken. */
static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context)
{
	struct memory_domain *domain = calloc(1, sizeof *domain);
	if (!domain)
		return -FI_ENOMEM;
	domain->fid = (struct fid_domain){{FI_CLASS_DOMAIN, context, &memory_plain_ops}, &domain_ops, &region_ops};
	domain->woken = context;
	*out = &domain->fid;
	return 0;
}

/* After fork, a child has the endpoints' memory and none of their threads. */
static void before_fork(void)
{
	pthread_mutex_lock(&memory_lock);
}

static void in_parent(void)
{
	pthread_mutex_unlock(&memory_lock);
}

static void in_child(void)
{
	memory_endpoints = NULL;
	pthread_mutex_unlock(&memory_lock);
}

static void handle_fork(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

static struct fi_ops_fabric fabric_ops = {.size = sizeof fabric_ops, .domain = open_domain};

static int open_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
	struct fid_fabric *fabric = calloc(1, sizeof *fabric);
	if (!fabric)
		return -FI_ENOMEM;
	fabric->fid = (struct fid){FI_CLASS_FABRIC, context, &memory_plain_ops};
	fabric->ops = &fabric_ops;
	*out = fabric;
	pthread_once(&fork_handled, handle_fork);
	return 0;
}

static void free_info(struct fi_info *info)
{
	if (!info)
		return;
	free(info->src_addr);
	if (info->fabric_attr)
		free(info->fabric_attr->prov_name);
	free(info->fabric_attr);
	free(info->domain_attr);
	free(info->ep_attr);
	free(info->tx_attr);
	free(info->rx_attr);
	free(info);
}

/* There is only one kind of info, so a copy is a new one. */
static struct fi_info *make_info(const struct fi_info *ignored)
{
	struct fi_info *info = calloc(1, sizeof *info);
	if (!info)
		return NULL;
	info->fabric_attr = calloc(1, sizeof *info->fabric_attr);
	info->domain_attr = calloc(1, sizeof *info->domain_attr);
	info->ep_attr = calloc(1, sizeof *info->ep_attr);
	info->tx_attr = calloc(1, sizeof *info->tx_attr);
	info->rx_attr = calloc(1, sizeof *info->rx_attr);
	if (!info->fabric_attr || !info->domain_attr || !info->ep_attr || !info->tx_attr || !info->rx_attr) {
		free_info(info);
		return NULL;
	}
	info->addr_format = FI_FORMAT_UNSPEC;
	info->domain_attr->mr_mode = FI_MR_VIRT_ADDR;
	info->domain_attr->mr_key_size = sizeof(uint64_t);
	/* A write copies its parts in turn, under one lock. */
	info->tx_attr->msg_order = info->rx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_RMA_WAW;
	info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = 4;
	info->ep_attr->max_order_waw_size = SIZE_MAX;
	return info;
}

static int get_info(uint32_t version, const char *node, const char *service, uint64_t flags,
		    const struct fi_info *hints, struct fi_info **out)
{
	struct fi_info *info = *out = make_info(NULL);
	if (info && (info->fabric_attr->prov_name = strdup(MEMORY_PROVIDER)))
		return 0;
	free_info(info);
	return -FI_ENOMEM;
}

static uint32_t version(void)
{
	return FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
}

static const char *error_of(int number)
{
	return strerror(number);
}

const struct library memory_library = {
	.getinfo = get_info,
	.freeinfo = free_info,
	.dupinfo = make_info,
	.fabric = open_fabric,
	.version = version,
	.strerror = error_of,
};
