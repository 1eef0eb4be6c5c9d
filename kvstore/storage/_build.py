"""Builds `kvstore.storage._uring`, the C wrapper of io_uring. Run as a program, it builds in place.

liburing is linked statically, so a wheel needs only a kernel on the target machine.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

__all__ = ["ffi"]

_SOURCE = Path(__file__).resolve().with_name("uring.c")

ffi = FFI()
ffi.cdef("""
    struct store_op { uint64_t kind, address, length, offset, tag; };
    struct store_done { uint64_t tag; int64_t result; };
    typedef struct store_ring store_ring;

    int store_ring_open(int file_fd, unsigned depth, store_ring **out);
    int store_ring_event_fd(const store_ring *r);
    int store_ring_depth_left(const store_ring *r);
    int store_ring_submit(store_ring *r, const struct store_op *ops, unsigned count);
    int store_ring_reap(store_ring *r, struct store_done *out, unsigned room);
    int store_ring_wait(store_ring *r);
    void store_ring_close(store_ring *r);
""")
ffi.set_source(
    "kvstore.storage._uring",
    "typedef struct store_ring store_ring;\n" + _SOURCE.read_text(encoding="utf-8"),
    depends=["kvstore/storage/uring.c"],
    extra_compile_args=[
        "-std=gnu11",
        "-Os",  # a wheel is small, and this is called from Python
        "-Wall",
        "-Wextra",
        "-fno-asynchronous-unwind-tables",
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=3",
    ],
    extra_link_args=["-l:liburing.a", "-Wl,--build-id=none,-z,relro,-z,now"],
    py_limited_api=True,
)

if __name__ == "__main__":
    import os

    os.chdir(_SOURCE.parents[2])
    ffi.compile(verbose=False)
