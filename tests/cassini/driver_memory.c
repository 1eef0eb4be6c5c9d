/* Regions: how to get a key, and what it permits. */
#include "driver.h"

#define REMOTE (FI_REMOTE_WRITE | FI_REMOTE_READ)

/* The error that a write of 8 bytes ends with, 0 if it lands. */
static int written(struct side *from, uint64_t key, uint64_t offset)
{
	void *context;
	struct iovec local = {from->memory, 8};
	struct fi_rma_iov remote = {offset, 8, key};
	struct fi_msg_rma message = {.msg_iov = &local,
				     .iov_count = 1,
				     .addr = from->peer,
				     .rma_iov = &remote,
				     .rma_iov_count = 1,
				     .context = from};
	GIVES(0, fi_writemsg(from->ep, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE));
	int error = end_of(from, &context);
	HOLDS(context == from);
	return error;
}

static void there_is_no_key_before_a_region_is_bound_and_enabled(void)
{
	struct side side;
	struct fid_mr *region;
	struct fid_ep *raw;
	side_open(&side);
	GIVES(0, fi_mr_reg(side.domain, side.memory, 4096, REMOTE, 0, 5, 0, &region, NULL));
	HOLDS(fi_mr_key(region) == FI_KEY_NOTAVAIL);
	HOLDS(fi_mr_desc(region));
	GIVES(-FI_EINVAL, fi_mr_enable(region));
	GIVES(0, fi_endpoint(side.domain, side.info, &raw, NULL));
	GIVES(-FI_EINVAL, fi_mr_bind(region, &raw->fid, 0)); /* not enabled itself */
	GIVES(-FI_EINVAL, fi_mr_bind(region, &side.cq->fid, 0));
	GIVES(0, fi_mr_bind(region, &side.ep->fid, 0));
	GIVES(-FI_EINVAL, fi_mr_bind(region, &side.ep->fid, 0));
	HOLDS(fi_mr_key(region) == FI_KEY_NOTAVAIL);
	GIVES(0, fi_mr_enable(region));
	HOLDS(fi_mr_key(region) >> 63 && fi_mr_key(region) != side.key);
	GIVES(0, fi_mr_enable(region));
	GIVES(0, fi_close(&region->fid));
	GIVES(0, fi_close(&raw->fid));
	/* Local use needs no key, and gets none. */
	region = region_new(&side, side.ep, side.memory, 4096, FI_WRITE, NULL);
	HOLDS(fi_mr_key(region) == FI_KEY_NOTAVAIL);
	GIVES(0, fi_close(&region->fid));
	side_close(&side);
}

static void a_region_is_one_range_of_the_hosts_memory(void)
{
	struct side side;
	struct fid_mr *region;
	side_open(&side);
	struct iovec ranges[2] = {{side.memory, 8}, {side.memory + 8, 8}};
	GIVES(-FI_ENOSYS, fi_mr_regv(side.domain, ranges, 2, REMOTE, 0, 0, 0, &region, NULL));
	GIVES(-FI_EINVAL, fi_mr_regv(side.domain, ranges, 0, REMOTE, 0, 0, 0, &region, NULL));
	struct fi_mr_attr attr = {.mr_iov = ranges, .iov_count = 1, .access = REMOTE, .iface = FI_HMEM_CUDA};
	GIVES(-FI_ENOSYS, fi_mr_regattr(side.domain, &attr, 0, &region));
	side_close(&side);
}

static void target_addresses_are_offsets_and_end_with_the_region(void)
{
	struct side from, to;
	pair_open(&from, &to);
	GIVES(0, written(&from, to.key, MEMORY_BYTES - 8));
	HOLDS(!memcmp(to.memory + MEMORY_BYTES - 8, from.memory, 8));
	GIVES(FI_EIO, written(&from, to.key, MEMORY_BYTES - 7));
	GIVES(FI_EIO, written(&from, to.key, (uint64_t)(uintptr_t)to.memory));
	GIVES(0, written(&from, to.key, 16));
	pair_close(&from, &to);
}

static void a_key_works_only_through_its_own_endpoint(void)
{
	struct side from, to;
	char address[8];
	fi_addr_t own, other;
	pair_open(&from, &to);
	struct fid_ep *second = endpoint_new(&to);
	own = from.peer;
	name_of(second, address);
	meet(&from, address);
	other = from.peer;
	HOLDS(own != other);
	GIVES(FI_EIO, written(&from, to.key, 0));
	struct fid_mr *region = region_new(&to, second, to.memory, MEMORY_BYTES, REMOTE, NULL);
	GIVES(0, written(&from, fi_mr_key(region), 0));
	from.peer = own;
	GIVES(FI_EIO, written(&from, fi_mr_key(region), 8));
	HOLDS(word_at(to.memory + 8) == 0);
	GIVES(0, fi_close(&region->fid));
	GIVES(0, fi_close(&second->fid));
	pair_close(&from, &to);
}

static void a_closed_region_accepts_no_write(void)
{
	struct side from, to;
	pair_open(&from, &to);
	GIVES(0, fi_close(&to.region->fid));
	GIVES(FI_EIO, written(&from, to.key, 0));
	HOLDS(word_at(to.memory) == 0);
	uint64_t before = to.key;
	to.region = region_new(&to, to.ep, to.memory, MEMORY_BYTES, REMOTE, NULL);
	to.key = fi_mr_key(to.region);
	HOLDS(to.key != before);
	GIVES(FI_EIO, written(&from, before, 0));
	GIVES(0, written(&from, to.key, 0));
	pair_close(&from, &to);
}

static void access_is_as_requested(void)
{
	struct side from, to;
	void *context;
	pair_open(&from, &to);
	struct fid_mr *readable = region_new(&to, to.ep, to.memory, 4096, FI_REMOTE_READ, NULL);
	struct fid_mr *writable = region_new(&to, to.ep, to.memory, 4096, FI_REMOTE_WRITE, NULL);
	GIVES(FI_EIO, written(&from, fi_mr_key(readable), 0));
	GIVES(0, written(&from, fi_mr_key(writable), 0));
	GIVES(0, fi_read(from.ep, from.memory + 64, 8, NULL, from.peer, 0, fi_mr_key(writable), &to));
	GIVES(FI_EIO, end_of(&from, &context));
	HOLDS(context == &to);
	GIVES(0, fi_close(&readable->fid));
	GIVES(0, fi_close(&writable->fid));
	pair_close(&from, &to);
}

static void a_regions_counter_counts_the_writes_into_it(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *counter = counter_new(&to), *other = counter_new(&to);
	struct fid_mr *region;
	GIVES(0, fi_mr_reg(to.domain, to.memory, 4096, REMOTE, 0, 0, 0, &region, NULL));
	GIVES(-FI_EINVAL, fi_mr_bind(region, &counter->fid, FI_REMOTE_READ));
	GIVES(0, fi_mr_bind(region, &counter->fid, FI_REMOTE_WRITE));
	GIVES(-FI_EINVAL, fi_mr_bind(region, &other->fid, FI_REMOTE_WRITE));
	GIVES(0, fi_mr_bind(region, &to.ep->fid, 0));
	GIVES(0, fi_mr_enable(region));
	GIVES(-FI_EINVAL, fi_mr_bind(region, &other->fid, FI_REMOTE_WRITE));
	for (int i = 0; i < 5; i++)
		GIVES(0, written(&from, fi_mr_key(region), (uint64_t)i * 8));
	GIVES(0, written(&from, to.key, 4096));
	BECOMES(fi_cntr_read(counter) == 5);
	GIVES(0, written(&from, fi_mr_key(region), 0));
	BECOMES(fi_cntr_read(counter) == 6);
	GIVES(-FI_EBUSY, fi_close(&counter->fid));
	GIVES(0, fi_close(&region->fid));
	GIVES(0, fi_close(&counter->fid));
	GIVES(0, fi_close(&other->fid));
	pair_close(&from, &to);
}

static void an_arriving_write_can_fire_work(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct fid_cntr *arrived = counter_new(&to), *end = counter_new(&to);
	struct fid_mr *region = region_new(&to, to.ep, to.memory, 4096, REMOTE, arrived);
	struct put answer = {.trigger = arrived, .end = end, .threshold = 2, .key = from.key, .length = 8};
	answer.offset = 4096;
	answer.source = to.memory;
	GIVES(0, queue_put(&to, &answer));
	memset(from.memory + 4096, 0, 8);
	GIVES(0, written(&from, fi_mr_key(region), 0));
	GIVES(0, written(&from, fi_mr_key(region), 8));
	BECOMES(word_at(from.memory + 4096) == word_at(from.memory));
	BECOMES(fi_cntr_read(end) == 1);
	expect_nothing(&to);
	GIVES(0, fi_close(&region->fid));
	GIVES(0, fi_close(&arrived->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

static void no_region_is_enabled_whose_key_reaches_other_memory(void)
{
	struct side side;
	bool key_cache = true;
	side_open(&side);
	GIVES(0, fi_control(&side.domain->fid, FI_OPT_CXI_SET_PROV_KEY_CACHE, &key_cache));
	struct fid_mr *region;
	GIVES(0, fi_mr_reg(side.domain, side.memory, 4096, REMOTE, 0, 0, 0, &region, NULL));
	GIVES(0, fi_mr_bind(region, &side.ep->fid, 0));
	GIVES(-FI_EINVAL, fi_mr_enable(region));
	GIVES(0, fi_close(&region->fid));
	struct fid_cntr *counter = counter_new(&side); /* then the key is its own */
	region = region_new(&side, side.ep, side.memory, 4096, REMOTE, counter);
	GIVES(0, fi_close(&region->fid));
	GIVES(0, fi_close(&counter->fid));
	side_close(&side);
}

const struct rule memory_rules[] = {
	{"there_is_no_key_before_a_region_is_bound_and_enabled", there_is_no_key_before_a_region_is_bound_and_enabled},
	{"a_region_is_one_range_of_the_hosts_memory", a_region_is_one_range_of_the_hosts_memory},
	{"target_addresses_are_offsets_and_end_with_the_region", target_addresses_are_offsets_and_end_with_the_region},
	{"a_key_works_only_through_its_own_endpoint", a_key_works_only_through_its_own_endpoint},
	{"a_closed_region_accepts_no_write", a_closed_region_accepts_no_write},
	{"access_is_as_requested", access_is_as_requested},
	{"a_regions_counter_counts_the_writes_into_it", a_regions_counter_counts_the_writes_into_it},
	{"an_arriving_write_can_fire_work", an_arriving_write_can_fire_work},
	{"no_region_is_enabled_whose_key_reaches_other_memory", no_region_is_enabled_whose_key_reaches_other_memory},
	{NULL, NULL},
};
