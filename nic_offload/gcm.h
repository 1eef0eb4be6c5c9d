/*
 * The libraries that AES-256-GCM can come from; aead.c chooses among them.
 */
#ifndef TRIGGERKV_GCM_H
#define TRIGGERKV_GCM_H

#include "core.h"

/* A stream begins with its associated data, gets its bytes in steps, and is ended. Each step returns 0 or a negative
 * errno. */
struct gcm_library {
	const char *name;
	const char *(*find)(void);  /* returns NULL, or why it can't be used. Called once, before all others */
	void *(*open)(void);	    /* NULL: no memory */
	void (*close)(void *stream); /* wipes it */
	int (*begin)(void *stream, int decrypts, const uint8_t *key, const uint8_t *nonce, const void *associated,
		     size_t length); /* a NULL key: that of the previous stream, in the same direction */
	int (*step)(void *stream, int decrypts, uint8_t *to, const uint8_t *from, size_t length);
	int (*give_tag)(void *stream, uint8_t *tag);
	int (*check_tag)(void *stream, const uint8_t *tag); /* -EBADMSG: it differs */
};

extern const struct gcm_library gcm_libcrypto, gcm_vaes;

#endif
