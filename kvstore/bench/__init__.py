"""What this machine gives: the bare fabric, the bare drive, its memory, and the path of the product over them.

`kvstore bench` prints what `parts` and `path` measure; `kvsim calibrate` reads that. The benchmarks in `tests/bench`,
which hold the product against its ceilings, stand on `bare` and `blocks` too.
"""
