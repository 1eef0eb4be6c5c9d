"""The storage engine: disk, extents, index, recovery, store."""
