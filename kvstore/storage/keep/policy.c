/* The policies' interface for `kvstore.storage.eviction` and a simulator, with checks that the core doesn't need. */
#include "inside.h"

int keep_policy_reserve(keep_policy *p, uint64_t rows)
{
	int error = rows <= p->rows ? 0 : p->kind->reserve(p, rows);

	if (error == 0 && rows > p->rows)
		p->rows = rows;
	return error;
}

void keep_policy_free(keep_policy *p)
{
	p->kind->free(p);
}

int keep_policy_admitted(keep_policy *p, uint32_t row, uint32_t pages, uint64_t name)
{
	int error = keep_policy_reserve(p, (uint64_t)row + 1);

	if (error == 0)
		p->kind->admitted(p, row, pages, name);
	return error;
}

int keep_policy_readmitted(keep_policy *p, uint32_t row, uint32_t pages)
{
	int error = keep_policy_reserve(p, (uint64_t)row + 1);

	if (error == 0)
		p->kind->readmitted(p, row, pages);
	return error;
}

int keep_policy_restored(keep_policy *p, const uint32_t *pages, uint64_t count)
{
	int error = keep_policy_reserve(p, count);

	for (uint64_t row = 0; error == 0 && row < count; row++)
		p->kind->restored(p, (uint32_t)row, pages[row]);
	return error;
}

int keep_policy_inherited(keep_policy *p, uint32_t row, uint32_t pages, uint32_t place)
{
	int error = place < p->rows ? keep_policy_reserve(p, (uint64_t)row + 1) : -EINVAL;

	if (error == 0)
		p->kind->inherited(p, row, pages, place);
	return error;
}

int keep_policy_touched(keep_policy *p, const uint32_t *rows, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		if (rows[i] >= p->rows)
			return -EINVAL;
		p->kind->touched(p, rows[i]);
	}
	return 0;
}

int keep_policy_removed(keep_policy *p, uint32_t row)
{
	if (row >= p->rows)
		return -EINVAL;
	p->kind->removed(p, row);
	return 0;
}

int keep_policy_evicted(keep_policy *p, uint32_t row, uint64_t name)
{
	if (row >= p->rows)
		return -EINVAL;
	p->kind->evicted(p, row, name);
	return 0;
}

/* The row to evict first; the same one until something changes. KEEP_NONE if there is none, or if the steps
 * are used up before one is found. */
int64_t keep_policy_candidate(keep_policy *p, int64_t *steps)
{
	return p->kind->candidate(p, steps);
}

uint64_t keep_policy_ghosts(const keep_policy *p)
{
	return p->kind->ghosts(p);
}
