/*
 * An io_uring over one drive, of a lane or a reader.
 */
#ifndef TRIGGERKV_DRIVE_RING_H
#define TRIGGERKV_DRIVE_RING_H

#include <liburing.h>
#include <stdint.h>

/* Opens a ring for the file `fd`, and an eventfd that it rings when a read or write has ended. If it fails, nothing is open. */
int drive_ring_open(struct io_uring *ring, int *event_fd, int fd, uint32_t depth);
void drive_ring_close(struct io_uring *ring, int event_fd); /* also one that could not be opened */

#endif
