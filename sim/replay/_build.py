"""Builds `sim.replay._events`, the discrete-event core. Run as a program, it does so in place."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

__all__ = ["ffi"]

_HERE = Path(__file__).resolve().parent
_HEADER = (_HERE / "events.h").read_text(encoding="utf-8")

ffi = FFI()
# The header is plain enough for cffi once its preprocessor lines and comments are out.
ffi.cdef(re.sub(r"/\*.*?\*/|^#.*?$", "", _HEADER, flags=re.DOTALL | re.MULTILINE))
ffi.set_source(
    "sim.replay._events",
    '#include "events.h"',
    sources=[f"sim/replay/{name}.c" for name in ("events", "resources", "scatter")],
    include_dirs=["sim/replay"],
    depends=["sim/replay/events.h", "sim/replay/events_inside.h"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
    libraries=["m"],
    py_limited_api=True,
)

if __name__ == "__main__":
    import os

    os.chdir(_HERE.parents[1])
    ffi.compile(verbose=False)
