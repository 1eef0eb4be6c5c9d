/*
 * Blocks whose bytes lie in pieces: gathered into one run when a put fires, scattered when a get has arrived.
 *
 * The bytes are copied, and not sent as a message for each piece, because a page of KV is a few KiB, and a message
 * costs more than the copy (docs/performance.md). A put is copied and checksummed in one pass.
 *
 * What always holds: each piece lies in one region, which can't be closed while a put of the pieces is queued. The
 * list of pieces never changes, and is freed when neither its owner nor an operation uses it.
 */
#define _GNU_SOURCE
#include "progress.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define GATHERED_AT_ONCE (8u << 10) /* checksummed while both copies are in a core's first cache */

struct placed {
	const char *address;
	uint32_t length;
};

struct tk_pieces {
	uint32_t users; /* atomic: references, by its owner and each operation */
	uint32_t count, regions_count;
	uint64_t bytes;
	struct tk_region **regions; /* after the pieces */
	struct placed pieces[];
};

static int place(struct placed *placed, const struct tk_piece *piece, struct tk_region *const *regions, uint32_t count)
{
	if (piece->region >= count || !piece->length)
		return -EINVAL;
	const struct tk_region *region = regions[piece->region];
	if (!region || piece->length > region->length || piece->offset > region->length - piece->length)
		return -ERANGE;
	*placed = (struct placed){(const char *)(region->address + piece->offset), piece->length};
	return 0;
}

int tk_pieces_open(struct tk_region *const *regions, uint32_t regions_count, const struct tk_piece *pieces,
		   uint32_t count, struct tk_pieces **out)
{
	if (!count || !regions_count)
		return -EINVAL;
	size_t pieces_bytes = count * sizeof(struct placed);
	struct tk_pieces *made = malloc(sizeof *made + pieces_bytes + regions_count * sizeof(void *));
	if (!made)
		return -ENOMEM;
	*made = (struct tk_pieces){
		.users = 1,
		.count = count,
		.regions_count = regions_count,
		.regions = (struct tk_region **)((char *)made->pieces + pieces_bytes),
	};
	memcpy(made->regions, regions, regions_count * sizeof(void *));
	for (uint32_t i = 0; i < count; i++) {
		int status = place(&made->pieces[i], &pieces[i], regions, regions_count);
		if (status) {
			free(made);
			return status;
		}
		made->bytes += pieces[i].length;
	}
	*out = made;
	return 0;
}

uint64_t tk_pieces_bytes(const struct tk_pieces *pieces)
{
	return pieces->bytes;
}

void tk_pieces_close(struct tk_pieces *pieces)
{
	if (!__atomic_sub_fetch(&pieces->users, 1, __ATOMIC_ACQ_REL))
		free(pieces);
}

void pieces_use(struct tk_pieces *pieces)
{
	__atomic_add_fetch(&pieces->users, 1, __ATOMIC_RELAXED);
	for (uint32_t i = 0; i < pieces->regions_count; i++)
		__atomic_add_fetch(&pieces->regions[i]->uses, 1, __ATOMIC_RELAXED);
}

void pieces_release(struct tk_pieces *pieces)
{
	for (uint32_t i = 0; i < pieces->regions_count; i++)
		__atomic_sub_fetch(&pieces->regions[i]->uses, 1, __ATOMIC_RELEASE);
	tk_pieces_close(pieces);
}

/* Gathers the next bytes of a put, and adds the copy to the checksum. Returns how many. */
uint32_t gather_some(struct work *work, uint32_t bytes_max)
{
	const struct placed *piece = &work->op.pieces->pieces[work->gathered.piece];
	uint32_t bytes = piece->length - work->gathered.done;
	if (bytes > bytes_max)
		bytes = bytes_max;
	if (bytes > GATHERED_AT_ONCE)
		bytes = GATHERED_AT_ONCE;
	char *target = (char *)work->op.local + work->summed;
	memcpy(target, piece->address + work->gathered.done, bytes);
	work->crc = tk_crc32c(target, bytes, work->crc);
	work->summed += bytes;
	work->gathered.done += bytes;
	if (work->gathered.done == piece->length) {
		work->gathered.piece++;
		work->gathered.done = 0;
	}
	return bytes;
}

/* Scatters the next bytes of a block, no more than are left of it. */
void pieces_fill(const struct tk_pieces *pieces, struct pieces_end *end, const char *from, uint64_t bytes, copy_bytes copy,
		 const char *next)
{
	while (bytes) {
		const struct placed *piece = &pieces->pieces[end->piece];
		uint64_t left = piece->length - end->done, some = left < bytes ? left : bytes;
		char *to = (char *)piece->address + end->done;
		copy(to, from, some, next);
		from += some;
		next = next ? next + some : NULL;
		bytes -= some;
		end->done = some == left ? 0 : end->done + (uint32_t)some;
		end->piece += some == left;
	}
}

void tk_scatter(const struct tk_scattered *blocks, uint32_t count)
{
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < count; i++)
		bytes += blocks[i].pieces->bytes;
	copy_bytes copy = copy_for(bytes);
	for (uint32_t i = 0; i < count; i++) {
		struct pieces_end end = {0};
		pieces_fill(blocks[i].pieces, &end, (const char *)blocks[i].source, blocks[i].pieces->bytes, copy, NULL);
	}
}

void tk_gather(const struct tk_pieces *pieces, void *target)
{
	char *to = target;
	for (uint32_t i = 0; i < pieces->count; i++) {
		memcpy(to, pieces->pieces[i].address, pieces->pieces[i].length);
		to += pieces->pieces[i].length;
	}
}
