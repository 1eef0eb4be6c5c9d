/*
 * Authenticated encryption of streams: AES-256-GCM of libcrypto.
 */
#ifndef TRIGGERKV_AEAD_H
#define TRIGGERKV_AEAD_H

#include "core.h"

struct aead; /* one stream at a time; one thread's */

struct aead *aead_open(void); /* NULL: there is no libcrypto, or no memory */
void aead_close(struct aead *aead);
/* Each gives 0 or a negative errno. A stream is begun, given its associated data and then its bytes in steps, and ended. */
int aead_begin(struct aead *aead, int decrypts, const uint8_t key[TK_AEAD_KEY], const uint8_t nonce[TK_AEAD_NONCE]);
int aead_associate(struct aead *aead, const void *data, size_t length);
int aead_step(struct aead *aead, void *to, const void *from, size_t length); /* `to` may be `from` */
int aead_end(struct aead *aead, uint8_t tag[TK_AEAD_TAG]); /* gives the tag, or compares with it; -EBADMSG: it differs */
void wipe(void *secret, size_t length);

#endif
