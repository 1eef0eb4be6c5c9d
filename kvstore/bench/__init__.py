"""Measures this machine: the bare fabric, the bare drive, its memory, and the product's path over them.

`kvstore bench` prints the results of `measure`, and `kvsim calibrate` reads them. The benchmarks in `tests/bench`,
which compare the product with its ceilings, use `bare` and `blocks` too.
"""
