/*
 * Opening and freeing a lane: its ring, its memory, and its place in the progress thread's list.
 */
#define _GNU_SOURCE
#include "lane_inside.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define STAGED_BYTES (8u << 20) /* encrypted bytes that are being written */

static void free_lane(struct tk_lane *lane)
{
	drive_ring_close(&lane->ring, lane->event_fd);
	free(lane->headers);
	staged_close(&lane->staged);
	if (lane->records)
		wipe(lane->records, lane->setup.depth * sizeof *lane->records);
	aead_close(lane->stream.aead);
	pthread_mutex_destroy(&lane->lock);
	free(lane->records);
	free(lane->pieces);
	free(lane->parts);
	free(lane->written);
	free(lane);
}

static int add_lane(struct tk_fabric *fabric, void *argument)
{
	struct tk_lane *lane = *(struct tk_lane **)argument;
	int status = rest_listen_writes(fabric, lane->event_fd);
	if (status)
		return status;
	lane->next = fabric->lanes;
	fabric->lanes = lane;
	__atomic_store_n(&fabric->is_serving, 1, __ATOMIC_RELAXED);
	return 0;
}

/* Memory for header pages, or for encrypted records. */
static int open_memory(struct tk_lane *lane)
{
	lane->records = calloc(lane->setup.depth, sizeof *lane->records);
	lane->pieces = calloc(lane->setup.depth, sizeof *lane->pieces);
	lane->parts = calloc(lane->setup.depth, sizeof *lane->parts);
	if (!lane->records || !lane->pieces || !lane->parts)
		return -ENOMEM;
	if (!lane->setup.encryption.vault) {
		size_t bytes = (size_t)lane->setup.depth * PAGE;
		if (posix_memalign((void **)&lane->headers, PAGE, bytes))
			return -ENOMEM;
		memset(lane->headers, 0, bytes); /* a page fault while a peer waits would cost as much as its put */
		return 0;
	}
	lane->stream.aead = aead_open();
	return lane->stream.aead ? staged_open(&lane->staged, STAGED_BYTES) : -ENOMEM;
}

int tk_lane_open(struct tk_fabric *fabric, const struct tk_lane_setup *setup, struct tk_lane **out)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (setup->depth < 2) /* the last piece of a large record takes two */
		return -EINVAL;
	struct tk_lane *lane = calloc(1, sizeof *lane);
	if (!lane)
		return -ENOMEM;
	pthread_mutex_init(&lane->lock, NULL);
	lane->fabric = fabric;
	lane->setup = *setup;
	status = drive_ring_open(&lane->ring, &lane->event_fd, setup->fd, setup->depth);
	if (!status)
		status = open_memory(lane);
	if (!status)
		status = on_the_thread(fabric, add_lane, &lane, sizeof lane);
	if (status) {
		if (status != TK_STUCK)
			free_lane(lane);
		return status;
	}
	*out = lane;
	return 0;
}

void free_lanes(struct tk_fabric *fabric)
{
	for (struct tk_lane *lane = fabric->lanes, *next; lane; lane = next) {
		next = lane->next;
		free_lane(lane);
	}
}
