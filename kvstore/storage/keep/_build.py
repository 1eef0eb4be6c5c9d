"""Builds `kvstore.storage.keep._keep` with cffi, which reads the declarations from its public header."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

__all__ = ["ffi"]

_HERE = Path(__file__).resolve().parent
_HEADERS = ("keep.h", "blocks.h", "hot.h")
_DECLARATIONS = "".join(
    (_HERE / name).read_text().split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]
    for name in _HEADERS
)
_PARTS = (
    "blocks",
    "blocks_change",
    "blocks_file",
    "blocks_load",
    "chains",
    "core",
    "core_removals",
    "core_guards",
    "core_sessions",
    "extents",
    "history",
    "hot",
    "hot_room",
    "lru",
    "map",
    "memory",
    "owners",
    "policy",
    "rings",
    "runs",
    "s3fifo",
    "wheel",
)

ffi = FFI()
ffi.cdef(_DECLARATIONS)
ffi.set_source(
    "kvstore.storage.keep._keep",
    "".join(f'#include "{name}"\n' for name in _HEADERS),
    sources=[*(f"kvstore/storage/keep/{name}.c" for name in _PARTS), "nic_offload/siphash.c"],
    depends=[
        *(
            f"kvstore/storage/keep/{name}"
            for name in (*_HEADERS, "inside.h", "blocks_inside.h", "hot_inside.h")
        ),
        "nic_offload/siphash.h",
    ],
    include_dirs=["kvstore/storage/keep", "nic_offload"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-falign-functions=1",  # a wheel is at most 1 MiB
        "-falign-jumps=1",
        "-falign-loops=1",
        "-falign-labels=1",
        "-g",
        "-Wall",
        "-Wextra",
        "-fvisibility=hidden",
        "-fno-asynchronous-unwind-tables",  # nothing is thrown; a debugger has its own with -g
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=3",
    ],
    extra_link_args=["-Wl,--build-id=none,-z,relro,-z,now"],
    py_limited_api=True,
)
