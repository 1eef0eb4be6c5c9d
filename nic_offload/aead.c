/*
 * AES-256-GCM, from OpenSSL's libcrypto, or from Intel's IPSec-MB where that is installed and the CPU has VAES: it
 * takes less than half the time of OpenSSL 3.0. The libraries are looked up on first use.
 *
 * What always holds: a library that doesn't reproduce a test vector of the GCM specification, or accepts a wrong tag,
 * is not used, and IPSec-MB must give libcrypto's bytes and tags for a message in many steps. Nonces are 12 bytes and
 * tags 16.
 *
 * What it doesn't do: prevent the same nonce from being used twice with a key, or hide decrypted bytes before
 * `aead_end` has confirmed the tag. The callers must do both.
 */
#define _GNU_SOURCE
#include "aead.h"

#include "gcm.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRIAL_BYTES 20011u /* of the message that compares two libraries: blocks of all sizes, and a rest */

static const struct gcm_library *chosen; /* NULL: there is none */
static char why_not[TK_AEAD_MESSAGE];
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct aead {
	const struct gcm_library *library;
	void *stream;
	int decrypts;
};

static struct aead *open_with(const struct gcm_library *library)
{
	struct aead *aead = calloc(1, sizeof *aead);
	if (!aead)
		return NULL;
	aead->library = library;
	if (!(aead->stream = library->open())) {
		free(aead);
		aead = NULL;
	}
	return aead;
}

/* The specification's test case 14: a key, a nonce and a block, all of zeros. */
static int knows_the_vector(const struct gcm_library *library)
{
	static const uint8_t zeros[32],
		expected[32] = {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18,
				0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0, 0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
	uint8_t made[32], back[16], bad[16];
	struct aead *aead = open_with(library);
	int right = aead && !aead_begin(aead, 0, zeros, zeros, NULL, 0) && !aead_step(aead, made, zeros, 16) &&
		    !aead_end(aead, made + 16) && !memcmp(made, expected, sizeof made);
	memcpy(bad, expected + 16, sizeof bad);
	bad[15] ^= 1;
	right = right && !aead_begin(aead, 1, zeros, zeros, NULL, 0) && !aead_step(aead, back, made, 16) &&
		!aead_end(aead, made + 16) && !memcmp(back, zeros, sizeof back);
	right = right && !aead_begin(aead, 1, NULL, zeros, NULL, 0) && !aead_step(aead, back, made, 16) &&
		aead_end(aead, bad) == -EBADMSG;
	aead_close(aead);
	return right;
}

/* Encrypts or decrypts a message in place, in steps of growing sizes; its tag follows it. */
static int move_in_steps(struct aead *aead, int decrypts, const uint8_t *key, uint8_t *message)
{
	int status = aead_begin(aead, decrypts, key, message + 7, message, 5);
	for (uint32_t at = 32, size = 1; !status && at < TRIAL_BYTES; at += size, size = 3 * size + 1) {
		size = size < TRIAL_BYTES - at ? size : TRIAL_BYTES - at;
		status = aead_step(aead, message + at, message + at, size);
	}
	return status ? status : aead_end(aead, message + TRIAL_BYTES);
}

/* Whether a library produces libcrypto's bytes and tag, and decrypts its own output. */
static int agrees(const struct gcm_library *library)
{
	uint8_t messages[2][TRIAL_BYTES + TK_AEAD_TAG], key[TK_AEAD_KEY];
	struct aead *one = open_with(&gcm_libcrypto), *other = open_with(library);
	for (uint32_t i = 0; i < TRIAL_BYTES; i++)
		messages[0][i] = messages[1][i] = (uint8_t)(i * i >> 3);
	memcpy(key, messages[0] + 100, sizeof key);
	int right = one && other && !move_in_steps(one, 0, key, messages[0]) && !move_in_steps(other, 0, key, messages[1]) &&
		    !memcmp(messages[0], messages[1], sizeof messages[0]);
	right = right && !move_in_steps(other, 1, key, messages[1]) && messages[1][TRIAL_BYTES - 1] == (uint8_t)((TRIAL_BYTES - 1) * (TRIAL_BYTES - 1) >> 3);
	aead_close(one);
	aead_close(other);
	return right;
}

static void find(void)
{
	const char *why = gcm_libcrypto.find();
	if (!why && !knows_the_vector(&gcm_libcrypto))
		why = "has no AES-256-GCM that works";
	if (why)
		snprintf(why_not, sizeof why_not, "%s %s", gcm_libcrypto.name, why);
	else if (!gcm_vaes.find() && knows_the_vector(&gcm_vaes) && agrees(&gcm_vaes))
		chosen = &gcm_vaes;
	else
		chosen = &gcm_libcrypto;
}

int tk_aead_load(char *message)
{
	pthread_once(&once, find);
	memcpy(message, why_not, sizeof why_not);
	if (chosen)
		snprintf(message, sizeof why_not, "%s", chosen->name);
	return chosen ? 0 : -ENOENT;
}

struct aead *aead_open(void)
{
	pthread_once(&once, find);
	return chosen ? open_with(chosen) : NULL;
}

void aead_close(struct aead *aead)
{
	if (!aead)
		return;
	aead->library->close(aead->stream);
	free(aead);
}

int aead_begin(struct aead *aead, int decrypts, const uint8_t *key, const uint8_t nonce[TK_AEAD_NONCE],
	       const void *associated, size_t length)
{
	aead->decrypts = decrypts;
	return aead->library->begin(aead->stream, decrypts, key, nonce, associated, length);
}

void aead_forget(struct aead *aead)
{
	static const uint8_t zeros[TK_AEAD_KEY];
	aead_begin(aead, aead->decrypts, zeros, zeros, NULL, 0);
}

int aead_step(struct aead *aead, void *to, const void *from, size_t length)
{
	return aead->library->step(aead->stream, aead->decrypts, to, from, length);
}

int aead_end(struct aead *aead, uint8_t tag[TK_AEAD_TAG])
{
	return aead->decrypts ? aead->library->check_tag(aead->stream, tag) : aead->library->give_tag(aead->stream, tag);
}

void wipe(void *secret, size_t length)
{
	explicit_bzero(secret, length);
}

/* Encrypts or decrypts a whole message. */
static int in_one(int decrypts, const struct tk_aead *of, const void *from, size_t length, void *to, uint8_t *tag)
{
	struct aead *aead = aead_open();
	if (!aead)
		return chosen ? -ENOMEM : -ENOENT;
	int status = aead_begin(aead, decrypts, of->key, of->nonce, (const void *)(uintptr_t)of->associated, of->associated_bytes);
	if (!status)
		status = aead_step(aead, to, from, length);
	if (!status)
		status = aead_end(aead, tag);
	aead_close(aead);
	if (status && decrypts)
		wipe(to, length);
	return status;
}

int tk_aead_encrypt(const struct tk_aead *of, const void *from, size_t length, void *to)
{
	return in_one(0, of, from, length, to, (uint8_t *)to + length);
}

int tk_aead_decrypt(const struct tk_aead *of, const void *from, size_t length, void *to)
{
	if (length < TK_AEAD_TAG)
		return -EBADMSG;
	uint8_t tag[TK_AEAD_TAG];
	memcpy(tag, (const uint8_t *)from + length - TK_AEAD_TAG, sizeof tag);
	return in_one(1, of, from, length - TK_AEAD_TAG, to, tag);
}

void tk_wipe(void *secret, size_t length)
{
	wipe(secret, length);
}
