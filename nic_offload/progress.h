/*
 * Functions that the files of the progress thread call in each other. All run on that thread only, unless marked.
 */
#ifndef TRIGGERKV_PROGRESS_H
#define TRIGGERKV_PROGRESS_H

#include "fabric.h"
#include "lane.h"

/* work.c: items, queues, reports */
void queue_push(struct queue *queue, struct work *work);
struct work *queue_pop(struct queue *queue);
void queue_remove(struct queue *queue, struct work *work);
int grow(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes);
/* For work that can no longer be refused. Without memory the thread blocks until there is some: callers get TK_STUCK at
 * their deadline, and nothing is lost. */
void grow_surely(void **items, uint32_t *capacity, uint32_t count, size_t item_bytes);
void report(struct tk_fabric *fabric, enum tk_event_kind kind, uint64_t tag, uint64_t value, int status, uint64_t time_ns);
void publish(struct tk_fabric *fabric);
void publish_soon(struct tk_fabric *fabric);
uint64_t deadline_of(const struct work *work);
uint64_t tag_of(const struct work *work);
struct tk_endpoint *endpoint_of(const struct work *work);
void adopt(struct tk_fabric *fabric, struct work *work);
void disown(struct tk_fabric *fabric, struct work *work);
void recycle(struct tk_fabric *fabric, struct work *work);
void release(struct tk_fabric *fabric, struct work *work);
void unpair(struct work *work); /* from its partner */
void drop(struct tk_fabric *fabric, struct work *work);
void finish(struct tk_fabric *fabric, struct work *work, int status);
void fail(struct tk_fabric *fabric, struct work *work, int status);
void landed(struct tk_fabric *fabric, struct work *work);
void list_ready(struct tk_fabric *fabric, struct tk_endpoint *endpoint);
void get_ready(struct tk_fabric *fabric, struct work *work, enum work_state state);

/* commands.c */
void run_command(struct tk_fabric *fabric, struct command *command);
int run_put_off(struct tk_fabric *fabric);     /* runs commands whose flush has ended; returns whether there was one */
void refuse_put_off(struct tk_fabric *fabric); /* because the thread ends */

/* counter.c: operations that wait for counters */
int wait_for_counter(struct tk_fabric *fabric, struct work *work);
void stop_waiting(struct tk_fabric *fabric, struct work *work);
struct work *next_waiting(struct tk_fabric *fabric, struct tk_counter *counter);
void activate(struct tk_fabric *fabric, struct tk_counter *counter);
void fire(struct tk_fabric *fabric, struct work *work, uint64_t now_ns);
uint64_t counter_value(struct tk_counter *counter);
void counter_move(struct tk_counter *counter, uint64_t step, int set);
int counter_over_word(struct tk_fabric *fabric, void *word, struct tk_bell *bell, int pipe_fd, struct tk_counter **out);
void counter_put_down(struct tk_counter *counter); /* these two: any thread */
void counter_fail(struct tk_fabric *fabric, struct tk_counter *counter, int status);
int poll_counters(struct tk_fabric *fabric);
void free_closed_counters(struct tk_fabric *fabric);
void free_counter(struct tk_counter *counter);

/* nic.c, nic_flush.c: what libfabric's deferred work holds */
int nic_open(struct tk_fabric *fabric);
void nic_close(struct tk_fabric *fabric);
int nic_counter(struct tk_fabric *fabric, struct fid_cntr **out);
int nic_hand_over(struct tk_fabric *fabric, struct tk_counter *counter);
void nic_follow_word(struct tk_fabric *fabric, struct tk_counter *counter, uint64_t value);
int nic_completed(struct tk_fabric *fabric, void *context, int status);
int nic_poll(struct tk_fabric *fabric);
int nic_take_back(struct tk_fabric *fabric, struct tk_counter *counter);
int nic_flush(struct tk_fabric *fabric); /* 0: done; NOT_YET: call again when it has ended; TK_UNFLUSHED: it failed */
int nic_end_flush(struct tk_fabric *fabric); /* returns whether one has ended */
void nic_flush_at_last(struct tk_fabric *fabric); /* flushes before the thread ends, and waits for it */
int nic_withdraw(struct tk_fabric *fabric, struct work *work);
void nic_give_up(struct tk_fabric *fabric, struct work *work);
int nic_is_tied_to(const struct tk_fabric *fabric, const struct tk_endpoint *endpoint);
int nic_fail_waiting(struct tk_fabric *fabric, struct tk_counter *counter); /* 0, or NOT_YET as from nic_flush */
void nic_leave(struct tk_fabric *fabric, struct slot *slot, int lost);
void nic_find_again(struct tk_fabric *fabric, struct slot *slot);
void nic_settle(struct tk_fabric *fabric, struct slot *slot);
void nic_fired(struct tk_fabric *fabric, struct slot *slot, uint64_t now_ns);
void nic_taken_back(struct tk_fabric *fabric, struct slot *slot, int lost);
int nic_follow_cut(struct tk_fabric *fabric, struct slot *slot);
void nic_put_flag(struct tk_fabric *fabric, struct slot *slot, int lost);

/* inbox.c: work for the thread, under the inbox's lock; any thread */
int reserve_work(struct tk_fabric *fabric, uint32_t count);
struct work *take_free(struct tk_fabric *fabric, enum work_kind kind); /* from what was reserved */
void give_back_finished(struct tk_fabric *fabric); /* the thread's; takes the lock */
int check_operation(const struct tk_fabric *fabric, const struct tk_operation *op); /* without the lock */
struct work *enqueue_operation(struct tk_fabric *fabric, const struct tk_operation *op);
struct work *enqueue_ack(struct tk_fabric *fabric, const struct tk_ack_watch *watch);

/* group.c: groups that callers wait for; any thread for the first two */
int group_open(struct tk_fabric *fabric, uint64_t tag, uint32_t count, int awaited, size_t head_bytes,
	       struct tk_group **out);
struct tk_put_head *group_head(struct tk_group *group, uint32_t row); /* NULL: it has none */
void group_use(struct tk_group *group);
void group_release(struct tk_group *group);
void group_fired(struct tk_group *group, uint32_t row, uint64_t now_ns);
void group_acked(struct tk_fabric *fabric, const struct tk_ack_watch *watch, uint32_t code);
void group_copies(struct tk_group *group, uint32_t row, int copies); /* while set, no word ends that row */
void report_over(struct tk_fabric *fabric); /* groups of puts that are due */
void groups_end(struct tk_fabric *fabric);  /* the thread ends */

/* posting.c: what is posted, what has completed */
int status_of_provider(int error);
int post_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer, uint64_t target,
	      uint64_t key); /* its end is not reported */
int post_landed(struct tk_fabric *fabric, struct work *work);
int post_confirmed_flag(struct work *work); /* when it ends, the flag has been delivered */
int note_taken(struct tk_endpoint *endpoint, int status); /* status: the provider's result of an attempt to send */
int post_ready(struct tk_fabric *fabric);
int drain_completions(struct tk_fabric *fabric);
int progress_wire(struct tk_fabric *fabric);

/* words.c: words that wait, or might be overtaken */
int post_or_queue_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
		       uint64_t target, uint64_t key); /* as post_word, but later if the provider has no room now */
int word_follows(struct tk_endpoint *endpoint, uint64_t word, uint64_t peer, struct spot spot); /* whether it waits */
int post_word_in_order(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, uint64_t peer,
		       struct spot spot);
void word_is_over(struct tk_fabric *fabric, struct work *work);
void forget_word(struct work *work);

/* domains.c: open and close on the progress thread once there is one; any thread for the others */
int domain_open(struct tk_fabric *fabric, uint32_t number, char *message); /* if it is not open */
void domain_close(struct domain *domain);
void close_fid(struct fid *fid); /* NULL: nothing to do */
void domain_hold(struct tk_fabric *fabric, uint32_t number);
void domain_leave(struct tk_fabric *fabric, uint32_t number);

/* streams.c: addresses of TCP, and what it leaves behind */
int address_is_same(const union address *a, const union address *b);
uint16_t address_port(const union address *address); /* 0: it is not an IP address */
int lowest_free_fd(void); /* the next descriptor opened is this one, or one above it */
void stop_streams(struct tk_fabric *fabric, const struct tk_endpoint *endpoint);

/* idle.c: how the thread idles. Any thread, except for `rest`. */
int rest_open(struct tk_fabric *fabric);
int rest_listen(struct tk_fabric *fabric, int pipe_fd);
int rest_listen_writes(struct tk_fabric *fabric, int event_fd);
int rest_ignore(struct tk_fabric *fabric, int event_fd);
void rest_look_again(struct tk_fabric *fabric);
void rest_overslept(struct tk_fabric *fabric);
int rest(struct tk_fabric *fabric, uint64_t idle_ns); /* returns whether something woke the thread */
void stop_sleeping(struct tk_fabric *fabric);

/* fabric.c: any thread */
void fabric_rouse(struct tk_fabric *fabric); /* also if the thread isn't known to sleep */
void init_condition(pthread_cond_t *condition); /* its timeouts are of CLOCK_MONOTONIC */
int wait_for_condition(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t until_ns); /* 0 or ETIMEDOUT */

/* core.c */
int take_inbox(struct tk_fabric *fabric); /* whether there was anything; -1 when the fabric is being closed */
int expire(struct tk_fabric *fabric);
int close_endpoint(struct tk_fabric *fabric, struct tk_endpoint *endpoint);

/* rounds.c: those of a caller, which has the turn */
int callers_may_run(const struct tk_fabric *fabric); /* any thread's */
void rounds_begin(struct tk_fabric *fabric, uint64_t until_ns);
int rounds_go_on(struct tk_fabric *fabric); /* runs one; false: it is the last */
int rounds_are_due(const struct tk_fabric *fabric); /* something new was posted, or a flag word stored */
int rounds_end(struct tk_fabric *fabric); /* whether the thread is wanted: for a command, or to end */

/* watch.c: watched words, checksums */
uint64_t flag_awaited(const struct tk_landing *landing);
int watch_add(struct watches *watches, const uint64_t *word, uint64_t expected, struct work *work);
void watch_remove(struct watches *watches, const struct work *work);
int poll_landings(struct tk_fabric *fabric);
int poll_acks(struct tk_fabric *fabric);
int make_checksums(struct tk_fabric *fabric);

/* desk.c: calls that are answered here */
int answer_at_desk(struct tk_fabric *fabric, const struct tk_landing *landing);
void miss_at_desk(struct work *work);
void over_at_desk(struct work *work, int status);
void poll_desks(struct tk_fabric *fabric);

/* desk_cold.c: blocks of such calls that a reader reads */
int cold_is_there(struct work *work, uint64_t place, uint64_t generation); /* its name still has that place */
void cold_over(struct work *work);
void cold_room_stays(struct work *work);
void cold_room_back(struct tk_shelf *shelf, const struct tk_room *room);
void poll_cold(struct tk_fabric *fabric);

/* sender.c: puts by grants, the client's side */
void sender_fire(struct tk_fabric *fabric, struct work *work);
void sender_summed(struct work *work);
uint32_t sender_head(const struct work *work, const void **bytes); /* returns their number */
void *sender_head_desc(const struct work *work);
int sender_shares(const struct work *work); /* whether its slot is mapped here; if so, these apply: */
uint32_t sender_copies(struct work *work, uint32_t bytes_max);
void sender_put(struct tk_fabric *fabric, struct work *work);
void sender_put_over(struct tk_fabric *fabric, struct work *work);
void sender_acked(struct work *watch, int is_final);
struct queue *sender_queue(const struct work *work); /* where it waits for a slot */
int poll_senders(struct tk_fabric *fabric);

const struct tk_sender_setup *sender_setup(const struct tk_sender *sender);
/* Bytes of a put that it can gather in this region. */
uint32_t sender_gathers(const struct tk_sender *sender, const struct tk_region *region);

/* caller.c: calls, the client's side */
void caller_fire(struct tk_fabric *fabric, struct work *work);
void caller_put_over(struct tk_fabric *fabric, struct work *work);
uint32_t caller_answered(struct tk_fabric *fabric, struct work *watch, uint32_t code); /* returns the code to report */
struct queue *caller_queue(const struct work *work); /* where it waits for a place */
int poll_callers(struct tk_fabric *fabric);

uint64_t caller_word(const struct tk_caller *caller, uint64_t address); /* the word's number among the caller's */
void caller_read(struct tk_caller *caller, uint32_t place); /* the bytes of an answer have been read */
void caller_shared(struct tk_caller *caller, int is_good); /* is_good: the block read passed its check */

/* shared.c: blocks that are read from the node's memory, the client's side */
struct shared_fetch *shared_fetch(struct tk_caller *caller, const struct tk_shared *shared, uint32_t blocks,
				  const void *rows, size_t row_bytes, const struct tk_wanted *wanted); /* any thread */
void shared_fetch_free(struct shared_fetch *fetch); /* any thread; nothing watches for it */
void shared_watches(struct shared_fetch *fetch, struct work *watch, uint32_t row); /* any thread */
void shared_asked(struct shared_fetch *fetch, uint32_t place);
int shared_where(struct tk_fabric *fabric, struct work *watch, struct tk_region *region, uint64_t address);
uint32_t shared_copy(struct tk_fabric *fabric, struct work *work, uint32_t bytes_max);
void shared_over(struct work *watch);
int shared_located(struct tk_fabric *fabric, struct work *watch); /* reads one block's location; 0: it must not be read */
int shared_words_came(struct tk_fabric *fabric); /* whether rows may have words that were not seen yet */
uint64_t shared_word(const struct tk_fabric *fabric, const struct work *watch); /* the awaited word, out of its row; or 0 */

/* shared_reads.c: the same, on the node's side */
int may_share(const struct work *work);
int send_location(struct tk_fabric *fabric, struct work *work); /* 0, or the error of posting */
void await_copy(struct tk_fabric *fabric, struct work *work); /* it has left all other queues */
int poll_shared_reads(struct tk_fabric *fabric);
/* Stores a word that follows no bytes in its row; returns 0 if it has to be posted. */
int put_row_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, struct spot spot);

/* shared_puts.c: puts and words between two ends on one machine */
/* Returns 0 if the word has to be posted. */
int put_shared_word(struct tk_fabric *fabric, struct tk_endpoint *endpoint, uint64_t word, struct spot spot);
void ring_later(struct tk_fabric *fabric, struct tk_endpoint *endpoint);
void ring_doorbells(struct tk_fabric *fabric);

/* block_copy.c; any thread */
typedef void (*copy_bytes)(void *to, const void *from, size_t length, const void *next); /* `next`: fetched for later */
copy_bytes copy_for(uint64_t bytes); /* for a get of so many */
struct block_copy {
	copy_bytes copy;
	const char *from, *then; /* `then`: what is copied afterwards; NULL: it is not known */
	char *to;
	struct tk_pieces *pieces; /* its destination instead of `to`; NULL: none */
	struct pieces_end filled;
	uint32_t length, skip, part; /* of the block; only the part after `skip` is written */
	uint32_t done, crc32c;	     /* of the block: how many bytes have been read, and their checksum */
};
/* Sets the destination; pieces of another length than the part are ignored. A `part` of 0: the whole block. */
void block_copy_into(struct block_copy *block, uint64_t address, struct tk_pieces *pieces, uint32_t skip, uint32_t part);
uint32_t block_copy_some(struct block_copy *block, uint32_t bytes_max); /* returns how many; whole steps */

/* pieces.c; any thread for all but the last */
void pieces_use(struct tk_pieces *pieces);
void pieces_release(struct tk_pieces *pieces);
void pieces_fill(const struct tk_pieces *pieces, struct pieces_end *end, const char *from, uint64_t bytes, copy_bytes copy,
		 const char *next);
uint32_t gather_some(struct work *work, uint32_t bytes_max);

/* receiver.c: the node's side */
int poll_receivers(struct tk_fabric *fabric);
void receivers_notify(struct tk_fabric *fabric);
void receivers_end(struct tk_fabric *fabric, struct tk_endpoint *endpoint);

/* reader.c: puts of bytes that are read from a drive */
void reader_begin(struct work *work);
void reader_release(struct work *work); /* the bytes are no longer needed */
void reader_withdraw(struct work *work); /* the same, while the drive may still be reading them */
void reader_put_over(struct work *work);
int poll_readers(struct tk_fabric *fabric);
void readers_end(struct tk_fabric *fabric);
void free_readers(struct tk_fabric *fabric); /* with the fabric */

/* shelf.c */
void free_shelves(struct tk_fabric *fabric);

#endif
