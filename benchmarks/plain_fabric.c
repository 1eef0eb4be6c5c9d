/*
 * Measures the provider without any of our code: writes to another process, and 8-byte words back and forth.
 *
 *   plain_fabric PROVIDER
 *
 * prints a line with its address and the location of its memory and its words, reads its peer's line, and then executes
 * the commands on its standard input, one a line, until end of file:
 *
 *   serve N            write the word back N times, each time it has become the next number
 *   write BYTES COUNT  write COUNT blocks, then a word; prints the nanoseconds until the word came back
 *   word N             write a word and wait until it came back, N times; prints the nanoseconds in all
 *
 * One thread, which spins, as the fastest program would, and yields now and then.
 */
#include <inttypes.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MEMORY_BYTES (512u << 20)
#define WINDOW 64
#define SPINS 64
#define WAIT_NS 60000000000ull

static struct fid_ep *endpoint;
static struct fid_cq *cq;
static struct fid_mr *memory_mr, *words_mr;
static char *memory;
static volatile uint64_t *words;
static fi_addr_t peer;
static uint64_t peer_memory, peer_memory_key, peer_words, peer_words_key;
static uint64_t sent, received;
static int in_flight;

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void must(const char *doing, long status)
{
	if (status >= 0)
		return;
	fprintf(stderr, "%s: %s\n", doing, fi_strerror((int)-status));
	exit(1);
}

static void progress(void)
{
	struct fi_cq_entry entries[WINDOW];
	ssize_t count = fi_cq_read(cq, entries, WINDOW);
	if (count != -FI_EAGAIN)
		must("reading completions", count);
	for (ssize_t i = 0; i < count; i++)
		in_flight -= entries[i].op_context == memory;
}

static void send_word(void)
{
	ssize_t status;
	sent++;
	while ((status = fi_inject_write(endpoint, &sent, sizeof sent, peer, peer_words, peer_words_key)) == -FI_EAGAIN)
		progress();
	must("writing a word", status);
}

static void await_word(void)
{
	uint64_t until_ns = now_ns() + WAIT_NS;
	received++;
	for (unsigned spins = 1; words[0] < received; spins++) {
		progress();
		if (spins % SPINS == 0)
			sched_yield(); /* `sockets` has its own thread, and other processes need the core too */
		if (spins % 65536 == 0 && now_ns() > until_ns)
			must("waiting for the word", -FI_ETIMEDOUT);
	}
}

static void write_blocks(uint64_t bytes, uint64_t count)
{
	uint64_t start_ns = now_ns();
	for (uint64_t i = 0; i < count; i++) {
		uint64_t offset = i * bytes % MEMORY_BYTES;
		ssize_t status;
		while (in_flight == WINDOW)
			progress();
		while ((status = fi_write(endpoint, memory + offset, bytes, fi_mr_desc(memory_mr), peer, peer_memory + offset,
					  peer_memory_key, memory)) == -FI_EAGAIN)
			progress();
		must("writing a block", status);
		in_flight++;
	}
	while (in_flight)
		progress();
	send_word();
	await_word();
	printf("%" PRIu64 "\n", now_ns() - start_ns);
}

static void bounce_words(uint64_t count)
{
	uint64_t start_ns = now_ns();
	for (uint64_t i = 0; i < count; i++) {
		send_word();
		await_word();
	}
	printf("%" PRIu64 "\n", now_ns() - start_ns);
}

static void serve(uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		await_word();
		send_word();
	}
}

static struct fi_info *choose(const char *provider)
{
	struct fi_info *hints = fi_allocinfo(), *info;
	hints->caps = FI_RMA;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup(provider);
	if (!strcmp(provider, "shm"))
		hints->tx_attr->msg_order = FI_ORDER_WAW; /* as in our code, so that shm checks keys */
	int local = !strcmp(provider, "shm");
	must("looking for the provider",
	     fi_getinfo(FI_VERSION(1, 17), local ? NULL : "127.0.0.1", NULL, local ? 0 : FI_SOURCE, hints, &info));
	return info;
}

static void introduce(const struct fi_info *info, struct fid_av *av)
{
	unsigned char address[256] = {0};
	size_t length = sizeof address;
	int virtual = !!(info->domain_attr->mr_mode & FI_MR_VIRT_ADDR);
	must("asking for the address", fi_getname(&endpoint->fid, address, &length));
	for (size_t i = 0; i < length; i++)
		printf("%02x", address[i]);
	printf(" %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", virtual ? (uint64_t)(uintptr_t)memory : 0,
	       fi_mr_key(memory_mr), virtual ? (uint64_t)(uintptr_t)words : 0, fi_mr_key(words_mr));
	char text[513];
	unsigned char theirs[256] = {0};
	if (scanf("%512s %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, text, &peer_memory, &peer_memory_key, &peer_words,
		  &peer_words_key) != 5)
		exit(1);
	for (size_t i = 0; text[2 * i]; i++)
		sscanf(text + 2 * i, "%2hhx", &theirs[i]);
	must("adding the peer", fi_av_insert(av, theirs, 1, &peer, 0, NULL) - 1);
}

int main(int count, char **arguments)
{
	if (count != 2)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	struct fi_info *info = choose(arguments[1]);
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fi_av_attr av_attr = {.type = FI_AV_UNSPEC};
	struct fi_cq_attr cq_attr = {.size = 4096, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE};
	must("opening the fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("opening the domain", fi_domain(fabric, info, &domain, NULL));
	must("opening the addresses", fi_av_open(domain, &av_attr, &av, NULL));
	must("opening the queue", fi_cq_open(domain, &cq_attr, &cq, NULL));
	must("opening the endpoint", fi_endpoint(domain, info, &endpoint, NULL));
	must("binding", fi_ep_bind(endpoint, &av->fid, 0));
	must("binding", fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("enabling", fi_enable(endpoint));
	memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	must("registering", fi_mr_reg(domain, memory, MEMORY_BYTES, FI_WRITE | FI_REMOTE_WRITE, 0, 1, 0, &memory_mr, NULL));
	must("registering", fi_mr_reg(domain, (void *)words, 4096, FI_WRITE | FI_REMOTE_WRITE, 0, 2, 0, &words_mr, NULL));
	introduce(info, av);
	char what[16];
	uint64_t first, second;
	while (scanf("%15s", what) == 1) {
		if (!strcmp(what, "write") && scanf("%" SCNu64 " %" SCNu64, &first, &second) == 2)
			write_blocks(first, second);
		else if (!strcmp(what, "word") && scanf("%" SCNu64, &first) == 1)
			bounce_words(first);
		else if (!strcmp(what, "serve") && scanf("%" SCNu64, &first) == 1)
			serve(first);
		else
			return 2;
	}
	return 0;
}
