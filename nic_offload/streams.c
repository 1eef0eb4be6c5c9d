/*
 * Finds the sockets of providers over TCP, and cleans up what they leave behind when an endpoint is closed.
 *
 * A peer that has connected but not yet identified itself is known to the provider as a half-open request that points
 * to the endpoint's listener. libfabric 1.17 frees the listener and keeps the request (see its source): one close in
 * five killed a client whose node had been suspended and then resumed. So before an endpoint is closed its listener
 * and all connections accepted through it are shut down, and the provider is given time to notice while the
 * endpoint still exists.
 *
 * What always holds: only sockets with exactly the endpoint's own local address are touched; no other socket can have
 * it.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/fi_cm.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NEAR 256 /* descriptors: each takes a microsecond to examine, and a thousand clients have thousands */
#define ROUNDS 4 /* of progress: a request is ended in the first that sees it */

uint16_t address_port(const union address *address)
{
	int family = address->any.sa_family;
	return family == AF_INET ? address->four.sin_port : family == AF_INET6 ? address->six.sin6_port : 0;
}

int address_is_same(const union address *a, const union address *b)
{
	if (a->any.sa_family != b->any.sa_family)
		return 0;
	if (a->any.sa_family == AF_INET)
		return a->four.sin_port == b->four.sin_port && a->four.sin_addr.s_addr == b->four.sin_addr.s_addr;
	if (a->any.sa_family == AF_INET6)
		return a->six.sin6_port == b->six.sin6_port &&
		       !memcmp(&a->six.sin6_addr, &b->six.sin6_addr, sizeof a->six.sin6_addr);
	return 0;
}

static void shut_down_all_at(const union address *own)
{
	DIR *folder = opendir("/proc/self/fd");
	if (!folder)
		return;
	for (struct dirent *entry; (entry = readdir(folder));) {
		union address local;
		socklen_t length = sizeof local;
		int fd = atoi(entry->d_name);
		if (fd > 0 && !getsockname(fd, &local.any, &length) && address_is_same(&local, own))
			shutdown(fd, SHUT_RDWR);
	}
	closedir(folder);
}

static int listens_at(int fd, const union address *own)
{
	union address local;
	socklen_t length = sizeof local;
	int listens = 0;
	if (getsockname(fd, &local.any, &length) || !address_is_same(&local, own))
		return 0;
	length = sizeof listens;
	return !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) && listens;
}

int lowest_free_fd(void)
{
	int fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
	if (fd >= 0)
		close(fd);
	return fd < 0 ? 0 : fd;
}

static int listener_among_all(const union address *own)
{
	int found = -ENOENT;
	DIR *folder = opendir("/proc/self/fd");
	if (!folder)
		return -errno;
	for (struct dirent *entry; found < 0 && (entry = readdir(folder));)
		if (listens_at(atoi(entry->d_name), own))
			found = atoi(entry->d_name);
	closedir(folder);
	return found;
}

int tk_endpoint_listener(struct tk_endpoint *endpoint)
{
	union address own = {0};
	size_t bytes = sizeof own;
	if (fi_getname(&endpoint->fid->fid, &own, &bytes) || !address_port(&own))
		return -ENOENT;
	for (int fd = endpoint->fds_from; fd < endpoint->fds_from + NEAR; fd++)
		if (listens_at(fd, &own))
			return fd;
	return listener_among_all(&own);
}

void stop_streams(struct tk_fabric *fabric, const struct tk_endpoint *endpoint)
{
	union address own = {0};
	size_t length = sizeof own;
	if (!fabric->streams || fi_getname(&endpoint->fid->fid, &own, &length))
		return;
	shut_down_all_at(&own);
	for (int round = 0; round < ROUNDS; round++)
		drain_completions(fabric);
}
