/* Endpoints, queues and address vectors: plain operations, what is refused, and the order of closing. */
#define _GNU_SOURCE
#include "driver.h"

#include <dirent.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_tagged.h>

static void an_endpoint_works_once_it_is_bound_and_enabled(void)
{
	struct side side;
	struct fid_ep *ep;
	char address[8];
	size_t length = 8;
	side_open(&side);
	GIVES(0, fi_endpoint(side.domain, side.info, &ep, NULL));
	GIVES(-FI_ENOSYS, fi_write(ep, side.memory, 8, NULL, 0, 0, side.key, NULL));
	GIVES(-FI_EOPBADSTATE, fi_getname(&ep->fid, address, &length));
	GIVES(-FI_ENOAV, fi_enable(ep));
	GIVES(0, fi_ep_bind(ep, &side.av->fid, 0));
	GIVES(-FI_ENOCQ, fi_enable(ep));
	GIVES(-FI_EBADFLAGS, fi_ep_bind(ep, &side.cq->fid, FI_TRANSMIT | FI_READ));
	GIVES(0, fi_ep_bind(ep, &side.cq->fid, FI_TRANSMIT));
	GIVES(-FI_EINVAL, fi_ep_bind(ep, &side.cq->fid, FI_TRANSMIT));
	GIVES(0, fi_enable(ep));
	GIVES(0, fi_enable(ep));
	length = 7;
	GIVES(-FI_ETOOSMALL, fi_getname(&ep->fid, address, &length));
	HOLDS(length == 8);
	GIVES(0, fi_getname(&ep->fid, address, &length));
	GIVES(0, fi_close(&ep->fid));
	side_close(&side);
}

static void missing_functions_are_refused_without_a_crash(void)
{
	struct side side;
	struct fid_ep *ep;
	struct fid_eq *eq;
	struct fi_eq_attr attr = {0};
	side_open(&side);
	GIVES(-FI_ENOSYS, fi_send(side.ep, side.memory, 8, NULL, 0, NULL));
	GIVES(-FI_ENOSYS, fi_recv(side.ep, side.memory, 8, NULL, 0, NULL));
	GIVES(-FI_ENOSYS, fi_tsend(side.ep, side.memory, 8, NULL, 0, 1, NULL));
	GIVES(-FI_ENOSYS, fi_atomic(side.ep, side.memory, 1, NULL, 0, 0, side.key, FI_UINT64, FI_SUM, NULL));
	GIVES(-FI_ENOSYS, fi_writedata(side.ep, side.memory, 8, NULL, 1, 0, 0, side.key, NULL));
	GIVES(-FI_ENOSYS, fi_inject_writedata(side.ep, side.memory, 8, 1, 0, 0, side.key));
	GIVES(-FI_ENOSYS, fi_scalable_ep(side.domain, side.info, &ep, NULL));
	GIVES(-FI_ENOSYS, fi_eq_open(side.fabric, &attr, &eq, NULL));
	GIVES(-FI_ENOENT, fi_cancel(&side.ep->fid, NULL));
	GIVES(-FI_EINVAL, fi_cq_sread(side.cq, NULL, 1, NULL, 0));
	side_close(&side);
}

static ssize_t write_with(struct side *side, uint64_t flags, size_t local_count, size_t remote_count)
{
	struct iovec local[2] = {{side->memory, 8}, {side->memory, 8}};
	struct fi_rma_iov remote[2] = {{0, 8, side->key}, {0, 8, side->key}};
	struct fi_msg_rma message = {.msg_iov = local,
				     .iov_count = local_count,
				     .addr = side->peer,
				     .rma_iov = remote,
				     .rma_iov_count = remote_count};
	return fi_writemsg(side->ep, &message, flags);
}

static void invalid_operations_are_refused(void)
{
	struct side from, to;
	pair_open(&from, &to);
	struct iovec ranges[2] = {{from.memory, 8}, {from.memory + 8, 8}};
	GIVES(-FI_EINVAL, write_with(&from, 0, 2, 1));
	GIVES(-FI_EINVAL, write_with(&from, 0, 1, 2));
	GIVES(-FI_EINVAL, write_with(&from, 0, 1, 0));
	GIVES(-FI_EBADFLAGS, write_with(&from, FI_TRIGGER, 1, 1));
	GIVES(-FI_EBADFLAGS, write_with(&from, FI_REMOTE_CQ_DATA, 1, 1));
	GIVES(-FI_EINVAL, write_with(&from, FI_FENCE, 1, 1)); /* not asked for in the hints */
	GIVES(-FI_EINVAL, fi_writemsg(from.ep, NULL, 0));
	GIVES(-FI_EINVAL, fi_writev(from.ep, ranges, NULL, 2, from.peer, 0, to.key, NULL));
	GIVES(-FI_EINVAL, fi_readv(from.ep, ranges, NULL, 2, from.peer, 0, to.key, NULL));
	GIVES(-FI_EINVAL, fi_write(from.ep, NULL, 8, NULL, from.peer, 0, to.key, NULL));
	GIVES(-FI_EINVAL, fi_write(from.ep, from.memory, 8, NULL, from.peer + 1, 0, to.key, NULL));
	GIVES(-FI_EINVAL, fi_write(from.ep, from.memory, 8, NULL, FI_ADDR_UNSPEC, 0, to.key, NULL));
	GIVES(-FI_EKEYREJECTED, fi_write(from.ep, from.memory, 8, NULL, from.peer, 0, 1ULL << 33, NULL));
	GIVES(-FI_EMSGSIZE, fi_write(from.ep, from.memory, (size_t)UINT32_MAX + 1, NULL, from.peer, 0, to.key, NULL));
	GIVES(-FI_EMSGSIZE, fi_inject_write(from.ep, from.memory, 193, from.peer, 0, to.key));
	expect_nothing(&from);
	pair_close(&from, &to);
}

static void entries_appear_only_on_request_when_the_queue_is_read(void)
{
	struct side from, to;
	void *context;
	pair_open(&from, &to);
	struct fid_cntr *written = counter_new(&from), *read = counter_new(&from);
	GIVES(-FI_EBUSY, fi_close(&from.ep->fid)); /* its region is bound */
	GIVES(0, fi_close(&from.region->fid));
	GIVES(0, fi_close(&from.ep->fid));
	GIVES(0, fi_endpoint(from.domain, from.info, &from.ep, NULL));
	GIVES(0, fi_ep_bind(from.ep, &from.cq->fid, FI_TRANSMIT | FI_SELECTIVE_COMPLETION));
	GIVES(0, fi_ep_bind(from.ep, &from.av->fid, 0));
	GIVES(0, fi_ep_bind(from.ep, &written->fid, FI_WRITE));
	GIVES(0, fi_ep_bind(from.ep, &read->fid, FI_READ));
	GIVES(-FI_EINVAL, fi_ep_bind(from.ep, &read->fid, FI_WRITE));
	GIVES(0, fi_enable(from.ep));
	from.region = region_new(&from, from.ep, from.memory, MEMORY_BYTES, FI_REMOTE_WRITE, NULL);

	GIVES(0, fi_write(from.ep, from.memory, 5000, NULL, from.peer, 0, to.key, &from));
	GIVES(0, fi_inject_write(from.ep, from.memory, 192, from.peer, 8192, to.key));
	from.memory[0] ^= 0xff; /* an inject has been copied */
	BECOMES(fi_cntr_read(written) == 2);
	HOLDS(to.memory[8192] == (from.memory[0] ^ 0xff) && to.memory[8191] == 0);
	GIVES(0, fi_read(from.ep, from.memory + 32768, 5000, NULL, from.peer, 0, to.key, &from));
	BECOMES(fi_cntr_read(read) == 1);
	HOLDS(!memcmp(from.memory + 32768, to.memory, 5000));
	expect_nothing(&from);
	struct iovec local = {from.memory, 64};
	struct fi_rma_iov remote = {0, 64, to.key};
	struct fi_msg_rma message = {.msg_iov = &local, .iov_count = 1, .addr = from.peer, .rma_iov = &remote};
	message.rma_iov_count = 1;
	message.context = &to;
	GIVES(0, fi_writemsg(from.ep, &message, FI_COMPLETION));
	BECOMES(fi_cntr_read(written) == 3);
	GIVES(0, end_of(&from, &context));
	HOLDS(context == &to);
	GIVES(0, fi_close(&from.region->fid));
	GIVES(-FI_EBUSY, fi_close(&written->fid));
	GIVES(0, fi_close(&from.ep->fid));
	GIVES(0, fi_close(&written->fid));
	GIVES(0, fi_close(&read->fid));
	from.ep = endpoint_new(&from);
	from.region = region_new(&from, from.ep, from.memory, MEMORY_BYTES, FI_REMOTE_WRITE, NULL);
	pair_close(&from, &to);
}

static void without_selective_completion_every_operation_has_an_entry(void)
{
	struct side from, to;
	char address[8];
	void *context;
	side_open_with(&from, FI_RMA | FI_FENCE, 0, 0);
	side_open(&to);
	name_of(to.ep, address);
	meet(&from, address);
	GIVES(0, fi_write(from.ep, from.memory, 8, NULL, from.peer, 0, to.key, &from));
	GIVES(0, end_of(&from, &context));
	HOLDS(context == &from);
	from.key = to.key;
	GIVES(0, write_with(&from, FI_FENCE | FI_DELIVERY_COMPLETE, 1, 1));
	GIVES(0, end_of(&from, &context));
	GIVES(0, write_with(&from, 0, 0, 1)); /* of no bytes */
	GIVES(0, end_of(&from, &context));
	/* An inject never has one. */
	GIVES(0, fi_inject_write(from.ep, "12345678", 8, from.peer, 0, to.key));
	BECOMES(!memcmp(to.memory, "12345678", 8));
	expect_nothing(&from);
	side_close(&from);
	side_close(&to);
}

static void the_same_address_has_the_same_number(void)
{
	struct side side;
	char first[8], second[8], text[64];
	size_t length = 8;
	fi_addr_t numbers[3];
	side_open(&side);
	struct fid_ep *other = endpoint_new(&side);
	name_of(side.ep, first);
	name_of(other, second);
	GIVES(1, fi_av_insert(side.av, first, 1, &numbers[0], 0, NULL));
	GIVES(1, fi_av_insert(side.av, second, 1, &numbers[1], 0, NULL));
	GIVES(1, fi_av_insert(side.av, first, 1, &numbers[2], 0, NULL));
	HOLDS(numbers[0] == numbers[2] && numbers[0] != numbers[1]);
	GIVES(-FI_EINVAL, fi_av_insert(side.av, first, 1, &numbers[2], FI_AV_USER_ID, NULL));
	GIVES(0, fi_av_lookup(side.av, numbers[1], text, &length));
	HOLDS(length == 8 && !memcmp(text, second, 8));
	GIVES(0, fi_av_remove(side.av, numbers, 1, 0));
	GIVES(0, fi_av_lookup(side.av, numbers[0], text, &length)); /* it was inserted twice */
	GIVES(0, fi_av_remove(side.av, numbers, 1, 0));
	GIVES(-FI_EINVAL, fi_av_lookup(side.av, numbers[0], text, &length));
	length = sizeof text;
	HOLDS(!strncmp(fi_av_straddr(side.av, first, text, &length), "fi_addr_cxi://127.0.0.1:", 24));
	GIVES(0, fi_close(&other->fid));
	side_close(&side);
}

static int descriptors_open(void)
{
	int count = 0;
	DIR *folder = opendir("/proc/self/fd");
	HOLDS(folder);
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static void objects_in_use_do_not_close_and_none_stays_open(void)
{
	int before = 0;
	for (int round = 0; round < 12; round++) {
		struct side side;
		side_open(&side);
		struct fid_cntr *counter = counter_new(&side);
		GIVES(-FI_EBUSY, fi_close(&side.fabric->fid));
		GIVES(-FI_EBUSY, fi_close(&side.domain->fid));
		GIVES(-FI_EBUSY, fi_close(&side.cq->fid));
		GIVES(-FI_EBUSY, fi_close(&side.av->fid));
		GIVES(-FI_EBUSY, fi_close(&side.ep->fid));
		GIVES(0, fi_close(&counter->fid));
		side_close(&side);
		if (round == 2)
			before = descriptors_open();
	}
	HOLDS(descriptors_open() <= before);
}

const struct rule endpoint_rules[] = {
	{"an_endpoint_works_once_it_is_bound_and_enabled", an_endpoint_works_once_it_is_bound_and_enabled},
	{"missing_functions_are_refused_without_a_crash", missing_functions_are_refused_without_a_crash},
	{"invalid_operations_are_refused", invalid_operations_are_refused},
	{"entries_appear_only_on_request_when_the_queue_is_read", entries_appear_only_on_request_when_the_queue_is_read},
	{"without_selective_completion_every_operation_has_an_entry",
	 without_selective_completion_every_operation_has_an_entry},
	{"the_same_address_has_the_same_number", the_same_address_has_the_same_number},
	{"objects_in_use_do_not_close_and_none_stays_open",
	 objects_in_use_do_not_close_and_none_stays_open},
	{NULL, NULL},
};
