/*
 * An io_uring over one drive, of a lane or a reader.
 */
#ifndef TRIGGERKV_DRIVE_RING_H
#define TRIGGERKV_DRIVE_RING_H

#include <liburing.h>
#include <stdint.h>

/* Opens a ring for `fd`, and an eventfd that it signals when a read or write has ended. On failure nothing is left
 * open. */
int drive_ring_open(struct io_uring *ring, int *event_fd, int fd, uint32_t depth);
void drive_ring_close(struct io_uring *ring, int event_fd); /* also after `drive_ring_open` has failed */

#endif
