/*
 * The shelf: blocks in registered memory that the progress thread may send to a peer that requests them by name at a
 * desk.
 *
 * What always holds: a block that is not listed is not found by name. A block that is being sent stays known until that
 * is over, and `tk_shelf_take` reports it, so its memory is not reused meanwhile. A name is listed once. Names are
 * spread by a keyed hash, so a peer that chooses names can't put them all into one chain.
 *
 * What it doesn't do: decide whether a block may be sent. The application does, and unlists a block that may no longer
 * be sent.
 */
#define _GNU_SOURCE
#include "shelf.h"

#include "progress.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define CHAINS_MIN 1024u
#define MULTIPLIER 0x9e3779b97f4a7c15u

static struct shelved **chain_of_name(struct tk_shelf *shelf, const uint8_t *owner, const uint8_t *key)
{
	uint8_t name[TK_OWNER_BYTES + TK_KEY_BYTES];
	names_join(name, owner, key);
	return &shelf->named[tk_siphash(shelf->secret, name, sizeof name) & (shelf->chains - 1)];
}

static struct shelved **chain_of_id(struct tk_shelf *shelf, uint64_t id)
{
	uint64_t hash = id * MULTIPLIER;
	return &shelf->known[(hash ^ hash >> 32) & (shelf->chains - 1)];
}

static int is_named(const struct shelved *block, const uint8_t *owner, const uint8_t *key)
{
	return !memcmp(block->block.key, key, TK_KEY_BYTES) && !memcmp(block->block.owner, owner, TK_OWNER_BYTES);
}

static struct shelved *find_in(struct shelved *block, const uint8_t *owner, const uint8_t *key)
{
	while (block && !is_named(block, owner, key))
		block = block->next_named;
	return block;
}

struct shelved *shelf_find(struct tk_shelf *shelf, const uint8_t *owner, const uint8_t *key)
{
	return find_in(*chain_of_name(shelf, owner, key), owner, key);
}

static struct shelved *find_id(struct tk_shelf *shelf, uint64_t id)
{
	struct shelved *block = *chain_of_id(shelf, id);
	while (block && block->block.id != id)
		block = block->next_known;
	return block;
}

/* Forgets a block that is neither listed nor being sent. */
static void forget_if_idle(struct tk_shelf *shelf, struct shelved *block)
{
	if (block->listed || block->sending)
		return;
	struct shelved **link = chain_of_id(shelf, block->block.id);
	while (*link != block)
		link = &(*link)->next_known;
	*link = block->next_known;
	shelf->count--;
	free(block);
}

void shelf_unlist(struct tk_shelf *shelf, struct shelved *block)
{
	if (!block->listed)
		return;
	struct shelved **link = chain_of_name(shelf, block->block.owner, block->block.key);
	while (*link != block)
		link = &(*link)->next_named;
	*link = block->next_named;
	block->listed = 0;
	directory_unlist(shelf, block);
	forget_if_idle(shelf, block);
}

/* The block is no longer being sent. */
void shelf_release(struct tk_shelf *shelf, struct shelved *block)
{
	block->sending--;
	forget_if_idle(shelf, block);
}

/* Adds chains when there are more blocks than chains. If there is no memory for that, chains get longer. */
static void spread(struct tk_shelf *shelf)
{
	uint32_t before = shelf->chains, chains = before * 2;
	struct shelved **named = calloc(chains, sizeof(void *)), **known = calloc(chains, sizeof(void *));
	struct shelved **old_named = shelf->named, **old_known = shelf->known;
	if (!named || !known) {
		free(named);
		free(known);
		return;
	}
	shelf->named = named;
	shelf->known = known;
	shelf->chains = chains;
	for (uint32_t i = 0; i < before; i++) {
		for (struct shelved *block = old_named[i], *next; block; block = next) {
			next = block->next_named;
			struct shelved **chain = chain_of_name(shelf, block->block.owner, block->block.key);
			block->next_named = *chain;
			*chain = block;
		}
		for (struct shelved *block = old_known[i], *next; block; block = next) {
			next = block->next_known;
			struct shelved **chain = chain_of_id(shelf, block->block.id);
			block->next_known = *chain;
			*chain = block;
		}
	}
	free(old_named);
	free(old_known);
}

static int is_inside(const struct tk_region *region, const struct tk_shelved *block)
{
	return block->length && block->address >= region->address && block->length <= region->length &&
	       block->address - region->address <= region->length - block->length;
}

int shelf_list(struct tk_shelf *shelf, const struct tk_shelved *block)
{
	if (find_id(shelf, block->id))
		return 0; /* it is listed, or is still being sent after it was unlisted; it can be listed again later */
	struct shelved *kept = calloc(1, sizeof *kept);
	if (!kept)
		return -ENOMEM;
	struct shelved *before = shelf_find(shelf, block->owner, block->key);
	if (before)
		shelf_unlist(shelf, before);
	if (shelf->count >= shelf->chains)
		spread(shelf);
	kept->block = *block;
	kept->listed = 1;
	struct shelved **named = chain_of_name(shelf, block->owner, block->key);
	struct shelved **known = chain_of_id(shelf, block->id);
	kept->next_named = *named;
	*named = kept;
	kept->next_known = *known;
	*known = kept;
	shelf->count++;
	directory_list(shelf, kept);
	return 0;
}

int tk_shelf_put(struct tk_shelf *shelf, const struct tk_shelved *blocks, int count)
{
	int status = fabric_refusal(shelf->fabric);
	for (int i = 0; !status && i < count; i++)
		status = is_inside(shelf->region, &blocks[i]) ? 0 : -ERANGE;
	if (status)
		return status;
	pthread_mutex_lock(&shelf->lock);
	for (int i = 0; !status && i < count; i++)
		status = shelf_list(shelf, &blocks[i]);
	pthread_mutex_unlock(&shelf->lock);
	return status;
}

static void unlist_some(struct tk_shelf *shelf, const uint8_t *names, size_t count, int others_only)
{
	struct shelved **chains[SHELF_HELD_FOR];
	for (size_t i = 0; i < count; i++) {
		const uint8_t *name = names + i * NAME_BYTES;
		chains[i] = chain_of_name(shelf, name, name + TK_OWNER_BYTES);
		__builtin_prefetch(chains[i]);
	}
	for (size_t i = 0; i < count; i++)
		__builtin_prefetch(*chains[i]);
	for (size_t i = 0; i < count; i++) {
		const uint8_t *name = names + i * NAME_BYTES;
		struct shelved *block = find_in(*chains[i], name, name + TK_OWNER_BYTES);
		if (block && !(others_only && block->block.id & LANDED_ID))
			shelf_unlist(shelf, block);
		if (!others_only)
			names_forget_place(&shelf->stored, name);
	}
}

void tk_shelf_unlist(struct tk_shelf *shelf, const uint8_t *names, size_t count, int others_only)
{
	for (size_t at = 0; at < count; at += SHELF_HELD_FOR) {
		pthread_mutex_lock(&shelf->lock);
		unlist_some(shelf, names + at * NAME_BYTES, shelf_rows_at_once(count - at), others_only);
		pthread_mutex_unlock(&shelf->lock);
	}
}

void tk_shelf_take(struct tk_shelf *shelf, const uint64_t *ids, int count, uint8_t *free)
{
	pthread_mutex_lock(&shelf->lock);
	for (int i = 0; i < count; i++) {
		struct shelved *block = find_id(shelf, ids[i]);
		free[i] = !block || !block->sending;
		if (block)
			shelf_unlist(shelf, block);
	}
	pthread_mutex_unlock(&shelf->lock);
}

static int rename_block(struct tk_shelf *shelf, uint64_t id, uint64_t new_id)
{
	struct shelved *block = find_id(shelf, id);
	if (!block || find_id(shelf, new_id))
		return 0;
	struct shelved **link = chain_of_id(shelf, id);
	while (*link != block)
		link = &(*link)->next_known;
	*link = block->next_known;
	block->block.id = new_id;
	link = chain_of_id(shelf, new_id);
	block->next_known = *link;
	*link = block;
	int was_used = block->was_used;
	block->was_used = 0;
	return was_used ? TK_RENAMED_USED : TK_RENAMED;
}

void tk_shelf_rename(struct tk_shelf *shelf, const uint64_t *ids, const uint64_t *new_ids, size_t count, uint8_t *done)
{
	for (size_t at = 0; at < count; at += SHELF_HELD_FOR) {
		size_t until = at + shelf_rows_at_once(count - at);
		pthread_mutex_lock(&shelf->lock);
		for (size_t i = at; i < until; i++)
			__builtin_prefetch(chain_of_id(shelf, ids[i]));
		for (size_t i = at; i < until; i++)
			__builtin_prefetch(*chain_of_id(shelf, ids[i]));
		for (size_t i = at; i < until; i++)
			done[i] = (uint8_t)rename_block(shelf, ids[i], new_ids[i]);
		pthread_mutex_unlock(&shelf->lock);
	}
}

void tk_shelf_stored(struct tk_shelf *shelf, const uint8_t *names, size_t count, int are_stored)
{
	for (size_t at = 0; at < count; at += SHELF_HELD_FOR) {
		pthread_mutex_lock(&shelf->lock);
		names_change(&shelf->stored, names + at * NAME_BYTES, shelf_rows_at_once(count - at), are_stored);
		pthread_mutex_unlock(&shelf->lock);
	}
}

void tk_shelf_place(struct tk_shelf *shelf, const struct tk_place *places, size_t count)
{
	uint64_t hashes[SHELF_HELD_FOR];
	for (size_t at = 0; at < count; at += SHELF_HELD_FOR) {
		size_t some = shelf_rows_at_once(count - at);
		for (size_t i = 0; i < some; i++) {
			uint8_t name[NAME_BYTES];
			names_join(name, places[at + i].owner, places[at + i].key);
			hashes[i] = names_hash(&shelf->stored, name);
		}
		pthread_mutex_lock(&shelf->lock);
		names_warm(&shelf->stored, hashes, some);
		for (size_t i = 0; i < some; i++)
			names_put_place(&shelf->stored, hashes[i], places[at + i].place);
		pthread_mutex_unlock(&shelf->lock);
	}
}

uint64_t tk_shelf_came(struct tk_shelf *shelf)
{
	return __atomic_load_n(&shelf->came, __ATOMIC_ACQUIRE);
}

void tk_shelf_use_readers(struct tk_shelf *shelf, const struct tk_cold_setup *setup)
{
	pthread_mutex_lock(&shelf->lock);
	shelf->cold.setup = *setup;
	pthread_mutex_unlock(&shelf->lock);
}

void tk_shelf_cold_state(struct tk_shelf *shelf, struct tk_cold_state *state)
{
	pthread_mutex_lock(&shelf->lock);
	*state = (struct tk_cold_state){.wanted_pages = shelf->cold.wanted_pages};
	for (uint32_t i = 0; i < shelf->cold.rooms_count; i++)
		state->rooms += shelf->cold.rooms[i].pages >= shelf->cold.wanted_pages;
	pthread_mutex_unlock(&shelf->lock);
}

int tk_shelf_count(struct tk_shelf *shelf)
{
	pthread_mutex_lock(&shelf->lock);
	uint32_t count = shelf->count;
	pthread_mutex_unlock(&shelf->lock);
	return (int)count;
}

static void free_shelf(struct tk_shelf *shelf)
{
	for (uint32_t i = 0; shelf->known && i < shelf->chains; i++)
		for (struct shelved *block = shelf->known[i], *next; block; block = next) {
			next = block->next_known;
			free(block);
		}
	for (struct tk_desk *desk = shelf->desks, *next; desk; desk = next) {
		next = desk->next;
		for (int i = 0; i < TK_CALL_PLACES; i++)
			free(desk->held[i].blocks);
		free(desk);
	}
	for (struct served *served = shelf->first, *next; served; served = next) {
		next = served->next;
		free(served);
	}
	directory_free(shelf);
	pthread_mutex_destroy(&shelf->lock);
	names_free(&shelf->stored);
	free(shelf->named);
	free(shelf->known);
	free(shelf->call);
	free(shelf->found);
	free(shelf->places);
	free(shelf->into);
	free(shelf->cold.rooms);
	free(shelf);
}

void free_shelves(struct tk_fabric *fabric)
{
	for (struct tk_shelf *shelf = fabric->shelves, *next; shelf; shelf = next) {
		next = shelf->next;
		free_shelf(shelf);
	}
}

int tk_shelf_open(struct tk_fabric *fabric, struct tk_region *region, struct tk_shelf **out)
{
	int status = fabric_refusal(fabric);
	if (status)
		return status;
	if (!region || region->fabric != fabric)
		return -EINVAL;
	struct tk_shelf *shelf = calloc(1, sizeof *shelf);
	if (!shelf)
		return -ENOMEM;
	pthread_mutex_init(&shelf->lock, NULL);
	int status_of_names = names_init(&shelf->stored);
	shelf->fabric = fabric;
	shelf->region = region;
	shelf->chains = CHAINS_MIN;
	shelf->named = calloc(CHAINS_MIN, sizeof(void *));
	shelf->known = calloc(CHAINS_MIN, sizeof(void *));
	shelf->call = malloc(TK_CALL_BYTES);
	shelf->found = calloc(TK_CALL_BLOCKS, sizeof(void *));
	shelf->places = calloc(TK_CALL_BLOCKS, sizeof *shelf->places);
	shelf->into = calloc(TK_CALL_BLOCKS, sizeof *shelf->into);
	if (status_of_names || !shelf->named || !shelf->known || !shelf->call || !shelf->found || !shelf->places || !shelf->into ||
	    getrandom(shelf->secret, sizeof shelf->secret, 0) != sizeof shelf->secret) {
		free_shelf(shelf);
		return -ENOMEM;
	}
	pthread_mutex_lock(&fabric->handle_lock);
	shelf->next = fabric->shelves;
	fabric->shelves = shelf;
	__atomic_store_n(&fabric->is_serving, 1, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&fabric->handle_lock);
	*out = shelf;
	return 0;
}
