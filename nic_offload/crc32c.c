/*
 * CRC32C (Castagnoli), the checksum of every payload.
 *
 * It uses ISA-L if that library is installed (wide carry-less multiplications). Otherwise it uses the processor's CRC
 * instruction: three independent lanes hide its latency of three cycles, and their results are joined by shifting each
 * CRC over as many zeros as the later lanes have bytes. Without the instruction it uses a table, eight bytes at a time.
 * All three give the same value; a test compares them on random input. ISA-L is looked up once, and used only if it
 * computes the check value.
 */
#define _GNU_SOURCE
#include "core.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u
#define LANE_BYTES 2048u
#define ISAL_BYTES_MAX (1u << 30) /* per call: it counts bytes in an int */
#define CHECK_VALUE 0xe3069283u	  /* of the digits 1 to 9, as in RFC 3720 */

static uint32_t byte_table[8][256];
static uint32_t lane_shift[4][256]; /* what LANE_BYTES zeros do to each byte of a CRC */
static int has_instruction;
static uint32_t (*isal_crc32_iscsi)(const uint8_t *data, int length, uint32_t crc); /* NULL: not installed */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t table_bytes(uint32_t crc, const uint8_t *at, size_t length)
{
	while (length >= 8) {
		uint64_t word;
		memcpy(&word, at, 8);
		word ^= crc;
		crc = 0;
		for (int i = 0; i < 8; i++)
			crc ^= byte_table[7 - i][(word >> (8 * i)) & 0xff];
		at += 8;
		length -= 8;
	}
	while (length--)
		crc = (crc >> 8) ^ byte_table[0][(crc ^ *at++) & 0xff];
	return crc;
}

static void find_isal(void)
{
	void *library = dlopen("libisal.so.2", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return;
	*(void **)&isal_crc32_iscsi = dlsym(library, "crc32_iscsi");
	if (isal_crc32_iscsi && ~isal_crc32_iscsi((const uint8_t *)"123456789", 9, ~0u) != CHECK_VALUE)
		isal_crc32_iscsi = NULL;
}

static uint32_t isal_bytes(uint32_t crc, const uint8_t *at, size_t length)
{
	for (; length > ISAL_BYTES_MAX; length -= ISAL_BYTES_MAX, at += ISAL_BYTES_MAX)
		crc = isal_crc32_iscsi(at, ISAL_BYTES_MAX, crc);
	return isal_crc32_iscsi(at, (int)length, crc);
}

static void fill_tables(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t crc = i;
		for (int bit = 0; bit < 8; bit++)
			crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
		byte_table[0][i] = crc;
	}
	for (uint32_t i = 0; i < 256; i++)
		for (int slice = 1; slice < 8; slice++) {
			uint32_t before = byte_table[slice - 1][i];
			byte_table[slice][i] = (before >> 8) ^ byte_table[0][before & 0xff];
		}

	static const uint8_t zeros[LANE_BYTES];
	uint32_t of_bit[32];
	for (int bit = 0; bit < 32; bit++)
		of_bit[bit] = table_bytes(1u << bit, zeros, LANE_BYTES);
	for (int byte = 0; byte < 4; byte++)
		for (uint32_t i = 0; i < 256; i++)
			for (int bit = 0; bit < 8; bit++)
				if (i >> bit & 1)
					lane_shift[byte][i] ^= of_bit[8 * byte + bit];
#if defined(__x86_64__)
	has_instruction = __builtin_cpu_supports("sse4.2");
#elif defined(__ARM_FEATURE_CRC32)
	has_instruction = 1;
#endif
}

#if defined(__x86_64__) || defined(__ARM_FEATURE_CRC32)
#if defined(__x86_64__)
#define WITH_CRC __attribute__((target("sse4.2")))
#define STEP_8(crc, word) __builtin_ia32_crc32di(crc, word)
#define STEP_1(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), byte)
#else
#include <arm_acle.h>
#define WITH_CRC
#define STEP_8(crc, word) __crc32cd((uint32_t)(crc), word)
#define STEP_1(crc, byte) __crc32cb((uint32_t)(crc), byte)
#endif

static uint32_t over_a_lane_of_zeros(uint32_t crc)
{
	return lane_shift[0][crc & 0xff] ^ lane_shift[1][crc >> 8 & 0xff] ^ lane_shift[2][crc >> 16 & 0xff] ^
	       lane_shift[3][crc >> 24];
}

static uint64_t load_8(const uint8_t *at)
{
	uint64_t word;
	memcpy(&word, at, 8);
	return word;
}

WITH_CRC static uint32_t instruction_bytes(uint32_t crc, const uint8_t *at, size_t length)
{
	uint64_t a = crc;
	for (; length >= 3 * LANE_BYTES; length -= 3 * LANE_BYTES, at += 3 * LANE_BYTES) {
		uint64_t b = 0, c = 0;
		for (size_t i = 0; i < LANE_BYTES; i += 8) {
			a = STEP_8(a, load_8(at + i));
			b = STEP_8(b, load_8(at + LANE_BYTES + i));
			c = STEP_8(c, load_8(at + 2 * LANE_BYTES + i));
		}
		a = over_a_lane_of_zeros((uint32_t)a) ^ b;
		a = over_a_lane_of_zeros((uint32_t)a) ^ c;
	}
	for (; length >= 8; length -= 8, at += 8)
		a = STEP_8(a, load_8(at));
	for (; length; length--)
		a = STEP_1(a, *at++);
	return (uint32_t)a;
}
#else
#define instruction_bytes table_bytes
#endif

static void prepare(void)
{
	find_isal();
	fill_tables();
}

uint32_t tk_crc32c(const void *data, size_t length, uint32_t seed)
{
	pthread_once(&once, prepare);
	if (isal_crc32_iscsi)
		return ~isal_bytes(~seed, data, length);
	return tk_crc32c_own(data, length, seed);
}

uint32_t tk_crc32c_own(const void *data, size_t length, uint32_t seed)
{
	pthread_once(&once, prepare);
	return ~(has_instruction ? instruction_bytes(~seed, data, length) : table_bytes(~seed, data, length));
}

int tk_crc32c_is_isal(void)
{
	pthread_once(&once, prepare);
	return !!isal_crc32_iscsi;
}

uint32_t tk_crc32c_table(const void *data, size_t length, uint32_t seed)
{
	pthread_once(&once, prepare);
	return ~table_bytes(~seed, data, length);
}
