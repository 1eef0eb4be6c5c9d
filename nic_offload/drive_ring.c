/*
 * Opens and closes the io_uring of a lane or a reader.
 */
#define _GNU_SOURCE
#include "drive_ring.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

int drive_ring_open(struct io_uring *ring, int *event_fd, int fd, uint32_t depth)
{
	int status = io_uring_queue_init(depth, ring, 0);
	if (status) {
		ring->ring_fd = -1;
		return status;
	}
	*event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	status = *event_fd < 0 ? -errno : io_uring_register_files(ring, &fd, 1);
	if (!status)
		status = io_uring_register_eventfd(ring, *event_fd);
	if (status)
		drive_ring_close(ring, *event_fd);
	return status;
}

void drive_ring_close(struct io_uring *ring, int event_fd)
{
	if (ring->ring_fd < 0)
		return;
	if (event_fd >= 0)
		close(event_fd);
	io_uring_unregister_files(ring);
	io_uring_queue_exit(ring);
	ring->ring_fd = -1;
}
