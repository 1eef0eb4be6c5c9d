/*
 * Records of a drive: tags of their header pages, and their encryption. A part of the public header, core.h.
 */
#ifndef TRIGGERKV_RECORDS_H
#define TRIGGERKV_RECORDS_H

#include <stddef.h>
#include <stdint.h>

struct tk_vault;
struct tk_decryption;

/* Shared with the cffi build, as in core.h. */
/* cdef begin */
/* Pages that begin with fixed bytes and their tag; the rest of each is zeros, and so is what follows from `used` to
 * `end`. */
#define TK_TAGGED_PAGE 4096
#define TK_TAGGED_KEY 32
#define TK_TAGGED_NAME 16
#define TK_TAGGED_FIXED 104
#define TK_TAGGED_TAG 16

struct tk_tagged {
	uint64_t address, number;
	uint32_t used, end; /* bytes from the address on */
	uint8_t fixed[TK_TAGGED_FIXED];
};

void tk_write_tagged(const void *key, const void *name, const struct tk_tagged *rows, uint32_t count);

/* AES-256-GCM; see aead.c. The ciphertext is as long as the plaintext, and its tag follows. */
#define TK_AEAD_KEY 32
#define TK_AEAD_NONCE 12
#define TK_AEAD_TAG 16
#define TK_AEAD_MESSAGE 96
struct tk_aead {
	uint8_t key[TK_AEAD_KEY];
	uint8_t nonce[TK_AEAD_NONCE];
	uint32_t associated_bytes;
	uint64_t associated; /* their address */
};
int tk_aead_load(char *message); /* message: the library's name, or the reason for -ENOENT */
int tk_aead_encrypt(const struct tk_aead *of, const void *from, size_t length, void *to);
int tk_aead_decrypt(const struct tk_aead *of, const void *from, size_t length, void *to); /* -EBADMSG: wrong tag */
void tk_wipe(void *secret, size_t length);

/* Slots of a keyring; see wrapped_keys.c. */
#define TK_SLOT 128
#define TK_SLOT_CLEAR 64
#define TK_SLOT_STORE 16
struct tk_slot_at {
	uint32_t row, number; /* its position among the given slots; its number in the keyring */
};
void tk_domain_tags(const void *domains, uint32_t count, uint64_t *tags); /* as `kvstore.names.domain_tag` has them */
void tk_slots_whole(const void *slots, uint32_t count, uint8_t *whole); /* 1 if its CRC is right, or 0 */
int tk_slots_authentic(const void *key, const void *store, const void *slots, uint32_t slot_count,
		       const struct tk_slot_at *which, uint32_t count, uint8_t *authentic); /* 1 if this key wraps the slot's, or 0 */

/* Keys of erase domains; see vault.c. The vault is closed after everything that uses it. */
#define TK_DOMAIN_BYTES 16
int tk_vault_open(uint32_t capacity, struct tk_vault **out);
void tk_vault_close(struct tk_vault *vault);
int tk_vault_is_locked(const struct tk_vault *vault); /* in memory, so never swapped */
void tk_vault_put(struct tk_vault *vault, const uint8_t *owner, const uint8_t *domain, uint32_t number, uint64_t id,
		  const uint8_t *key);
int tk_vault_drop(struct tk_vault *vault, uint32_t number); /* -ENOKEY: it was not there */
uint32_t tk_vault_count(struct tk_vault *vault);
/* A text of a domain, sealed with a key derived from the domain's: as long as the plain text, and its tag follows.
 * -ENOKEY: the domain's key is not in the vault. -EBADMSG: this is not what was sealed. */
struct tk_text {
	uint64_t id, associated, text; /* of the key; addresses */
	uint32_t number, associated_bytes, bytes, zeros; /* of the key; `bytes` without the tag */
	uint8_t nonce[TK_AEAD_NONCE], more_zeros[4];
};
int tk_seal_text(struct tk_vault *vault, const struct tk_text *text, void *to);
int tk_unseal_text(struct tk_vault *vault, const struct tk_text *text, void *to);

/* Memory for keys: locked, if the system allows it, and in no core dump and no forked process. NULL: no memory. */
void *tk_secret_pages(size_t bytes, int *is_locked);
void tk_free_secret_pages(void *pages, size_t bytes); /* wiped */

/* Encrypted records of a drive; see record_encryption.c. */
#define TK_SALT_BYTES 16
struct tk_encryption {
	struct tk_vault *vault; /* NULL: records are not encrypted */
	const uint8_t *secret; /* for tags of encrypted records' headers: TK_TAGGED_KEY bytes, which must not move */
	uint8_t salt[TK_SALT_BYTES];   /* random, new each time the drive is opened */
	uint8_t drive[TK_TAGGED_NAME];
};
struct tk_to_encrypt { /* a record: a header page, and a payload */
	uint64_t source, target, offset, id;
	uint32_t number, size; /* bytes at the target */
	uint8_t fixed[TK_TAGGED_FIXED]; /* the header it would have in the clear */
};
struct tk_decrypted {
	uint64_t id;
	uint32_t number, zero;
	uint8_t fixed[TK_TAGGED_FIXED];
};
void tk_tag_header(const struct tk_encryption *with, uint64_t offset, const void *fixed, void *tag);
int tk_encrypt_records(const struct tk_encryption *with, const struct tk_to_encrypt *rows, uint32_t count);
/* Opens a header page; 0: with a stream for the payload. -EBADMSG: it is not a record of this place, or was changed.
 * -ENOKEY: its key is not in the vault; number and id name the key, and `fixed` has the part that is in the clear. */
int tk_decryption_open(const struct tk_encryption *with, uint64_t offset, const void *page, struct tk_decrypted *out,
		       struct tk_decryption **opened);
int tk_decryption_step(struct tk_decryption *decryption, void *bytes, uint64_t length); /* the next ones, in place */
int tk_decryption_end(struct tk_decryption *decryption); /* -EBADMSG: they are not what was written */
void tk_decryption_close(struct tk_decryption *decryption);
/* cdef end */

#endif
