/*
 * Opens and closes endpoints, peers and regions. Any thread.
 *
 * What always holds: everything that changes what the progress thread reads is done by that thread. In a child after
 * fork every call is refused.
 */
#define _GNU_SOURCE
#include "cxi.h"
#include "progress.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define KEY_TRIES 8

struct opening {
	struct tk_endpoint *endpoint;
	size_t length;
	char source[TK_ADDRESS_BYTES]; /* where to listen, if any bytes are given */
};

static int open_from(struct tk_fabric *fabric, const struct opening *opening)
{
	struct tk_endpoint *endpoint = opening->endpoint;
	struct fid_domain *domain = fabric->domains[endpoint->domain].fid;
	if (!opening->length)
		return fi_endpoint(domain, fabric->info, &endpoint->fid, NULL);
	struct fi_info *info = fabric->library->dupinfo(fabric->info);
	void *source = malloc(opening->length);
	if (!info || !source) {
		free(source);
		if (info)
			fabric->library->freeinfo(info);
		return -ENOMEM;
	}
	memcpy(source, opening->source, opening->length);
	free(info->src_addr);
	info->src_addr = source;
	info->src_addrlen = opening->length;
	int status = fi_endpoint(domain, info, &endpoint->fid, NULL);
	fabric->library->freeinfo(info);
	return status;
}

static int open_endpoint(struct tk_fabric *fabric, void *argument)
{
	struct opening *opening = argument;
	struct tk_endpoint *endpoint = opening->endpoint;
	const struct domain *domain = &fabric->domains[endpoint->domain];
	char why[TK_MESSAGE_BYTES]; /* ignored: the error code is enough */
	endpoint->fds_from = lowest_free_fd();
	int status = domain_open(fabric, endpoint->domain, why);
	if (status || (status = open_from(fabric, opening)))
		return status;
	if ((status = fi_ep_bind(endpoint->fid, &domain->av->fid, 0)) ||
	    (status = fi_ep_bind(endpoint->fid, &domain->cq->fid, FI_TRANSMIT | FI_RECV)) ||
	    (status = fi_enable(endpoint->fid)))
		fi_close(&endpoint->fid->fid);
	return status;
}

/* Whether the fabric has a domain of this number, or may have one. */
static int may_have(const struct tk_fabric *fabric, uint32_t domain)
{
	return !domain || (domain < TK_DOMAINS_MAX && library_has_domains(fabric->info));
}

int tk_endpoint_open(struct tk_fabric *fabric, const void *source, size_t length, uint32_t domain,
		     struct tk_endpoint **out, char *message)
{
	message[0] = 0;
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	if (length > TK_ADDRESS_BYTES || !may_have(fabric, domain))
		return -EINVAL;
	struct tk_endpoint *endpoint = calloc(1, sizeof *endpoint);
	if (!endpoint)
		return -ENOMEM;
	endpoint->fabric = fabric;
	endpoint->domain = domain;
	endpoint->doorbell = -1;
	struct opening opening = {.endpoint = endpoint, .length = length};
	if (length)
		memcpy(opening.source, source, length);
	domain_hold(fabric, domain);
	int status = on_the_thread(fabric, open_endpoint, &opening, sizeof opening);
	if (status) {
		if (status == TK_STUCK)
			return status; /* the thread may still be using it */
		domain_leave(fabric, domain);
		free(endpoint);
		return refused(fabric, message, "opening an endpoint", status);
	}
	union address own = {0};
	size_t own_bytes = sizeof own;
	if (fabric->streams && !fi_getname(&endpoint->fid->fid, &own, &own_bytes))
		endpoint->port = address_port(&own);
	pthread_mutex_lock(&fabric->handle_lock);
	endpoint->next = fabric->endpoints;
	fabric->endpoints = endpoint;
	pthread_mutex_unlock(&fabric->handle_lock);
	rest_look_again(fabric);
	fabric_wake(fabric); /* it may be sleeping for long, as it does without endpoints */
	*out = endpoint;
	return 0;
}

uint64_t tk_endpoint_stalled_ns(const struct tk_endpoint *endpoint)
{
	uint64_t since_ns = __atomic_load_n(&endpoint->stalled_ns, __ATOMIC_RELAXED);
	return since_ns ? tk_now_ns() - since_ns : 0;
}

int tk_endpoint_has_broken(const struct tk_endpoint *endpoint)
{
	return __atomic_load_n(&endpoint->has_broken, __ATOMIC_RELAXED);
}

int tk_endpoint_address(struct tk_endpoint *endpoint, void *out)
{
	if (!fabric_is_ours(endpoint->fabric))
		return -ECHILD;
	size_t length = TK_ADDRESS_BYTES;
	int status = fi_getname(&endpoint->fid->fid, out, &length);
	return status ? status : (int)length;
}

/* Wipes it, so that no copy of its keys is left. */
void endpoint_free(struct tk_endpoint *endpoint)
{
	explicit_bzero(endpoint, sizeof *endpoint);
	free(endpoint);
}

int tk_endpoint_close(struct tk_endpoint *endpoint)
{
	struct tk_fabric *fabric = endpoint->fabric;
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	uint32_t domain = endpoint->domain;
	int status = on_the_thread(fabric, core_close_endpoint, &endpoint, sizeof endpoint);
	if (status == TK_STUCK || status == TK_UNFLUSHED || status == -ESHUTDOWN)
		return status; /* the fabric still has it */
	endpoint_free(endpoint);
	domain_leave(fabric, domain);
	return status;
}

struct peer {
	char address[TK_ADDRESS_BYTES]; /* padded: the peer may give fewer bytes than its address family needs */
	uint32_t domain;
	fi_addr_t number;
};

static int add_peer(struct tk_fabric *fabric, void *argument)
{
	struct peer *peer = argument;
	char why[TK_MESSAGE_BYTES];
	int status = domain_open(fabric, peer->domain, why);
	if (status)
		return status;
	int added = fi_av_insert(fabric->domains[peer->domain].av, peer->address, 1, &peer->number, 0, NULL);
	return added == 1 ? 0 : added < 0 ? added : -EINVAL;
}

/* If there is no memory to remember it, the thread naps instead of sleeping. */
static void remember_peer(struct tk_fabric *fabric, const struct peer *peer)
{
	pthread_mutex_lock(&fabric->handle_lock);
	if (!grow((void **)&fabric->peers, &fabric->peers_capacity, fabric->peers_count, sizeof *fabric->peers)) {
		struct known_peer *known = &fabric->peers[fabric->peers_count++];
		memcpy(&known->address, peer->address, sizeof known->address);
		known->domain = peer->domain;
		known->number = peer->number;
	}
	pthread_mutex_unlock(&fabric->handle_lock);
	rest_look_again(fabric);
}

static void forget_peer(struct tk_fabric *fabric, const struct peer *peer)
{
	pthread_mutex_lock(&fabric->handle_lock);
	for (uint32_t i = 0; i < fabric->peers_count; i++)
		if (fabric->peers[i].domain == peer->domain && fabric->peers[i].number == peer->number) {
			fabric->peers[i] = fabric->peers[--fabric->peers_count];
			break;
		}
	pthread_mutex_unlock(&fabric->handle_lock);
}

static int remove_peer(struct tk_fabric *fabric, void *argument)
{
	struct peer *peer = argument;
	struct fid_av *av = fabric->domains[peer->domain].av;
	return av ? fi_av_remove(av, &peer->number, 1, 0) : -EINVAL;
}

int tk_peer_add(struct tk_fabric *fabric, uint32_t domain, const void *address, size_t length, uint64_t *out)
{
	struct peer peer = {.domain = domain, .number = FI_ADDR_UNSPEC};
	if (length > TK_ADDRESS_BYTES || !length || !may_have(fabric, domain))
		return -EINVAL;
	memcpy(peer.address, address, length);
	domain_hold(fabric, domain);
	int status = on_the_thread(fabric, add_peer, &peer, sizeof peer);
	if (!status && fabric->streams)
		remember_peer(fabric, &peer);
	else if (status && status != TK_STUCK)
		domain_leave(fabric, domain);
	*out = peer.number;
	return status;
}

int tk_peer_remove(struct tk_fabric *fabric, uint32_t domain, uint64_t number)
{
	struct peer peer = {.domain = domain, .number = number};
	if (!may_have(fabric, domain))
		return -EINVAL;
	if (!fabric_refusal(fabric))
		forget_peer(fabric, &peer);
	int status = on_the_thread(fabric, remove_peer, &peer, sizeof peer);
	if (!status)
		domain_leave(fabric, domain);
	return status;
}

/* Keys are random, so a peer can't guess the key of a region that it was not given. */
static int register_with_random_key(struct tk_fabric *fabric, struct tk_region *region, uint64_t access, int gpu)
{
	size_t key_bytes = fabric->info->domain_attr->mr_key_size;
	struct fid_domain *domain = fabric->domains[region->domain].fid;
	struct iovec range = {(void *)region->address, region->length};
	for (int i = 0;; i++) {
		uint64_t key;
		if (getrandom(&key, sizeof key, 0) != sizeof key)
			return -EIO;
		if (key_bytes < sizeof key)
			key &= ((uint64_t)1 << (8 * key_bytes)) - 1;
		struct fi_mr_attr attr = {
			.mr_iov = &range,
			.iov_count = 1,
			.access = access,
			.requested_key = key,
			.iface = FI_HMEM_CUDA,
			.device.cuda = gpu,
		};
		int status = gpu == TK_HOST ? fi_mr_reg(domain, range.iov_base, range.iov_len, access, 0, key, 0,
							&region->mr, NULL) :
					      fi_mr_regattr(domain, &attr, 0, &region->mr);
		if (status != -FI_ENOKEY || i == KEY_TRIES)
			return status;
	}
}

/* Where the provider binds memory to endpoints, memory that no peer may touch needs no registration at all. */
static int register_region(struct tk_fabric *fabric, struct tk_endpoint *endpoint, struct tk_region *region,
			   uint32_t access, int gpu)
{
	if (gpu != TK_HOST && !(fabric->info->caps & FI_HMEM))
		return -ENOSYS;
	uint64_t wanted = FI_WRITE | FI_READ;
	if (access & TK_REMOTE_WRITE)
		wanted |= FI_REMOTE_WRITE;
	if (access & TK_REMOTE_READ)
		wanted |= FI_REMOTE_READ;
	int binds = !!(fabric->info->domain_attr->mr_mode & FI_MR_ENDPOINT);
	if (binds && !access)
		return 0;
	if (binds && !endpoint)
		return -EINVAL;
	int status = register_with_random_key(fabric, region, wanted, gpu);
	if (status || !binds)
		return status;
	if ((status = fi_mr_bind(region->mr, &endpoint->fid->fid, 0)) || (status = fi_mr_enable(region->mr))) {
		fi_close(&region->mr->fid);
		return status;
	}
	region->endpoint = endpoint;
	return 0;
}

int tk_region_open(struct tk_fabric *fabric, struct tk_endpoint *endpoint, void *address, size_t length,
		   uint32_t access, int gpu, struct tk_region **out)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	if (!length || (endpoint && endpoint->fabric != fabric))
		return -EINVAL;
	struct tk_region *region = calloc(1, sizeof *region);
	if (!region)
		return -ENOMEM;
	region->fabric = fabric;
	region->address = (uintptr_t)address;
	region->length = length;
	region->domain = endpoint ? endpoint->domain : 0;
	int status = register_region(fabric, endpoint, region, access, gpu);
	if (status) {
		free(region);
		return status;
	}
	region->key = region->mr ? fi_mr_key(region->mr) : 0;
	region->desc = region->mr ? fi_mr_desc(region->mr) : NULL;
	region->base = fabric->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? region->address : 0;
	domain_hold(fabric, region->domain);
	pthread_mutex_lock(&fabric->handle_lock);
	region->next = fabric->regions;
	fabric->regions = region;
	pthread_mutex_unlock(&fabric->handle_lock);
	*out = region;
	return 0;
}

int tk_region_close(struct tk_region *region)
{
	struct tk_fabric *fabric = region->fabric;
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	if (__atomic_load_n(&region->uses, __ATOMIC_ACQUIRE))
		return -EBUSY;
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_region **link = &fabric->regions; *link; link = &(*link)->next)
		if (*link == region) {
			*link = region->next;
			break;
		}
	pthread_mutex_unlock(&fabric->handle_lock);
	int status = region->mr ? fi_close(&region->mr->fid) : 0;
	domain_leave(fabric, region->domain);
	free(region);
	return status;
}

uint64_t tk_region_uses(struct tk_region *region)
{
	return __atomic_load_n(&region->uses, __ATOMIC_ACQUIRE);
}

uint64_t tk_region_key(struct tk_region *region)
{
	return region->key;
}

uint64_t tk_region_base(struct tk_region *region)
{
	return region->base;
}
