/*
 * Shared by the driver's rules: libfabric loaded as nic_offload loads it, sides of a fabric, and bounded waits.
 *
 * A rule is a function that returns if the rule holds, and otherwise ends the process with a message.
 */
#ifndef CASSINI_DRIVER_H
#define CASSINI_DRIVER_H

#include "cxi.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_trigger.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_BYTES 65536u
#define WAIT_S 20

struct library {
	int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
		       const struct fi_info *hints, struct fi_info **info);
	void (*freeinfo)(struct fi_info *info);
	struct fi_info *(*dupinfo)(const struct fi_info *info);
	int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
	uint32_t (*version)(void);
	const char *(*strerror)(int number);
	int (*doorbell_fd)(struct fid_cntr *counter, off_t *offset);
};
extern struct library library;

struct rule {
	const char *name;
	void (*run)(void);
};
extern const struct rule info_rules[], memory_rules[], endpoint_rules[], counter_rules[], work_rules[],
	failure_rules[], process_rules[], slot_rules[], setting_rules[];

/* A domain with one endpoint and one region of `memory`. */
struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	struct fid_mr *region;
	uint64_t key;
	unsigned char *memory;
	fi_addr_t peer;
};

extern uint64_t order_asked; /* of those opened from now on; see driver_settings.c */
struct fi_info *hints_new(void);
struct fid_ep *endpoint_new(struct side *side); /* bound and enabled */
struct fid_mr *region_new(struct side *side, struct fid_ep *ep, void *memory, size_t bytes, uint64_t access,
			  struct fid_cntr *counter);
void side_open(struct side *side);
void side_open_with(struct side *side, uint64_t caps, size_t requests, uint64_t queue_flags);
void side_close(struct side *side);
void pair_open(struct side *from, struct side *to);
void pair_close(struct side *from, struct side *to);
void meet(struct side *from, const void *address);
void name_of(struct fid_ep *ep, void *address);

struct fid_cntr *counter_new(struct side *side);
struct fi_cxi_cntr_ops *counter_ops(struct fid_cntr *counter);
uint64_t *doorbell(struct fid_cntr *counter, size_t offset);
void store(uint64_t *word, uint64_t value);
void ring(struct fid_cntr *counter, uint64_t value); /* and wait until the NIC took it */

/* A deferred write of `length` bytes from the start of `from`'s memory to `offset` of the peer's region. */
struct put {
	struct fid_cntr *trigger, *end;
	uint64_t threshold, offset, key, flags;
	void *source, *context;
	size_t length;
	enum fi_op_type type; /* 0: a write */
};
int queue_put(struct side *from, const struct put *put);
int queue_count(struct side *side, enum fi_op_type type, struct fid_cntr *trigger, uint64_t threshold,
		struct fid_cntr *target, uint64_t value);
int end_of(struct side *side, void **context); /* waits for a completion: 0, or the error that it is */
void expect_nothing(struct side *side);
double seconds_now(void);
uint64_t word_at(const void *address);

void fail(const char *file, int line, const char *what, long long got) __attribute__((noreturn));

#define HOLDS(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition))                                                                                      \
			fail(__FILE__, __LINE__, #condition, 0);                                                       \
	} while (0)
#define GIVES(wanted, call)                                                                                            \
	do {                                                                                                           \
		long long got = (long long)(call);                                                                     \
		if (got != (long long)(wanted))                                                                        \
			fail(__FILE__, __LINE__, #call " gives " #wanted, got);                                        \
	} while (0)
#define BECOMES(condition)                                                                                             \
	do {                                                                                                           \
		double until = seconds_now() + WAIT_S;                                                                 \
		while (!(condition)) {                                                                                 \
			if (seconds_now() > until)                                                                     \
				fail(__FILE__, __LINE__, "in time: " #condition, 0);                                   \
			sched_yield();                                                                                 \
		}                                                                                                      \
	} while (0)

#endif
