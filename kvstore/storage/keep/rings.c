/* Doubly linked rings in one array, 8 bytes per node. The owner decides which nodes are heads. */
#include "inside.h"

int keep_rings_reach(struct keep_rings *rings, uint64_t nodes)
{
	uint32_t had = rings->room;
	int error = keep_grow((void **)&rings->links, &rings->room, nodes, sizeof *rings->links);

	for (uint32_t node = had; node < rings->room; node++)
		rings->links[node] = (struct keep_link){node, node};
	return error;
}

/* Whether a node is in a ring; the node may not exist. */
int keep_rings_is_linked(const struct keep_rings *rings, uint32_t node)
{
	return node < rings->room && rings->links[node].after != node;
}

/* Inserts a free node before another one; before a head means at the end of its ring. */
void keep_rings_push(struct keep_rings *rings, uint32_t head, uint32_t node)
{
	struct keep_link *links = rings->links;
	uint32_t last = links[head].before;

	keep_assert(node < rings->room && links[node].after == node && node != head);
	links[last].after = links[head].before = node;
	links[node] = (struct keep_link){head, last};
}

/* Removes a node from its ring, if it is in one. */
void keep_rings_unlink(struct keep_rings *rings, uint32_t node)
{
	struct keep_link *links = rings->links, link = links[node];

	links[link.before].after = link.after;
	links[link.after].before = link.before;
	links[node] = (struct keep_link){node, node};
}

/* Appends all nodes of one ring to another one. */
void keep_rings_move_all(struct keep_rings *rings, uint32_t source, uint32_t target)
{
	struct keep_link *links = rings->links, from = links[source];
	uint32_t end = links[target].before;

	if (from.after == source)
		return;
	links[end].after = from.after;
	links[from.after].before = end;
	links[from.before].after = target;
	links[target].before = from.before;
	links[source] = (struct keep_link){source, source};
}
