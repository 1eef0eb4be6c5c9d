/* Rules that need two processes. Children are forked before anything is open. */
#define _GNU_SOURCE
#include "driver.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct target {
	char address[8];
	uint64_t key;
};

static void say_to(int channel, const void *what, size_t bytes)
{
	HOLDS(write(channel, what, bytes) == (ssize_t)bytes);
}

static void receive_from(int channel, void *what, size_t bytes)
{
	HOLDS(read(channel, what, bytes) == (ssize_t)bytes);
}

/* The child offers its memory, sums it up when told to, and ends. */
static pid_t child_new(int *channel)
{
	int pair[2];
	HOLDS(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
	pid_t child = fork();
	HOLDS(child >= 0);
	if (child) {
		close(pair[1]);
		*channel = pair[0];
		return child;
	}
	struct side side;
	struct target target;
	uint64_t sum = 0;
	char go;
	close(pair[0]);
	side_open(&side);
	name_of(side.ep, target.address);
	target.key = side.key;
	say_to(pair[1], &target, sizeof target);
	/* From here on the target sits in a read: only its NIC is there to take the bytes. */
	receive_from(pair[1], &go, 1);
	for (size_t i = 0; i < MEMORY_BYTES; i++)
		sum += side.memory[i];
	say_to(pair[1], &sum, sizeof sum);
	receive_from(pair[1], &go, 1);
	side_close(&side);
	exit(0);
}

static void one_process_puts_into_another(void)
{
	struct side from;
	struct target target;
	uint64_t wanted = 0, sum;
	int channel, how;
	pid_t child = child_new(&channel);
	receive_from(channel, &target, sizeof target);
	side_open(&from);
	meet(&from, target.address);
	for (size_t i = 0; i < MEMORY_BYTES; i++)
		wanted += from.memory[i] = (unsigned char)(i * 13 + 5);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = target.key, .length = MEMORY_BYTES};
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 1);
	say_to(channel, "", 1);
	receive_from(channel, &sum, sizeof sum);
	HOLDS(sum == wanted);
	say_to(channel, "", 1);
	HOLDS(waitpid(child, &how, 0) == child && how == 0);
	expect_nothing(&from);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	side_close(&from);
}

static void operations_to_a_dead_process_fail(void)
{
	struct side from;
	struct target target;
	void *context;
	int channel;
	pid_t child = child_new(&channel);
	receive_from(channel, &target, sizeof target);
	setenv("SOFT_CASSINI_UNREACHABLE_MS", "200", 1);
	side_open(&from);
	meet(&from, target.address);
	struct fid_cntr *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 1, .key = target.key, .length = MEMORY_BYTES};
	GIVES(0, queue_put(&from, &put));
	ring(trigger, 1);
	BECOMES(fi_cntr_read(end) == 1);
	put.threshold = 2;
	put.context = &target;
	GIVES(0, queue_put(&from, &put));
	HOLDS(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	ring(trigger, 1);
	BECOMES(fi_cntr_readerr(end) == 1);
	HOLDS(end_of(&from, &context) > 0);
	HOLDS(context == &target);
	HOLDS(fi_cntr_read(end) == 1);
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	side_close(&from);
}

/* The child knows nothing of libfabric: it maps a page and stores to it, as a GPU would. */
static void another_process_can_ring_a_doorbell(void)
{
	int channel[2], how;
	off_t offset;
	struct side from, to;
	HOLDS(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channel));
	pid_t child = fork();
	HOLDS(child >= 0);
	if (!child) {
		char path[64];
		struct {
			int fd;
			off_t offset;
		} page;
		close(channel[0]);
		receive_from(channel[1], &page, sizeof page);
		snprintf(path, sizeof path, "/proc/%d/fd/%d", getppid(), page.fd);
		FILE *file = fopen(path, "r+");
		HOLDS(file);
		size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
		void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), page.offset);
		HOLDS(at != MAP_FAILED);
		uint64_t *word = at;
		for (int i = 0; i < 100; i++) {
			store(word, 3);
			BECOMES(word_at(word) == 0);
		}
		_exit(0);
	}
	pair_open(&from, &to);
	struct fid_cntr *spare = counter_new(&from), *trigger = counter_new(&from), *end = counter_new(&from);
	struct put put = {.trigger = trigger, .end = end, .threshold = 300, .key = to.key, .length = 4096};
	GIVES(0, queue_put(&from, &put));
	struct {
		int fd;
		off_t offset;
	} page = {.fd = library.doorbell_fd(trigger, &offset)};
	page.offset = offset;
	HOLDS(page.fd >= 0);
	say_to(channel[0], &page, sizeof page);
	HOLDS(waitpid(child, &how, 0) == child && how == 0);
	BECOMES(fi_cntr_read(end) == 1);
	GIVES(300, fi_cntr_read(trigger));
	GIVES(0, fi_cntr_read(spare));
	HOLDS(!memcmp(to.memory, from.memory, 4096));
	expect_nothing(&from);
	GIVES(0, fi_close(&spare->fid));
	GIVES(0, fi_close(&trigger->fid));
	GIVES(0, fi_close(&end->fid));
	pair_close(&from, &to);
}

const struct rule process_rules[] = {
	{"one_process_puts_into_another", one_process_puts_into_another},
	{"operations_to_a_dead_process_fail", operations_to_a_dead_process_fail},
	{"another_process_can_ring_a_doorbell", another_process_can_ring_a_doorbell},
	{NULL, NULL},
};
