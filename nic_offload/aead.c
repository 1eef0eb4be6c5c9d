/*
 * AES-256-GCM, of OpenSSL's libcrypto, which is looked up when it is needed first.
 *
 * What always holds: a library that doesn't reproduce a test vector of the GCM specification, or accepts a wrong tag, is
 * not used. Nonces are 12 bytes and tags 16.
 *
 * What it doesn't do: prevent the same nonce from being used twice with a key, or hide decrypted bytes before `aead_end`
 * has confirmed the tag. Both are the callers' duty.
 */
#define _GNU_SOURCE
#include "aead.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GET_TAG 0x10 /* EVP_CTRL_AEAD_GET_TAG */
#define SET_TAG 0x11 /* EVP_CTRL_AEAD_SET_TAG */
#define STEP_MAX (1u << 30) /* of one call: it counts bytes in an int */

static struct {
	void *(*fetch)(void *context, const char *name, const char *properties);
	void *(*ctx_new)(void);
	void (*ctx_free)(void *ctx);
	int (*init)(void *ctx, const void *cipher, const uint8_t *key, const uint8_t *nonce, int encrypts, const void *params);
	int (*update)(void *ctx, uint8_t *out, int *out_length, const uint8_t *in, int length);
	int (*final)(void *ctx, uint8_t *out, int *out_length);
	int (*ctrl)(void *ctx, int what, int length, void *data);
} crypto;
static void *cipher; /* NULL: there is none */
static char why_not[TK_AEAD_MESSAGE];
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct aead {
	void *ctx;
	int decrypts;
};

static struct aead *new_stream(void)
{
	struct aead *aead = calloc(1, sizeof *aead);
	if (aead && !(aead->ctx = crypto.ctx_new())) {
		free(aead);
		aead = NULL;
	}
	return aead;
}

/* The specification's test case 14: a key, a nonce and a block, all of zeros. */
static int is_right(void)
{
	static const uint8_t zeros[32],
		expected[32] = {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18,
				0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0, 0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
	uint8_t made[32], back[16], bad[16];
	struct aead *aead = new_stream();
	int right = aead && !aead_begin(aead, 0, zeros, zeros) && !aead_step(aead, made, zeros, 16) &&
		    !aead_end(aead, made + 16) && !memcmp(made, expected, sizeof made);
	memcpy(bad, expected + 16, sizeof bad);
	bad[15] ^= 1;
	right = right && !aead_begin(aead, 1, zeros, zeros) && !aead_step(aead, back, made, 16) &&
		!aead_end(aead, made + 16) && !memcmp(back, zeros, sizeof back);
	right = right && !aead_begin(aead, 1, zeros, zeros) && !aead_step(aead, back, made, 16) &&
		aead_end(aead, bad) == -EBADMSG;
	aead_close(aead);
	return right;
}

static void find(void)
{
	static const struct {
		const char *name;
		void **where;
	} wanted[] = {
		{"EVP_CIPHER_fetch", (void **)&crypto.fetch},	    {"EVP_CIPHER_CTX_new", (void **)&crypto.ctx_new},
		{"EVP_CIPHER_CTX_free", (void **)&crypto.ctx_free}, {"EVP_CipherInit_ex2", (void **)&crypto.init},
		{"EVP_CipherUpdate", (void **)&crypto.update},	    {"EVP_CipherFinal_ex", (void **)&crypto.final},
		{"EVP_CIPHER_CTX_ctrl", (void **)&crypto.ctrl},	   
	};
	void *library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		snprintf(why_not, sizeof why_not, "OpenSSL's libcrypto.so.3 could not be loaded");
		return;
	}
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
		if (!(*wanted[i].where = dlsym(library, wanted[i].name))) {
			snprintf(why_not, sizeof why_not, "OpenSSL's libcrypto.so.3 has no %s", wanted[i].name);
			return;
		}
	cipher = crypto.fetch(NULL, "AES-256-GCM", NULL);
	if (!cipher || !is_right()) {
		snprintf(why_not, sizeof why_not, "OpenSSL's libcrypto.so.3 has no AES-256-GCM that works");
		cipher = NULL;
	}
}

int tk_aead_load(char *message)
{
	pthread_once(&once, find);
	memcpy(message, why_not, sizeof why_not);
	return cipher ? 0 : -ENOENT;
}

struct aead *aead_open(void)
{
	pthread_once(&once, find);
	return cipher ? new_stream() : NULL;
}

void aead_close(struct aead *aead)
{
	if (!aead)
		return;
	crypto.ctx_free(aead->ctx); /* which wipes it */
	free(aead);
}

int aead_begin(struct aead *aead, int decrypts, const uint8_t *key, const uint8_t *nonce)
{
	aead->decrypts = decrypts;
	return crypto.init(aead->ctx, cipher, key, nonce, !decrypts, NULL) == 1 ? 0 : -EIO;
}

int aead_associate(struct aead *aead, const void *data, size_t length)
{
	int moved;
	return crypto.update(aead->ctx, NULL, &moved, data, (int)length) == 1 ? 0 : -EIO;
}

int aead_step(struct aead *aead, void *to, const void *from, size_t length)
{
	for (size_t at = 0; at < length;) {
		int part = length - at < STEP_MAX ? (int)(length - at) : (int)STEP_MAX, moved;
		if (crypto.update(aead->ctx, (uint8_t *)to + at, &moved, (const uint8_t *)from + at, part) != 1 || moved != part)
			return -EIO;
		at += (size_t)part;
	}
	return 0;
}

int aead_end(struct aead *aead, uint8_t *tag)
{
	uint8_t none[TK_AEAD_TAG];
	int moved;
	if (aead->decrypts) {
		if (crypto.ctrl(aead->ctx, SET_TAG, TK_AEAD_TAG, tag) != 1)
			return -EIO;
		return crypto.final(aead->ctx, none, &moved) == 1 ? 0 : -EBADMSG;
	}
	if (crypto.final(aead->ctx, none, &moved) != 1)
		return -EIO;
	return crypto.ctrl(aead->ctx, GET_TAG, TK_AEAD_TAG, tag) == 1 ? 0 : -EIO;
}

void wipe(void *secret, size_t length)
{
	explicit_bzero(secret, length);
}

/* All of a message at once. */
static int in_one(int decrypts, const struct tk_aead *of, const void *from, size_t length, void *to, uint8_t *tag)
{
	struct aead *aead = aead_open();
	if (!aead)
		return cipher ? -ENOMEM : -ENOENT;
	int status = aead_begin(aead, decrypts, of->key, of->nonce);
	if (!status)
		status = aead_associate(aead, (const void *)(uintptr_t)of->associated, of->associated_bytes);
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
