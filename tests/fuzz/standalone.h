/*
 * For a compiler without libFuzzer (-DSTANDALONE): a program that makes a fuzzer's inputs itself. It is included at the end
 * of a fuzzer, which defines before it how long an input is at most (RUN_BYTES_MAX), how long that of a run is
 * (`run_bytes`), and what it has counted (`counted`).
 */
#ifdef STANDALONE
#include <stdio.h>

/* So many inputs, the same each time; prints what was counted. */
int main(int count, char **arguments)
{
	static uint8_t data[RUN_BYTES_MAX];
	uint64_t state = 1, runs = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
	for (uint64_t run = 0; run < runs; run++) {
		for (size_t at = 0; at < sizeof data; at++) {
			state = state * 6364136223846793005u + 1442695040888963407u;
			data[at] = (uint8_t)(state >> 56);
		}
		LLVMFuzzerTestOneInput(data, run_bytes(state, run));
	}
	printf("%u\n", counted);
	return 0;
}
#endif
