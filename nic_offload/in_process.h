/*
 * Shared by the two files of the provider `memory`: see in_process.c.
 */
#ifndef TRIGGERKV_IN_PROCESS_H
#define TRIGGERKV_IN_PROCESS_H

#include "fabric.h"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

/* Its first bytes are at the position of an address family, but don't contain one. */
struct location {
	uint32_t no_family;
	int32_t process;
	uint64_t endpoint;
};

struct memory_region {
	struct fid_mr mr;
	struct memory_domain *domain;
	struct memory_region *next;
	char *address;
	size_t length;
	uint64_t access;
};

struct memory_domain {
	struct fid_domain fid;
	struct memory_region *regions;
	struct tk_fabric *woken; /* woken when something is written into one of its endpoints */
};

struct memory_peers {
	struct fid_av fid;
	struct location *locations; /* one without an endpoint is free */
	size_t count;
};

struct completion {
	void *context;
	int error;
};

struct memory_queue {
	struct fid_cq fid;
	struct completion *entries; /* unread ones begin at `first` */
	size_t first, end, capacity;
};

struct memory_endpoint {
	struct fid_ep fid;
	struct memory_domain *domain;
	struct memory_peers *peers;
	struct memory_queue *queue;
	struct location location;
	struct memory_endpoint *next;
};

extern pthread_mutex_t memory_lock; /* for all of these, in all fabrics */
extern struct memory_endpoint *memory_endpoints;
extern struct fi_ops memory_plain_ops; /* of an object that has only its own memory to free */

int memory_close_plain(struct fid *fid);
int memory_control(struct fid *fid, int command, void *argument);

/* Adds a completion to a queue; the caller may change it while it holds the lock. */
int memory_complete(struct memory_queue *queue, void *context, int error);

int memory_open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context);

#endif
