/*
 * What cxi adds to libfabric's interface, as far as this project uses it: names, numbers and member order are those
 * that the provider publishes, because Debian's headers don't carry them.
 */
#ifndef CASSINI_CXI_H
#define CASSINI_CXI_H

#include <rdma/fabric.h>
#include <rdma/fi_eq.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define FI_CXI_COUNTER_OPS "cxi_counter_ops"
#define FI_CXI_CNTR_SUCCESS_MAX ((1ULL << 48) - 1)
#define FI_CXI_CNTR_FAILURE_MAX ((1ULL << 7) - 1)

/* Byte offsets within a counter's doorbell page. */
#define CXI_DOORBELL_ADD 0
#define CXI_DOORBELL_ADD_FAILURE 64
#define CXI_DOORBELL_RESET 128
#define CXI_DOORBELL_RESET_FAILURE 192

/* The write-back word: 48 bits of successes, 7 of failures, and a bit that the NIC sets when it writes. */
#define CXI_WRITE_BACK_VALID (1ULL << 63)
#define CXI_WRITE_BACK_FAILURE_SHIFT 48

#define FI_CXI_CNTR_CACHED (1ULL << 32)
#define FI_CXI_HRP (1ULL << 60)
#define FI_CXI_CNTR_WB (1ULL << 62)
#define FI_CXI_WEAK_FENCE_BIT (1ULL << 63)

enum {
	FI_OPT_CXI_SET_MR_MATCH_EVENTS = -(0xccc << 16) + 3,
	FI_OPT_CXI_GET_MR_MATCH_EVENTS,
	FI_OPT_CXI_SET_OPTIMIZED_MRS,
	FI_OPT_CXI_GET_OPTIMIZED_MRS,
	FI_OPT_CXI_SET_PROV_KEY_CACHE,
	FI_OPT_CXI_GET_PROV_KEY_CACHE,
};

struct fi_cxi_cntr_ops {
	int (*set_wb_buffer)(struct fid *fid, void *buf, size_t len);
	int (*get_mmio_addr)(struct fid *fid, void **addr, size_t *len);
};

struct fi_cxi_dom_ops {
	int (*cntr_read)(struct fid *fid, unsigned int cntr, uint64_t *value, struct timespec *ts);
	int (*topology)(struct fid *fid, unsigned int *group, unsigned int *switch_id, unsigned int *port);
	int (*enable_hybrid_mr_desc)(struct fid *fid, bool enable);
	size_t (*ep_get_unexp_msgs)(struct fid_ep *ep, struct fi_cq_tagged_entry *entry, size_t count,
				    fi_addr_t *src_addr, size_t *ux_count);
	int (*get_dwq_depth)(struct fid *fid, size_t *depth);
	int (*enable_mr_match_events)(struct fid *fid, bool enable);
	int (*enable_optimized_mrs)(struct fid *fid, bool enable);
};

/* Not of cxi, but of the stand-in alone: a file to map a counter's doorbell page from, in any process. The file
 * stays the stand-in's and lives as long as the counter's domain. */
int soft_cassini_doorbell_fd(struct fid_cntr *cntr, off_t *offset);

#endif
