"""Eviction without a drive: what goes when room is needed or its time is over.

`evictor` is the core: it hears of changes to blocks and plans evictions, in an order that a `policy` keeps (`lru`,
`s3fifo`; `policies` knows them by name). `chains` lets sessions go from their tails, `guards` keep blocks from going,
`wheel` lets them expire, `pressure` says when room is wanted. `ground` and `clearing` find room that lies together;
`removals` remembers what was removed, and why.

Nothing here does I/O, looks at a clock or needs a library, so a simulator can replay a trace through the same objects.
"""
