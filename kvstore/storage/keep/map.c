/* Ids by 64-bit keys, in chains; 8 bytes per id beside the key, which is in the owner's table.
 *
 * The number of chains follows the number of ids, one chain at a time (linear hashing), so the table is never rebuilt,
 * and no call pays for earlier ones. If there is no memory for one more chain, chains get longer. Keys are numbers
 * chosen by the node, or keyed digests, so clients can't make them collide. Sixteen neighbours share a cache line of
 * the table of heads, because blocks that were put together are requested together.
 */
#include "inside.h"

enum { FIRST_BUCKETS = 16, RUN_BITS = 4 };

static uint64_t hash_of(uint64_t key)
{
	uint64_t mixed = (key >> RUN_BITS) * 0x9e3779b97f4a7c15u;

	mixed ^= mixed >> 32;
	mixed *= 0xd6e8feb86659fd93u;
	return key ^ mixed ^ mixed >> 32;
}

static uint64_t key_of(const struct keep_map *map, uint32_t id)
{
	uint64_t key;

	memcpy(&key, map->keys + (size_t)id * map->stride, sizeof key);
	return key;
}

/* The largest power of two that is not above the number of chains. */
static uint32_t level_of(uint32_t buckets)
{
	return UINT32_C(1) << (31 - __builtin_clz(buckets));
}

static uint32_t *head_of(const struct keep_map *map, uint64_t key)
{
	uint64_t hash = hash_of(key);
	uint32_t level = level_of(map->buckets), bucket = hash & (2 * (uint64_t)level - 1);

	return &map->heads[bucket < map->buckets ? bucket : bucket - level];
}

void keep_map_free(struct keep_map *map)
{
	free(map->heads);
	free(map->next);
}

/* Chains, including their heads, hold ids plus one: zero is the end. */
int keep_map_reserve(struct keep_map *map, uint64_t ids, const void *keys, size_t stride)
{
	int error = keep_grow((void **)&map->next, &map->next_room, ids, sizeof *map->next);

	map->keys = keys;
	map->stride = (uint32_t)stride;
	if (error < 0 || map->buckets > 0)
		return error;
	error = keep_grow((void **)&map->heads, &map->heads_room, FIRST_BUCKETS, sizeof *map->heads);
	if (error == 0)
		map->buckets = FIRST_BUCKETS;
	return error;
}

/* Makes a chain for each expected id, while there are no ids; fewer, without enough memory. */
void keep_map_expect(struct keep_map *map, uint64_t count)
{
	keep_assert(map->count == 0);
	if (count > map->buckets && keep_grow((void **)&map->heads, &map->heads_room, count, sizeof *map->heads) == 0)
		map->buckets = (uint32_t)count;
}

/* Prefetches into the cache what a search for these keys will read. `keys` are `stride` bytes apart. */
void keep_map_warm(const struct keep_map *map, const uint64_t *keys, size_t stride, uint64_t count)
{
	if (map->count == 0)
		return;
	for (uint64_t i = 0; i < count; i++)
		__builtin_prefetch(head_of(map, *(const uint64_t *)((const char *)keys + i * stride)));
	for (uint64_t i = 0; i < count; i++) {
		uint32_t link = *head_of(map, *(const uint64_t *)((const char *)keys + i * stride));

		if (link != 0) {
			__builtin_prefetch(&map->next[link - 1]);
			__builtin_prefetch(map->keys + (size_t)(link - 1) * map->stride);
		}
	}
}

uint32_t keep_map_find(const struct keep_map *map, uint64_t key)
{
	if (map->count == 0)
		return KEEP_NO_ID;
	for (uint32_t link = *head_of(map, key); link != 0; link = map->next[link - 1])
		if (key_of(map, link - 1) == key)
			return link - 1;
	return KEEP_NO_ID;
}

/* Splits the next chain in two. */
static void add_bucket(struct keep_map *map)
{
	uint32_t level, *from, link, kept = 0, moved = 0;

	if (map->buckets == UINT32_MAX / 2 ||
	    keep_grow((void **)&map->heads, &map->heads_room, (uint64_t)map->buckets + 1, sizeof *map->heads) < 0)
		return;
	level = level_of(map->buckets);
	from = &map->heads[map->buckets - level];
	link = *from;
	while (link != 0) {
		uint32_t following = map->next[link - 1];
		uint32_t *to = hash_of(key_of(map, link - 1)) & level ? &moved : &kept;

		map->next[link - 1] = *to;
		*to = link;
		link = following;
	}
	*from = kept;
	map->heads[map->buckets++] = moved;
}

/* Adds an id. Its key is in the table, and no other id has it. */
void keep_map_add(struct keep_map *map, uint32_t id)
{
	uint32_t *head;

	if (map->count >= map->buckets)
		add_bucket(map);
	head = head_of(map, key_of(map, id));
	map->next[id] = *head;
	*head = id + 1;
	map->count++;
}

uint32_t keep_map_remove(struct keep_map *map, uint64_t key)
{
	if (map->count == 0)
		return KEEP_NO_ID;
	for (uint32_t *link = head_of(map, key); *link != 0; link = &map->next[*link - 1]) {
		uint32_t id = *link - 1;

		if (key_of(map, id) == key) {
			*link = map->next[id];
			map->count--;
			return id;
		}
	}
	return KEEP_NO_ID;
}
