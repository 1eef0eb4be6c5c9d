/*
 * Domains of a fabric: memory registered with one is reached only through that domain's endpoints.
 *
 * What always holds: the first domain exists as long as the fabric. Another is opened with its first endpoint or peer;
 * if the provider's connections are TCP, it is closed, with its descriptors, when its last endpoint, peer and region
 * are gone. Other providers may still return operations that are on the wire, so their domains stay open. What it
 * doesn't do: know which tenant a domain belongs to.
 */
#include "cxi.h"
#include "progress.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define CQ_ENTRIES 4096

void close_fid(struct fid *fid)
{
	if (fid)
		fi_close(fid);
}

void domain_close(struct domain *domain)
{
	close_fid(domain->cq ? &domain->cq->fid : NULL);
	close_fid(domain->av ? &domain->av->fid : NULL);
	close_fid(domain->fid ? &domain->fid->fid : NULL);
	domain->cq = NULL;
	domain->av = NULL;
	domain->fid = NULL;
}

/* Otherwise a Cassini NIC's key would give access to all memory of the process, registered or not, for ever. */
static int confine_keys(struct tk_fabric *fabric, struct domain *domain)
{
	bool is_cached = false;
	const char *chosen = getenv("FI_CXI_PROV_KEY_CACHE");
	if (strcmp(fabric->info->fabric_attr->prov_name, "cxi") || (chosen && !strcmp(chosen, "0")))
		return 0;
	return fi_control(&domain->fid->fid, CXI_SET_PROV_KEY_CACHE, &is_cached);
}

static int open_domain(struct tk_fabric *fabric, struct domain *domain, char *message)
{
	int status = fi_domain(fabric->fid, fabric->info, &domain->fid, fabric);
	if (status)
		return refused(fabric, message, "opening the domain", status);
	if ((status = confine_keys(fabric, domain)))
		return refused(fabric, message, "confining keys to their regions (FI_CXI_PROV_KEY_CACHE=0 does so too)",
			       status);
	struct fi_av_attr av = {.type = FI_AV_UNSPEC};
	if ((status = fi_av_open(domain->fid, &av, &domain->av, NULL)))
		return refused(fabric, message, "opening the address vector", status);
	struct fi_cq_attr cq = {.size = CQ_ENTRIES, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE};
	if ((status = fi_cq_open(domain->fid, &cq, &domain->cq, NULL)))
		return refused(fabric, message, "opening the completion queue", status);
	return 0;
}

int domain_open(struct tk_fabric *fabric, uint32_t number, char *message)
{
	struct domain *domain = &fabric->domains[number];
	int status = domain->cq ? 0 : open_domain(fabric, domain, message);
	if (status)
		domain_close(domain);
	else if (fabric->domains_end <= number)
		fabric->domains_end = number + 1;
	return status;
}

void domain_hold(struct tk_fabric *fabric, uint32_t number)
{
	__atomic_add_fetch(&fabric->domains[number].uses, 1, __ATOMIC_SEQ_CST);
}

/* A caller that opens an endpoint or a peer takes a reference to its domain before it calls this thread. */
static int close_unused(struct tk_fabric *fabric, void *argument)
{
	struct domain *domain = &fabric->domains[*(uint32_t *)argument];
	if (!__atomic_load_n(&domain->uses, __ATOMIC_SEQ_CST))
		domain_close(domain);
	while (fabric->domains_end > 1 && !fabric->domains[fabric->domains_end - 1].cq)
		fabric->domains_end--;
	return 0;
}

void domain_leave(struct tk_fabric *fabric, uint32_t number)
{
	if (!__atomic_sub_fetch(&fabric->domains[number].uses, 1, __ATOMIC_SEQ_CST) && number && fabric->streams)
		on_the_thread(fabric, close_unused, &number, sizeof number);
}
