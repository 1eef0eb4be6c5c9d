/*
 * Encrypts records as docs/record-format.md describes them, and opens them.
 *
 * What always holds: a record key belongs to a domain key and to one opening of a drive, during which a generation is
 * used once, so no nonce is used twice with it. Place and header are authenticated with payload and identity; only the
 * expiry, which may be extended in place, is covered by the header's tag alone. Nothing in a record can be trusted
 * until both GCM tags have been compared.
 */
#define _GNU_SOURCE
#include "record_encryption.h"

#include "blake2b.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "TKVSEALD"
#define VERSION 1
#define PAYLOAD 1u /* the ends of nonces */
#define IDENTITY 2u
#define HEADER_BYTES (TK_TAGGED_FIXED + TK_TAGGED_TAG)

static const uint8_t person[BLAKE2B_PERSON] = "tkv record";

struct identity {
	uint8_t key[TK_KEY_BYTES];
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint32_t crc32c, zeros;
};
struct associated {
	uint8_t drive[TK_TAGGED_NAME];
	uint64_t offset;
	uint8_t before_expiry[offsetof(struct encrypted_fixed, expires_ms)];
	uint8_t behind_it[offsetof(struct encrypted_fixed, payload_tag) - offsetof(struct encrypted_fixed, domain)];
	uint8_t payload_tag[TK_AEAD_TAG]; /* of an identity alone */
};
_Static_assert(sizeof(struct associated) == 96, "it has no gaps");
_Static_assert(sizeof(struct identity) == 72, "it has no gaps");

static void make_record_key(const struct vault_key *key, const uint8_t *salt, uint8_t *out)
{
	vault_derive(key, person, salt, TK_SALT_BYTES, out);
}

static int begin(struct aead *aead, int decrypts, const uint8_t *record_key, const struct tk_encryption *with,
		 const struct encrypted_fixed *fixed, uint64_t offset, uint32_t what)
{
	uint8_t nonce[TK_AEAD_NONCE];
	memcpy(nonce, &fixed->generation, 8);
	memcpy(nonce + 8, &what, 4);
	struct associated with_it = {.offset = offset};
	memcpy(with_it.drive, with->drive, sizeof with_it.drive);
	memcpy(with_it.before_expiry, fixed, sizeof with_it.before_expiry);
	memcpy(with_it.behind_it, &fixed->domain, sizeof with_it.behind_it);
	memcpy(with_it.payload_tag, fixed->payload_tag, sizeof with_it.payload_tag);
	size_t length = what == IDENTITY ? sizeof with_it : offsetof(struct associated, payload_tag);
	return aead_begin(aead, decrypts, record_key, nonce, &with_it, length);
}

int record_begin(struct record_stream *stream, const struct tk_encryption *with, const struct vault_key *key,
		 const struct header_fixed *plain, uint64_t offset)
{
	/* Ids are never reused, so the same id means the previous record's key; deriving and expanding a key takes a
	 * tenth of the time for 32 KiB. */
	int is_same = stream->is_keyed && stream->fixed.domain == key->number && stream->fixed.key_id == key->id &&
		      !memcmp(stream->fixed.salt, with->salt, sizeof stream->fixed.salt);
	stream->plain = *plain;
	stream->offset = offset;
	stream->fixed = (struct encrypted_fixed){
		.version = VERSION,
		.kind = plain->kind,
		.length = plain->length,
		.generation = plain->generation,
		.expires_ms = plain->expires_ms,
		.domain = key->number,
		.key_id = key->id,
	};
	memcpy(stream->fixed.magic, MAGIC, sizeof stream->fixed.magic);
	memcpy(stream->fixed.salt, with->salt, sizeof stream->fixed.salt);
	uint8_t record_key[TK_AEAD_KEY];
	if (!is_same)
		make_record_key(key, with->salt, record_key);
	int status = begin(stream->aead, 0, is_same ? NULL : record_key, with, &stream->fixed, offset, PAYLOAD);
	if (!is_same)
		wipe(record_key, sizeof record_key);
	stream->is_keyed = !status;
	return status;
}

void record_forget(struct record_stream *stream)
{
	stream->is_keyed = 0;
	aead_forget(stream->aead);
}

int record_end(struct record_stream *stream, const struct tk_encryption *with, char *page)
{
	struct identity identity = {.crc32c = stream->plain.crc32c};
	memcpy(identity.key, stream->plain.key, sizeof identity.key);
	memcpy(identity.owner, stream->plain.owner, sizeof identity.owner);
	memcpy(identity.fingerprint, stream->plain.fingerprint, sizeof identity.fingerprint);
	int status = aead_end(stream->aead, stream->fixed.payload_tag);
	struct tk_tagged row = {.address = (uint64_t)(uintptr_t)page, .number = stream->offset};
	memcpy(row.fixed, &stream->fixed, sizeof row.fixed);
	tk_write_tagged(with->secret, with->drive, &row, 1);
	if (!status)
		status = begin(stream->aead, 0, NULL, with, &stream->fixed, stream->offset, IDENTITY);
	if (!status)
		status = aead_step(stream->aead, page + HEADER_BYTES, &identity, sizeof identity);
	if (!status)
		status = aead_end(stream->aead, (uint8_t *)page + HEADER_BYTES + sizeof identity);
	return status;
}

int is_encrypted(const char *page)
{
	return !memcmp(page, MAGIC, 8);
}

void tk_tag_header(const struct tk_encryption *with, uint64_t offset, const void *fixed, void *tag)
{
	struct blake2b keyed;
	uint64_t block[BLAKE2B_BLOCK / 8];
	blake2b_begin(&keyed, with->secret, NULL, TK_TAGGED_TAG);
	memcpy(block, with->drive, TK_TAGGED_NAME);
	memcpy((char *)block + TK_TAGGED_NAME, &offset, 8);
	memcpy((char *)block + TK_TAGGED_NAME + 8, fixed, TK_TAGGED_FIXED);
	blake2b_end(&keyed, block, BLAKE2B_BLOCK, tag, TK_TAGGED_TAG);
	wipe(&keyed, sizeof keyed);
}

/* Whether a page is the header page of an encrypted record at this place. */
static int has_its_tag(const struct tk_encryption *with, uint64_t offset, const char *page)
{
	uint8_t tag[TK_TAGGED_TAG], differs = 0;
	tk_tag_header(with, offset, page, tag);
	for (size_t i = 0; i < sizeof tag; i++)
		differs |= tag[i] ^ (uint8_t)page[TK_TAGGED_FIXED + i];
	return is_encrypted(page) && !differs;
}

int record_open(struct aead *aead, const struct tk_encryption *with, uint64_t offset, const char *page,
		struct header_fixed *plain)
{
	struct encrypted_fixed fixed;
	struct identity identity;
	struct vault_key key;
	uint8_t record_key[TK_AEAD_KEY], tag[TK_AEAD_TAG];
	memcpy(&fixed, page, sizeof fixed);
	if (!has_its_tag(with, offset, page) || fixed.version != VERSION)
		return -EBADMSG;
	*plain = (struct header_fixed){
		.kind = fixed.kind,
		.length = fixed.length,
		.generation = fixed.generation,
		.expires_ms = fixed.expires_ms,
	};
	int status = vault_by_number(with->vault, fixed.domain, fixed.key_id, &key);
	if (status)
		return status;
	make_record_key(&key, fixed.salt, record_key);
	wipe(&key, sizeof key);
	memcpy(tag, page + HEADER_BYTES + sizeof identity, sizeof tag);
	status = begin(aead, 1, record_key, with, &fixed, offset, IDENTITY);
	wipe(record_key, sizeof record_key);
	if (!status)
		status = aead_step(aead, &identity, page + HEADER_BYTES, sizeof identity);
	if (!status)
		status = aead_end(aead, tag);
	if (!status) {
		plain->crc32c = identity.crc32c;
		memcpy(plain->key, identity.key, sizeof plain->key);
		memcpy(plain->owner, identity.owner, sizeof plain->owner);
		memcpy(plain->fingerprint, identity.fingerprint, sizeof plain->fingerprint);
		status = begin(aead, 1, NULL, with, &fixed, offset, PAYLOAD);
	}
	return status;
}

void record_payload_tag(const char *page, uint8_t tag[TK_AEAD_TAG])
{
	memcpy(tag, page + offsetof(struct encrypted_fixed, payload_tag), TK_AEAD_TAG);
}

/* --- whole records, for the application */

static int encrypt_one(struct record_stream *stream, const struct tk_encryption *with, const struct tk_to_encrypt *row)
{
	struct vault_key key;
	struct header_fixed plain;
	char *page = (char *)(uintptr_t)row->target;
	memcpy(&plain, row->fixed, sizeof plain);
	int status = vault_by_number(with->vault, row->number, row->id, &key);
	if (status)
		return status;
	status = record_begin(stream, with, &key, &plain, row->offset);
	wipe(&key, sizeof key);
	if (!status)
		status = aead_step(stream->aead, page + TK_TAGGED_PAGE, (const char *)(uintptr_t)row->source + TK_TAGGED_PAGE, plain.length);
	int ended = record_end(stream, with, page);
	if (row->size > TK_TAGGED_PAGE + plain.length)
		memset(page + TK_TAGGED_PAGE + plain.length, 0, row->size - TK_TAGGED_PAGE - plain.length);
	return status ? status : ended;
}

int tk_encrypt_records(const struct tk_encryption *with, const struct tk_to_encrypt *rows, uint32_t count)
{
	struct record_stream stream = {.aead = aead_open()};
	int status = stream.aead ? 0 : -ENOMEM;
	for (uint32_t i = 0; !status && i < count; i++)
		status = encrypt_one(&stream, with, &rows[i]);
	aead_close(stream.aead);
	return status;
}

struct tk_decryption {
	struct aead *aead;
	uint8_t payload_tag[TK_AEAD_TAG];
};

int tk_decryption_open(const struct tk_encryption *with, uint64_t offset, const void *page, struct tk_decrypted *out,
		       struct tk_decryption **opened)
{
	struct encrypted_fixed fixed;
	struct header_fixed plain = {0};
	struct tk_decryption *decryption = calloc(1, sizeof *decryption);
	if (!decryption || !(decryption->aead = aead_open())) {
		tk_decryption_close(decryption);
		return -ENOMEM;
	}
	memcpy(&fixed, page, sizeof fixed);
	memcpy(decryption->payload_tag, fixed.payload_tag, sizeof fixed.payload_tag);
	int status = record_open(decryption->aead, with, offset, page, &plain);
	*out = (struct tk_decrypted){.id = fixed.key_id, .number = fixed.domain};
	memcpy(out->fixed, &plain, sizeof out->fixed);
	if (status)
		tk_decryption_close(decryption);
	else
		*opened = decryption;
	return status;
}

int tk_decryption_step(struct tk_decryption *decryption, void *bytes, uint64_t length)
{
	return aead_step(decryption->aead, bytes, bytes, length);
}

int tk_decryption_end(struct tk_decryption *decryption)
{
	return aead_end(decryption->aead, decryption->payload_tag);
}

void tk_decryption_close(struct tk_decryption *decryption)
{
	if (!decryption)
		return;
	aead_close(decryption->aead);
	free(decryption);
}
