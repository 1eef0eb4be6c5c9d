/*
 * Keys of erase domains, for lanes, readers and the application.
 */
#ifndef TRIGGERKV_VAULT_H
#define TRIGGERKV_VAULT_H

#include "core.h"

struct vault_key {
	uint8_t key[TK_AEAD_KEY];
	uint64_t id;
	uint32_t number;
};

/* Each copies the key; the caller wipes the copy. Any thread. -ENOKEY: the vault doesn't have it. */
int vault_by_name(struct tk_vault *vault, const uint8_t *owner, const uint8_t *domain, struct vault_key *out);
int vault_by_number(struct tk_vault *vault, uint32_t number, uint64_t id, struct vault_key *out);
/* Derives a key for one purpose (16 bytes) and one message (1 to 128 bytes), which the caller wipes. */
void vault_derive(const struct vault_key *key, const uint8_t *purpose, const void *message, uint32_t bytes, uint8_t *out);

#endif
