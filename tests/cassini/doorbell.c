/*
 * Doorbell pages: one for each counter, in a file without a name that any process can map.
 *
 * A store to a real doorbell, once fenced, is a message to the NIC. Here it is a word of memory that the NIC's thread
 * takes with an exchange: of two stores between two polls of the thread, it sees the last. A caller must
 * therefore wait until the word for adding reads 0 again, and the words for resetting their idle value, before
 * ringing once more. Nothing better is robust: a trap on each store (a protected page and SIGSEGV, or userfaultfd)
 * would have to decode the storing instruction, would take SIGSEGV from the process, and does not see the mappings
 * of other processes.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RESET_IDLE UINT64_MAX /* a reset is a store of 0, so an idle word must be something else */

static unsigned counters_open; /* of all domains of the process, as a NIC has them */

static size_t page_bytes(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

int doorbells_open(struct domain *domain)
{
	size_t bytes = COUNTERS_MAX * page_bytes();
	domain->doorbell_fd = memfd_create("cassini doorbells", MFD_CLOEXEC);
	if (domain->doorbell_fd < 0)
		return -errno;
	if (ftruncate(domain->doorbell_fd, (off_t)bytes))
		return -errno;
	void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, domain->doorbell_fd, 0);
	if (pages == MAP_FAILED)
		return -errno;
	domain->doorbells = pages;
	return 0;
}

void doorbells_close(struct domain *domain)
{
	if (domain->doorbells)
		munmap(domain->doorbells, COUNTERS_MAX * page_bytes());
	if (domain->doorbell_fd >= 0)
		close(domain->doorbell_fd);
}

void *doorbell_page(const struct counter *counter)
{
	return counter->domain->doorbells + counter->page * page_bytes();
}

static uint64_t *word(const struct counter *counter, size_t offset)
{
	return (uint64_t *)((char *)doorbell_page(counter) + offset);
}

int doorbell_take(struct counter *counter)
{
	struct domain *domain = counter->domain;
	if (__atomic_add_fetch(&counters_open, 1, __ATOMIC_RELAXED) > COUNTERS_MAX) {
		__atomic_sub_fetch(&counters_open, 1, __ATOMIC_RELAXED);
		return -FI_EDOMAIN;
	}
	/* One domain alone can't run out of pages before the process runs out of counters. */
	while (domain->pages_used[counter->page])
		counter->page++;
	domain->pages_used[counter->page] = 1;
	*word(counter, CXI_DOORBELL_RESET) = RESET_IDLE;
	*word(counter, CXI_DOORBELL_RESET_FAILURE) = RESET_IDLE;
	return 0;
}

void doorbell_give_back(struct counter *counter)
{
	memset(doorbell_page(counter), 0, page_bytes());
	counter->domain->pages_used[counter->page] = 0;
	__atomic_sub_fetch(&counters_open, 1, __ATOMIC_RELAXED);
}

static uint64_t take(uint64_t *at, uint64_t idle)
{
	if (__atomic_load_n(at, __ATOMIC_ACQUIRE) == idle)
		return idle;
	return __atomic_exchange_n(at, idle, __ATOMIC_ACQ_REL);
}

static int poll_reset(struct counter *counter, size_t offset, void (*set)(struct counter *, uint64_t))
{
	uint64_t rung = take(word(counter, offset), RESET_IDLE);
	if (rung == RESET_IDLE)
		return 0;
	if (rung)
		give_up("a doorbell can only reset a counter to 0, and something else was stored to it.");
	set(counter, 0);
	return 1;
}

/* Resets come first: a caller that resets and then adds waits in between, so both orders are right. */
int doorbell_poll(struct counter *counter)
{
	int rang = poll_reset(counter, CXI_DOORBELL_RESET, counter_set);
	rang |= poll_reset(counter, CXI_DOORBELL_RESET_FAILURE, counter_set_failure);
	uint64_t more = take(word(counter, CXI_DOORBELL_ADD), 0);
	if (more > FI_CXI_CNTR_SUCCESS_MAX)
		give_up("a doorbell was rung with more than 2^48 - 1 successes.");
	if (more)
		counter_add(counter, more);
	uint64_t failures = take(word(counter, CXI_DOORBELL_ADD_FAILURE), 0);
	if (failures > FI_CXI_CNTR_FAILURE_MAX)
		give_up("a doorbell was rung with more than 127 failures.");
	if (failures)
		counter_add_failure(counter, failures);
	return rang || more || failures;
}

EXPORTED int soft_cassini_doorbell_fd(struct fid_cntr *fid, off_t *offset)
{
	const struct counter *counter = (const struct counter *)fid;
	*offset = (off_t)(counter->page * page_bytes());
	return counter->domain->doorbell_fd;
}
