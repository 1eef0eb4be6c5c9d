"""NVIDIA's run-time compiler: the kernels of `flag_kernel.cu` as PTX and machine code.

PyTorch for CUDA brings the compiler, as does `triggerkv[cuda]`.

What always holds: importing this needs neither a GPU nor the compiler; `compiled` says in one sentence what is missing,
or what the compiler reported. A source is compiled once per process for each architecture.

What it doesn't do: load or launch anything.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nic_offload.errors import CudaUnavailable

__all__ = ["KERNEL_SOURCE", "Compiled", "compiled"]

KERNEL_SOURCE = Path(__file__).with_name("flag_kernel.cu")


class Compiled(NamedTuple):
    """The kernels for GPUs of one compute capability."""

    ptx: str
    machine_code: bytes  # a driver older than the compiler can load it, but perhaps not the PTX


def _path() -> str | None:
    """Where the compiler is: in one of NVIDIA's wheels, which share the package `nvidia`, or the system's."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("**/lib/libnvrtc.so.*[0-9]")):
            return str(path)
    return ctypes.util.find_library("nvrtc")


@cache
def _library() -> ctypes.CDLL:
    path = _path()
    if path is None:
        raise CudaUnavailable(
            "The kernels that ring flags need NVRTC, which is not installed: install the package's extra 'cuda'."
        )
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise CudaUnavailable(f"NVRTC at {path} could not be loaded: {error}.") from error


@cache
def compiled(architecture: int, source: Path = KERNEL_SOURCE) -> Compiled:
    """Compile the kernels for a compute capability, such as 90."""
    library, program = _library(), ctypes.c_void_p()
    text = source.read_text().encode()
    if code := library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None):
        raise CudaUnavailable(f"NVRTC could not create a program ({code}).")
    try:
        options = (ctypes.c_char_p * 2)(b"-std=c++17", b"-arch=sm_%d" % architecture)
        if code := library.nvrtcCompileProgram(program, len(options), options):
            said = " ".join(_output(library, program, "ProgramLog").decode(errors="replace").split())
            raise CudaUnavailable(
                f"NVRTC did not compile {source.name} for sm_{architecture} ({code}): {said}"
            )
        ptx = _output(library, program, "PTX").rstrip(b"\0").decode()
        return Compiled(ptx, _output(library, program, "CUBIN"))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    code = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    out = ctypes.create_string_buffer(max(1, size.value))
    if code or getattr(library, f"nvrtcGet{what}")(program, out):
        raise CudaUnavailable(f"NVRTC returned no {what}.")
    return out.raw
