/* Allocation that reports failure, and the abort when an invariant is broken. */
#include "inside.h"

/* Makes room for this many items in an array, and some more; new ones are zero. Without memory nothing changes. */
int keep_grow(void **array, uint32_t *room, uint64_t wanted, size_t size)
{
	uint64_t more = wanted + wanted / 8 + 16;
	char *grown;

	if (wanted <= *room)
		return 0;
	if (more > UINT32_MAX)
		return -ENOMEM;
	grown = realloc(*array, more * size); /* large arrays are remapped, not copied */
	if (grown == NULL) {
		more = wanted;
		grown = realloc(*array, more * size);
	}
	if (grown == NULL)
		return -ENOMEM;
	memset(grown + *room * size, 0, (more - *room) * size);
	*array = grown;
	*room = (uint32_t)more;
	return 0;
}

/* The same with little spare room, for many small arrays. New items are not zero. */
int keep_grow_tightly(void **array, uint32_t *room, uint64_t wanted, size_t size)
{
	uint64_t more = wanted + wanted / 8 + 1;
	void *grown;

	if (wanted <= *room)
		return 0;
	grown = more > UINT32_MAX ? NULL : realloc(*array, more * size);
	if (grown == NULL)
		return -ENOMEM;
	*array = grown;
	*room = (uint32_t)more;
	return 0;
}

void keep_broken(const char *file, int line, const char *condition)
{
	fprintf(stderr, "triggerkv: %s:%d: `%s` does not hold; the node ends before it does harm.\n", file, line, condition);
	abort();
}
