"""Eviction without a drive: which blocks go when room is needed, or when they expire.

`evictor` is the core: it is told of changes to blocks and plans evictions, in an order that a `policy` keeps (`lru`,
`s3fifo`; `policies` has them by name). `chains` evicts sessions from their tails, `guards` protect blocks from
eviction, `wheel` lets them expire, `pressure` says when room is wanted. `ground` and `clearing` find contiguous room;
`removals` remembers what was removed, and why.

Nothing here does I/O, reads a clock or needs a library, so a simulator can replay a trace through the same objects.
"""
