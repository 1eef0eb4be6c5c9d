/*
 * libfabric, loaded at run time. Nearly all of libfabric's calls are inline functions over tables in its
 * handles; only these few are exported, and the module is not linked against them.
 */
#ifndef TRIGGERKV_LIBRARY_H
#define TRIGGERKV_LIBRARY_H

#include <rdma/fabric.h>

struct library {
	int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
		       const struct fi_info *hints, struct fi_info **info);
	void (*freeinfo)(struct fi_info *info);
	struct fi_info *(*dupinfo)(const struct fi_info *info);
	int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
	uint32_t (*version)(void);
	const char *(*strerror)(int number);
};

/* Its only provider, and its replacement for libfabric: in_process.c. */
#define MEMORY_PROVIDER "memory"
extern const struct library memory_library;

/* The library with this provider: libfabric (NULL until tk_library_load has succeeded), or our own. */
const struct library *library_of(const char *provider);

/* The version of the interface to request: the one this was compiled for, or the library's if that is older. */
uint32_t library_version_asked(const struct library *library);

/* Hints for an endpoint that can do what a fabric opened with these flags needs; free with freeinfo. NULL: no memory. */
struct fi_info *library_hints(const struct library *library, const char *provider, uint32_t flags);

/* Whether the provider implements FI_QUEUE_WORK. */
int library_defers_work(const char *provider_name);

/* Whether FI_DELIVERY_COMPLETE makes a difference with the provider. */
int library_confirms(const char *provider_name);

/* Whether an endpoint of it accepts everything while there is a connection, so that one that accepts nothing more has
 * lost it. The provider itself reports no loss if, as far as it knows, nothing was under way. */
int library_shows_breaks(const char *provider_name);

/* Whether the failure of a write without its own context crashes the provider. */
int library_loses_context(const char *provider_name);

/* Whether a write never overtakes an earlier one to the same place. */
int library_keeps_order(const struct fi_info *info);

/* How many puts of one endpoint may be on the wire at a time. */
uint32_t library_posted_max(const char *provider_name);

/* The longest message whose bytes are written in order, as the provider promises; 0: none. */
size_t library_order_max(const struct fi_info *info);

/* Whether its connections are TCP, and everything under way ends with its endpoint. */
int library_has_streams(const char *provider_name);

/* Whether another domain costs next to nothing: no thread (`sockets` has three), and no registration of memory that
 * peers don't access. */
int library_has_domains(const struct fi_info *info);

/* Sets the environment in which libfabric is loaded and opened; `begins` 0: restores it. */
void library_environment(int begins);

#endif
