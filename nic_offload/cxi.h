/*
 * The part of the cxi provider's own interface (HPE Slingshot's Cassini NIC) that is used here. No distribution of
 * libfabric ships its header, so the tables are declared by hand: the order of their members is the interface.
 */
#ifndef TRIGGERKV_CXI_H
#define TRIGGERKV_CXI_H

#include <rdma/fi_endpoint.h>
#include <stdint.h>
#include <time.h>

#define CXI_COUNTER_OPS "cxi_counter_ops"
#define CXI_DOMAIN_OPS "dom_ops_v4" /* the first version that reports the depth */
#define CXI_DEPTH 504		    /* of the default service, whose 512 slots are shared by all processes */

#define CXI_SET_PROV_KEY_CACHE (-(0xccc << 16) + 7) /* of a domain, by fi_control: a bool */

struct cxi_counter_ops {
	int (*set_wb_buffer)(struct fid *fid, void *buffer, size_t length);
	int (*get_mmio_addr)(struct fid *fid, void **address, size_t *length);
};

struct cxi_domain_ops {
	int (*cntr_read)(struct fid *fid, unsigned int counter, uint64_t *value, struct timespec *time);
	int (*topology)(struct fid *fid, unsigned int *group, unsigned int *rank, unsigned int *port);
	int (*enable_hybrid_mr_desc)(struct fid *fid, _Bool enable);
	size_t (*ep_get_unexp_msgs)(struct fid_ep *endpoint, void *entries, size_t count, uint64_t *sources,
				    size_t *unexpected);
	int (*get_dwq_depth)(struct fid *fid, size_t *depth);
};

#endif
