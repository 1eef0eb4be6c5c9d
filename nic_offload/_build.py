"""Builds the C core (`nic_offload._core`) with cffi, which reads the declarations from its public headers."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

__all__ = ["ffi"]

_HERE = Path(__file__).parent
_DECLARATIONS = "".join(
    (_HERE / name).read_text().split("/* cdef begin */", 1)[1].split("/* cdef end */", 1)[0]
    for name in ("records.h", "operations.h", "core.h", "attached.h", "cold.h")
)

_HANDLES = (
    "fabric",
    "endpoint",
    "region",
    "caller",
    "counter",
    "group",
    "shelf",
    "desk",
    "direct",
    "sender",
    "receiver",
    "lane",
    "reader",
    "pieces",
    "vault",
    "decryption",
)
_PARTS = (
    "aead",
    "atomic_words",
    "blake2b",
    "block_copy",
    "caller",
    "caller_places",
    "commands",
    "core",
    "counter",
    "counter_handles",
    "crc32c",
    "desk",
    "desk_cold",
    "desk_log",
    "desk_where",
    "direct",
    "directory",
    "domains",
    "drive_ring",
    "fabric",
    "gcm_libcrypto",
    "gcm_vaes",
    "group",
    "handles",
    "header_pages",
    "idle",
    "in_process",
    "in_process_rma",
    "inbox",
    "lane",
    "lane_open",
    "lane_writes",
    "library",
    "memory",
    "names",
    "nic",
    "nic_flush",
    "nic_probe",
    "nic_submit",
    "pieces",
    "posting",
    "puts",
    "reader",
    "reader_pieces",
    "receiver",
    "receiver_puts",
    "record_encryption",
    "rounds",
    "seal",
    "secrets",
    "sender",
    "shared",
    "shared_puts",
    "shared_reads",
    "shelf",
    "siphash",
    "staged",
    "streams",
    "turn",
    "vault",
    "watch",
    "words",
    "work",
    "wrapped_keys",
)

ffi = FFI()
ffi.cdef("".join(f"struct tk_{name};\n" for name in _HANDLES) + _DECLARATIONS)
ffi.set_source(
    "nic_offload._core",
    '#include "core.h"\n#include "cold.h"',
    sources=[f"nic_offload/{name}.c" for name in _PARTS],
    depends=[str(header.relative_to(_HERE.parent)) for header in sorted(_HERE.glob("*.h"))],
    include_dirs=["nic_offload"],
    libraries=["pthread", "dl"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-fno-inline-small-functions",  # a wheel is at most 1 MiB, and nothing is measurably slower
        "-falign-functions=1",
        "-falign-jumps=1",
        "-falign-loops=1",
        "-falign-labels=1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-fvisibility=hidden",
        "-ffunction-sections",
        "-fno-asynchronous-unwind-tables",  # nothing is thrown; a debugger has its own with -g
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=3",
    ],
    extra_link_args=["-l:liburing.a", "-Wl,--build-id=none,-z,relro,-z,now,--exclude-libs,ALL,--gc-sections"],
)
