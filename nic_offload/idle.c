/*
 * How the progress thread idles after a round that found nothing to do.
 *
 * It spins for a short time and then sleeps until there is a call of our own process, a byte on one of the fabric's
 * sockets, a store to a flag word followed by its bell, or a deadline. If there are endpoints, and no sockets of the
 * provider can be found (shared memory, a NIC), it naps instead, for increasing times of up to two milliseconds.
 *
 * Providers over TCP have a descriptor to wait for, but it is useless: that of net (1.17) is always readable once
 * something is connected. So their sockets are found as in streams.c: those at the ports of our endpoints, and those
 * connected to our peers. The search is repeated for a second each time endpoints or peers change. If something moves
 * without a wake-up there is one more search; as long as such searches find nothing, they become less and less
 * frequent, because words in shared memory move without sockets. Searches take a sixteenth of the thread's time at
 * most. A socket missed until the next search costs no more than a nap.
 *
 * A flag word's bell is a pipe and a count of sleeping threads. A store reads the count, and writes to the pipe if it
 * is not zero. A GPU stores without ringing: while an awaited word may be stored to by a GPU, no sleep is longer than a
 * nap.
 *
 * What always holds: nothing that arrives before the sleep is missed, because posted work and words are checked once
 * more after the sleeper has been counted. No sleep goes past a deadline. A thread that was woken spins before it
 * sleeps again: a provider may have read more than it has processed.
 */
#define _GNU_SOURCE
#include "progress.h"
#include "turn.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 50000u
#define SPIN_AWAITED_NS 500000u /* while an answer is due: the peer may be computing its next message's checksum */
#define SPINS_A_YIELD 8
#define TAKEN_NS 2000u		/* a yield that takes longer has let another thread run */
#define NAP_SHARE 16		/* a nap lasts this part of the idle time before it */
#define SPIN_WORKING_NS 10000000u /* with puts on the wire: longer, but not for a peer that accepts nothing */
#define NAP_NS_MIN 30000u
#define NAP_NS_MAX 2000000u
#define SLEEP_NS_MIN 20000000u /* the longest sleep with sockets that wake the thread, at first */
#define SLEEP_NS_MAX 200000000u
#define SLEEP_SHARE 16	       /* of the idle time before it, between the two */
#define LOOK_EVERY_NS 5000000u
#define LOOK_FOR_NS 1000000000u
#define DOUBT_NS_MAX 10000000000u /* between two searches that only a movement without a wake-up caused */
#define LOOK_SHARE 16 /* searches take at most this part of the thread's time: there may be thousands of sockets */
#define PORTS 65536
#define PORTS_A_WORD 64
#define EVENTS_A_TIME 16
#define BELL_BYTES 4096

enum { WAKES_CALL, WAKES_SOCKET, WAKES_LISTENER, WAKES_BELL, WAKES_WRITES };

static uint64_t event_of(int kind, int fd)
{
	return (uint64_t)kind << 32 | (uint32_t)fd;
}

static int watch_new(struct tk_fabric *fabric, int kind, int fd, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.u64 = event_of(kind, fd)};
	return epoll_ctl(fabric->sleep_fd, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

static int watch_fd(struct tk_fabric *fabric, int kind, int fd, uint32_t events)
{
	int status = watch_new(fabric, kind, fd, events);
	return status == -EEXIST ? 0 : status;
}

int rest_open(struct tk_fabric *fabric)
{
	fabric->sleep_fd = epoll_create1(EPOLL_CLOEXEC);
	if (fabric->sleep_fd < 0)
		return -errno;
	return watch_fd(fabric, WAKES_CALL, fabric->wake_fd, EPOLLIN);
}

int rest_listen(struct tk_fabric *fabric, int pipe_fd)
{
	return watch_fd(fabric, WAKES_BELL, pipe_fd, EPOLLIN | EPOLLET);
}

int rest_listen_writes(struct tk_fabric *fabric, int event_fd)
{
	return watch_fd(fabric, WAKES_WRITES, event_fd, EPOLLIN | EPOLLET); /* it is never drained */
}

int rest_ignore(struct tk_fabric *fabric, int event_fd)
{
	return epoll_ctl(fabric->sleep_fd, EPOLL_CTL_DEL, event_fd, NULL) ? -errno : 0;
}

void rest_look_again(struct tk_fabric *fabric)
{
	__atomic_store_n(&fabric->sockets_changed, 1, __ATOMIC_RELEASE);
}

static int leads_to_a_peer(const struct tk_fabric *fabric, const union address *remote)
{
	for (uint32_t i = 0; i < fabric->peers_count; i++)
		if (address_is_same(&fabric->peers[i].address, remote))
			return 1;
	return 0;
}

/* The ports of endpoints and of peers, one bit for each port. */
struct ports {
	uint64_t own[PORTS / PORTS_A_WORD], peers[PORTS / PORTS_A_WORD];
};

static void add_port(uint64_t *ports, uint16_t port)
{
	ports[port / PORTS_A_WORD] |= UINT64_C(1) << port % PORTS_A_WORD;
}

static int has_port(const uint64_t *ports, uint16_t port)
{
	return port && ports[port / PORTS_A_WORD] >> port % PORTS_A_WORD & 1;
}

static void list_ports(struct tk_fabric *fabric, struct ports *ports)
{
	memset(ports, 0, sizeof *ports);
	pthread_mutex_lock(&fabric->handle_lock);
	for (const struct tk_endpoint *endpoint = fabric->endpoints; endpoint; endpoint = endpoint->next)
		add_port(ports->own, endpoint->port);
	for (uint32_t i = 0; i < fabric->peers_count; i++)
		add_port(ports->peers, address_port(&fabric->peers[i].address));
	pthread_mutex_unlock(&fabric->handle_lock);
}

/* Callers wait for the handles' lock without a deadline, so no system call is made while it is held. */
static void look_at(struct tk_fabric *fabric, const struct ports *ports, int fd)
{
	union address local, remote;
	socklen_t length = sizeof local;
	if (getsockname(fd, &local.any, &length) || !address_port(&local))
		return;
	length = sizeof remote;
	int is_ours = has_port(ports->own, address_port(&local));
	if (!is_ours && !getpeername(fd, &remote.any, &length) && has_port(ports->peers, address_port(&remote))) {
		pthread_mutex_lock(&fabric->handle_lock);
		is_ours = leads_to_a_peer(fabric, &remote);
		pthread_mutex_unlock(&fabric->handle_lock);
	}
	if (!is_ours)
		return;
	int listens = 0;
	length = sizeof listens;
	getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
	int status = watch_new(fabric, listens ? WAKES_LISTENER : WAKES_SOCKET, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
	fabric->sockets += !status || status == -EEXIST;
	fabric->sockets_found += !status;
}

/* Something moved without a wake-up: one search is due, unless such searches have found nothing. */
void rest_overslept(struct tk_fabric *fabric)
{
	if (fabric->now_ns < fabric->doubt_next_ns)
		return;
	fabric->looked_ns = 0;
	fabric->doubts = 1;
}

/* After any search: adjusts the pause between those without a wake-up. */
static void doubt_less(struct tk_fabric *fabric, uint64_t now_ns)
{
	if (fabric->sockets_found)
		fabric->doubt_ns = 0;
	else if (fabric->doubts)
		fabric->doubt_ns = fabric->doubt_ns * 2 > DOUBT_NS_MAX ? DOUBT_NS_MAX : fabric->doubt_ns * 2 + LOOK_EVERY_NS;
	fabric->doubt_next_ns = now_ns + fabric->doubt_ns;
	fabric->doubts = 0;
}

static void look_for_sockets(struct tk_fabric *fabric)
{
	uint64_t now_ns = fabric->now_ns;
	if (__atomic_exchange_n(&fabric->sockets_changed, 0, __ATOMIC_ACQ_REL)) {
		fabric->look_until_ns = now_ns + LOOK_FOR_NS;
		fabric->looked_ns = 0;
	}
	if (now_ns < fabric->look_next_ns)
		return;
	if (fabric->looked_ns && (now_ns > fabric->look_until_ns || now_ns - fabric->looked_ns < LOOK_EVERY_NS))
		return;
	fabric->looked_ns = now_ns;
	DIR *folder = opendir("/proc/self/fd");
	if (!folder)
		return;
	struct ports ports;
	list_ports(fabric, &ports);
	uint64_t began_ns = tk_now_ns();
	fabric->statistics.searches++;
	fabric->sockets = 0;
	fabric->sockets_found = 0;
	for (struct dirent *entry; (entry = readdir(folder));)
		if (entry->d_name[0] != '.')
			look_at(fabric, &ports, atoi(entry->d_name));
	closedir(folder);
	uint64_t ended_ns = tk_now_ns();
	doubt_less(fabric, ended_ns);
	fabric->look_next_ns = ended_ns + (LOOK_SHARE - 1) * (ended_ns - began_ns);
}

/* Drains the bells and calls that woke the thread, so that they can wake it again. Returns whether there was anything.
 * If no socket was among them, the next round doesn't poll the provider: the new work is in our memory. */
static int drain_wakes(struct tk_fabric *fabric)
{
	struct epoll_event events[EVENTS_A_TIME];
	char ignored[BELL_BYTES];
	int count = epoll_wait(fabric->sleep_fd, events, EVENTS_A_TIME, 0), sockets = 0;
	for (int i = 0; i < count; i++) {
		int kind = (int)(events[i].data.u64 >> 32), fd = (int)(uint32_t)events[i].data.u64;
		sockets += kind == WAKES_SOCKET || kind == WAKES_LISTENER;
		if (kind == WAKES_LISTENER) {
			rest_look_again(fabric);
		} else if (kind == WAKES_CALL || kind == WAKES_BELL) {
			ssize_t got = read(fd, ignored, kind == WAKES_CALL ? sizeof(uint64_t) : sizeof ignored);
			(void)got;
		}
	}
	fabric->wire_is_quiet = count > 0 && !sockets;
	return count > 0;
}

/* On few cores a spin without a yield starves the application; but a yield delays a flag by as much as the rest of a
 * round. So it yields every time while other threads take the core, and otherwise now and then. */
static void spin(struct tk_fabric *fabric)
{
	if (fabric->spins_alone) {
		fabric->spins_alone--;
		return;
	}
	uint64_t before_ns = tk_now_ns();
	sched_yield();
	fabric->spins_alone = tk_now_ns() - before_ns < TAKEN_NS ? SPINS_A_YIELD : 0;
}

static int is_working(const struct tk_fabric *fabric)
{
	return fabric->in_flight || fabric->ready_first || fabric->summing.head;
}

/* Without an endpoint nothing can arrive; opening one wakes the thread. */
static int has_endpoints(struct tk_fabric *fabric)
{
	pthread_mutex_lock(&fabric->handle_lock);
	int has = fabric->endpoints != NULL;
	pthread_mutex_unlock(&fabric->handle_lock);
	return has;
}

static uint64_t sleep_ns(struct tk_fabric *fabric, uint64_t idle_ns, int working)
{
	uint64_t now_ns = fabric->now_ns, longest_ns = idle_ns / SLEEP_SHARE, at_ns = fabric->next_deadline_ns;
	if (longest_ns < SLEEP_NS_MIN)
		longest_ns = SLEEP_NS_MIN;
	if (longest_ns > SLEEP_NS_MAX)
		longest_ns = SLEEP_NS_MAX;
	if (!fabric->sockets && has_endpoints(fabric)) {
		longest_ns = working || idle_ns < NAP_NS_MIN * NAP_SHARE ? NAP_NS_MIN : idle_ns / NAP_SHARE;
		if (longest_ns > NAP_NS_MAX)
			longest_ns = NAP_NS_MAX;
	} else if (fabric->active_count || working) {
		longest_ns = NAP_NS_MAX;
	}
	if (fabric->caller_runs && fabric->rest_until_ns < now_ns + longest_ns)
		longest_ns = fabric->rest_until_ns > now_ns ? fabric->rest_until_ns - now_ns : 0;
	if (fabric->over_at_ns < at_ns)
		at_ns = fabric->over_at_ns;
	if (at_ns < now_ns + longest_ns)
		longest_ns = at_ns > now_ns + NAP_NS_MIN ? at_ns - now_ns : NAP_NS_MIN;
	return longest_ns;
}

/* From now on a store to an awaited word rings its bell. Neighbouring words mostly share one, which is counted once. */
static void count_sleeper(struct tk_fabric *fabric, int more)
{
	struct tk_bell *last = NULL;
	for (uint32_t i = 0; i < fabric->active_count; i++) {
		struct tk_bell *bell = fabric->active[i]->bell;
		if (bell && bell != last)
			__atomic_add_fetch(&bell->sleepers, more, __ATOMIC_SEQ_CST);
		if (bell)
			last = bell;
	}
}

int rounds_are_due(const struct tk_fabric *fabric)
{
	if (__atomic_load_n(&fabric->posted_something, __ATOMIC_SEQ_CST))
		return 1;
	for (uint32_t i = 0; i < fabric->active_count; i++) {
		const struct tk_counter *counter = fabric->active[i];
		if (counter->word && counter->count && tk_word_load(counter->word) >= counter->heap[0].threshold)
			return 1;
	}
	return 0;
}

void stop_sleeping(struct tk_fabric *fabric)
{
	if (!fabric->asleep)
		return;
	fabric->asleep = 0;
	count_sleeper(fabric, -1);
	__atomic_store_n(&fabric->sleeping, 0, __ATOMIC_SEQ_CST);
}

int rest(struct tk_fabric *fabric, uint64_t idle_ns)
{
	int working = is_working(fabric);
	if (fabric->pending_count) {
		sched_yield(); /* they are published soon, and nothing else would wake the thread */
		return 0;
	}
	if (idle_ns < (working ? SPIN_WORKING_NS : fabric->acks.count ? SPIN_AWAITED_NS : SPIN_NS)) {
		spin(fabric);
		return 0;
	}
	if (fabric->streams)
		look_for_sockets(fabric);
	uint64_t before_ns = tk_now_ns(), nap_ns = sleep_ns(fabric, idle_ns, working);
	int woken = 1, is_thread = !fabric->caller_runs;
	fabric->asleep = 1;
	__atomic_store_n(&fabric->sleeping, 1, __ATOMIC_SEQ_CST);
	count_sleeper(fabric, 1);
	if (!rounds_are_due(fabric)) {
		struct pollfd wait = {.fd = fabric->sleep_fd, .events = POLLIN};
		struct timespec timeout = {.tv_nsec = (long)nap_ns};
		if (is_thread)
			turn_sleeps(fabric->turn);
		woken = ppoll(&wait, 1, &timeout, NULL) > 0;
		if (is_thread)
			turn_wakes(fabric->turn);
		woken = woken && drain_wakes(fabric);
	}
	woken |= !fabric->asleep; /* a caller has run rounds meanwhile */
	stop_sleeping(fabric);
	fabric->rested = 1;
	fabric->overslept = !woken;
	fabric->statistics.sleeps++;
	fabric->statistics.asleep_ns += tk_now_ns() - before_ns;
	return woken;
}
