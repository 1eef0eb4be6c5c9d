/*
 * A software Cassini: a stand-in for libfabric that answers as the provider `cxi`, with processes, sockets and keys
 * that are real and a NIC that is a thread.
 *
 * The parts: `library.c` finds the real libfabric, whose `net` (or `tcp`) provider is the wire; `info.c` answers
 * fi_getinfo; `domain.c`, `endpoint.c`, `address.c`, `queue.c`, `memory.c` and `counter.c` are libfabric's objects;
 * `device_memory.c` finds a test device's memory; `rma.c` checks reads and writes; `work.c` holds deferred work and fires
 * it; `doorbell.c` is the doorbell pages; `nic.c` is the thread; `wire.c` carries bytes; `hold.c` holds up steps for a
 * test; `refuse.c` has the missing functions and the messages.
 *
 * What always holds:
 *   - all state of a domain is used under its `lock`; the NIC's thread holds it for one turn at a time;
 *   - each endpoint has a wire domain of its own, so a key works through one endpoint only;
 *   - an operation is in one list at a time: waiting for its trigger, ready, suspected, on the wire, or done and
 *     waiting for software to read the queue;
 *   - counters, write-back words and bytes move without the application; entries of a completion queue appear only
 *     inside a call of the application.
 *
 * What it doesn't do: messages, atomics, collectives, client keys, wait objects, reads from memory of devices.
 */
#ifndef CASSINI_CASSINI_H
#define CASSINI_CASSINI_H

#include "cxi.h"

#include <netinet/in.h>
#include <pthread.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_trigger.h>

#define COUNTERS_MAX 2047u  /* a NIC has 2048, and the first is no counter */
#define TRIGGERS_MAX 504u /* a service has 512, of which the provider keeps 8 */
#define INJECT_BYTES_MAX 192u
#define MESSAGE_BYTES_MAX 0xffffffffu
#define REQUESTS_DEFAULT 1024u
#define REQUESTS_MAX 16384u
#define ADDRESS_BYTES 8u

#define KEY_IS_PROVIDERS (1ULL << 63)
#define KEY_COUNTS (1ULL << 60) /* the target counts what arrives, so the sender has to say which key it used */
#define KEY_CLIENTS_MAX 0xffffffffULL

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

struct counter;
struct domain;
struct endpoint;

/* As long as cxi's addresses are, and as opaque. */
struct address {
	uint32_t ip; /* both in network order */
	uint16_t port;
	uint16_t zero;
};

enum op_kind { OP_WRITE, OP_READ };

struct op {
	struct fi_context2 wire_context; /* first: the wire gives its address back */
	struct op *next;
	struct endpoint *endpoint;
	struct counter *counter; /* counts the end of it; may be NULL */
	void *context;
	void *buffer;
	void *copy; /* of injected bytes; freed with the operation */
	size_t length;
	uint64_t offset, key, flags;
	uint64_t refused_since_ns; /* when the wire first returned -FI_EAGAIN */
	struct address peer;
	enum op_kind kind;
	int holds_request;
	int suspected;
	int doomed;  /* half of its bytes go out, and then it fails */
	int waits;   /* turns to wait, on a wire that reorders */
	unsigned held_in; /* see hold.c; 0: not held */
	enum { WHOLE, UPPER_HALF, LOWER_HALF } part; /* of its bytes that goes out next */
	int error; /* how it ended */
};

struct op_list {
	struct op *head, *tail;
};

struct peer {
	struct address address;
	fi_addr_t wire;
	int refuses; /* in this turn: later operations wait too, to keep their order */
};

struct wire {
	struct fid_domain *domain;
	struct fid_cq *cq;
	struct fid_av *av;
	struct fid_ep *ep;
	struct peer *peers;
	size_t peers_count, peers_capacity;
};

struct fabric {
	struct fid_fabric fid;
	int users;
};

struct region {
	struct fid_mr fid;
	struct domain *domain;
	struct endpoint *endpoint;
	struct counter *counter;
	struct region *next; /* of its endpoint */
	struct fid_mr *wire;
	void *buffer;
	size_t length;
	uint64_t access;
	uint16_t id;
	int enabled;
};

struct completion {
	struct completion *next;
	void *context;
	uint64_t flags;
	int error;
};

struct completion_queue {
	struct fid_cq fid;
	struct domain *domain;
	enum fi_cq_format format;
	struct completion *head, *tail;
	int users;
};

struct address_vector {
	struct fid_av fid;
	struct domain *domain;
	struct {
		struct address address;
		unsigned users;
	} *entries;
	size_t count;
	int users;
};

struct trigger {
	struct trigger *next;
	uint64_t threshold;
	enum { FIRES_OP, FIRES_ADD, FIRES_SET, FIRES_WRITE_BACK } fires;
	struct op *op;
	struct counter *target;
	uint64_t value;
};

struct counter {
	struct fid_cntr fid;
	struct domain *domain;
	struct counter *next, *next_moved;
	struct trigger *triggers; /* the newest first */
	uint64_t success, failure;
	uint64_t own_write_back;
	uint64_t *write_back;
	uint64_t flags;
	enum fi_wait_obj wait;
	uint32_t page;
	int bound; /* by endpoints and regions */
	int uses;  /* by operations and triggers that are under way */
	int moved;
	uint64_t moved_ns;
};

struct endpoint {
	struct fid_ep fid;
	struct domain *domain;
	struct endpoint *next;
	struct completion_queue *transmit_queue, *receive_queue;
	struct address_vector *addresses;
	struct counter *write_counter, *read_counter, *send_counter, *receive_counter;
	struct region *regions;
	struct wire wire;
	struct address address;
	struct op_list ready, suspects, posted, done;
	size_t requests, requests_max;
	uint64_t caps, op_flags;
	unsigned triggered; /* deferred operations that wait for their trigger */
	unsigned posted_count;
	int bound; /* by regions */
	int selective;
	int ordered; /* writes after writes were asked for in order */
	int enabled;
};

struct domain {
	struct fid_domain fid;
	struct fabric *fabric;
	struct fi_info *wire_info;
	struct fid_fabric *wire_fabric;
	pthread_mutex_t lock;
	pthread_mutex_t commands; /* the one queue that trigger commands go through; a flush holds it */
	pthread_cond_t work;
	pthread_t thread;
	struct endpoint *endpoints;
	struct counter *counters;
	struct counter *moved;
	char *doorbells;
	uint64_t key_sequence;
	uint64_t unreachable_ns; /* how long the wire may return -FI_EAGAIN for a peer */
	uint64_t region_ids[1024]; /* a bit for each of 65536 */
	uint8_t pages_used[COUNTERS_MAX];
	int doorbell_fd;
	int waiting; /* calls that want the lock */
	int users;
	int thread_started;
	int stop;
	int idle;
	int errors_count; /* thresholds are compared with successes plus failures */
	int reorders;
	uint64_t late_ns, late_until_ns; /* until then, what is due fires so much later */
	long fails_every, fails_from; /* every such write of at least so many bytes fails; 0: none does */
	long writes;		      /* of so many bytes */
	long flushes_to_fail;	      /* the first ones; they drop nothing */
	uint32_t chance;
	bool hybrid_descriptors, match_events, optimized_regions, key_cache, takes_devices;
};

/* library.c */
struct wire_library {
	int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
		       const struct fi_info *hints, struct fi_info **info);
	void (*freeinfo)(struct fi_info *info);
	struct fi_info *(*dupinfo)(const struct fi_info *info);
	int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
	uint32_t (*version)(void);
	const char *(*strerror)(int number);
};
HIDDEN const struct wire_library *wire_library(void); /* NULL: this machine has no libfabric */
HIDDEN int wire_info(struct in_addr source, struct fi_info **info);

/* refuse.c */
HIDDEN void refuse_all(void *table, size_t bytes);
HIDDEN int say(int status, const char *sentence); /* gives `status` back */
HIDDEN void give_up(const char *sentence) __attribute__((noreturn));
HIDDEN extern struct fi_ops_msg no_messages;
HIDDEN extern struct fi_ops_tagged no_tagged;
HIDDEN extern struct fi_ops_atomic no_atomics;
HIDDEN extern struct fi_ops_collective no_collectives;
HIDDEN extern struct fi_ops_rma no_rma;

/* domain.c */
HIDDEN int domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context);
HIDDEN void domain_lock(struct domain *domain);
HIDDEN void domain_unlock(struct domain *domain);
HIDDEN uint64_t now_ns(void);
HIDDEN long setting(const char *name, long otherwise);

/* nic.c */
HIDDEN void *nic_run(void *domain);
HIDDEN void nic_wake(struct domain *domain); /* with the lock held, as are all below but the libfabric calls */

/* doorbell.c */
HIDDEN int doorbells_open(struct domain *domain);
HIDDEN void doorbells_close(struct domain *domain);
HIDDEN int doorbell_take(struct counter *counter);
HIDDEN void doorbell_give_back(struct counter *counter);
HIDDEN void *doorbell_page(const struct counter *counter);
HIDDEN int doorbell_poll(struct counter *counter);

/* counter.c */
HIDDEN int counter_open(struct fid_domain *domain, struct fi_cntr_attr *attr, struct fid_cntr **out, void *context);
HIDDEN void counter_add(struct counter *counter, uint64_t value);
HIDDEN void counter_set(struct counter *counter, uint64_t value);
HIDDEN void counter_add_failure(struct counter *counter, uint64_t value);
HIDDEN void counter_set_failure(struct counter *counter, uint64_t value);
HIDDEN void counter_write_back(struct counter *counter);
HIDDEN uint64_t counter_reached(const struct counter *counter); /* what thresholds are compared with */
HIDDEN void counter_look(struct counter *counter); /* its triggers are examined by the next work_fire */

/* work.c */
HIDDEN int work_queue(struct domain *domain, struct fi_deferred_work *work);
HIDDEN int work_flush(struct domain *domain);
HIDDEN int work_wait_for(struct counter *counter, uint64_t threshold);
HIDDEN void work_fire(struct domain *domain);
HIDDEN void work_forget_waits(struct counter *counter);
HIDDEN void work_forget_moved(struct counter *counter);

/* rma.c */
struct rma {
	enum op_kind kind;
	const void *buffer;
	size_t length;
	void *descriptor;
	fi_addr_t peer;
	uint64_t offset, key, flags;
	void *context;
	int deferred;
	struct counter *counter; /* of deferred work alone */
};
HIDDEN extern struct fi_ops_rma rma_ops;
HIDDEN int rma_prepare(struct endpoint *endpoint, const struct rma *rma, struct op **out);

/* endpoint.c */
HIDDEN int endpoint_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context);
HIDDEN void endpoint_start(struct op *op);
HIDDEN void endpoint_finish(struct op *op, int error);
HIDDEN void endpoint_progress(struct endpoint *endpoint); /* what software does when it reads a queue */
HIDDEN void op_free(struct op *op);
HIDDEN void op_push(struct op_list *list, struct op *op);
HIDDEN struct op *op_pop(struct op_list *list);
HIDDEN void op_remove(struct op_list *list, struct op *op);

/* hold.c */
HIDDEN void hold_write(struct op *op);
HIDDEN int is_held(const struct op *op);
HIDDEN void hold_flush(void);

/* wire.c */
HIDDEN int wire_open(struct endpoint *endpoint);
HIDDEN void wire_close(struct endpoint *endpoint);
HIDDEN int wire_turn(struct endpoint *endpoint); /* 1: something moved */
HIDDEN void wire_shuffle(struct op *op); /* before it is posted, where the wire reorders */

/* queue.c */
HIDDEN int queue_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **out, void *context);
HIDDEN void queue_push(struct completion_queue *queue, void *context, uint64_t flags, int error);

/* address.c */
HIDDEN int addresses_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **out, void *context);
HIDDEN int addresses_find(struct address_vector *addresses, fi_addr_t number, struct address *out);

/* memory.c */
HIDDEN extern struct fi_ops_mr region_ops;

/* device_memory.c */
HIDDEN void *device_memory(const void *address, size_t length);

#endif
