/*
 * Puts and gets through Redis's fastest ordinary client: hiredis, blocking calls over TCP, one thread.
 *
 *   redis_client PORT SALT
 *
 * reads a line at a time from its standard input and answers each with one line, which begins with `ok` or `error`:
 *
 *   open SIZE SLOTS               memory for so many blocks of this size, as source and as target
 *   put NAME HOW BATCH WINDOW CALLS  SET fresh keys: a call is BATCH commands and their replies, WINDOW calls under way
 *   get NAME BATCH WINDOW         GET what was put under the name, in that order
 *   check NAME                    how many of them are there, byte for byte
 *   forget NAME                   DEL them
 *   ready                         connect again: the server was restarted
 *
 * The answer to a put or a get has its start and its end (CLOCK_MONOTONIC), its CPU time, and for each call the
 * nanoseconds from its first command to its last reply. HOW is the server's configuration, and is ignored here.
 *
 * A value is copied once, from hiredis' buffer to its destination. Buffers are reused (`maxbuf = 0`, and a malloc that
 * returns no memory to the kernel), so that a large value doesn't fault in new pages each time.
 */
#include <errno.h>
#include <hiredis/hiredis.h>
#include <inttypes.h>
#include <limits.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#define KEY_BYTES 32
#define NAMES_MAX 16
#define CALLS_MAX 4096
#define WAIT_S 60

struct set {
	char name[16];
	uint64_t first, count;
};

/* Stands for a reply object, so nothing has to be freed. */
enum reply { REPLY_OK = 1, REPLY_NIL, REPLY_ERROR };

static redisContext *redis;
static unsigned salt;
static struct set sets[NAMES_MAX];
static uint64_t keys_given;
static char *source, *target;
static uint64_t block_bytes, slots;
static uint64_t reply_slot;   /* where the next value goes */
static uint64_t reply_length; /* of the last value */
static uint64_t begun_ns[CALLS_MAX], spent_ns[CALLS_MAX];
static char error[256];

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec now;
	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int fail(const char *format, ...)
{
	va_list rest;
	va_start(rest, format);
	vsnprintf(error, sizeof error, format, rest);
	va_end(rest);
	return -1;
}

/* --- replies, without an object for each */

static void *took_string(const redisReadTask *task, char *text, size_t length)
{
	if (task->type == REDIS_REPLY_ERROR) {
		snprintf(error, sizeof error, "%.*s", (int)(length < 200 ? length : 200), text);
		return (void *)REPLY_ERROR;
	}
	if (task->type == REDIS_REPLY_STRING && length <= block_bytes) {
		memcpy(target + reply_slot % slots * block_bytes, text, length);
		reply_length = length;
	}
	return (void *)REPLY_OK;
}

static void *took_integer(const redisReadTask *task, long long value)
{
	(void)task, (void)value;
	return (void *)REPLY_OK;
}

static void *took_array(const redisReadTask *task, int count)
{
	(void)task, (void)count;
	return (void *)REPLY_ERROR;
}

static void *took_nil(const redisReadTask *task)
{
	(void)task;
	return (void *)REPLY_NIL;
}

static void free_nothing(void *reply)
{
	(void)reply;
}

static redisReplyObjectFunctions functions = {took_string, took_array, took_integer, took_nil, free_nothing};

static enum reply take_reply(void)
{
	void *reply = NULL;
	if (redisGetReply(redis, &reply) != REDIS_OK) {
		fail("the connection ended: %s", redis->errstr);
		return REPLY_ERROR;
	}
	return (enum reply)(uintptr_t)reply;
}

/* --- commands */

static void make_key(char *key, uint64_t number)
{
	memset(key, 'k', KEY_BYTES);
	memcpy(key, &salt, sizeof salt);
	memcpy(key + sizeof salt, &number, sizeof number);
}

static void append(const char *command, uint64_t number, const char *value)
{
	char key[KEY_BYTES];
	make_key(key, number);
	const char *words[] = {command, key, value};
	size_t lengths[] = {strlen(command), KEY_BYTES, block_bytes};
	redisAppendCommandArgv(redis, value ? 3 : 2, words, lengths);
}

static int push(void)
{
	int done = 0;
	while (!done)
		if (redisBufferWrite(redis, &done) != REDIS_OK)
			return fail("the connection ended: %s", redis->errstr);
	return 0;
}

static int take_call(const struct set *set, uint64_t call, uint64_t batch, int is_put)
{
	for (uint64_t i = 0; i < batch; i++) {
		reply_slot = call * batch + i;
		reply_length = 0;
		enum reply reply = take_reply();
		if (reply == REPLY_ERROR)
			return -1;
		if (!is_put && (reply == REPLY_NIL || reply_length != block_bytes))
			return fail("block %" PRIu64 " of %s did not come back", reply_slot, set->name);
	}
	spent_ns[call] = clock_ns(CLOCK_MONOTONIC) - begun_ns[call];
	return 0;
}

static int transfer(const struct set *set, uint64_t batch, uint64_t window, int is_put)
{
	uint64_t calls = set->count / batch, taken = 0;
	uint64_t start_ns = clock_ns(CLOCK_MONOTONIC), start_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	for (uint64_t call = 0; call < calls; call++) {
		begun_ns[call] = clock_ns(CLOCK_MONOTONIC);
		for (uint64_t i = 0; i < batch; i++) {
			uint64_t number = call * batch + i;
			append(is_put ? "SET" : "GET", set->first + number,
			       is_put ? source + number % slots * block_bytes : NULL);
			if (is_put && push()) /* the server processes it while the next value is copied */
				return -1;
		}
		if (push() || (call + 1 - taken == window && take_call(set, taken++, batch, is_put)))
			return -1;
	}
	while (taken < calls)
		if (take_call(set, taken++, batch, is_put))
			return -1;
	uint64_t end_ns = clock_ns(CLOCK_MONOTONIC);
	printf("ok %" PRIu64 " %" PRIu64 " %" PRIu64, start_ns, end_ns, clock_ns(CLOCK_PROCESS_CPUTIME_ID) - start_cpu_ns);
	for (uint64_t call = 0; call < calls; call++)
		printf(" %" PRIu64, spent_ns[call]);
	printf("\n");
	return 0;
}

static int check(const struct set *set)
{
	uint64_t there = 0;
	for (uint64_t i = 0; i < set->count; i++) {
		append("GET", set->first + i, NULL);
		reply_slot = i;
		reply_length = 0;
		enum reply reply = take_reply();
		if (reply == REPLY_ERROR)
			return -1;
		uint64_t offset = i % slots * block_bytes;
		there += reply_length == block_bytes && !memcmp(source + offset, target + offset, block_bytes);
	}
	printf("ok %" PRIu64 "\n", there);
	return 0;
}

static int forget(struct set *set)
{
	for (uint64_t i = 0; i < set->count; i++)
		append("DEL", set->first + i, NULL);
	for (uint64_t i = 0; i < set->count; i++)
		if (take_reply() == REPLY_ERROR)
			return -1;
	set->count = 0;
	printf("ok\n");
	return 0;
}

/* --- memory, and the loop over commands */

static struct set *find(const char *name)
{
	for (int i = 0; i < NAMES_MAX; i++) {
		if (!sets[i].name[0])
			snprintf(sets[i].name, sizeof sets[i].name, "%s", name);
		if (!strcmp(sets[i].name, name))
			return &sets[i];
	}
	return NULL;
}

static char *allocate(uint64_t bytes)
{
	return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
}

static int open_memory(uint64_t size, uint64_t count)
{
	if (source)
		munmap(source, block_bytes * slots), munmap(target, block_bytes * slots);
	block_bytes = size;
	slots = count;
	source = allocate(size * count);
	target = allocate(size * count);
	if (source == MAP_FAILED || target == MAP_FAILED)
		return fail("no memory for %" PRIu64 " blocks", count);
	uint64_t state = 88172645463325252u + salt;
	for (uint64_t i = 0; i < size * count / 8; i++) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		((uint64_t *)source)[i] = state;
	}
	printf("ok\n");
	return 0;
}

static int connect_to(int port)
{
	struct timeval wait = {.tv_sec = WAIT_S};
	if (redis)
		redisFree(redis);
	redis = redisConnectWithTimeout("127.0.0.1", port, wait);
	if (!redis || redis->err)
		return fail("no Redis at port %d: %s", port, redis ? redis->errstr : strerror(errno));
	redisSetTimeout(redis, wait);
	redis->reader->fn = &functions;
	redis->reader->maxbuf = 0;
	return 0;
}

static int obey(const char *line, int port)
{
	char what[16], name[16], how[16];
	uint64_t first, second, third;
	if (!strcmp(line, "ready")) {
		if (connect_to(port))
			return -1;
		printf("ok\n");
		return 0;
	}
	if (sscanf(line, "open %" SCNu64 " %" SCNu64, &first, &second) == 2)
		return open_memory(first, second);
	if (sscanf(line, "put %15s %15s %" SCNu64 " %" SCNu64 " %" SCNu64, name, how, &first, &second, &third) == 5) {
		struct set *set = find(name);
		if (!set || third > CALLS_MAX || first * second > slots)
			return fail("too much is wanted: %s", line);
		*set = (struct set){.first = keys_given, .count = first * third};
		snprintf(set->name, sizeof set->name, "%s", name);
		keys_given += set->count;
		return transfer(set, first, second, 1);
	}
	if (sscanf(line, "get %15s %" SCNu64 " %" SCNu64, name, &first, &second) == 3)
		return find(name) ? transfer(find(name), first, second, 0) : fail("no blocks named %s", name);
	if (sscanf(line, "%15s %15s", what, name) == 2 && find(name)) {
		if (!strcmp(what, "check"))
			return check(find(name));
		if (!strcmp(what, "forget"))
			return forget(find(name));
	}
	return fail("not understood: %s", line);
}

int main(int count, char **arguments)
{
	char line[256];
	if (count != 3)
		return 2;
	mallopt(M_MMAP_MAX, 0);
	mallopt(M_TRIM_THRESHOLD, INT_MAX);
	setvbuf(stdout, NULL, _IOLBF, 0);
	salt = (unsigned)strtoul(arguments[2], NULL, 10);
	if (connect_to(atoi(arguments[1]))) {
		printf("error %s\n", error);
		return 1;
	}
	printf("ok\n");
	while (fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (obey(line, atoi(arguments[1]))) {
			printf("error %s\n", error);
			return 1;
		}
	}
	return 0;
}
