/* What the C files of this folder share among themselves. */
#ifndef KEEP_INSIDE_H
#define KEEP_INSIDE_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "keep.h"

/* In every build. A bug ends the node before it reaches a drive; what is on the drive is the truth. */
#define keep_assert(condition) ((condition) ? (void)0 : keep_broken(__FILE__, __LINE__, #condition))

__attribute__((noreturn, cold)) void keep_broken(const char *file, int line, const char *condition);
int keep_grow(void **array, uint32_t *room, uint64_t wanted, size_t size);

/* runs.c */

enum { KEEP_RUN_ITEMS = 256, KEEP_SPARES_MAX = 2 };

struct keep_item {
	uint64_t a, b, c; /* ordered by a, then by b */
};

struct keep_run {
	uint32_t count;
	struct keep_item items[KEEP_RUN_ITEMS];
};

struct keep_top {
	uint64_t a, b; /* of the run's first item */
	struct keep_run *run;
};

struct keep_runs {
	struct keep_top *tops;
	uint32_t count, room;
	uint64_t items;
	struct keep_run *spares[KEEP_SPARES_MAX];
	uint32_t spare_count;
};

struct keep_place {
	uint32_t run, at;
};

void keep_runs_free(struct keep_runs *runs);
int keep_runs_reserve(struct keep_runs *runs, unsigned insertions);
struct keep_place keep_runs_find(const struct keep_runs *runs, uint64_t a, uint64_t b);
struct keep_item *keep_runs_at(const struct keep_runs *runs, struct keep_place place);
struct keep_place keep_runs_next(const struct keep_runs *runs, struct keep_place place);
int keep_runs_before(const struct keep_runs *runs, struct keep_place *place);
void keep_runs_changed(struct keep_runs *runs, struct keep_place place);
void keep_runs_insert(struct keep_runs *runs, struct keep_item item);
void keep_runs_remove(struct keep_runs *runs, struct keep_place place);

#endif
