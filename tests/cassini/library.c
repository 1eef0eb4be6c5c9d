/*
 * The real libfabric beneath, and the exports that a libfabric has and that need no provider.
 *
 * It is found by its soname, never through TRIGGERKV_LIBFABRIC: that names the stand-in itself.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static struct wire_library library;
static int found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
	int is_set = !getenv("IPATH_NO_BACKTRACE") && !setenv("IPATH_NO_BACKTRACE", "1", 0);
	void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
	if (is_set)
		unsetenv("IPATH_NO_BACKTRACE");
	if (!handle)
		return;
	library.getinfo = dlvsym(handle, "fi_getinfo", "FABRIC_1.3");
	library.freeinfo = dlvsym(handle, "fi_freeinfo", "FABRIC_1.3");
	library.dupinfo = dlvsym(handle, "fi_dupinfo", "FABRIC_1.3");
	library.fabric = dlvsym(handle, "fi_fabric", "FABRIC_1.1");
	library.version = dlvsym(handle, "fi_version", "FABRIC_1.0");
	library.strerror = dlvsym(handle, "fi_strerror", "FABRIC_1.0");
	found = library.getinfo && library.freeinfo && library.dupinfo && library.fabric && library.version &&
		library.strerror;
}

const struct wire_library *wire_library(void)
{
	pthread_once(&once, load);
	return found ? &library : NULL;
}

/* What the wire offers at one of this machine's addresses: reliable datagrams with offsets into regions and keys of
 * our choice. -FI_EINVAL: no such address here. */
int wire_info(struct in_addr source, struct fi_info **info)
{
	static const char *const providers[] = {"net", "tcp"};
	char node[INET_ADDRSTRLEN];
	int status = -FI_ENODATA;
	inet_ntop(AF_INET, &source, node, sizeof node);
	for (size_t i = 0; i < sizeof providers / sizeof *providers; i++) {
		struct fi_info *hints = wire_library()->dupinfo(NULL);
		if (!hints)
			return -FI_ENOMEM;
		hints->caps = FI_RMA | FI_MSG;
		hints->mode = FI_CONTEXT | FI_CONTEXT2;
		hints->addr_format = FI_SOCKADDR_IN;
		hints->ep_attr->type = FI_EP_RDM;
		hints->domain_attr->threading = FI_THREAD_SAFE;
		hints->fabric_attr->prov_name = strdup(providers[i]);
		status = wire_library()->getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, info);
		wire_library()->freeinfo(hints);
		if (!status)
			return 0;
	}
	return status == -FI_ENODATA ? -FI_EINVAL : status;
}

EXPORTED uint32_t fi_version(void)
{
	return wire_library() ? wire_library()->version() : FI_VERSION(1, 17);
}

EXPORTED const char *fi_strerror(int number)
{
	return wire_library() ? wire_library()->strerror(number) : strerror(number);
}

EXPORTED void fi_freeinfo(struct fi_info *info)
{
	if (wire_library())
		wire_library()->freeinfo(info);
}

EXPORTED struct fi_info *fi_dupinfo(const struct fi_info *info)
{
	return wire_library() ? wire_library()->dupinfo(info) : NULL;
}
