/*
 * Address vectors: numbers for addresses. The same address has the same number, as often as it is inserted, until it
 * was removed as often. An operation takes the address when it is called or queued: removing it later changes
 * nothing for that one.
 */
#include "cassini.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fi_ops fid_ops;
static struct fi_ops_av addresses_ops;

int addresses_find(struct address_vector *addresses, fi_addr_t number, struct address *out)
{
	if (number >= addresses->count || !addresses->entries[number].users)
		return -FI_EINVAL;
	*out = addresses->entries[number].address;
	return 0;
}

static int insert_one(struct address_vector *addresses, const struct address *address, fi_addr_t *number)
{
	size_t free_one = addresses->count, at = 0;
	for (; at < addresses->count; at++) {
		if (!addresses->entries[at].users)
			free_one = at;
		else if (!memcmp(&addresses->entries[at].address, address, sizeof *address))
			break;
	}
	if (at == addresses->count)
		at = free_one;
	if (at == addresses->count) {
		void *larger = realloc(addresses->entries, (at + 1) * sizeof *addresses->entries);
		if (!larger)
			return -FI_ENOMEM;
		addresses->entries = larger;
		addresses->entries[at].users = 0;
		addresses->count++;
	}
	addresses->entries[at].address = *address;
	addresses->entries[at].users++;
	if (number)
		*number = at;
	return 0;
}

static int insert(struct fid_av *fid, const void *from, size_t count, fi_addr_t *numbers, uint64_t flags, void *context)
{
	struct address_vector *addresses = (struct address_vector *)fid;
	int inserted = 0;
	(void)context;
	if ((!from && count) || flags & ~FI_MORE)
		return -FI_EINVAL;
	domain_lock(addresses->domain);
	for (size_t i = 0; i < count; i++) {
		struct address address;
		memcpy(&address, (const char *)from + i * sizeof address, sizeof address);
		if (!insert_one(addresses, &address, numbers ? &numbers[i] : NULL))
			inserted++;
		else if (numbers)
			numbers[i] = FI_ADDR_NOTAVAIL;
	}
	domain_unlock(addresses->domain);
	return inserted;
}

static int addresses_remove(struct fid_av *fid, fi_addr_t *numbers, size_t count, uint64_t flags)
{
	struct address_vector *addresses = (struct address_vector *)fid;
	if (flags)
		return -FI_EINVAL;
	domain_lock(addresses->domain);
	for (size_t i = 0; i < count; i++)
		if (numbers[i] < addresses->count && addresses->entries[numbers[i]].users)
			addresses->entries[numbers[i]].users--;
	domain_unlock(addresses->domain);
	return 0;
}

static int lookup(struct fid_av *fid, fi_addr_t number, void *out, size_t *length)
{
	struct address_vector *addresses = (struct address_vector *)fid;
	struct address address;
	domain_lock(addresses->domain);
	int status = addresses_find(addresses, number, &address);
	domain_unlock(addresses->domain);
	if (status)
		return status;
	memcpy(out, &address, *length < sizeof address ? *length : sizeof address);
	*length = sizeof address;
	return 0;
}

static const char *describe(struct fid_av *fid, const void *from, char *buffer, size_t *length)
{
	struct address address;
	char ip[INET_ADDRSTRLEN];
	(void)fid;
	memcpy(&address, from, sizeof address);
	inet_ntop(AF_INET, &address.ip, ip, sizeof ip);
	int needed = snprintf(buffer, *length, "fi_addr_cxi://%s:%u", ip, ntohs(address.port));
	*length = (size_t)needed + 1;
	return buffer;
}

static int addresses_close(struct fid *fid)
{
	struct address_vector *addresses = (struct address_vector *)fid;
	struct domain *domain = addresses->domain;
	domain_lock(domain);
	int busy = addresses->users != 0;
	if (!busy)
		domain->users--;
	domain_unlock(domain);
	if (busy)
		return -FI_EBUSY;
	free(addresses->entries);
	free(addresses);
	return 0;
}

int addresses_open(struct fid_domain *fid, struct fi_av_attr *attr, struct fid_av **out, void *context)
{
	struct domain *domain = (struct domain *)fid;
	if (!attr || !out || attr->rx_ctx_bits || attr->name || attr->flags & (FI_READ | FI_EVENT))
		return -FI_EINVAL;
	if (attr->type != FI_AV_UNSPEC && attr->type != FI_AV_MAP && attr->type != FI_AV_TABLE)
		return -FI_EINVAL;
	struct address_vector *addresses = calloc(1, sizeof *addresses);
	if (!addresses)
		return -FI_ENOMEM;
	addresses->fid.fid = (struct fid){.fclass = FI_CLASS_AV, .context = context, .ops = &fid_ops};
	addresses->fid.ops = &addresses_ops;
	addresses->domain = domain;
	domain_lock(domain);
	domain->users++;
	domain_unlock(domain);
	*out = &addresses->fid;
	return 0;
}

__attribute__((constructor)) static void fill(void)
{
	refuse_all(&fid_ops, sizeof fid_ops);
	fid_ops.close = addresses_close;
	refuse_all(&addresses_ops, sizeof addresses_ops);
	addresses_ops.insert = insert;
	addresses_ops.remove = addresses_remove;
	addresses_ops.lookup = lookup;
	addresses_ops.straddr = describe;
}
