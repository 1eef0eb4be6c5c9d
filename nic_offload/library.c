/*
 * Loads libfabric, and finds out what its providers can do.
 */
#define _GNU_SOURCE
#include "library.h"

#include "core.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANGES 2u /* target ranges of a put with its flag */
#define PARTS 3u  /* its source ranges: head, bytes, flag */

static struct library library;
static int loaded;
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

/* Structures changed between versions of the interface: the version compiled for is requested by name. */
static void *resolve(void *handle, const char *name, const char *version)
{
	void *symbol = dlvsym(handle, name, version);
	return symbol ? symbol : dlsym(handle, name);
}

/* Variables that are set while libfabric is loaded and a fabric of ours is opened, unless the user has set them. Not
 * for longer, because other users of libfabric in the process would read them too; and none of a provider that such
 * users may share with us. */
static struct variable {
	const char *name, *value;
	int is_ours;
} variables[] = {
	/* Debian's build pulls in libinfinipath, which otherwise takes over a dozen signals and drops
	 * back-trace files into the working folder. */
	{"IPATH_NO_BACKTRACE", "1", 0},
	/* The sockets provider would spin for 10 ms at a time in its own thread. */
	{"FI_SOCKETS_PE_WAITTIME", "0", 0},
};
static int environments; /* uses in progress */
static pthread_mutex_t environment_lock = PTHREAD_MUTEX_INITIALIZER;

void library_environment(int begins)
{
	pthread_mutex_lock(&environment_lock);
	int changes = begins ? !environments++ : !--environments;
	for (size_t i = 0; changes && i < sizeof variables / sizeof *variables; i++) {
		struct variable *variable = &variables[i];
		if (!begins && variable->is_ours)
			unsetenv(variable->name);
		variable->is_ours = begins && !getenv(variable->name) && !setenv(variable->name, variable->value, 0);
	}
	pthread_mutex_unlock(&environment_lock);
}

int tk_library_load(const char *path, char *message)
{
	pthread_mutex_lock(&load_lock);
	int status = 0;
	if (loaded)
		goto out;
	library_environment(1);
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	library_environment(0);
	if (!handle) {
		snprintf(message, TK_MESSAGE_BYTES, "%s", dlerror());
		status = -ENOENT;
		goto out;
	}
	struct library found = {
		.getinfo = resolve(handle, "fi_getinfo", "FABRIC_1.3"),
		.freeinfo = resolve(handle, "fi_freeinfo", "FABRIC_1.3"),
		.dupinfo = resolve(handle, "fi_dupinfo", "FABRIC_1.3"),
		.fabric = resolve(handle, "fi_fabric", "FABRIC_1.1"),
		.version = resolve(handle, "fi_version", "FABRIC_1.0"),
		.strerror = resolve(handle, "fi_strerror", "FABRIC_1.0"),
	};
	if (!found.getinfo || !found.freeinfo || !found.dupinfo || !found.fabric || !found.version ||
	    !found.strerror) {
		snprintf(message, TK_MESSAGE_BYTES, "%s is not a libfabric of version 1.x or 2.x", path);
		dlclose(handle);
		status = -ENOSYS;
		goto out;
	}
	library = found;
	loaded = 1;
out:
	pthread_mutex_unlock(&load_lock);
	return status;
}

const struct library *library_of(const char *provider)
{
	if (!strcmp(provider, MEMORY_PROVIDER))
		return &memory_library;
	return loaded ? &library : NULL;
}

uint32_t tk_library_version(void)
{
	return loaded ? library.version() : 0;
}

uint32_t library_version_asked(const struct library *asked)
{
	uint32_t has = asked->version(), wanted = FI_VERSION(1, 17);
	return has < wanted ? has : wanted;
}

struct fi_info *library_hints(const struct library *asked, const char *provider, uint32_t flags)
{
	struct fi_info *hints = asked->dupinfo(NULL);
	if (!hints)
		return NULL;
	hints->caps = FI_RMA | (flags & TK_DEFERRED_WORK ? FI_TRIGGER : 0) | (flags & TK_DEVICE_MEMORY ? FI_HMEM : 0);
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
				      FI_MR_ENDPOINT | (flags & TK_DEVICE_MEMORY ? FI_MR_HMEM : 0);
	hints->domain_attr->threading = FI_THREAD_SAFE;
	/* Unless an order is requested, shm writes straight into the other process, where no key, no end of a region
	 * and no closed endpoint stops it. */
	if (provider && !strcmp(provider, "shm"))
		hints->tx_attr->msg_order = FI_ORDER_WAW;
	if (provider && !(hints->fabric_attr->prov_name = strdup(provider))) {
		asked->freeinfo(hints);
		return NULL;
	}
	return hints;
}

static int is_one_of(const char *name, const char *const *names)
{
	for (; *names; names++)
		if (!strcmp(name, *names))
			return 1;
	return 0;
}

/* One message, because order is not enough: a connection that breaks between two loses the first and may carry the
 * second. */
uint64_t tk_order_max(uint64_t orders, uint64_t size_max, uint64_t ranges, uint64_t parts)
{
	return orders & (FI_ORDER_WAW | FI_ORDER_RMA_WAW) && ranges >= RANGES && parts >= PARTS ? size_max : 0;
}

size_t library_order_max(const struct fi_info *info)
{
	return tk_order_max(info->tx_attr->msg_order & info->rx_attr->msg_order, info->ep_attr->max_order_waw_size,
			    info->tx_attr->rma_iov_limit, info->tx_attr->iov_limit);
}

/* Whether a word that is written after another one to the same place stays there. */
int tk_keeps_order(uint64_t orders, uint64_t size_max)
{
	return orders & (FI_ORDER_WAW | FI_ORDER_RMA_WAW) && size_max >= sizeof(uint64_t);
}

int library_keeps_order(const struct fi_info *info)
{
	return tk_keeps_order(info->tx_attr->msg_order & info->rx_attr->msg_order, info->ep_attr->max_order_waw_size);
}

int library_has_streams(const char *provider_name)
{
	static const char *const streams[] = {"net", "tcp", "tcp;ofi_rxm", MEMORY_PROVIDER, NULL};
	return is_one_of(provider_name, streams);
}

int library_has_domains(const struct fi_info *info)
{
	return !(info->domain_attr->mr_mode & (FI_MR_LOCAL | FI_MR_ENDPOINT)) &&
	       strcmp(info->fabric_attr->prov_name, "sockets");
}

int library_confirms(const char *provider_name)
{
	/* The peer performs shm's writes in any case, and a refused write never ends. With confirmations shm does one
	 * write at a time. */
	return strcmp(provider_name, "shm") != 0;
}

int library_shows_breaks(const char *provider_name)
{
	static const char *const all[] = {"net", "tcp", NULL}; /* tcp;ofi_rxm accepts nothing without credits either */
	return is_one_of(provider_name, all);
}

int library_loses_context(const char *provider_name)
{
	/* The completion of an injected write has no context, and the provider's error path uses it as a pointer (1.17:
	 * a crash). */
	return strstr(provider_name, "ofi_rxm") != NULL;
}

uint32_t library_posted_max(const char *provider_name)
{
	/* On a busy machine `sockets` never delivered one in a hundred of the first bursts of 64: its thread spun (1.17). */
	return strcmp(provider_name, "sockets") ? 64 : 16;
}

int library_defers_work(const char *provider_name)
{
	static const char *const deferred[] = {"sockets", "cxi", NULL};
	return is_one_of(provider_name, deferred);
}

int tk_library_providers(struct tk_provider_info *out, int out_max)
{
	if (!loaded)
		return -ENOSYS;
	struct fi_info *list = NULL;
	int status = library.getinfo(library_version_asked(&library), NULL, NULL, 0, NULL, &list);
	if (status)
		return status == -FI_ENODATA ? 0 : status;
	int count = 0;
	for (struct fi_info *info = list; info; info = info->next) {
		const char *name = info->fabric_attr->prov_name;
		int known = 0;
		for (; known < count && strcmp(out[known].name, name); known++)
			;
		if (known == count) {
			if (count == out_max)
				break;
			memset(&out[count], 0, sizeof out[count]);
			snprintf(out[count].name, sizeof out[count].name, "%s", name);
			out[count].ordered = 0;
			out[count].deferred_work = library_defers_work(name);
			count++;
		}
		if (info->ep_attr->type == FI_EP_RDM && (info->caps & FI_RMA)) {
			out[known].rma = 1;
			out[known].ordered |= library_order_max(info) != 0;
		}
	}
	library.freeinfo(list);
	return count;
}
