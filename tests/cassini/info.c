/*
 * fi_getinfo: one entry, `cxi0`, or none. This machine has no other NIC as far as the stand-in is concerned.
 *
 * The values are the provider's. Features that the stand-in lacks are not offered: messages, atomics,
 * collectives, client keys; memory of devices only with SOFT_CASSINI_HMEM. A node is the NIC's name, or an IPv4 address
 * of this machine for the wire to lie on, where the provider wants its own kind of address.
 */
#define _GNU_SOURCE
#include "cassini.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CAPS_RMA (FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)
#define CAPS_DOMAIN (FI_LOCAL_COMM | FI_REMOTE_COMM)
#define CAPS (CAPS_RMA | CAPS_DOMAIN | FI_RMA_EVENT | FI_FENCE | FI_TRIGGER)
/* Features with a cost are offered only on request. */
#define CAPS_ON_DEMAND (FI_RMA_EVENT | FI_FENCE | FI_HMEM)
#define CAPS_TRANSMIT (FI_RMA | FI_READ | FI_WRITE | FI_FENCE | FI_TRIGGER)
#define CAPS_RECEIVE (FI_RMA | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_RMA_EVENT | FI_TRIGGER)
#define ORDER                                                                                                          \
	(FI_ORDER_SAS | FI_ORDER_WAW | FI_ORDER_RMA_WAW | FI_ORDER_RMA_RAR | FI_ORDER_ATOMIC_WAW |                     \
	 FI_ORDER_ATOMIC_WAR | FI_ORDER_ATOMIC_RAW | FI_ORDER_ATOMIC_RAR)
#define TRANSMIT_FLAGS                                                                                                 \
	(FI_INJECT | FI_COMPLETION | FI_INJECT_COMPLETE | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE |                \
	 FI_MATCH_COMPLETE | FI_REMOTE_CQ_DATA | FI_MORE | FI_FENCE)
#define RECEIVE_FLAGS (FI_COMPLETION | FI_MULTI_RECV | FI_MORE)
#define RECEIVES_MAX 15360u
#define MR_MODE (FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

static uint64_t caps_offered(void)
{
	return CAPS | (setting("SOFT_CASSINI_HMEM", 0) ? FI_HMEM : 0);
}

static int differs(const char *wanted, const char *have)
{
	return wanted && *wanted && strcmp(wanted, have);
}

static int domain_fits(const struct fi_domain_attr *want)
{
	if (!want)
		return 1;
	/* A caller that requests regions bound to endpoints is assumed to allocate them as well. */
	int mr_mode = want->mr_mode == FI_MR_ENDPOINT ? FI_MR_ENDPOINT | FI_MR_ALLOCATED : want->mr_mode;
	return !differs(want->name, "cxi0") && (mr_mode & MR_MODE) == MR_MODE &&
	       want->control_progress != FI_PROGRESS_AUTO && want->data_progress != FI_PROGRESS_AUTO &&
	       !(want->caps & ~CAPS_DOMAIN) && want->cq_cnt <= 32 && want->ep_cnt <= 128 && want->cntr_cnt <= 16 &&
	       want->mr_cnt <= 100 && want->mr_iov_limit <= 1 && want->mr_key_size <= 8 && want->cq_data_size <= 8 &&
	       !want->max_ep_stx_ctx && !want->max_ep_srx_ctx && !want->auth_key;
}

static int transmit_fits(const struct fi_tx_attr *want)
{
	return !want || (!(want->caps & ~CAPS_TRANSMIT) && !(want->op_flags & ~TRANSMIT_FLAGS) &&
			 !(want->msg_order & ~ORDER) && want->inject_size <= INJECT_BYTES_MAX &&
			 want->size <= REQUESTS_MAX && want->iov_limit <= 1 && want->rma_iov_limit <= 1);
}

static int receive_fits(const struct fi_rx_attr *want)
{
	return !want || (!(want->caps & ~CAPS_RECEIVE) && !(want->op_flags & ~RECEIVE_FLAGS) &&
			 !(want->msg_order & ~ORDER) && want->size <= RECEIVES_MAX && want->iov_limit <= 1);
}

static int endpoint_fits(const struct fi_ep_attr *want)
{
	return !want || ((want->type == FI_EP_UNSPEC || want->type == FI_EP_RDM) &&
			 (want->protocol == FI_PROTO_UNSPEC || want->protocol == FI_PROTO_CXI) &&
			 want->max_msg_size <= MESSAGE_BYTES_MAX && want->tx_ctx_cnt <= 1 && want->rx_ctx_cnt <= 1 &&
			 !want->auth_key);
}

static int fits(const struct fi_info *want)
{
	if (want->caps & ~caps_offered() || (want->addr_format != FI_FORMAT_UNSPEC && want->addr_format != FI_ADDR_CXI))
		return 0;
	const struct fi_fabric_attr *fabric = want->fabric_attr;
	if (fabric && (differs(fabric->name, "cxi") || differs(fabric->prov_name, "cxi")))
		return 0;
	return endpoint_fits(want->ep_attr) && domain_fits(want->domain_attr) && transmit_fits(want->tx_attr) &&
	       receive_fits(want->rx_attr);
}

static void fill_domain(struct fi_domain_attr *domain, const struct fi_domain_attr *want)
{
	domain->threading = want && want->threading ? want->threading : FI_THREAD_SAFE;
	domain->control_progress = FI_PROGRESS_MANUAL;
	domain->data_progress = FI_PROGRESS_MANUAL;
	domain->resource_mgmt = FI_RM_ENABLED;
	domain->av_type = want ? want->av_type : FI_AV_UNSPEC;
	domain->mr_mode = MR_MODE;
	domain->mr_key_size = 8;
	domain->cq_data_size = 8;
	domain->cq_cnt = 32;
	domain->ep_cnt = 128;
	domain->tx_ctx_cnt = domain->rx_ctx_cnt = 1;
	domain->max_ep_tx_ctx = domain->max_ep_rx_ctx = 1;
	domain->cntr_cnt = 16;
	domain->mr_iov_limit = 1;
	domain->mr_cnt = 100;
	domain->caps = CAPS_DOMAIN;
}

static void fill_contexts(struct fi_info *info, const struct fi_info *want)
{
	const struct fi_tx_attr *tx = want ? want->tx_attr : NULL;
	const struct fi_rx_attr *rx = want ? want->rx_attr : NULL;
	info->tx_attr->caps = info->caps & CAPS_TRANSMIT;
	info->tx_attr->op_flags = tx ? tx->op_flags : 0;
	info->tx_attr->msg_order = tx ? tx->msg_order : ORDER;
	info->tx_attr->inject_size = tx && tx->inject_size ? tx->inject_size : INJECT_BYTES_MAX;
	info->tx_attr->size = tx && tx->size ? tx->size : REQUESTS_DEFAULT;
	info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = 1;
	info->rx_attr->caps = info->caps & CAPS_RECEIVE;
	info->rx_attr->op_flags = rx ? rx->op_flags : 0;
	info->rx_attr->msg_order = ORDER;
	info->rx_attr->size = rx && rx->size ? rx->size : REQUESTS_DEFAULT;
	info->rx_attr->iov_limit = 1;
}

static int fill(struct fi_info *info, uint32_t version, const struct fi_info *want)
{
	info->caps = caps_offered() & ~(want && want->caps ? CAPS_ON_DEMAND & ~want->caps : 0);
	info->addr_format = FI_ADDR_CXI;
	info->ep_attr->type = FI_EP_RDM;
	info->ep_attr->protocol = FI_PROTO_CXI;
	info->ep_attr->protocol_version = 1;
	info->ep_attr->max_msg_size = MESSAGE_BYTES_MAX;
	info->ep_attr->max_order_waw_size = SIZE_MAX;
	info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
	fill_domain(info->domain_attr, want ? want->domain_attr : NULL);
	fill_contexts(info, want);
	info->domain_attr->name = strdup("cxi0");
	info->fabric_attr->name = strdup("cxi");
	info->fabric_attr->prov_name = strdup("cxi");
	info->fabric_attr->prov_version = FI_VERSION(0, 2);
	info->fabric_attr->api_version = version;
	info->src_addr = calloc(1, ADDRESS_BYTES);
	info->src_addrlen = ADDRESS_BYTES;
	return info->domain_attr->name && info->fabric_attr->name && info->fabric_attr->prov_name && info->src_addr ?
		       0 :
		       -FI_ENOMEM;
}

/* 0: not an IPv4 address. */
static in_addr_t parse(const char *node)
{
	struct in_addr address;
	if (!node || !strcmp(node, "cxi0"))
		return htonl(INADDR_LOOPBACK);
	return inet_pton(AF_INET, node, &address) == 1 ? address.s_addr : 0;
}

static int is_ours(in_addr_t ip)
{
	struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr = {.s_addr = ip}};
	int probe = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (probe < 0)
		return 0;
	int status = bind(probe, (struct sockaddr *)&name, sizeof name);
	close(probe);
	return !status;
}

static int fill_addresses(struct fi_info *info, const char *node, uint64_t flags, const struct fi_info *want)
{
	in_addr_t named = parse(node);
	((struct address *)info->src_addr)->ip = flags & FI_SOURCE ? named : htonl(INADDR_LOOPBACK);
	const void *destination = want ? want->dest_addr : NULL;
	struct address by_node = {.ip = named};
	if (node && !(flags & FI_SOURCE))
		destination = &by_node;
	if (!destination)
		return 0;
	info->dest_addr = malloc(ADDRESS_BYTES);
	if (!info->dest_addr)
		return -FI_ENOMEM;
	memcpy(info->dest_addr, destination, ADDRESS_BYTES);
	info->dest_addrlen = ADDRESS_BYTES;
	return 0;
}

EXPORTED int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
			const struct fi_info *hints, struct fi_info **out)
{
	if (!wire_library())
		return say(-FI_ENODATA, "there is no libfabric on this machine to be the wire.");
	if (flags & FI_SOURCE && !node && !service)
		return -FI_EINVAL;
	if (service)
		return say(-FI_EINVAL, "a service is a number of cxi's that the stand-in's wire hasn't got.");
	in_addr_t named = parse(node);
	if (!named)
		return -FI_EINVAL;
	if (flags & FI_SOURCE && !is_ours(named))
		return -FI_EINVAL;
	if (hints && !fits(hints))
		return -FI_ENODATA;
	struct fi_info *info = wire_library()->dupinfo(NULL);
	if (!info)
		return -FI_ENOMEM;
	int status = fill(info, version, hints);
	if (!status)
		status = fill_addresses(info, node, flags, hints);
	if (status) {
		wire_library()->freeinfo(info);
		return status;
	}
	*out = info;
	return 0;
}
