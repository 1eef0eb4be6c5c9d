/*
 * Memory in huge pages through which bytes go to a drive and come from it: a ring, released in the order in which it
 * was allocated. Drives are up to one and a half times as fast with huge pages as with the small pages of shared
 * memory.
 */
#ifndef TRIGGERKV_STAGED_H
#define TRIGGERKV_STAGED_H

#include <stdint.h>

struct staged {
	char *memory;
	uint32_t bytes, at, in_use; /* at: where the next part goes */
};

int staged_open(struct staged *staged, uint32_t bytes); /* the memory is allocated on first use */
void staged_close(struct staged *staged);
/* NULL: not enough is free now. `taken` is the size to release; it includes bytes skipped at the memory's end. */
char *staged_take(struct staged *staged, uint32_t size, uint32_t *taken);
void staged_give(struct staged *staged, uint32_t taken);

#endif
