"""Eviction without a drive: which blocks are evicted when room is needed, or removed when they expire.

`evictor` is the core: it gets all changes to blocks and plans evictions, in an order that a `policy` keeps (`lru`,
`s3fifo`; `policies` has them by name). Their work is done in C (`kvstore.storage.keep`). `pressure` says when room is
needed, `clearing` finds contiguous room, `removals` remembers what was removed, and why.

Nothing here does I/O, reads a clock or needs a library except that C code, so a simulator can replay a trace through
the same objects.
"""
