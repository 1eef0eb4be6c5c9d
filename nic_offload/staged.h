/*
 * Memory in huge pages through which bytes go to a drive and come from it: a ring, given back in the order in which it was
 * taken. Drives move bytes from and to these up to half as fast again as with the small pages of shared memory.
 */
#ifndef TRIGGERKV_STAGED_H
#define TRIGGERKV_STAGED_H

#include <stdint.h>

struct staged {
	char *memory;
	uint32_t bytes, at, in_use; /* at: where the next part goes */
};

int staged_open(struct staged *staged, uint32_t bytes); /* the memory is there when it is used first */
void staged_close(struct staged *staged);
/* NULL: so much is not free now. `taken` is to be given back, what was left out before the memory's end included. */
char *staged_take(struct staged *staged, uint32_t size, uint32_t *taken);
void staged_give(struct staged *staged, uint32_t taken);

#endif
