"""Builds the C core (`nic_offload._core`) through cffi; the declarations are read from `core.h` itself."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

__all__ = ["ffi"]

_HERE = Path(__file__).parent
_HEADER = (_HERE / "core.h").read_text()
_DECLARATIONS = _HEADER.split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]

ffi = FFI()
ffi.cdef("struct tk_fabric; struct tk_endpoint; struct tk_region;\n" + _DECLARATIONS)
ffi.set_source(
    "nic_offload._core",
    '#include "core.h"',
    sources=["nic_offload/core.c", "nic_offload/fabric.c", "nic_offload/library.c", "nic_offload/crc32c.c"],
    depends=["nic_offload/core.h", "nic_offload/library.h", "nic_offload/fabric.h"],
    include_dirs=["nic_offload"],
    libraries=["pthread", "dl"],
    extra_compile_args=["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)
