/*
 * Fabric and domain: opening, closing, control commands and cxi's extensions of a domain.
 *
 * What always holds: a domain closes only when nothing of it is left, and its NIC's thread ends with it.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define UNREACHABLE_MS 5000
#define LATE_FOR_NS 300000000u

static struct fi_ops fabric_fid_ops, fid_ops;
static struct fi_ops_fabric fabric_ops;
static struct fi_ops_domain domain_ops;

uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

long setting(const char *name, long otherwise)
{
	const char *text = getenv(name);
	return text && *text ? strtol(text, NULL, 10) : otherwise;
}

void domain_lock(struct domain *domain)
{
	__atomic_add_fetch(&domain->waiting, 1, __ATOMIC_ACQ_REL);
	pthread_mutex_lock(&domain->lock);
	__atomic_sub_fetch(&domain->waiting, 1, __ATOMIC_ACQ_REL);
}

void domain_unlock(struct domain *domain)
{
	pthread_mutex_unlock(&domain->lock);
}

static struct domain *domain_of(struct fid *fid)
{
	return (struct domain *)fid;
}

static int get_depth(struct fid *fid, size_t *depth)
{
	if (fid->fclass != FI_CLASS_DOMAIN)
		return -FI_EINVAL;
	*depth = TRIGGERS_MAX;
	return 0;
}

static int enable_hybrid_descriptors(struct fid *fid, bool enable)
{
	if (fid->fclass != FI_CLASS_DOMAIN)
		return -FI_EINVAL;
	domain_of(fid)->hybrid_descriptors = enable;
	return 0;
}

static int enable_match_events(struct fid *fid, bool enable)
{
	if (fid->fclass != FI_CLASS_DOMAIN)
		return -FI_EINVAL;
	domain_of(fid)->match_events = enable;
	return 0;
}

static int enable_optimized_regions(struct fid *fid, bool enable)
{
	if (fid->fclass != FI_CLASS_DOMAIN)
		return -FI_EINVAL;
	domain_of(fid)->optimized_regions = enable;
	return 0;
}

static int topology(struct fid *fid, unsigned *group, unsigned *switch_id, unsigned *port)
{
	if (fid->fclass != FI_CLASS_DOMAIN)
		return -FI_EINVAL;
	if (group)
		*group = 0;
	if (switch_id)
		*switch_id = 0;
	if (port)
		*port = 0;
	return 0;
}

static int read_hardware_counter(struct fid *fid, unsigned counter, uint64_t *value, struct timespec *time)
{
	(void)fid, (void)counter, (void)value, (void)time;
	return -FI_EINVAL; /* there is no such counter in software */
}

static size_t no_unexpected_messages(struct fid_ep *ep, struct fi_cq_tagged_entry *entry, size_t count,
				     fi_addr_t *source, size_t *unexpected)
{
	(void)ep, (void)entry, (void)count, (void)source;
	*unexpected = 0;
	return 0;
}

static struct fi_cxi_dom_ops extension = {
	.cntr_read = read_hardware_counter,
	.topology = topology,
	.enable_hybrid_mr_desc = enable_hybrid_descriptors,
	.ep_get_unexp_msgs = no_unexpected_messages,
	.get_dwq_depth = get_depth,
	.enable_mr_match_events = enable_match_events,
	.enable_optimized_mrs = enable_optimized_regions,
};

static int ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context)
{
	(void)fid, (void)flags, (void)context;
	/* Each version only added to the one before. */
	if (strlen(name) != strlen("dom_ops_v1") || strncmp(name, "dom_ops_v", 9) || name[9] < '1' || name[9] > '6')
		return -FI_EINVAL;
	*ops = &extension;
	return 0;
}

static int control(struct fid *fid, int command, void *argument)
{
	struct domain *domain = domain_of(fid);
	if (command != FI_FLUSH_WORK && !argument)
		return -FI_EINVAL;
	switch (command) {
	case FI_QUEUE_WORK:
		return work_queue(domain, argument);
	case FI_FLUSH_WORK:
		return work_flush(domain);
	case FI_OPT_CXI_SET_MR_MATCH_EVENTS:
		domain->match_events = *(bool *)argument;
		return 0;
	case FI_OPT_CXI_GET_MR_MATCH_EVENTS:
		*(bool *)argument = domain->match_events;
		return 0;
	case FI_OPT_CXI_SET_OPTIMIZED_MRS:
		domain->optimized_regions = *(bool *)argument;
		return 0;
	case FI_OPT_CXI_GET_OPTIMIZED_MRS:
		*(bool *)argument = domain->optimized_regions;
		return 0;
	case FI_OPT_CXI_SET_PROV_KEY_CACHE:
		if (setting("SOFT_CASSINI_KEY_CACHE_STAYS", 0))
			return -FI_EINVAL; /* as an earlier provider, which doesn't know it */
		domain->key_cache = *(bool *)argument;
		return 0;
	case FI_OPT_CXI_GET_PROV_KEY_CACHE:
		*(bool *)argument = domain->key_cache;
		return 0;
	default:
		return -FI_EINVAL; /* FI_CANCEL_WORK too: the provider doesn't know it */
	}
}

static void domain_free(struct domain *domain)
{
	doorbells_close(domain);
	if (domain->wire_fabric)
		fi_close(&domain->wire_fabric->fid);
	if (domain->wire_info)
		wire_library()->freeinfo(domain->wire_info);
	pthread_cond_destroy(&domain->work);
	pthread_mutex_destroy(&domain->commands);
	pthread_mutex_destroy(&domain->lock);
	free(domain);
}

static int domain_close(struct fid *fid)
{
	struct domain *domain = domain_of(fid);
	domain_lock(domain);
	int busy = domain->users != 0;
	if (!busy) {
		domain->stop = 1;
		nic_wake(domain);
	}
	domain_unlock(domain);
	if (busy)
		return -FI_EBUSY;
	pthread_join(domain->thread, NULL);
	__atomic_sub_fetch(&domain->fabric->users, 1, __ATOMIC_RELAXED);
	domain_free(domain);
	return 0;
}

static int start(struct domain *domain, const struct fi_info *info)
{
	const struct address *source = info->src_addr;
	int status = wire_info((struct in_addr){source->ip}, &domain->wire_info);
	if (!status)
		status = wire_library()->fabric(domain->wire_info->fabric_attr, &domain->wire_fabric, NULL);
	if (!status)
		status = doorbells_open(domain);
	if (!status && getrandom(&domain->key_sequence, sizeof domain->key_sequence, 0) < 0)
		status = -FI_EIO;
	if (!status)
		status = -pthread_create(&domain->thread, NULL, nic_run, domain);
	if (!status)
		pthread_setname_np(domain->thread, "cassini");
	return status;
}

int domain_open(struct fid_fabric *fid, struct fi_info *info, struct fid_domain **out, void *context)
{
	if (!info || !info->src_addr || info->src_addrlen != ADDRESS_BYTES || !info->domain_attr)
		return -FI_EINVAL;
	struct domain *domain = calloc(1, sizeof *domain);
	if (!domain)
		return -FI_ENOMEM;
	pthread_condattr_t monotonic;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&domain->work, &monotonic);
	pthread_condattr_destroy(&monotonic);
	pthread_mutex_init(&domain->lock, NULL);
	pthread_mutex_init(&domain->commands, NULL);
	domain->doorbell_fd = -1;
	domain->unreachable_ns = (uint64_t)setting("SOFT_CASSINI_UNREACHABLE_MS", UNREACHABLE_MS) * 1000000u;
	domain->errors_count = setting("SOFT_CASSINI_ERRORS_COUNT", 0) != 0;
	domain->reorders = setting("SOFT_CASSINI_REORDER", 0) != 0;
	domain->late_ns = (uint64_t)setting("SOFT_CASSINI_LATE_MS", 0) * 1000000u;
	domain->late_until_ns = now_ns() + LATE_FOR_NS;
	domain->fails_every = setting("SOFT_CASSINI_FAIL_EVERY", 0);
	domain->fails_from = setting("SOFT_CASSINI_FAIL_FROM", sizeof(uint64_t) + 1);
	domain->flushes_to_fail = setting("SOFT_CASSINI_FLUSHES_FAIL", 0);
	domain->chance = 1;
	domain->fabric = (struct fabric *)fid;
	domain->optimized_regions = true;
	domain->key_cache = setting("FI_CXI_PROV_KEY_CACHE", 1) != 0;
	domain->takes_devices = info->caps & FI_HMEM;
	domain->fid.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &fid_ops};
	domain->fid.ops = &domain_ops;
	domain->fid.mr = &region_ops;
	int status = start(domain, info);
	if (status) {
		domain_free(domain);
		return status;
	}
	__atomic_add_fetch(&domain->fabric->users, 1, __ATOMIC_RELAXED);
	*out = &domain->fid;
	return 0;
}

static int fabric_close(struct fid *fid)
{
	struct fabric *fabric = (struct fabric *)fid;
	if (__atomic_load_n(&fabric->users, __ATOMIC_RELAXED))
		return -FI_EBUSY;
	free(fabric);
	return 0;
}

EXPORTED int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context)
{
	if (!attr || !attr->name || strcmp(attr->name, "cxi"))
		return -FI_ENODEV;
	if (!wire_library())
		return say(-FI_ENOSYS, "there is no libfabric on this machine to be the wire.");
	struct fabric *fabric = calloc(1, sizeof *fabric);
	if (!fabric)
		return -FI_ENOMEM;
	fabric->fid.fid = (struct fid){.fclass = FI_CLASS_FABRIC, .context = context, .ops = &fabric_fid_ops};
	fabric->fid.ops = &fabric_ops;
	fabric->fid.api_version = attr->api_version;
	*out = &fabric->fid;
	return 0;
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fabric_fid_ops, sizeof fabric_fid_ops);
	fabric_fid_ops.close = fabric_close;
	refuse_all(&fabric_ops, sizeof fabric_ops);
	fabric_ops.domain = domain_open;
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = domain_close;
	fid_ops.control = control;
	fid_ops.ops_open = ops_open;
	refuse_all(&domain_ops, sizeof domain_ops);
	domain_ops.av_open = addresses_open;
	domain_ops.cq_open = queue_open;
	domain_ops.endpoint = endpoint_open;
	domain_ops.cntr_open = counter_open;
}
