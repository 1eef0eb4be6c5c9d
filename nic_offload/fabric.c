/*
 * Opens and closes a fabric, and sends commands to its thread. Any thread.
 */
#define _GNU_SOURCE
#include "progress.h"
#include "turn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>


uint64_t tk_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* After fork, a child has the memory but neither the thread nor the sockets: it must touch nothing. */
int fabric_is_ours(const struct tk_fabric *fabric)
{
	return fabric->pid == getpid();
}

/* The error that every call must return now, or 0. */
int fabric_refusal(const struct tk_fabric *fabric)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	return __atomic_load_n(&fabric->stuck, __ATOMIC_ACQUIRE) ? TK_STUCK : 0;
}

int refused(const struct tk_fabric *fabric, char *message, const char *doing, int status)
{
	snprintf(message, TK_MESSAGE_BYTES, "%s: %s", doing, fabric->library->strerror(-status));
	return status;
}

static void free_counters(struct tk_counter *counter)
{
	for (struct tk_counter *next; counter; counter = next) {
		next = counter->next;
		free_counter(counter);
	}
}

static void free_fabric(struct tk_fabric *fabric)
{
	/* The order matters: endpoints (the progress thread has closed them), regions, counters, queue, addresses,
	 * domain, fabric. */
	while (fabric->regions) {
		struct tk_region *region = fabric->regions;
		fabric->regions = region->next;
		close_fid(region->mr ? &region->mr->fid : NULL);
		free(region);
	}
	while (fabric->endpoints) {
		struct tk_endpoint *endpoint = fabric->endpoints;
		fabric->endpoints = endpoint->next;
		endpoint_free(endpoint);
	}
	nic_close(fabric);
	free_shelves(fabric);
	free_lanes(fabric);
	free_readers(fabric);
	free_counters(fabric->counters);
	free_counters(fabric->closing);
	for (uint32_t i = 0; i < TK_DOMAINS_MAX; i++)
		domain_close(&fabric->domains[i]);
	close_fid(fabric->fid ? &fabric->fid->fid : NULL);
	if (fabric->info)
		fabric->library->freeinfo(fabric->info);
	for (uint32_t i = 0; fabric->chunks && i < fabric->chunks_max; i++)
		free(fabric->chunks[i].items);
	free(fabric->active);
	free(fabric->nic.slots);
	free(fabric->chunks);
	free(fabric->landings.items);
	free(fabric->acks.items);
	free(fabric->pending);
	free(fabric->events);
	free(fabric->peers);
	if (fabric->sleep_fd >= 0)
		close(fabric->sleep_fd);
	if (fabric->wake_fd >= 0)
		close(fabric->wake_fd);
	if (fabric->event_fd >= 0)
		close(fabric->event_fd);
	pthread_mutex_destroy(&fabric->handle_lock);
	pthread_mutex_destroy(&fabric->inbox_lock);
	pthread_mutex_destroy(&fabric->event_lock);
	pthread_cond_destroy(&fabric->command_done);
	if (fabric->turn)
		turn_release(fabric->turn);
	free(fabric);
}

static int find_provider(struct tk_fabric *fabric, const char *provider, const char *node, uint32_t flags)
{
	const struct library *lib = fabric->library;
	struct fi_info *hints = library_hints(lib, provider, flags);
	if (!hints)
		return -ENOMEM;
	int status = lib->getinfo(library_version_asked(lib), node, NULL, node ? FI_SOURCE : 0, hints, &fabric->info);
	lib->freeinfo(hints);
	return status;
}

static int open_provider(struct tk_fabric *fabric, const char *provider, const char *node, uint32_t flags,
			 char *message)
{
	int deferred = !!(flags & TK_DEFERRED_WORK);
	library_environment(1);
	int status = find_provider(fabric, provider, node, flags);
	if (status == -FI_ENODATA && flags & TK_DEVICE_MEMORY)
		status = find_provider(fabric, provider, node, flags & ~(uint32_t)TK_DEVICE_MEMORY);
	if (!status)
		status = fabric->library->fabric(fabric->info->fabric_attr, &fabric->fid, NULL);
	library_environment(0);
	if (status)
		return refused(fabric, message, fabric->info ? "opening the fabric" : "looking for the provider", status);
	if (deferred && !library_defers_work(fabric->info->fabric_attr->prov_name))
		return refused(fabric, message, "asking for deferred work", -FI_ENOSYS);
	fabric->order_max = library_order_max(fabric->info);
	fabric->keeps_order = library_keeps_order(fabric->info);
	fabric->posted_max = library_posted_max(fabric->info->fabric_attr->prov_name);
	fabric->streams = library_has_streams(fabric->info->fabric_attr->prov_name);
	fabric->loses_context = library_loses_context(fabric->info->fabric_attr->prov_name);
	fabric->shows_breaks = library_shows_breaks(fabric->info->fabric_attr->prov_name);
	fabric->confirms = library_confirms(fabric->info->fabric_attr->prov_name);

	if ((status = domain_open(fabric, 0, message)))
		return status;
	return deferred ? nic_open(fabric) : 0;
}

void init_condition(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
}

int wait_for_condition(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t until_ns)
{
	struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
	return pthread_cond_timedwait(condition, lock, &until);
}

int tk_fabric_open(const char *provider, const char *node, uint32_t work_max, uint64_t answer_ns, uint32_t flags,
		   struct tk_fabric **out, char *message)
{
	message[0] = 0;
	const struct library *library = library_of(provider);
	if (!library)
		return -ENOSYS;
	struct tk_fabric *fabric = calloc(1, sizeof *fabric);
	if (!fabric)
		return -ENOMEM;
	fabric->library = library;
	fabric->pid = getpid();
	fabric->work_max = work_max;
	fabric->answer_ns = answer_ns;
	fabric->chunks_max = (work_max + WORK_CHUNK - 1) / WORK_CHUNK;
	fabric->next_deadline_ns = fabric->over_at_ns = fabric->held_until_ns = fabric->cold_notify_ns = UINT64_MAX;
	fabric->started_ns = tk_now_ns();
	pthread_mutex_init(&fabric->handle_lock, NULL);
	pthread_mutex_init(&fabric->inbox_lock, NULL);
	pthread_mutex_init(&fabric->event_lock, NULL);
	init_condition(&fabric->command_done);
	fabric->sleep_fd = -1;
	fabric->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	fabric->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	fabric->chunks = calloc(fabric->chunks_max, sizeof *fabric->chunks);
	fabric->turn = turn_open(fabric);

	int status = 0;
	if (fabric->wake_fd < 0 || fabric->event_fd < 0)
		status = -errno;
	else if (!fabric->chunks || !fabric->turn)
		status = -ENOMEM;
	else if (!(status = rest_open(fabric)))
		status = open_provider(fabric, provider, node, flags, message);
	if (!status)
		status = -pthread_create(&fabric->thread, NULL, core_progress, fabric);
	if (status) {
		free_fabric(fabric);
		return status;
	}
	pthread_setname_np(fabric->thread, "triggerkv");
	*out = fabric;
	return 0;
}

void fabric_rouse(struct tk_fabric *fabric)
{
	uint64_t one = 1;
	ssize_t ignored = write(fabric->wake_fd, &one, sizeof one);
	(void)ignored;
}

void fabric_wake(struct tk_fabric *fabric)
{
	__atomic_store_n(&fabric->posted_something, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&fabric->sleeping, __ATOMIC_SEQ_CST))
		fabric_rouse(fabric);
}

/* Waits for the thread, under the inbox's lock; false after the deadline. */
static int waited(struct tk_fabric *fabric, uint64_t until_ns)
{
	return wait_for_condition(&fabric->command_done, &fabric->inbox_lock, until_ns) != ETIMEDOUT;
}

/* The same for an answer; after the first one that did not arrive in time, no caller waits for another. */
static int answered(struct tk_fabric *fabric, uint64_t until_ns)
{
	if (!fabric->stuck && !waited(fabric, until_ns))
		__atomic_store_n(&fabric->stuck, 1, __ATOMIC_RELEASE);
	return !fabric->stuck;
}

int tk_fabric_close(struct tk_fabric *fabric)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	uint64_t until_ns = tk_now_ns() + fabric->answer_ns;
	pthread_mutex_lock(&fabric->inbox_lock);
	fabric->stop = 1;
	fabric_wake(fabric);
	while (!fabric->ended && waited(fabric, until_ns))
		;
	int ended = fabric->ended;
	if (!ended)
		__atomic_store_n(&fabric->stuck, 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&fabric->inbox_lock);
	if (!ended)
		return TK_STUCK;
	pthread_join(fabric->thread, NULL);
	int status = fabric->end_status;
	if (!status)
		free_fabric(fabric);
	return status;
}

int tk_fabric_event_fd(struct tk_fabric *fabric)
{
	return fabric->event_fd;
}

int tk_fabric_traits(struct tk_fabric *fabric, char *provider_name)
{
	snprintf(provider_name, TK_PROVIDER_NAME_BYTES, "%s", fabric->info->fabric_attr->prov_name);
	uint32_t format = fabric->info->addr_format;
	return (fabric->order_max ? TK_FLAG_IN_MESSAGE : 0) |
	       (format == FI_SOCKADDR_IN ? TK_IPV4 : format == FI_SOCKADDR_IN6 ? TK_IPV6 : 0) |
	       (fabric->info->domain_attr->mr_mode & FI_MR_ENDPOINT ? TK_BINDS_MEMORY : 0) |
	       (library_has_domains(fabric->info) ? TK_HAS_DOMAINS : 0) |
	       (fabric->info->caps & FI_HMEM ? TK_TAKES_DEVICES : 0);
}

/* A thread that does not answer may still use what it was given, so none of that is freed. */
int on_the_thread(struct tk_fabric *fabric, int (*run)(struct tk_fabric *, void *), void *argument,
		  size_t argument_bytes)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	struct command *command = calloc(1, sizeof *command + argument_bytes);
	if (!command)
		return -ENOMEM;
	command->run = run;
	if (argument_bytes)
		memcpy(command->argument, argument, argument_bytes);
	uint64_t until_ns = tk_now_ns() + fabric->answer_ns;
	pthread_mutex_lock(&fabric->inbox_lock);
	while (!status && fabric->command && !fabric->stop)
		status = answered(fabric, until_ns) ? 0 : TK_STUCK;
	if (!status && fabric->stop)
		status = -ESHUTDOWN;
	if (!status) {
		fabric->command = command;
		fabric_wake(fabric);
		while (!command->done && !command->abandoned)
			command->abandoned = !answered(fabric, until_ns) && !command->done;
		if (command->abandoned) {
			pthread_mutex_unlock(&fabric->inbox_lock);
			return TK_STUCK;
		}
		status = command->result;
		if (argument_bytes)
			memcpy(argument, command->argument, argument_bytes);
	}
	pthread_mutex_unlock(&fabric->inbox_lock);
	free(command);
	return status;
}

int tk_fabric_statistics(struct tk_fabric *fabric, struct tk_statistics *out)
{
	if (!fabric_is_ours(fabric))
		return -ECHILD;
	const uint64_t *from = (const uint64_t *)&fabric->shown;
	uint64_t *to = (uint64_t *)out;
	for (size_t i = 0; i < sizeof *out / sizeof *to; i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
	out->alive_ns = tk_now_ns() - fabric->started_ns;
	clockid_t clock;
	struct timespec spent;
	if (!pthread_getcpuclockid(fabric->thread, &clock) && !clock_gettime(clock, &spent))
		out->cpu_ns = (uint64_t)spent.tv_sec * 1000000000u + (uint64_t)spent.tv_nsec;
	return 0;
}

