/*
 * Completion queues. An entry comes into one only when software reads it: that is what manual progress means.
 *
 * What always holds: entries come out in the order in which they went in, and an error stops the reader until it is
 * taken with fi_cq_readerr, which itself brings nothing in. A queue never overruns, as the provider's doesn't.
 */
#include "cassini.h"

#include <stdlib.h>
#include <string.h>

static struct fi_ops fid_ops;
static struct fi_ops_cq queue_ops;

static struct completion_queue *queue_of(struct fid *fid)
{
	return (struct completion_queue *)fid;
}

void queue_push(struct completion_queue *queue, void *context, uint64_t flags, int error)
{
	struct completion *entry = calloc(1, sizeof *entry);
	if (!entry)
		give_up("there is no memory for a completion.");
	*entry = (struct completion){.context = context, .flags = flags, .error = error};
	if (queue->tail)
		queue->tail->next = entry;
	else
		queue->head = entry;
	queue->tail = entry;
}

static void pop(struct completion_queue *queue)
{
	struct completion *entry = queue->head;
	queue->head = entry->next;
	if (!queue->head)
		queue->tail = NULL;
	free(entry);
}

static size_t entry_bytes(enum fi_cq_format format)
{
	switch (format) {
	case FI_CQ_FORMAT_MSG:
		return sizeof(struct fi_cq_msg_entry);
	case FI_CQ_FORMAT_DATA:
		return sizeof(struct fi_cq_data_entry);
	case FI_CQ_FORMAT_TAGGED:
		return sizeof(struct fi_cq_tagged_entry);
	default:
		return sizeof(struct fi_cq_entry);
	}
}

static ssize_t readfrom(struct fid_cq *fid, void *buffer, size_t count, fi_addr_t *sources)
{
	struct completion_queue *queue = queue_of(&fid->fid);
	struct domain *domain = queue->domain;
	size_t bytes = entry_bytes(queue->format), taken = 0;
	domain_lock(domain);
	for (struct endpoint *endpoint = domain->endpoints; endpoint; endpoint = endpoint->next)
		if (endpoint->transmit_queue == queue || endpoint->receive_queue == queue)
			endpoint_progress(endpoint);
	ssize_t status = queue->head ? 0 : -FI_EAGAIN;
	if (queue->head && queue->head->error)
		status = -FI_EAVAIL;
	for (; taken < count && queue->head && !queue->head->error; taken++) {
		/* Each format begins with the one before it. */
		struct fi_cq_tagged_entry entry = {.op_context = queue->head->context, .flags = queue->head->flags};
		memcpy((char *)buffer + taken * bytes, &entry, bytes);
		if (sources)
			sources[taken] = FI_ADDR_NOTAVAIL;
		pop(queue);
	}
	domain_unlock(domain);
	return taken ? (ssize_t)taken : status;
}

static ssize_t queue_read(struct fid_cq *fid, void *buffer, size_t count)
{
	return readfrom(fid, buffer, count, NULL);
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags)
{
	struct completion_queue *queue = queue_of(&fid->fid);
	ssize_t status = -FI_EAGAIN;
	(void)flags;
	domain_lock(queue->domain);
	if (queue->head && queue->head->error) {
		*out = (struct fi_cq_err_entry){
			.op_context = queue->head->context,
			.flags = queue->head->flags,
			.err = queue->head->error,
			.prov_errno = queue->head->error,
		};
		pop(queue);
		status = 1;
	}
	domain_unlock(queue->domain);
	return status;
}

/* Without a wait object there is nothing to sleep on, and the stand-in has none. */
static ssize_t sread(struct fid_cq *fid, void *buffer, size_t count, const void *condition, int timeout)
{
	(void)fid, (void)buffer, (void)count, (void)condition, (void)timeout;
	return -FI_EINVAL;
}

static ssize_t sreadfrom(struct fid_cq *fid, void *buffer, size_t count, fi_addr_t *sources, const void *condition,
			 int timeout)
{
	(void)sources;
	return sread(fid, buffer, count, condition, timeout);
}

static const char *describe(struct fid_cq *fid, int number, const void *data, char *buffer, size_t length)
{
	(void)fid, (void)data;
	const char *text = wire_library()->strerror(number);
	if (buffer && length) {
		buffer[0] = 0;
		strncat(buffer, text, length - 1);
	}
	return text;
}

static int queue_close(struct fid *fid)
{
	struct completion_queue *queue = queue_of(fid);
	struct domain *domain = queue->domain;
	domain_lock(domain);
	int busy = queue->users != 0;
	if (!busy)
		domain->users--;
	domain_unlock(domain);
	if (busy)
		return -FI_EBUSY;
	while (queue->head)
		pop(queue);
	free(queue);
	return 0;
}

int queue_open(struct fid_domain *fid, struct fi_cq_attr *attr, struct fid_cq **out, void *context)
{
	struct domain *domain = (struct domain *)fid;
	if (!out)
		return -FI_EINVAL;
	if (attr && attr->format > FI_CQ_FORMAT_TAGGED)
		return -FI_ENOSYS;
	if (attr && attr->wait_obj != FI_WAIT_NONE)
		return say(-FI_ENOSYS, "cxi's completion queues can wait on a descriptor, the stand-in's can't.");
	struct completion_queue *queue = calloc(1, sizeof *queue);
	if (!queue)
		return -FI_ENOMEM;
	queue->fid.fid = (struct fid){.fclass = FI_CLASS_CQ, .context = context, .ops = &fid_ops};
	queue->fid.ops = &queue_ops;
	queue->domain = domain;
	queue->format = attr && attr->format ? attr->format : FI_CQ_FORMAT_CONTEXT;
	domain_lock(domain);
	domain->users++;
	domain_unlock(domain);
	*out = &queue->fid;
	return 0;
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = queue_close;
	queue_ops = (struct fi_ops_cq){
		.size = sizeof queue_ops,
		.read = queue_read,
		.readfrom = readfrom,
		.readerr = read_error,
		.sread = sread,
		.sreadfrom = sreadfrom,
		.strerror = describe,
	};
}
