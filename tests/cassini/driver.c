/*
 * Runs one rule of the software Cassini: `driver RULE`, or lists them: `driver`. The library is the one that
 * TRIGGERKV_LIBFABRIC names.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct library library;
uint64_t order_asked;

static const struct rule *const groups[] = {info_rules, memory_rules,	endpoint_rules, counter_rules,
					    work_rules, failure_rules, process_rules,	slot_rules,
					    setting_rules};

void fail(const char *file, int line, const char *what, long long got)
{
	fprintf(stderr, "%s:%d: not so: %s (%lld)\n", file, line, what, got);
	exit(1);
}

double seconds_now(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

uint64_t word_at(const void *address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
}

/* All earlier writes are visible when the doorbell rings. */
void store(uint64_t *word, uint64_t value)
{
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

struct fi_info *hints_new(void)
{
	struct fi_info *hints = library.dupinfo(NULL);
	HOLDS(hints);
	hints->caps = FI_RMA;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup("cxi");
	return hints;
}

struct fid_ep *endpoint_new(struct side *side)
{
	struct fid_ep *ep;
	GIVES(0, fi_endpoint(side->domain, side->info, &ep, side));
	GIVES(0, fi_ep_bind(ep, &side->cq->fid, FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION));
	GIVES(0, fi_ep_bind(ep, &side->av->fid, 0));
	GIVES(0, fi_enable(ep));
	return ep;
}

struct fid_mr *region_new(struct side *side, struct fid_ep *ep, void *memory, size_t bytes, uint64_t access,
			  struct fid_cntr *counter)
{
	struct fid_mr *region;
	GIVES(0, fi_mr_reg(side->domain, memory, bytes, access, 0, 0, 0, &region, NULL));
	if (counter)
		GIVES(0, fi_mr_bind(region, &counter->fid, FI_REMOTE_WRITE));
	GIVES(0, fi_mr_bind(region, &ep->fid, 0));
	GIVES(0, fi_mr_enable(region));
	return region;
}

void side_open_with(struct side *side, uint64_t caps, size_t requests, uint64_t queue_flags)
{
	struct fi_info *hints = hints_new();
	struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_NONE};
	struct fi_av_attr av = {.type = FI_AV_UNSPEC};
	bool key_cache = false;
	hints->caps = caps;
	hints->tx_attr->size = requests;
	hints->tx_attr->msg_order = order_asked;
	GIVES(0, library.getinfo(FI_VERSION(1, 17), "127.0.0.1", NULL, FI_SOURCE, hints, &side->info));
	library.freeinfo(hints);
	GIVES(0, library.fabric(side->info->fabric_attr, &side->fabric, NULL));
	GIVES(0, fi_domain(side->fabric, side->info, &side->domain, NULL));
	GIVES(0, fi_control(&side->domain->fid, FI_OPT_CXI_SET_PROV_KEY_CACHE, &key_cache));
	GIVES(0, fi_av_open(side->domain, &av, &side->av, NULL));
	GIVES(0, fi_cq_open(side->domain, &cq, &side->cq, NULL));
	GIVES(0, fi_endpoint(side->domain, side->info, &side->ep, side));
	GIVES(0, fi_ep_bind(side->ep, &side->cq->fid, FI_TRANSMIT | FI_RECV | queue_flags));
	GIVES(0, fi_ep_bind(side->ep, &side->av->fid, 0));
	GIVES(0, fi_enable(side->ep));
	side->memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	HOLDS(side->memory != MAP_FAILED);
	side->region = region_new(side, side->ep, side->memory, MEMORY_BYTES, FI_REMOTE_WRITE | FI_REMOTE_READ, NULL);
	side->key = fi_mr_key(side->region);
}

void side_open(struct side *side)
{
	side_open_with(side, FI_RMA, 0, FI_SELECTIVE_COMPLETION);
}

void side_close(struct side *side)
{
	GIVES(0, fi_close(&side->region->fid));
	GIVES(0, fi_close(&side->ep->fid));
	GIVES(0, fi_close(&side->cq->fid));
	GIVES(0, fi_close(&side->av->fid));
	GIVES(0, fi_close(&side->domain->fid));
	GIVES(0, fi_close(&side->fabric->fid));
	library.freeinfo(side->info);
	munmap(side->memory, MEMORY_BYTES);
}

void name_of(struct fid_ep *ep, void *address)
{
	size_t length = 8;
	GIVES(0, fi_getname(&ep->fid, address, &length));
	HOLDS(length == 8);
}

void meet(struct side *from, const void *address)
{
	GIVES(1, fi_av_insert(from->av, address, 1, &from->peer, 0, NULL));
}

/* `from` gets some bytes to send. */
void pair_open(struct side *from, struct side *to)
{
	char address[8];
	side_open(from);
	side_open(to);
	name_of(to->ep, address);
	meet(from, address);
	name_of(from->ep, address);
	meet(to, address);
	for (size_t i = 0; i < MEMORY_BYTES; i++)
		from->memory[i] = (unsigned char)(i * 7 + 1);
}

void pair_close(struct side *from, struct side *to)
{
	side_close(from);
	side_close(to);
}

struct fid_cntr *counter_new(struct side *side)
{
	struct fid_cntr *counter;
	GIVES(0, fi_cntr_open(side->domain, NULL, &counter, NULL));
	return counter;
}

struct fi_cxi_cntr_ops *counter_ops(struct fid_cntr *counter)
{
	struct fi_cxi_cntr_ops *ops;
	GIVES(0, fi_open_ops(&counter->fid, FI_CXI_COUNTER_OPS, 0, (void **)&ops, NULL));
	return ops;
}

uint64_t *doorbell(struct fid_cntr *counter, size_t offset)
{
	void *page;
	size_t length;
	GIVES(0, counter_ops(counter)->get_mmio_addr(&counter->fid, &page, &length));
	return (uint64_t *)((char *)page + offset);
}

void ring(struct fid_cntr *counter, uint64_t value)
{
	uint64_t *word = doorbell(counter, CXI_DOORBELL_ADD);
	store(word, value);
	BECOMES(word_at(word) == 0);
}

int queue_put(struct side *from, const struct put *put)
{
	struct iovec local = {put->source ? put->source : from->memory, put->length};
	struct fi_rma_iov remote = {put->offset, put->length, put->key};
	struct fi_op_rma rma = {
		.ep = from->ep,
		.msg = {.msg_iov = &local,
			.iov_count = 1,
			.addr = from->peer,
			.rma_iov = &remote,
			.rma_iov_count = 1,
			.context = put->context},
		.flags = put->flags,
	};
	struct fi_deferred_work work = {
		.threshold = put->threshold,
		.triggering_cntr = put->trigger,
		.completion_cntr = put->end,
		.op_type = put->type == FI_OP_READ ? FI_OP_READ : FI_OP_WRITE,
		.op.rma = &rma,
	};
	int status = fi_control(&from->domain->fid, FI_QUEUE_WORK, &work);
	/* cxi reads nothing of this after the call, so it is overwritten here. */
	memset(&local, 0x5a, sizeof local);
	memset(&remote, 0x5a, sizeof remote);
	memset(&rma, 0x5a, sizeof rma);
	memset(&work, 0x5a, sizeof work);
	return status;
}

int queue_count(struct side *side, enum fi_op_type type, struct fid_cntr *trigger, uint64_t threshold,
		struct fid_cntr *target, uint64_t value)
{
	struct fi_op_cntr op = {.cntr = target, .value = value};
	struct fi_deferred_work work = {
		.threshold = threshold, .triggering_cntr = trigger, .op_type = type, .op.cntr = &op};
	return fi_control(&side->domain->fid, FI_QUEUE_WORK, &work);
}

int end_of(struct side *side, void **context)
{
	struct fi_cq_msg_entry entry;
	struct fi_cq_err_entry error = {0};
	ssize_t status;
	BECOMES((status = fi_cq_read(side->cq, &entry, 1)) != -FI_EAGAIN);
	if (status == 1) {
		HOLDS(entry.flags & FI_RMA);
		*context = entry.op_context;
		return 0;
	}
	GIVES(-FI_EAVAIL, status);
	GIVES(1, fi_cq_readerr(side->cq, &error, 0));
	HOLDS(error.err);
	*context = error.op_context;
	return error.err;
}

void expect_nothing(struct side *side)
{
	struct fi_cq_msg_entry entry;
	GIVES(-FI_EAGAIN, fi_cq_read(side->cq, &entry, 1));
}

/* As in nic_offload: the symbol's compiled version, or any symbol of the name if there are no versions. */
static void *resolve(void *handle, const char *name, const char *version)
{
	void *symbol = dlvsym(handle, name, version);
	return symbol ? symbol : dlsym(handle, name);
}

static void load(void)
{
	const char *path = getenv("TRIGGERKV_LIBFABRIC");
	void *handle = dlopen(path ? path : "", RTLD_NOW | RTLD_LOCAL);
	if (!handle)
		fail(__FILE__, __LINE__, dlerror(), 0);
	library.getinfo = resolve(handle, "fi_getinfo", "FABRIC_1.3");
	library.freeinfo = resolve(handle, "fi_freeinfo", "FABRIC_1.3");
	library.dupinfo = resolve(handle, "fi_dupinfo", "FABRIC_1.3");
	library.fabric = resolve(handle, "fi_fabric", "FABRIC_1.1");
	library.version = resolve(handle, "fi_version", "FABRIC_1.0");
	library.strerror = resolve(handle, "fi_strerror", "FABRIC_1.0");
	library.doorbell_fd = dlsym(handle, "soft_cassini_doorbell_fd");
	HOLDS(library.getinfo && library.freeinfo && library.dupinfo && library.fabric && library.version);
	HOLDS(library.strerror && library.doorbell_fd);
}

int main(int count, char **arguments)
{
	if (count > 1)
		load();
	for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
		for (const struct rule *rule = groups[i]; rule->name; rule++) {
			if (count < 2) {
				puts(rule->name);
			} else if (!strcmp(rule->name, arguments[1])) {
				rule->run();
				return 0;
			}
		}
	}
	return count < 2 ? 0 : 2;
}
