/* What fi_getinfo and its neighbours answer. */
#include "driver.h"

static int asks(void (*change)(struct fi_info *hints), struct fi_info **out)
{
	struct fi_info *hints = hints_new();
	change(hints);
	int status = library.getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, out);
	library.freeinfo(hints);
	return status;
}

static void without_hints_only_cxi_is_listed(void)
{
	struct fi_info *list;
	GIVES(0, library.getinfo(FI_VERSION(1, 17), NULL, NULL, 0, NULL, &list));
	HOLDS(list);
	for (struct fi_info *info = list; info; info = info->next)
		HOLDS(!strcmp(info->fabric_attr->prov_name, "cxi"));
	library.freeinfo(list);
}

static void change_nothing(struct fi_info *hints)
{
	(void)hints;
}

static void the_entry_equals_that_of_the_real_provider(void)
{
	struct fi_info *info;
	GIVES(0, asks(change_nothing, &info));
	HOLDS(!info->next);
	HOLDS(!strcmp(info->domain_attr->name, "cxi0") && !strcmp(info->fabric_attr->name, "cxi"));
	HOLDS(info->addr_format == FI_ADDR_CXI && info->src_addrlen == 8);
	HOLDS(info->ep_attr->type == FI_EP_RDM && info->ep_attr->protocol == FI_PROTO_CXI);
	HOLDS(info->ep_attr->max_msg_size == UINT32_MAX);
	HOLDS(info->domain_attr->mr_mode == (FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY));
	HOLDS(info->domain_attr->control_progress == FI_PROGRESS_MANUAL);
	HOLDS(info->domain_attr->data_progress == FI_PROGRESS_MANUAL);
	HOLDS(info->domain_attr->mr_key_size == 8 && info->domain_attr->cntr_cnt == 16);
	HOLDS(info->tx_attr->inject_size == 192 && info->tx_attr->size == 1024);
	HOLDS(info->tx_attr->iov_limit == 1 && info->tx_attr->rma_iov_limit == 1);
	HOLDS(info->tx_attr->msg_order == 0);
	HOLDS((info->caps & (FI_RMA | FI_READ | FI_WRITE)) == (FI_RMA | FI_READ | FI_WRITE));
	HOLDS(info->caps & FI_TRIGGER && info->caps & FI_REMOTE_WRITE);
	HOLDS(!(info->caps & (FI_FENCE | FI_RMA_EVENT | FI_HMEM)));
	library.freeinfo(info);
}

static void ask_for_extras(struct fi_info *hints)
{
	hints->caps |= FI_FENCE | FI_RMA_EVENT | FI_TRIGGER;
	hints->tx_attr->msg_order = FI_ORDER_WAW;
	hints->tx_attr->size = 77;
	hints->domain_attr->mr_mode |= FI_MR_LOCAL | FI_MR_VIRT_ADDR;
}

static void extras_are_given_only_on_request(void)
{
	struct fi_info *info;
	GIVES(0, asks(ask_for_extras, &info));
	HOLDS((info->caps & (FI_FENCE | FI_RMA_EVENT)) == (FI_FENCE | FI_RMA_EVENT));
	HOLDS(info->tx_attr->msg_order == FI_ORDER_WAW && info->tx_attr->size == 77);
	HOLDS(info->domain_attr->mr_mode == (FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_PROV_KEY));
	library.freeinfo(info);
}

#define CHANGE(name, statement)                                                                                        \
	static void name(struct fi_info *hints)                                                                        \
	{                                                                                                              \
		statement;                                                                                             \
	}
CHANGE(no_endpoint_bit, hints->domain_attr->mr_mode &= ~FI_MR_ENDPOINT)
CHANGE(no_allocated_bit, hints->domain_attr->mr_mode &= ~FI_MR_ALLOCATED)
CHANGE(no_key_bit, hints->domain_attr->mr_mode &= ~FI_MR_PROV_KEY)
CHANGE(no_mode_at_all, hints->domain_attr->mr_mode = 0)
CHANGE(automatic_progress, hints->domain_attr->data_progress = FI_PROGRESS_AUTO)
CHANGE(automatic_control, hints->domain_attr->control_progress = FI_PROGRESS_AUTO)
CHANGE(many_counters, hints->domain_attr->cntr_cnt = 17)
CHANGE(other_domain, hints->domain_attr->name = strdup("cxi1"))
CHANGE(device_memory, hints->caps |= FI_HMEM)
CHANGE(messages, hints->caps |= FI_MSG)
CHANGE(connected, hints->ep_attr->type = FI_EP_MSG)
CHANGE(huge_message, hints->ep_attr->max_msg_size = (size_t)UINT32_MAX + 1)
CHANGE(big_inject, hints->tx_attr->inject_size = 193)
CHANGE(deep_queue, hints->tx_attr->size = 16385)
CHANGE(two_ranges, hints->tx_attr->iov_limit = 2)
CHANGE(two_remote_ranges, hints->tx_attr->rma_iov_limit = 2)
CHANGE(read_after_write, hints->tx_attr->msg_order = FI_ORDER_RAW)
CHANGE(other_addresses, hints->addr_format = FI_SOCKADDR_IN)
CHANGE(other_provider, strcpy(hints->fabric_attr->prov_name, "tcp"))

static void unsatisfiable_hints_give_no_data(void)
{
	void (*const changes[])(struct fi_info *) = {
		no_endpoint_bit, no_allocated_bit,  no_key_bit,	    no_mode_at_all, automatic_progress,
		automatic_control, many_counters,   other_domain,   device_memory,  messages,
		connected,	 huge_message,	    big_inject,	    deep_queue,	    two_ranges,
		two_remote_ranges, read_after_write, other_addresses, other_provider,
	};
	struct fi_info *info = NULL;
	for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
		int status = asks(changes[i], &info);
		if (status != -FI_ENODATA || info)
			fail(__FILE__, __LINE__, "hint number", (long long)i);
	}
}

static void a_node_is_the_nic_or_a_local_address(void)
{
	struct fi_info *info;
	GIVES(-FI_EINVAL, library.getinfo(FI_VERSION(1, 17), NULL, NULL, FI_SOURCE, NULL, &info));
	GIVES(-FI_EINVAL, library.getinfo(FI_VERSION(1, 17), "somewhere", NULL, FI_SOURCE, NULL, &info));
	GIVES(-FI_EINVAL, library.getinfo(FI_VERSION(1, 17), "203.0.113.9", NULL, FI_SOURCE, NULL, &info));
	GIVES(0, library.getinfo(FI_VERSION(1, 17), "cxi0", NULL, FI_SOURCE, NULL, &info));
	library.freeinfo(info);
	GIVES(0, library.getinfo(FI_VERSION(1, 17), "203.0.113.9", NULL, 0, NULL, &info));
	HOLDS(info->dest_addr && info->dest_addrlen == 8);
	library.freeinfo(info);
	GIVES(0, library.getinfo(FI_VERSION(1, 17), "127.0.0.1", NULL, FI_SOURCE, NULL, &info));
	HOLDS(!memcmp(info->src_addr, "\x7f\0\0\1\0\0\0\0", 8) && !info->dest_addr);
	library.freeinfo(info);
}

static void the_other_exports_of_libfabric_work(void)
{
	struct fi_info *hints = library.dupinfo(NULL);
	HOLDS(hints && hints->tx_attr && hints->rx_attr && hints->ep_attr && hints->domain_attr && hints->fabric_attr);
	HOLDS(!hints->caps && !hints->mode && !hints->next && !hints->domain_attr->mr_mode);
	struct fi_fabric_attr attr = {.name = "net"};
	struct fid_fabric *fabric;
	GIVES(-FI_ENODEV, library.fabric(&attr, &fabric, NULL));
	HOLDS(library.version() >= FI_VERSION(1, 5));
	HOLDS(strlen(library.strerror(FI_EINVAL)) > 3);
	library.freeinfo(hints);
}

const struct rule info_rules[] = {
	{"without_hints_only_cxi_is_listed", without_hints_only_cxi_is_listed},
	{"the_entry_equals_that_of_the_real_provider", the_entry_equals_that_of_the_real_provider},
	{"extras_are_given_only_on_request", extras_are_given_only_on_request},
	{"unsatisfiable_hints_give_no_data", unsatisfiable_hints_give_no_data},
	{"a_node_is_the_nic_or_a_local_address", a_node_is_the_nic_or_a_local_address},
	{"the_other_exports_of_libfabric_work", the_other_exports_of_libfabric_work},
	{NULL, NULL},
};
