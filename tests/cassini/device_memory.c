/*
 * Memory of a device, as a test's device has it: shared memory that this process has mapped twice, once without any
 * access, which is the device's address, and once for the device itself. The NIC reaches it through the second mapping,
 * as a real one does through dmabuf; a CPU that touches the device's address crashes.
 */
#include "cassini.h"

#include <stdio.h>
#include <string.h>

struct mapping {
	unsigned long start, end, offset, inode;
	char access[8], device[16];
};

static int next_mapping(FILE *maps, struct mapping *out)
{
	char line[512];
	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx %7s %lx %15s %lu", &out->start, &out->end, out->access, &out->offset,
			   out->device, &out->inode) == 6)
			return 1;
	return 0;
}

static int is_same_file(const struct mapping *one, const struct mapping *other)
{
	return one->inode == other->inode && !strcmp(one->device, other->device);
}

/* The same bytes where the NIC can reach them. NULL: it is no device's memory. */
void *device_memory(const void *address, size_t length)
{
	unsigned long at = (unsigned long)address;
	struct mapping of_device = {0}, other;
	void *found = NULL;
	FILE *maps = fopen("/proc/self/maps", "re");
	if (!maps)
		return NULL;
	while (next_mapping(maps, &other))
		if (other.start <= at && at + length <= other.end && !strcmp(other.access, "---s"))
			of_device = other;
	rewind(maps);
	unsigned long place = of_device.offset + (at - of_device.start);
	while (of_device.inode && !found && next_mapping(maps, &other))
		if (is_same_file(&of_device, &other) && !strncmp(other.access, "rw", 2) && other.offset <= place &&
		    place + length <= other.offset + (other.end - other.start))
			found = (void *)(other.start + (place - other.offset));
	fclose(maps);
	return found;
}
