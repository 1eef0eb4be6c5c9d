/*
 * Memory regions: registered, bound to an endpoint and then enabled; only then is there a key.
 *
 * What always holds: a target address is an offset into the region; a key is good through the endpoint that its
 * region is bound to and only until the region is closed.
 */
#include "cassini.h"

#include <stdlib.h>

#define REMOTE (FI_REMOTE_READ | FI_REMOTE_WRITE)
#define IDS_MAX 65536u
#define ID_BITS 16
#define SEQUENCE_MASK ((1ULL << 43) - 1)

static struct fi_ops fid_ops;
struct fi_ops_mr region_ops;

static struct region *region_of(struct fid *fid)
{
	return (struct region *)fid;
}

static int take_id(struct domain *domain, uint16_t *id)
{
	for (uint32_t i = 0; i < IDS_MAX; i++) {
		uint64_t bit = 1ULL << i % 64;
		if (domain->region_ids[i / 64] & bit)
			continue;
		domain->region_ids[i / 64] |= bit;
		*id = (uint16_t)i;
		return 0;
	}
	return -FI_ENOSPC;
}

static int enable(struct region *region)
{
	struct domain *domain = region->domain;
	if (!region->endpoint)
		return -FI_EINVAL;
	if (region->enabled || !(region->access & REMOTE))
		return 0;
	if (domain->key_cache && !region->counter && !domain->match_events)
		return say(-FI_EINVAL, "with the cache of provider keys, this key would reach all memory of the process.");
	int status = take_id(domain, &region->id);
	if (status)
		return status;
	uint64_t key = KEY_IS_PROVIDERS | (++domain->key_sequence & SEQUENCE_MASK) << ID_BITS | region->id;
	if (region->counter || domain->match_events)
		key |= KEY_COUNTS;
	status = fi_mr_reg(region->endpoint->wire.domain, region->buffer, region->length, region->access, 0, key, 0,
			   &region->wire, NULL);
	if (status) {
		domain->region_ids[region->id / 64] &= ~(1ULL << region->id % 64);
		return status;
	}
	region->fid.key = key;
	region->enabled = 1;
	return 0;
}

static int control(struct fid *fid, int command, void *argument)
{
	struct region *region = region_of(fid);
	(void)argument;
	if (command != FI_ENABLE)
		return -FI_EINVAL;
	domain_lock(region->domain);
	int status = enable(region);
	domain_unlock(region->domain);
	return status;
}

static int bind_counter(struct region *region, struct counter *counter, uint64_t flags)
{
	if (counter->domain != region->domain || region->enabled || region->counter || !(flags & FI_REMOTE_WRITE))
		return -FI_EINVAL;
	region->counter = counter;
	counter->bound++;
	return 0;
}

static int bind_endpoint(struct region *region, struct endpoint *endpoint)
{
	if (endpoint->domain != region->domain || region->enabled || region->endpoint || !endpoint->enabled)
		return -FI_EINVAL;
	region->endpoint = endpoint;
	region->next = endpoint->regions;
	endpoint->regions = region;
	endpoint->bound++;
	return 0;
}

static int region_bind(struct fid *fid, struct fid *other, uint64_t flags)
{
	struct region *region = region_of(fid);
	int status = -FI_EINVAL;
	domain_lock(region->domain);
	if (other->fclass == FI_CLASS_CNTR)
		status = bind_counter(region, (struct counter *)other, flags);
	else if (other->fclass == FI_CLASS_EP)
		status = bind_endpoint(region, (struct endpoint *)other);
	domain_unlock(region->domain);
	return status;
}

static int region_close(struct fid *fid)
{
	struct region *region = region_of(fid);
	struct domain *domain = region->domain;
	domain_lock(domain);
	if (region->wire)
		fi_close(&region->wire->fid);
	if (region->enabled)
		domain->region_ids[region->id / 64] &= ~(1ULL << region->id % 64);
	if (region->counter)
		region->counter->bound--;
	if (region->endpoint) {
		struct region **at = &region->endpoint->regions;
		while (*at != region)
			at = &(*at)->next;
		*at = region->next;
		region->endpoint->bound--;
	}
	domain->users--;
	domain_unlock(domain);
	free(region);
	return 0;
}

static int register_attr(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out)
{
	struct domain *domain = (struct domain *)fid;
	if (fid->fclass != FI_CLASS_DOMAIN || !attr || !attr->iov_count)
		return -FI_EINVAL;
	if (attr->iov_count != 1)
		return -FI_ENOSYS;
	if (flags & FI_DIRECTED_RECV)
		return -FI_EINVAL;
	void *buffer = attr->mr_iov->iov_base;
	if (attr->iface != FI_HMEM_SYSTEM && !(domain->takes_devices && attr->iface == FI_HMEM_CUDA))
		return say(-FI_ENOSYS, "memory of a device is registered only where it was asked for, and only CUDA's.");
	if (attr->iface != FI_HMEM_SYSTEM && !(buffer = device_memory(buffer, attr->mr_iov->iov_len)))
		return say(-FI_EINVAL, "this is no memory of a test's device.");
	struct region *region = calloc(1, sizeof *region);
	if (!region)
		return -FI_ENOMEM;
	region->fid.fid = (struct fid){.fclass = FI_CLASS_MR, .context = attr->context, .ops = &fid_ops};
	region->fid.key = FI_KEY_NOTAVAIL;
	region->fid.mem_desc = region;
	region->domain = domain;
	region->buffer = buffer;
	region->length = attr->mr_iov->iov_len;
	region->access = attr->access;
	domain_lock(domain);
	domain->users++;
	domain_unlock(domain);
	*out = &region->fid;
	return 0;
}

static int register_vector(struct fid *fid, const struct iovec *ranges, size_t count, uint64_t access, uint64_t offset,
			   uint64_t key, uint64_t flags, struct fid_mr **out, void *context)
{
	struct fi_mr_attr attr = {
		.mr_iov = ranges,
		.iov_count = count,
		.access = access,
		.offset = offset,
		.requested_key = key,
		.context = context,
	};
	return register_attr(fid, &attr, flags, out);
}

static int register_one(struct fid *fid, const void *buffer, size_t length, uint64_t access, uint64_t offset,
			uint64_t key, uint64_t flags, struct fid_mr **out, void *context)
{
	struct iovec range = {(void *)buffer, length};
	return register_vector(fid, &range, 1, access, offset, key, flags, out, context);
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = region_close;
	fid_ops.bind = region_bind;
	fid_ops.control = control;
	region_ops = (struct fi_ops_mr){
		.size = sizeof region_ops,
		.reg = register_one,
		.regv = register_vector,
		.regattr = register_attr,
	};
}
