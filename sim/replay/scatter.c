/* The drives of the pages of blocks; see events_scatter. */
#include "events.h"

enum { LOT_SHIFT = 51 };

/* A step of splitmix64: every bit of the result depends on every bit of the number. */
static uint64_t mixed(uint64_t number)
{
	number += UINT64_C(0x9e3779b97f4a7c15);
	number = (number ^ number >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	number = (number ^ number >> 27) * UINT64_C(0x94d049bb133111eb);
	return number ^ number >> 31;
}

void events_scatter(const int64_t *blocks, int64_t count, int64_t layers, int64_t parts, int64_t ranks,
		    const int32_t *home_of_lot, int64_t drives, int64_t *counts)
{
	int64_t i, layer, rank;

	for (i = 0; i < count; i++) {
		uint64_t block = mixed((uint64_t)blocks[i]);

		for (layer = 0; layer < layers; layer++)
			for (rank = 0; rank < ranks; rank++) {
				uint64_t page = mixed(block ^ (uint64_t)(layer * ranks + rank));
				int64_t part = layer * parts / layers;

				counts[(part * ranks + rank) * drives + home_of_lot[page >> LOT_SHIFT]]++;
			}
	}
}
