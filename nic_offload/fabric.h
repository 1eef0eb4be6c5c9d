/*
 * State shared between calls from any thread (fabric.c, handles.c, inbox.c) and the progress thread (all other files).
 *
 * Work moves in one direction: a caller fills free items under `inbox_lock` and links them into the inbox; the progress
 * thread takes the whole inbox at once and owns each item until its end; then the item returns to the free list. Only
 * the inbox, the free list and the events are shared.
 */
#ifndef TRIGGERKV_FABRIC_H
#define TRIGGERKV_FABRIC_H

#include "core.h"
#include "library.h"
#include "seal.h"

#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_trigger.h>
#include <sys/socket.h>
#include <sys/types.h>

struct shared_row;

union address {
	struct sockaddr any;
	struct sockaddr_in four;
	struct sockaddr_in6 six;
	char room[TK_ADDRESS_BYTES];
};

#define WORK_CHUNK 1024u /* items taken from the heap at a time; tk_fabric_shrink leaves as many */

enum work_kind { WORK_OPERATION, WORK_LANDING, WORK_ACK };

enum work_state {
	WORK_WAITING,	  /* for its counter or watched word */
	WORK_UNGRANTED,	  /* fired, and waiting for a slot; a call: for a place */
	WORK_HELD,	  /* held by the NIC, which fires it */
	WORK_READING,	  /* its bytes are being read from a drive */
	WORK_SUMMING,	  /* its CRC is being computed */
	WORK_READY,	  /* to be posted */
	WORK_POSTED,	  /* the bytes are on their way */
	WORK_FLAG_READY,  /* the bytes have arrived, the chained flag put is to be posted */
	WORK_FLAG_POSTED, /* the chained flag put is on its way */
	WORK_SHARED,	  /* the peer has the bytes' location, and has not confirmed yet that it has read them */
	WORK_OVER,	  /* freed at the end of the round */
	WORK_STRANDED,	  /* its endpoint is closed, and the provider may still complete it */
};

/* How far the pieces have been processed, in order. */
struct pieces_end {
	uint32_t piece, done; /* bytes of that piece */
};

struct work {
	struct fi_context2 context; /* must be first: libfabric returns its address */
	struct work *next;	    /* in the inbox, the free list or a queue */
	struct work *previous;	    /* in a queue */
	struct work *before, *after; /* links all items that the thread owns */
	uint32_t chunk;		    /* number of its chunk */
	uint32_t place;		    /* in its counter's heap, or among the watches */
	enum work_kind kind;
	enum work_state state;
	int acked;   /* a landing: `landed` has been sent */
	int late;    /* TK_LATE has been reported */
	int counted; /* the NIC has moved the completion counter */
	int failed;  /* the error it ended with; 0: success, or not ended */
	uint32_t crc, summed;
	struct shared_row *shared; /* of bytes that the peer reads itself */
	struct pieces_end gathered; /* how far a put of pieces has got */
	uint64_t fired_ns, posted_ns;
	uint32_t code; /* of an ack watch: the last code received */
	uint64_t flag_word; /* the word that is sent for `flag_value` */
	int is_word;	    /* a word of words.c */
	struct work *next_word; /* the next word of its endpoint */
	int follows;	    /* `later`, a word to the same place, waits for this one */
	uint64_t later;
	uint64_t sequence;
	struct slot *slot; /* at the NIC, if the NIC holds it */
	struct reading *reading; /* the read that fetches its bytes from a drive, or NULL */
	struct batch *batch;	 /* the batch of that read */
	struct shelved *shelved; /* of a put from the shelf: the block, the call, and the place of the call */
	struct served *served;
	struct tk_desk *desk;
	/* Of a put by grant or a call, and of the watch for the peer's answer. */
	struct work *partner; /* the put's watch, or the watch's put; NULL: it has ended, or there was none */
	uint32_t grant;	      /* the slot, or the place, plus one; 0: none */
	uint32_t word;	      /* a put's acknowledgement word plus one */
	struct tk_sender *sender; /* of the watch, and so is `caller` */
	struct tk_caller *caller;
	struct called *called; /* of a call's put */
	struct shared_fetch *fetch; /* of a watch: the call whose blocks may be read from the node's memory */
	uint32_t fetch_row;	    /* the index of its block in that call, or the number of blocks for the call itself */
	union {
		struct tk_operation op;
		struct tk_landing landing;
		struct tk_ack_watch ack;
	};
};

/* Items that were taken from the heap together, and go back together. */
struct work_chunk {
	struct work *items; /* NULL: none */
	struct work *free;
	uint32_t count, free_count;
};

struct queue {
	struct work *head, *tail;
};

/* An item in a heap. Its sort keys are copied here, so that finding its place touches no other item's memory. */
struct waiting {
	uint64_t threshold, sequence;
	struct work *work;
};

/* A counter and the operations that wait for it in our own queue, lowest threshold first. */
struct tk_counter {
	struct tk_fabric *fabric;
	struct tk_counter *next;
	uint64_t *word;	      /* its value; NULL: the NIC has it */
	struct tk_bell *bell; /* rung after each store to `word`; NULL: none */
	uint64_t *own_word;   /* storage of `word` if the caller gave none; freed with the counter */
	struct fid_cntr *nic; /* with deferred work: the counter that the NIC's operations wait for */
	uint64_t uses;	      /* atomic: operations that wait for it or are to move it */
	int is_shared;	      /* by batches of puts that wait for the same word; none of them moves it */
	int failed;	      /* atomic: the errno of the first operation that failed to move it; 0: none */

	/* Used only by the thread that runs the rounds. */
	uint64_t mirrored; /* the value of `word` up to which `nic` has been moved */
	int is_behind;	   /* `nic` stands still: the NIC may have operations that were taken back, until a flush */
	struct waiting *heap;
	uint32_t count, capacity;
	uint32_t held; /* operations at the NIC that have not fired, as far as known */
	int listed;    /* among the fabric's active counters */
};

/* The words that watches read, kept apart from their items so that a round of polling stays in few cache lines. */
struct watch {
	const uint64_t *word;
	uint64_t expected; /* of a flag */
	uint64_t before;
	struct work *work;
};

struct watches {
	struct watch *items;
	uint32_t count, capacity, has_new; /* `has_new`: one was added since they were last polled */
};

/* A call that the progress thread executes while its caller waits. Everything that changes what the thread polls goes
 * this way: rxm, for one, crashes when an endpoint is enabled while its completion queue is read. The command has a
 * copy of its argument, because the thread may still be executing it when the caller no longer waits. */
#define NOT_YET INT_MIN /* the command is run again when a flush has ended */
struct command {
	struct command *next; /* postponed */
	int (*run)(struct tk_fabric *fabric, void *argument);
	int result;
	int done;
	int abandoned;
	uint64_t argument[];
};

struct known_peer {
	union address address;
	uint32_t domain;
	uint64_t number;
};

/* Words of the peer in memory that both ends have mapped, and the peer's address of the first. */
struct shared_words {
	struct spot first;
	uint64_t address;
	uint32_t count; /* 0: none */
};

/* Memory of ours that a peer can read, and the rows in which it gets locations there. */
struct shared_reads {
	struct spot first; /* of its words */
	uint64_t rows, memory, bytes;
	uint32_t count, has_words; /* of rows; whether they have words too, */
	uint64_t words;		   /* and how many were stored */
};

struct domain {
	struct fid_domain *fid;
	struct fid_av *av;
	struct fid_cq *cq;
	uint32_t uses; /* endpoints, peers and regions; atomic */
};

struct tk_endpoint {
	struct tk_fabric *fabric;
	uint32_t domain;
	struct tk_endpoint *next;
	struct fid_ep *fid;
	int fds_from; /* its descriptors are at or a little above this number */
	uint16_t port; /* of TCP, in the network's order; 0: none */
	struct seal seal; /* set before anything goes through it */

	/* Used only by the thread that runs the rounds. Each endpoint has its own queue and its own share of the wire,
	 * so that a peer that accepts nothing, or can't be reached, doesn't hold up others. */
	struct queue ready;
	struct tk_endpoint *next_ready;
	int is_ready; /* it is in the fabric's list */
	uint32_t in_flight;
	struct work *words; /* see words.c; linked by `next_word` */
	int stalled; /* the provider accepted nothing at the last attempt; it may still be connecting to the peer */
	uint64_t stalled_ns; /* since when; atomic */
	uint64_t again_ns; /* when to try again */
	int has_sent, has_broken; /* `has_broken` is atomic */
	struct shared_words shared_words;
	struct shared_reads shared_reads;
	int doorbell; /* the peer's, if it is on this machine and gets words without the fabric */
	int is_due;   /* the next endpoint whose bell is to be rung at the end of the round */
	struct tk_endpoint *next_due;
};

struct tk_region {
	struct tk_fabric *fabric;
	struct tk_region *next;
	struct fid_mr *mr;
	void *desc;
	uint64_t address, length, key, base;
	uint64_t uses; /* atomic: queued or posted operations that read from it or write to it */
	uint32_t domain;
	struct tk_endpoint *endpoint; /* the endpoint it is bound to, if the provider binds memory */
};

#define STEPS_MAX 2u

/* A slot at the NIC: all that one operation needs there. Slots are reused, so their two counters only grow. */
struct slot {
	struct slot *next; /* free */
	struct work *work; /* NULL: free, or lost */
	int lost;	   /* something unfinished may still refer to it, and to the next three */
	struct tk_counter *trigger, *completion;
	struct tk_endpoint *endpoint;
	int fired; /* its counter has reached the threshold, as far as known */
	int cut;   /* the NIC does the first of two steps, and the thread then does the second */
	int is_reported;  /* the completion queue reports the end of that first step */
	int moved_by_then, reached_before; /* as known when the last flush began */
	struct fid_cntr *moved, *done;	    /* the bytes have moved; all is done */
	uint64_t moved_before, done_before; /* their values when the operation was handed over */
	uint32_t steps_count;
	struct fi_deferred_work steps[STEPS_MAX];
	struct fi_op_rma rma[2];
	struct fi_op_cntr counts[2];
	struct iovec local[2];
	struct fi_rma_iov remote[2];
	void *desc[2];
	uint64_t flag_value;
};

/* libfabric's deferred work, where it is used. */
struct nic {
	int used;
	int own_counters; /* counters have doorbells, and the NIC moves them itself */
	int silent;	  /* no completions: only its counter shows that an operation is done */
	int failures_fire; /* failures count towards a threshold, like successes */
	uint32_t depth, room; /* steps it may hold, and those still free */
	struct slot *slots, *free;
	uint32_t slots_count, slots_opened;
	uint32_t held, fired, lost;
	uint64_t try_again_ns; /* after a refusal: no attempt before this time */
	uint64_t kicked_ns;
	int flushing;	   /* `flusher` is running; meanwhile counters can be neither read nor set, only added to */
	int flushed;	   /* atomic: it has finished */
	int flush_status, just_flushed; /* the latter: a flush has ended, and nothing has been handed over since */
	uint64_t flush_began_ns;
	pthread_t flusher;
};

struct tk_fabric {
	const struct library *library; /* the one with its provider */
	pid_t pid;
	struct fi_info *info;
	struct fid_fabric *fid;
	struct domain domains[TK_DOMAINS_MAX];
	uint32_t domains_end; /* one after the last open one */
	size_t order_max; /* messages of up to this many bytes are written in order, their flag last; 0: none */
	int keeps_order;  /* words to one place arrive in order */
	uint32_t posted_max; /* puts of one endpoint on the wire at a time */
	int streams;	  /* its connections are TCP, and end with their endpoint */
	int loses_context; /* for writes without a context, see library.h; words are written with `word_context` */
	struct fi_context2 word_context;
	int shows_breaks; /* it accepts nothing only if there is no connection */
	int confirms; /* delivery must be requested: otherwise a completion means only that the write was sent */
	int wake_fd, event_fd;
	struct turn *turn; /* decides which thread runs the rounds */
	int is_serving;	   /* atomic: the fabric has a receiver, lanes or a shelf */
	int sleep_fd; /* the descriptors the thread sleeps on: `wake_fd`, bells, and known sockets */
	pthread_t thread;

	pthread_mutex_t handle_lock;
	struct tk_region *regions;
	struct tk_endpoint *endpoints;
	struct known_peer *peers; /* addresses to which our sockets may be connected */
	uint32_t peers_count, peers_capacity;
	struct tk_counter *counters;
	struct tk_shelf *shelves;
	struct tk_counter *closing; /* closed, and to be freed; the list's head is atomic */

	pthread_mutex_t inbox_lock;
	pthread_cond_t command_done;
	struct queue inbox;
	struct work_chunk *chunks;
	uint32_t chunks_max;
	uint32_t first_free; /* no chunk before this one has a free item */
	uint32_t free_count, work_count, work_max;
	uint32_t free_least; /* of `free_count`, since tk_fabric_shrink was last called */
	uint64_t sequence;
	struct command *command;
	struct command *put_off; /* used only by the thread that runs the rounds */
	uint64_t answer_ns; /* the deadline for the thread to answer a call */
	int stuck;	    /* atomic: the thread has missed it once, and gets no more calls */
	int stop, ended, end_status; /* the latter: 0, or TK_UNFLUSHED */
	int posted_something; /* atomic: the inbox has something, or a command waits */
	int sleeping;	      /* atomic */
	int sockets_changed;  /* atomic: the search for sockets must be repeated */

	pthread_mutex_t event_lock;
	struct tk_event *events;
	uint32_t events_count; /* written under the lock, and atomic: it is read without */
	uint32_t events_first, events_capacity;
	int signalled;

	/* Used only by the thread that runs the rounds. */
	struct work *all;
	struct queue summing;
	struct queue shared; /* WORK_SHARED */
	struct tk_endpoint *ready_first, *ready_last; /* endpoints that have something to post */
	struct tk_endpoint *due; /* endpoints whose doorbells are to be rung */
	struct tk_counter **active; /* counters for which something waits */
	uint32_t active_count, active_capacity;
	struct nic nic;
	struct tk_sender *senders;
	struct tk_caller *callers;
	struct tk_receiver *receivers;
	struct tk_lane *lanes;
	struct tk_reader *readers;
	uint32_t reading; /* records that the readers have */
	struct watches landings, acks;
	int caller_runs;	/* a caller runs this round, and sleeps until `rest_until_ns` at most */
	uint64_t rest_until_ns;
	int is_recalled, wire_is_quiet; /* a caller's round found work for the thread alone; no socket woke the thread */
	struct idle_read { uint64_t ns, least_ns, long_reads; } idle_read; /* what a read of an idle queue takes */
	int asleep;		/* the thread that runs the next round must call `stop_sleeping` first */
	uint64_t held_until_ns; /* the earliest time at which a block that a desk holds for a peer may be released */
	uint64_t cold_notify_ns; /* when calls that desks answered from drives are reported */
	uint32_t in_flight;
	uint64_t next_deadline_ns, over_at_ns; /* over_at_ns: when the next of these is reported, unless a caller has seen it: */
	struct tk_group *over, *last_over;     /* puts that ended while no caller waited */
	uint64_t now_ns; /* the time of this round: reading the clock costs as much as polling a word */
	uint32_t spins_alone, sockets; /* rounds left until it yields again; those that wake the thread */
	int rested; /* rounds since the completion queue was last read */
	int overslept; /* the last sleep timed out: no wake-up announced whatever is there now */
	uint64_t looked_ns, look_until_ns; /* the last search for sockets (0: one is due), and when searches end */
	uint64_t look_next_ns;		   /* no search begins before this time */
	uint64_t doubt_ns, doubt_next_ns;  /* the pause between searches after a movement without a wake-up, and its end */
	int doubts, sockets_found;	   /* the next search is one of these; new ones, in the last search */
	uint64_t started_ns, busy_ns; /* `busy_ns`: when a round last found something to do */
	struct work *finished;
	struct tk_event *pending;
	uint32_t pending_count, pending_capacity;
	uint64_t published_ns;
	struct tk_statistics statistics;
	struct tk_statistics shown; /* atomic, each field by itself: the statistics as of the last round */
};

void *core_progress(void *fabric);

/* fabric.c: for the calls of any thread */
int fabric_is_ours(const struct tk_fabric *fabric);
int fabric_refusal(const struct tk_fabric *fabric);
void fabric_wake(struct tk_fabric *fabric);
int refused(const struct tk_fabric *fabric, char *message, const char *doing, int status);
int on_the_thread(struct tk_fabric *fabric, int (*run)(struct tk_fabric *fabric, void *argument), void *argument,
		  size_t argument_bytes);

void endpoint_free(struct tk_endpoint *endpoint); /* handles.c */
struct work *take_free_work(struct tk_fabric *fabric, uint32_t count); /* inbox.c; on the progress thread */

struct cancellation {
	struct tk_desk *desk; /* the desk whose reads are cancelled, by the generations of its words; or NULL */
	uint64_t count;
	uint64_t tags[];
};

/* Commands that need the thread's lists. Endpoints and counters are passed as a pointer to their pointer. */
int core_cancel(struct tk_fabric *fabric, void *cancellation);
int core_close_endpoint(struct tk_fabric *fabric, void *endpoint);
int core_flush(struct tk_fabric *fabric, void *unused);
int core_reset_counter(struct tk_fabric *fabric, void *counter);

#endif
