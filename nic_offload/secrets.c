/*
 * Memory for keys, and texts that are sealed with keys.
 *
 * What always holds: the pages are in no core dump and no forked process, are never swapped if the system lets us lock
 * them, and are wiped before they are freed. The key of a text is derived from its domain's key and its nonce, and used
 * for texts only: a text is lost with the key of its domain. What it doesn't do: generate nonces.
 */
#define _GNU_SOURCE
#include "aead.h"
#include "vault.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

static const uint8_t purpose[16] = "tkv text";

void *tk_secret_pages(size_t bytes, int *is_locked)
{
	void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == MAP_FAILED)
		return NULL;
	madvise(pages, bytes, MADV_DONTDUMP);
	madvise(pages, bytes, MADV_WIPEONFORK);
	*is_locked = !mlock(pages, bytes);
	return pages;
}

void tk_free_secret_pages(void *pages, size_t bytes)
{
	wipe(pages, bytes);
	munmap(pages, bytes);
}

static int begin(struct tk_vault *vault, const struct tk_text *text, int decrypts, struct aead **out)
{
	struct vault_key key;
	uint8_t made[TK_AEAD_KEY];
	int status = vault_by_number(vault, text->number, text->id, &key);
	if (status)
		return status;
	vault_derive(&key, purpose, text->nonce, TK_AEAD_NONCE, made);
	wipe(&key, sizeof key);
	struct aead *aead = aead_open();
	status = aead ? aead_begin(aead, decrypts, made, text->nonce, (const void *)(uintptr_t)text->associated,
				   text->associated_bytes)
		      : -ENOMEM;
	wipe(made, sizeof made);
	*out = aead;
	return status;
}

int tk_seal_text(struct tk_vault *vault, const struct tk_text *text, void *to)
{
	struct aead *aead = NULL;
	int status = begin(vault, text, 0, &aead);
	if (!status)
		status = aead_step(aead, to, (const void *)(uintptr_t)text->text, text->bytes);
	if (!status)
		status = aead_end(aead, (uint8_t *)to + text->bytes);
	aead_close(aead);
	return status;
}

int tk_unseal_text(struct tk_vault *vault, const struct tk_text *text, void *to)
{
	struct aead *aead = NULL;
	uint8_t tag[TK_AEAD_TAG];
	memcpy(tag, (const uint8_t *)(uintptr_t)text->text + text->bytes, sizeof tag);
	int status = begin(vault, text, 1, &aead);
	if (!status)
		status = aead_step(aead, to, (const void *)(uintptr_t)text->text, text->bytes);
	if (!status)
		status = aead_end(aead, tag);
	aead_close(aead);
	if (status)
		wipe(to, text->bytes);
	return status;
}
