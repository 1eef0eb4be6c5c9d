"""What one thread of the node decides about room, in C: free extents, and the order in which blocks go.

`keep.h` says what the C holds to. Its users are `kvstore.storage.extents` and `kvstore.storage.eviction`.
"""
