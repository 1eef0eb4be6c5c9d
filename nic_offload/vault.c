/*
 * The vault: keys of erase domains. Each is found by its owner and domain, for writing records, and by the number and
 * id that a record names, for reading it.
 *
 * What always holds: the keys lie in separate pages that are in no core dump and in no forked process, and, if the
 * system allows it, are never swapped. A key that is dropped or evicted is overwritten in the same call. If the vault
 * is full, a key that has not been used lately is evicted.
 *
 * What it doesn't do: hold all keys, or load them. The application looks up a key that is not here.
 */
#define _GNU_SOURCE
#include "vault.h"

#include "aead.h"
#include "blake2b.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define NAME_BYTES (TK_OWNER_BYTES + TK_DOMAIN_BYTES)
#define NONE UINT32_MAX

struct entry {
	struct vault_key is;
	uint8_t name[NAME_BYTES]; /* owner and domain */
	uint32_t by_name, by_number; /* the next one in the bucket */
	uint32_t is_taken, was_used;
};

struct tk_vault {
	pthread_mutex_t lock; /* for all that follows */
	uint64_t secret[2];
	struct entry *entries;
	uint32_t *names, *numbers; /* the first of each bucket, as many as entries */
	uint32_t capacity, count, hand;
	int is_locked;
};

static size_t entries_bytes(const struct tk_vault *vault)
{
	return vault->capacity * sizeof *vault->entries;
}

int tk_vault_open(uint32_t capacity, struct tk_vault **out)
{
	if (!capacity)
		return -EINVAL;
	struct tk_vault *vault = calloc(1, sizeof *vault);
	if (!vault)
		return -ENOMEM;
	vault->capacity = capacity;
	vault->names = malloc(capacity * sizeof *vault->names);
	vault->numbers = malloc(capacity * sizeof *vault->numbers);
	vault->entries = tk_secret_pages(entries_bytes(vault), &vault->is_locked);
	pthread_mutex_init(&vault->lock, NULL);
	if (!vault->names || !vault->numbers || !vault->entries ||
	    getrandom(vault->secret, sizeof vault->secret, 0) != sizeof vault->secret) {
		tk_vault_close(vault);
		return -ENOMEM;
	}
	memset(vault->names, 0xff, capacity * sizeof *vault->names);
	memset(vault->numbers, 0xff, capacity * sizeof *vault->numbers);
	*out = vault;
	return 0;
}

void tk_vault_close(struct tk_vault *vault)
{
	if (vault->entries)
		tk_free_secret_pages(vault->entries, entries_bytes(vault));
	pthread_mutex_destroy(&vault->lock);
	free(vault->names);
	free(vault->numbers);
	free(vault);
}

int tk_vault_is_locked(const struct tk_vault *vault)
{
	return vault->is_locked;
}

static uint32_t *name_bucket(struct tk_vault *vault, const uint8_t *name)
{
	return &vault->names[tk_siphash(vault->secret, name, NAME_BYTES) % vault->capacity];
}

static uint32_t *number_bucket(struct tk_vault *vault, uint32_t number)
{
	return &vault->numbers[number % vault->capacity];
}

static struct entry *of_name(struct tk_vault *vault, const uint8_t *name)
{
	for (uint32_t at = *name_bucket(vault, name); at != NONE; at = vault->entries[at].by_name)
		if (!memcmp(vault->entries[at].name, name, NAME_BYTES))
			return &vault->entries[at];
	return NULL;
}

static struct entry *of_number(struct tk_vault *vault, uint32_t number)
{
	for (uint32_t at = *number_bucket(vault, number); at != NONE; at = vault->entries[at].by_number)
		if (vault->entries[at].is.number == number)
			return &vault->entries[at];
	return NULL;
}

static void drop(struct tk_vault *vault, struct entry *entry)
{
	uint32_t at = (uint32_t)(entry - vault->entries);
	uint32_t *link = name_bucket(vault, entry->name);
	while (*link != at)
		link = &vault->entries[*link].by_name;
	*link = entry->by_name;
	link = number_bucket(vault, entry->is.number);
	while (*link != at)
		link = &vault->entries[*link].by_number;
	*link = entry->by_number;
	wipe(entry, sizeof *entry);
	vault->count--;
}

/* A free place; if there is none, that of a key that was not used since the clock hand last passed it. */
static struct entry *place(struct tk_vault *vault)
{
	for (;;) {
		struct entry *entry = &vault->entries[vault->hand];
		vault->hand = (vault->hand + 1) % vault->capacity;
		if (!entry->is_taken)
			return entry;
		if (!entry->was_used) {
			drop(vault, entry);
			return entry;
		}
		entry->was_used = 0;
	}
}

void tk_vault_put(struct tk_vault *vault, const uint8_t *owner, const uint8_t *domain, uint32_t number, uint64_t id,
		  const uint8_t *key)
{
	uint8_t name[NAME_BYTES];
	memcpy(name, owner, TK_OWNER_BYTES);
	memcpy(name + TK_OWNER_BYTES, domain, TK_DOMAIN_BYTES);
	pthread_mutex_lock(&vault->lock);
	struct entry *old = of_name(vault, name);
	if (old)
		drop(vault, old);
	if ((old = of_number(vault, number)))
		drop(vault, old);
	struct entry *entry = place(vault);
	*entry = (struct entry){.is = {.id = id, .number = number}, .is_taken = 1, .was_used = 1};
	memcpy(entry->is.key, key, TK_AEAD_KEY);
	memcpy(entry->name, name, NAME_BYTES);
	uint32_t at = (uint32_t)(entry - vault->entries), *bucket = name_bucket(vault, name);
	entry->by_name = *bucket;
	*bucket = at;
	bucket = number_bucket(vault, number);
	entry->by_number = *bucket;
	*bucket = at;
	vault->count++;
	pthread_mutex_unlock(&vault->lock);
}

int tk_vault_drop(struct tk_vault *vault, uint32_t number)
{
	pthread_mutex_lock(&vault->lock);
	struct entry *entry = of_number(vault, number);
	if (entry)
		drop(vault, entry);
	pthread_mutex_unlock(&vault->lock);
	return entry ? 0 : -ENOKEY;
}

uint32_t tk_vault_count(struct tk_vault *vault)
{
	pthread_mutex_lock(&vault->lock);
	uint32_t count = vault->count;
	pthread_mutex_unlock(&vault->lock);
	return count;
}

int vault_by_name(struct tk_vault *vault, const uint8_t *owner, const uint8_t *domain, struct vault_key *out)
{
	uint8_t name[NAME_BYTES];
	memcpy(name, owner, TK_OWNER_BYTES);
	memcpy(name + TK_OWNER_BYTES, domain, TK_DOMAIN_BYTES);
	pthread_mutex_lock(&vault->lock);
	struct entry *entry = of_name(vault, name);
	if (entry) {
		entry->was_used = 1;
		*out = entry->is;
	}
	pthread_mutex_unlock(&vault->lock);
	return entry ? 0 : -ENOKEY;
}

int vault_by_number(struct tk_vault *vault, uint32_t number, uint64_t id, struct vault_key *out)
{
	pthread_mutex_lock(&vault->lock);
	struct entry *entry = of_number(vault, number);
	int is_it = entry && entry->is.id == id;
	if (is_it) {
		entry->was_used = 1;
		*out = entry->is;
	}
	pthread_mutex_unlock(&vault->lock);
	return is_it ? 0 : -ENOKEY;
}

void vault_derive(const struct vault_key *key, const uint8_t *purpose, const void *message, uint32_t bytes, uint8_t *out)
{
	struct blake2b keyed;
	uint64_t block[BLAKE2B_BLOCK / 8] = {0};
	memcpy(block, message, bytes);
	blake2b_begin(&keyed, key->key, purpose, TK_AEAD_KEY);
	blake2b_end(&keyed, block, bytes, out, TK_AEAD_KEY);
	wipe(&keyed, sizeof keyed);
}
