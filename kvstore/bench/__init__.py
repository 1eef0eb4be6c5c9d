"""Measures this machine: the bare fabric, the bare drive, its memory, and the product's path over them.

`kvstore bench` prints the results of `measure`, and `kvsim calibrate` reads them. The benchmarks in `benchmarks/`,
which compare the product with its ceilings, use `bare` and `path_blocks` too.
"""
