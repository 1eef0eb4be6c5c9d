"""Decisions about room, in C, for one thread of the node: free extents, and the order of eviction.

`keep.h` says what always holds. Its users are `kvstore.storage.extents` and `kvstore.storage.eviction`.
"""
