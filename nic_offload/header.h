/*
 * The start of a record on a drive, for lanes (which write it) and readers.
 */
#ifndef TRIGGERKV_HEADER_H
#define TRIGGERKV_HEADER_H

#include "core.h"

/* The part of a record's header that its tag covers: docs/record-format.md. */
struct header_fixed {
	uint8_t magic[8];
	uint16_t version, kind;
	uint32_t length;
	uint8_t key[TK_KEY_BYTES];
	uint8_t owner[TK_OWNER_BYTES];
	uint8_t fingerprint[TK_FINGERPRINT_BYTES];
	uint64_t generation, expires_ms;
	uint32_t crc32c, zeros;
};
_Static_assert(sizeof(struct header_fixed) == TK_TAGGED_FIXED, "a header is what its tag covers, and the tag");

#endif
