/*
 * Opening and closing a fabric, its regions and peers; queueing work and taking events. Any thread.
 */
#define _GNU_SOURCE
#include "fabric.h"

#include <errno.h>
#include <rdma/fi_cm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define CQ_ENTRIES 4096
#define KEY_TRIES 8
#define EVENTS_FOR_EACH 4u /* events that may wait to be taken, for each piece of work that may be queued */

uint64_t tk_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Huge pages where the kernel has them, and all of them there before the first block comes: a fault for each
 * page would cost the first blocks several times what their bytes do. */
int tk_memory_populate(void *address, size_t length)
{
	madvise(address, length, MADV_HUGEPAGE);
	return madvise(address, length, MADV_POPULATE_WRITE) ? -errno : 0;
}

uint64_t tk_word_load(const void *address)
{
	return __atomic_load_n((const uint64_t *)address, __ATOMIC_ACQUIRE);
}

void tk_word_store(void *address, uint64_t value)
{
	__atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
}

/* A child of fork has the memory but neither the thread nor the sockets: it must touch nothing. */
static int is_ours(const struct tk_fabric *fabric)
{
	return fabric->pid == getpid();
}

static int refused(char *message, const char *doing, int status)
{
	snprintf(message, TK_MESSAGE_BYTES, "%s: %s", doing, library_loaded()->strerror(-status));
	return status;
}

static void close_fid(struct fid *fid)
{
	if (fid)
		fi_close(fid);
}

static void free_fabric(struct tk_fabric *fabric)
{
	/* The order matters: endpoints (the progress thread has closed them), regions, queue, addresses, domain,
	 * fabric. */
	while (fabric->regions) {
		struct tk_region *region = fabric->regions;
		fabric->regions = region->next;
		fi_close(&region->mr->fid);
		free(region);
	}
	while (fabric->endpoints) {
		struct tk_endpoint *endpoint = fabric->endpoints;
		fabric->endpoints = endpoint->next;
		free(endpoint);
	}
	close_fid(fabric->cq ? &fabric->cq->fid : NULL);
	close_fid(fabric->av ? &fabric->av->fid : NULL);
	close_fid(fabric->domain ? &fabric->domain->fid : NULL);
	close_fid(fabric->fid ? &fabric->fid->fid : NULL);
	if (fabric->info)
		library_loaded()->freeinfo(fabric->info);
	for (uint32_t i = 0; i < fabric->triggers_count; i++)
		free(fabric->triggers[i].heap);
	for (uint32_t i = 0; i < fabric->chunks_count; i++)
		free(fabric->chunks[i]);
	free(fabric->triggers);
	free(fabric->chunks);
	free(fabric->landings.items);
	free(fabric->acks.items);
	free(fabric->pending);
	free(fabric->events);
	if (fabric->wake_fd >= 0)
		close(fabric->wake_fd);
	if (fabric->event_fd >= 0)
		close(fabric->event_fd);
	pthread_mutex_destroy(&fabric->handle_lock);
	pthread_mutex_destroy(&fabric->inbox_lock);
	pthread_mutex_destroy(&fabric->event_lock);
	pthread_cond_destroy(&fabric->command_done);
	free(fabric);
}

static int open_domain(struct tk_fabric *fabric, const char *provider, const char *node, char *message)
{
	const struct library *lib = library_loaded();
	struct fi_info *hints = library_hints(provider);
	if (!hints)
		return -ENOMEM;
	int status = lib->getinfo(library_version_asked(), node, NULL, node ? FI_SOURCE : 0, hints, &fabric->info);
	lib->freeinfo(hints);
	if (status)
		return refused(message, "looking for the provider", status);
	fabric->ordered = library_is_ordered(fabric->info->fabric_attr->prov_name);

	if ((status = lib->fabric(fabric->info->fabric_attr, &fabric->fid, NULL)))
		return refused(message, "opening the fabric", status);
	if ((status = fi_domain(fabric->fid, fabric->info, &fabric->domain, NULL)))
		return refused(message, "opening the domain", status);
	struct fi_av_attr av = {.type = FI_AV_UNSPEC};
	if ((status = fi_av_open(fabric->domain, &av, &fabric->av, NULL)))
		return refused(message, "opening the address vector", status);
	struct fi_cq_attr cq = {.size = CQ_ENTRIES, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE};
	if ((status = fi_cq_open(fabric->domain, &cq, &fabric->cq, NULL)))
		return refused(message, "opening the completion queue", status);
	return 0;
}

int tk_fabric_open(const char *provider, const char *node, uint32_t work_max, struct tk_fabric **out,
		   char *message)
{
	message[0] = 0;
	if (!library_loaded())
		return -ENOSYS;
	struct tk_fabric *fabric = calloc(1, sizeof *fabric);
	if (!fabric)
		return -ENOMEM;
	fabric->pid = getpid();
	fabric->work_max = work_max;
	fabric->chunks_max = (work_max + WORK_CHUNK - 1) / WORK_CHUNK;
	fabric->next_deadline_ns = UINT64_MAX;
	fabric->started_ns = tk_now_ns();
	pthread_mutex_init(&fabric->handle_lock, NULL);
	pthread_mutex_init(&fabric->inbox_lock, NULL);
	pthread_mutex_init(&fabric->event_lock, NULL);
	pthread_cond_init(&fabric->command_done, NULL);
	fabric->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	fabric->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	fabric->chunks = calloc(fabric->chunks_max, sizeof *fabric->chunks);

	int status = 0;
	if (fabric->wake_fd < 0 || fabric->event_fd < 0)
		status = -errno;
	else if (!fabric->chunks)
		status = -ENOMEM;
	else
		status = open_domain(fabric, provider, node, message);
	if (!status) {
		status = -pthread_create(&fabric->thread, NULL, core_progress, fabric);
		fabric->thread_started = !status;
	}
	if (status) {
		free_fabric(fabric);
		return status;
	}
	pthread_setname_np(fabric->thread, "triggerkv");
	*out = fabric;
	return 0;
}

static void wake(struct tk_fabric *fabric)
{
	__atomic_store_n(&fabric->posted_something, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&fabric->sleeping, __ATOMIC_SEQ_CST)) {
		uint64_t one = 1;
		ssize_t ignored = write(fabric->wake_fd, &one, sizeof one);
		(void)ignored;
	}
}

int tk_fabric_close(struct tk_fabric *fabric)
{
	if (!is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->inbox_lock);
	fabric->stop = 1;
	pthread_mutex_unlock(&fabric->inbox_lock);
	wake(fabric);
	if (fabric->thread_started)
		pthread_join(fabric->thread, NULL);
	free_fabric(fabric);
	return 0;
}

int tk_fabric_event_fd(struct tk_fabric *fabric)
{
	return fabric->event_fd;
}

int tk_fabric_provider(struct tk_fabric *fabric, char *out)
{
	snprintf(out, TK_PROVIDER_NAME_BYTES, "%s", fabric->info->fabric_attr->prov_name);
	return fabric->ordered;
}

static int on_the_thread(struct tk_fabric *fabric, int (*run)(struct tk_fabric *, void *), void *argument)
{
	if (!is_ours(fabric))
		return -ECHILD;
	struct command command = {.run = run, .argument = argument};
	pthread_mutex_lock(&fabric->inbox_lock);
	while (fabric->command && !fabric->stop)
		pthread_cond_wait(&fabric->command_done, &fabric->inbox_lock);
	if (fabric->stop) {
		pthread_mutex_unlock(&fabric->inbox_lock);
		return -ESHUTDOWN;
	}
	fabric->command = &command;
	wake(fabric);
	while (!command.done)
		pthread_cond_wait(&fabric->command_done, &fabric->inbox_lock);
	pthread_mutex_unlock(&fabric->inbox_lock);
	return command.result;
}

static int open_endpoint(struct tk_fabric *fabric, void *argument)
{
	struct tk_endpoint *endpoint = argument;
	int status = fi_endpoint(fabric->domain, fabric->info, &endpoint->fid, NULL);
	if (status)
		return status;
	if ((status = fi_ep_bind(endpoint->fid, &fabric->av->fid, 0)) ||
	    (status = fi_ep_bind(endpoint->fid, &fabric->cq->fid, FI_TRANSMIT | FI_RECV)) ||
	    (status = fi_enable(endpoint->fid)))
		fi_close(&endpoint->fid->fid);
	return status;
}

int tk_endpoint_open(struct tk_fabric *fabric, struct tk_endpoint **out, char *message)
{
	message[0] = 0;
	if (!is_ours(fabric))
		return -ECHILD;
	struct tk_endpoint *endpoint = calloc(1, sizeof *endpoint);
	if (!endpoint)
		return -ENOMEM;
	endpoint->fabric = fabric;
	int status = on_the_thread(fabric, open_endpoint, endpoint);
	if (status) {
		free(endpoint);
		return refused(message, "opening an endpoint", status);
	}
	pthread_mutex_lock(&fabric->handle_lock);
	endpoint->next = fabric->endpoints;
	fabric->endpoints = endpoint;
	pthread_mutex_unlock(&fabric->handle_lock);
	*out = endpoint;
	return 0;
}

int tk_endpoint_address(struct tk_endpoint *endpoint, void *out)
{
	size_t length = TK_ADDRESS_BYTES;
	int status = fi_getname(&endpoint->fid->fid, out, &length);
	return status ? status : (int)length;
}

int tk_fabric_statistics(struct tk_fabric *fabric, struct tk_statistics *out)
{
	if (!is_ours(fabric))
		return -ECHILD;
	const uint64_t *from = (const uint64_t *)&fabric->shown;
	uint64_t *to = (uint64_t *)out;
	for (size_t i = 0; i < sizeof *out / sizeof *to; i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
	out->alive_ns = tk_now_ns() - fabric->started_ns;
	return 0;
}

struct peer {
	char address[TK_ADDRESS_BYTES]; /* padded: a peer's word is not trusted to be as long as its kind */
	fi_addr_t number;
};

static int add_peer(struct tk_fabric *fabric, void *argument)
{
	struct peer *peer = argument;
	int added = fi_av_insert(fabric->av, peer->address, 1, &peer->number, 0, NULL);
	return added == 1 ? 0 : added < 0 ? added : -EINVAL;
}

static int remove_peer(struct tk_fabric *fabric, void *argument)
{
	struct peer *peer = argument;
	return fi_av_remove(fabric->av, &peer->number, 1, 0);
}

int tk_peer_add(struct tk_fabric *fabric, const void *address, size_t length, uint64_t *out)
{
	struct peer peer = {.number = FI_ADDR_UNSPEC};
	if (length > TK_ADDRESS_BYTES || !length)
		return -EINVAL;
	memcpy(peer.address, address, length);
	int status = on_the_thread(fabric, add_peer, &peer);
	*out = peer.number;
	return status;
}

int tk_peer_remove(struct tk_fabric *fabric, uint64_t number)
{
	struct peer peer = {.number = number};
	return on_the_thread(fabric, remove_peer, &peer);
}

/* Keys are random so that nobody can guess the key of a region that was not given to him. */
static int register_with_random_key(struct tk_fabric *fabric, void *address, size_t length, uint64_t access,
				    struct fid_mr **mr)
{
	size_t key_bytes = fabric->info->domain_attr->mr_key_size;
	for (int i = 0;; i++) {
		uint64_t key;
		if (getrandom(&key, sizeof key, 0) != sizeof key)
			return -EIO;
		if (key_bytes < sizeof key)
			key &= ((uint64_t)1 << (8 * key_bytes)) - 1;
		int status = fi_mr_reg(fabric->domain, address, length, access, 0, key, 0, mr, NULL);
		if (status != -FI_ENOKEY || i == KEY_TRIES)
			return status;
	}
}

int tk_region_open(struct tk_fabric *fabric, void *address, size_t length, int remote_write,
		   struct tk_region **out)
{
	if (!is_ours(fabric))
		return -ECHILD;
	if (!length)
		return -EINVAL;
	struct tk_region *region = calloc(1, sizeof *region);
	if (!region)
		return -ENOMEM;
	uint64_t access = FI_WRITE | (remote_write ? FI_REMOTE_WRITE : 0);
	int status = register_with_random_key(fabric, address, length, access, &region->mr);
	if (status) {
		free(region);
		return status;
	}
	region->fabric = fabric;
	region->address = (uintptr_t)address;
	region->length = length;
	region->key = fi_mr_key(region->mr);
	region->desc = fi_mr_desc(region->mr);
	region->base = fabric->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? region->address : 0;
	pthread_mutex_lock(&fabric->handle_lock);
	region->next = fabric->regions;
	fabric->regions = region;
	pthread_mutex_unlock(&fabric->handle_lock);
	*out = region;
	return 0;
}

int tk_region_close(struct tk_region *region)
{
	struct tk_fabric *fabric = region->fabric;
	if (!is_ours(fabric))
		return -ECHILD;
	if (__atomic_load_n(&region->uses, __ATOMIC_ACQUIRE))
		return -EBUSY;
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_region **link = &fabric->regions; *link; link = &(*link)->next)
		if (*link == region) {
			*link = region->next;
			break;
		}
	pthread_mutex_unlock(&fabric->handle_lock);
	int status = fi_close(&region->mr->fid);
	free(region);
	return status;
}

uint64_t tk_region_key(struct tk_region *region)
{
	return region->key;
}

uint64_t tk_region_base(struct tk_region *region)
{
	return region->base;
}

/* Under inbox_lock. All or none: -EAGAIN when the bound on queued work would be passed. */
static int reserve_work(struct tk_fabric *fabric, uint32_t count)
{
	if (fabric->stop)
		return -ESHUTDOWN;
	if (count > fabric->free_count + (fabric->work_max - fabric->work_count))
		return -EAGAIN;
	if (__atomic_load_n(&fabric->events_count, __ATOMIC_RELAXED) > EVENTS_FOR_EACH * fabric->work_max)
		return -EAGAIN; /* nobody takes the events */
	while (fabric->free_count < count) {
		uint32_t left = fabric->work_max - fabric->work_count;
		uint32_t more = left < WORK_CHUNK ? left : WORK_CHUNK;
		struct work *chunk = calloc(more, sizeof *chunk);
		if (!chunk)
			return -ENOMEM;
		fabric->chunks[fabric->chunks_count++] = chunk;
		fabric->work_count += more;
		fabric->free_count += more;
		for (uint32_t i = 0; i < more; i++) {
			chunk[i].next = fabric->free;
			fabric->free = &chunk[i];
		}
	}
	return 0;
}

/* Under inbox_lock, after reserve_work. */
static struct work *enqueue(struct tk_fabric *fabric, enum work_kind kind)
{
	struct work *work = fabric->free;
	fabric->free = work->next;
	fabric->free_count--;
	memset(work, 0, sizeof *work);
	work->kind = kind;
	work->sequence = fabric->sequence++;
	if (fabric->inbox.tail)
		fabric->inbox.tail->next = work;
	else
		fabric->inbox.head = work;
	fabric->inbox.tail = work;
	return work;
}

static int check_put(const struct tk_fabric *fabric, const struct tk_put *put)
{
	if (!put->endpoint || put->endpoint->fabric != fabric)
		return -EINVAL;
	if (put->trigger % 8 || put->flag_target % 8 || (!put->length && !(put->flags & TK_FLAG_PUT)))
		return -EINVAL;
	if (!put->length)
		return 0;
	const struct tk_region *region = put->region;
	if (!region || region->fabric != fabric || put->source < region->address ||
	    put->length > region->length || put->source - region->address > region->length - put->length)
		return -ERANGE;
	return 0;
}

int tk_arm(struct tk_fabric *fabric, const struct tk_put *puts, int count)
{
	if (!is_ours(fabric))
		return -ECHILD;
	for (int i = 0; i < count; i++) {
		int status = check_put(fabric, &puts[i]);
		if (status)
			return status;
	}
	pthread_mutex_lock(&fabric->inbox_lock);
	int status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++) {
		enqueue(fabric, WORK_PUT)->put = puts[i];
		if (puts[i].region)
			__atomic_add_fetch(&puts[i].region->uses, 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		wake(fabric);
	return status;
}

int tk_watch_landings(struct tk_fabric *fabric, const struct tk_landing *landings, int count)
{
	if (!is_ours(fabric))
		return -ECHILD;
	for (int i = 0; i < count; i++)
		if (!landings[i].endpoint || !landings[i].word || landings[i].word % 8 || landings[i].ack_target % 8)
			return -EINVAL;
	pthread_mutex_lock(&fabric->inbox_lock);
	int status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++)
		enqueue(fabric, WORK_LANDING)->landing = landings[i];
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		wake(fabric);
	return status;
}

int tk_watch_acks(struct tk_fabric *fabric, const struct tk_ack_watch *watches, int count)
{
	if (!is_ours(fabric))
		return -ECHILD;
	for (int i = 0; i < count; i++)
		if (!watches[i].endpoint || !watches[i].word || watches[i].word % 8)
			return -EINVAL;
	pthread_mutex_lock(&fabric->inbox_lock);
	int status = reserve_work(fabric, (uint32_t)count);
	for (int i = 0; !status && i < count; i++)
		enqueue(fabric, WORK_ACK)->ack = watches[i];
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!status)
		wake(fabric);
	return status;
}

int tk_cancel(struct tk_fabric *fabric, const uint64_t *tags, int count)
{
	struct cancellation wanted = {.tags = tags, .count = count};
	return count > 0 ? on_the_thread(fabric, core_cancel, &wanted) : 0;
}

int tk_endpoint_close(struct tk_endpoint *endpoint)
{
	struct tk_fabric *fabric = endpoint->fabric;
	if (!is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->handle_lock);
	for (struct tk_endpoint **link = &fabric->endpoints; *link; link = &(*link)->next)
		if (*link == endpoint) {
			*link = endpoint->next;
			break;
		}
	pthread_mutex_unlock(&fabric->handle_lock);
	int status = on_the_thread(fabric, core_close_endpoint, endpoint);
	free(endpoint);
	return status;
}

int tk_fabric_reap(struct tk_fabric *fabric, struct tk_event *out, int out_max)
{
	if (!is_ours(fabric))
		return -ECHILD;
	pthread_mutex_lock(&fabric->event_lock);
	uint32_t count = fabric->events_count;
	if (count > (uint32_t)out_max)
		count = (uint32_t)out_max;
	if (count)
		memcpy(out, fabric->events + fabric->events_first, count * sizeof *out);
	fabric->events_first += count;
	__atomic_store_n(&fabric->events_count, fabric->events_count - count, __ATOMIC_RELAXED);
	if (!fabric->events_count) {
		fabric->events_first = 0;
		if (fabric->signalled) {
			uint64_t ignored;
			ssize_t got = read(fabric->event_fd, &ignored, sizeof ignored);
			(void)got;
			fabric->signalled = 0;
		}
	}
	pthread_mutex_unlock(&fabric->event_lock);
	return (int)count;
}
