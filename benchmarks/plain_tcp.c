/*
 * Measures a TCP round trip over loopback without any of our code: BYTES one way, eight bytes back.
 *
 *   plain_tcp BYTES ROUNDS spin|block IDLE_US
 *
 * prints the median of the rounds in nanoseconds. Two processes: with `spin` neither sleeps in a system call, with
 * `block` both do. It is idle for IDLE_US before each round.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS_MAX 100000
#define SPINS 64 /* before it yields */

static int flags;

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void must(const char *doing, int ok)
{
	if (ok)
		return;
	perror(doing);
	exit(1);
}

/* Returns 0 if the connection is closed or has failed. */
static int receive_all(int fd, char *into, size_t length)
{
	for (unsigned spins = 0; length;) {
		ssize_t got = recv(fd, into, length, flags);
		if (got > 0) {
			into += got;
			length -= (size_t)got;
		} else if (!got || errno != EAGAIN) {
			return 0;
		} else if (++spins % SPINS == 0) {
			sched_yield();
		}
	}
	return 1;
}

static void send_all(int fd, const char *from, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, from, length, flags | MSG_NOSIGNAL);
		must("send", sent >= 0 || errno == EAGAIN);
		if (sent > 0) {
			from += sent;
			length -= (size_t)sent;
		}
	}
}

static void answer(int fd, char *memory, size_t length)
{
	while (receive_all(fd, memory, length))
		send_all(fd, "answered", 8);
	exit(0);
}

static int ascending(const void *a, const void *b)
{
	uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
	return left < right ? -1 : left > right;
}

int main(int count, char **arguments)
{
	if (count != 5) {
		fprintf(stderr, "usage: %s BYTES ROUNDS spin|block IDLE_US\n", arguments[0]);
		return 2;
	}
	size_t length = strtoul(arguments[1], NULL, 10);
	unsigned rounds = (unsigned)strtoul(arguments[2], NULL, 10);
	flags = strcmp(arguments[3], "spin") ? 0 : MSG_DONTWAIT;
	useconds_t idle_us = (useconds_t)strtoul(arguments[4], NULL, 10);
	static uint64_t took_ns[ROUNDS_MAX];
	char *memory = calloc(1, length);
	must("memory", memory && rounds && rounds <= ROUNDS_MAX);

	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t size = sizeof address;
	int listening = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	must("bind", !bind(listening, (struct sockaddr *)&address, sizeof address) && !listen(listening, 1) &&
			     !getsockname(listening, (struct sockaddr *)&address, &size));
	pid_t other = fork();
	must("fork", other >= 0);
	int fd = other ? socket(AF_INET, SOCK_STREAM, 0) : accept(listening, NULL, NULL);
	must("connect", fd >= 0 && (!other || !connect(fd, (struct sockaddr *)&address, sizeof address)));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (!other)
		answer(fd, memory, length);
	for (unsigned i = 0; i < rounds; i++) {
		char word[8];
		if (idle_us)
			usleep(idle_us);
		uint64_t start_ns = now_ns();
		send_all(fd, memory, length);
		must("the answer", receive_all(fd, word, sizeof word));
		took_ns[i] = now_ns() - start_ns;
	}
	close(fd);
	waitpid(other, NULL, 0);
	qsort(took_ns, rounds, sizeof *took_ns, ascending);
	printf("%llu\n", (unsigned long long)took_ns[rounds / 2]);
	return 0;
}
