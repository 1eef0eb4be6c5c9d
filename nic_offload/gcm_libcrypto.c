/*
 * AES-256-GCM from OpenSSL's libcrypto.
 */
#define _GNU_SOURCE
#include "gcm.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#define GET_TAG 0x10 /* EVP_CTRL_AEAD_GET_TAG */
#define SET_TAG 0x11 /* EVP_CTRL_AEAD_SET_TAG */
#define STEP_MAX (1u << 30) /* per call: it counts bytes in an int */

static struct {
	void *(*fetch)(void *context, const char *name, const char *properties);
	void *(*ctx_new)(void);
	void (*ctx_free)(void *ctx);
	int (*init)(void *ctx, const void *cipher, const uint8_t *key, const uint8_t *nonce, int encrypts, const void *params);
	int (*update)(void *ctx, uint8_t *out, int *out_length, const uint8_t *in, int length);
	int (*final)(void *ctx, uint8_t *out, int *out_length);
	int (*ctrl)(void *ctx, int what, int length, void *data);
} crypto;
static void *cipher;

static const char *find(void)
{
	static char lacks[64];
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
	if (!library)
		return "could not be loaded";
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
		if (!(*wanted[i].where = dlsym(library, wanted[i].name))) {
			snprintf(lacks, sizeof lacks, "has no %s", wanted[i].name);
			return lacks;
		}
	cipher = crypto.fetch(NULL, "AES-256-GCM", NULL);
	return cipher ? NULL : "has no AES-256-GCM";
}

static void *open_stream(void)
{
	return crypto.ctx_new();
}

static void close_stream(void *stream)
{
	crypto.ctx_free(stream);
}

static int step(void *stream, int decrypts, uint8_t *to, const uint8_t *from, size_t length)
{
	(void)decrypts;
	for (size_t at = 0; at < length;) {
		int part = length - at < STEP_MAX ? (int)(length - at) : (int)STEP_MAX, moved;
		if (crypto.update(stream, to ? to + at : NULL, &moved, from + at, part) != 1 || moved != part)
			return -EIO;
		at += (size_t)part;
	}
	return 0;
}

static int begin(void *stream, int decrypts, const uint8_t *key, const uint8_t *nonce, const void *associated, size_t length)
{
	if (crypto.init(stream, key ? cipher : NULL, key, nonce, !decrypts, NULL) != 1)
		return -EIO;
	return step(stream, decrypts, NULL, associated, length);
}

static int give_tag(void *stream, uint8_t *tag)
{
	uint8_t none[TK_AEAD_TAG];
	int moved;
	if (crypto.final(stream, none, &moved) != 1)
		return -EIO;
	return crypto.ctrl(stream, GET_TAG, TK_AEAD_TAG, tag) == 1 ? 0 : -EIO;
}

static int check_tag(void *stream, const uint8_t *tag)
{
	uint8_t none[TK_AEAD_TAG];
	int moved;
	if (crypto.ctrl(stream, SET_TAG, TK_AEAD_TAG, (void *)(uintptr_t)tag) != 1)
		return -EIO;
	return crypto.final(stream, none, &moved) == 1 ? 0 : -EBADMSG;
}

const struct gcm_library gcm_libcrypto = {
	.name = "OpenSSL's libcrypto.so.3",
	.find = find,
	.open = open_stream,
	.close = close_stream,
	.begin = begin,
	.step = step,
	.give_tag = give_tag,
	.check_tag = check_tag,
};
