/*
 * Encrypted records, as lanes write and readers read them.
 */
#ifndef TRIGGERKV_RECORD_ENCRYPTION_H
#define TRIGGERKV_RECORD_ENCRYPTION_H

#include "aead.h"
#include "header.h"
#include "vault.h"

/* The part of a header page that is in the clear, and that its tag covers: docs/record-format.md. */
struct encrypted_fixed {
	uint8_t magic[8];
	uint16_t version, kind;
	uint32_t length;
	uint64_t generation, expires_ms;
	uint32_t domain, zeros;
	uint64_t key_id;
	uint8_t salt[TK_SALT_BYTES];
	uint8_t payload_tag[TK_AEAD_TAG];
	uint8_t more_zeros[24];
};
_Static_assert(sizeof(struct encrypted_fixed) == TK_TAGGED_FIXED, "an encrypted record's header is tagged like any other");

/* Writes a record, header page included, in steps: begin, payload in order, end. The key may be wiped after
 * `record_begin`. */
struct record_stream {
	struct aead *aead;
	struct encrypted_fixed fixed;
	struct header_fixed plain;
	uint64_t offset;
	int is_keyed; /* `aead` has the key of `fixed`; 0 after `record_forget` */
};
int record_begin(struct record_stream *stream, const struct tk_encryption *with, const struct vault_key *key,
		 const struct header_fixed *plain, uint64_t offset);
int record_end(struct record_stream *stream, const struct tk_encryption *with, char *page);
void record_forget(struct record_stream *stream); /* overwrites its key */

int is_encrypted(const char *page);
/* Opens a header page. 0: then the payload can be decrypted in steps with `aead`, which ends with this tag. -EBADMSG:
 * it is not a header of this place; -ENOKEY: its key is not in the vault. */
int record_open(struct aead *aead, const struct tk_encryption *with, uint64_t offset, const char *page,
		struct header_fixed *plain);
void record_payload_tag(const char *page, uint8_t tag[TK_AEAD_TAG]);

#endif
