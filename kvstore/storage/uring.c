/* A thin layer over io_uring: arrays of operations go in, arrays of results come out.
 *
 * Always holds: a result is the whole requested length or -errno. A short transfer is continued
 * from where it stopped; one that ends at the end of the file is -EIO.
 *
 * Not thread-safe: one thread calls it. No SQPOLL (burns a core), no IOPOLL (most drives lack it), no
 * DEFER_TASKRUN (hangs behind an eventfd unless every peek enters the kernel first).
 */
#include <errno.h>
#include <liburing.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { STORE_READ = 0, STORE_WRITE = 1, STORE_SYNC = 2 };
enum { DIRECT_ALIGN = 512, STUMBLES_MAX = 16 };

struct store_op {
	uint64_t kind, address, length, offset, tag;
};

struct store_done {
	uint64_t tag;
	int64_t result;
};

/* One operation in flight. `moved` grows when the kernel moves less than was requested. */
struct flight {
	struct store_op op;
	uint64_t moved;
	unsigned stumbles; /* EINTR and EAGAIN, which are not errors of the drive */
};

struct store_ring {
	struct io_uring ring;
	int event_fd;
	unsigned free_count;
	struct flight *flights;
	unsigned *free_list;
};

static void prepare(struct store_ring *r, struct flight *f)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring); /* there are as many entries as flights */
	char *address = (char *)(uintptr_t)f->op.address + f->moved;
	unsigned length = (unsigned)(f->op.length - f->moved);
	uint64_t offset = f->op.offset + f->moved;

	if (f->op.kind == STORE_READ)
		io_uring_prep_read(sqe, 0, address, length, offset);
	else if (f->op.kind == STORE_WRITE)
		io_uring_prep_write(sqe, 0, address, length, offset);
	else
		io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, f);
}

/* Entries that the kernel doesn't accept now stay in the ring; the eventfd makes the caller reap again, which resubmits
 * them. */
static int flush(struct store_ring *r)
{
	while (io_uring_sq_ready(&r->ring) > 0) {
		int taken = io_uring_submit(&r->ring);
		if (taken == -EINTR)
			continue;
		if (taken == -EAGAIN || taken == -EBUSY || taken == 0)
			return eventfd_write(r->event_fd, 1) < 0 ? -errno : 0;
		if (taken < 0)
			return taken;
	}
	return 0;
}

/* Returns whether the operation has ended; otherwise prepares the rest of it. */
static int settle(struct store_ring *r, struct flight *f, int moved, int64_t *result)
{
	if ((moved == -EINTR || moved == -EAGAIN) && ++f->stumbles <= STUMBLES_MAX) {
		prepare(r, f);
		return 0;
	}
	if (moved < 0 || f->op.kind == STORE_SYNC) {
		*result = moved;
		return 1;
	}
	f->moved += (uint64_t)moved;
	if (f->moved == f->op.length) {
		*result = (int64_t)f->moved;
		return 1;
	}
	if (moved == 0 || f->moved > f->op.length || f->moved % DIRECT_ALIGN != 0) {
		*result = -EIO;
		return 1;
	}
	prepare(r, f);
	return 0;
}

int store_ring_depth_left(const struct store_ring *r)
{
	return (int)r->free_count;
}

int store_ring_event_fd(const struct store_ring *r)
{
	return r->event_fd;
}

void store_ring_close(struct store_ring *r)
{
	if (r->ring.ring_fd >= 0) {
		/* Otherwise the kernel releases the drive some time later, and the device can't be opened again until
		 * then. */
		io_uring_unregister_files(&r->ring);
		io_uring_queue_exit(&r->ring);
	}
	if (r->event_fd >= 0)
		close(r->event_fd);
	free(r->flights);
	free(r->free_list);
	free(r);
}

int store_ring_open(int file_fd, unsigned depth, struct store_ring **out)
{
	struct store_ring *r = calloc(1, sizeof *r);
	int error;

	if (r == NULL)
		return -ENOMEM;
	r->ring.ring_fd = -1;
	r->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	r->flights = calloc(depth, sizeof *r->flights);
	r->free_list = calloc(depth, sizeof *r->free_list);
	if (r->event_fd < 0 || r->flights == NULL || r->free_list == NULL) {
		error = r->event_fd < 0 ? -errno : -ENOMEM;
		store_ring_close(r);
		return error;
	}
	for (r->free_count = 0; r->free_count < depth; r->free_count++)
		r->free_list[r->free_count] = r->free_count;
	error = io_uring_queue_init(depth, &r->ring, 0);
	if (error < 0)
		r->ring.ring_fd = -1;
	if (error == 0)
		error = io_uring_register_files(&r->ring, &file_fd, 1);
	if (error == 0)
		error = io_uring_register_eventfd(&r->ring, r->event_fd);
	if (error < 0) {
		store_ring_close(r);
		return error;
	}
	*out = r;
	return 0;
}

/* Accepts as many of the first operations as there are free entries; returns how many, or -errno. */
int store_ring_submit(struct store_ring *r, const struct store_op *ops, unsigned count)
{
	unsigned accepted = count < r->free_count ? count : r->free_count;
	int error;

	for (unsigned i = 0; i < accepted; i++) {
		struct flight *f = &r->flights[r->free_list[--r->free_count]];
		*f = (struct flight){.op = ops[i]};
		prepare(r, f);
	}
	error = flush(r);
	return error < 0 ? error : (int)accepted;
}

/* Returns up to `room` results in `out`; never waits. Returns how many, or -errno. */
int store_ring_reap(struct store_ring *r, struct store_done *out, unsigned room)
{
	struct io_uring_cqe *cqe;
	unsigned count = 0;
	uint64_t ignored;
	int error;

	(void)eventfd_read(r->event_fd, &ignored); /* before the peek, so that nothing can be missed */
	while (count < room && io_uring_peek_cqe(&r->ring, &cqe) == 0) {
		struct flight *f = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;

		io_uring_cqe_seen(&r->ring, cqe);
		if (settle(r, f, moved, &out[count].result)) {
			out[count++].tag = f->op.tag;
			r->free_list[r->free_count++] = (unsigned)(f - r->flights);
		}
	}
	error = flush(r);
	return error < 0 ? error : (int)count;
}

/* Waits until at least one completion can be reaped. */
int store_ring_wait(struct store_ring *r)
{
	struct io_uring_cqe *cqe;
	int error;

	do
		error = io_uring_wait_cqe(&r->ring, &cqe);
	while (error == -EINTR);
	return error;
}
