"""The drive and what stands on it: disk, extents, index, recovery, store."""
