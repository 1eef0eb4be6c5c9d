"""flag_kernel.cu as NVIDIA's compilers see it: it compiles, and the fence comes before the store.

No GPU is needed for this. NVRTC is what CuPy compiles it with where it runs; nvcc is looked for as well. Where
neither is installed the tests are skipped; docs/gpu.md says which wheels hold them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nic_offload.cuda import KERNEL_SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable

ARCHITECTURES = (75, 80, 90, 100, 120)  # the oldest that CUDA 13 knows, Ampere, Hopper, and the Blackwells

STORE = re.compile(r"st\.(?:volatile|relaxed\.sys|release\.sys|mmio\.relaxed\.sys)(?:\.global)?\.[bu]64\b")
FENCE = re.compile(r"(?:membar|fence(?:\.sc|\.acq_rel)?)\.sys;")


def _in_wheels(pattern: str) -> Path | None:
    """A file of the wheels nvidia-*: they share the package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob(pattern))), None)


def _nvcc(source: Path, architecture: int, tmp_path: Path) -> str:
    found = shutil.which("nvcc") or _in_wheels("**/bin/nvcc")
    if found is None:
        pytest.skip("there is no nvcc: neither on the PATH nor in a wheel nvidia-cuda-nvcc")
    # Machine code, not only PTX: ptxas has its say too.
    for kind, target in (("-cubin", f"sm_{architecture}"), ("-ptx", f"compute_{architecture}")):
        out = tmp_path / f"flag{kind}"
        done = subprocess.run(
            [found, kind, f"-arch={target}", "-Werror=all-warnings", "-o", out, source],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return out.read_text()


class _Nvrtc:
    """The few calls of NVRTC's C interface that make PTX of a text."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def compile(self, text: str, *options: str) -> str:
        call, program = self._library, ctypes.c_void_p()
        made = call.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"flag_kernel.cu", 0, None, None)
        assert made == 0
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = call.nvrtcCompileProgram(program, len(options), given)
            assert code == 0, self._text(program, "ProgramLog")
            return self._text(program, "PTX")
        finally:
            call.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        out = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, out) == 0
        return out.value.decode()


def _nvrtc(source: Path, architecture: int, _tmp_path: Path) -> str:
    found = _in_wheels("**/lib/libnvrtc.so.*")
    if found is None:
        pytest.skip("there is no NVRTC: no wheel nvidia-cuda-nvrtc")
    return _Nvrtc(found).compile(source.read_text(), "-std=c++17", f"-arch=compute_{architecture}")


def breaches(ptx: str) -> list[str]:
    """What is wrong with the kernels of a PTX text: each stores once to a word, right after a system's fence."""
    found: list[str] = []
    kernels = re.findall(r"\.entry (\w+)\(.*?\{(.*?)\n\}", ptx, re.DOTALL)
    if {name for name, _ in kernels} != {"tk_ring", "tk_ring_next"}:
        found.append(f"the kernels are {kernels}")
    for name, body in kernels:
        stores = [match.start() for match in STORE.finditer(body)]
        fences = [match.start() for match in FENCE.finditer(body)]
        if len(stores) != 1:
            found.append(f"{name} has {len(stores)} stores to a word")
        elif len(fences) != 1 or fences[0] > stores[0]:
            found.append(f"{name} has no fence of the system before its store")
        elif re.search(r"\b(?:st|red|atom)\.", body[fences[0] : stores[0]]):
            found.append(f"{name} stores something between its fence and its store")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compiler", [_nvcc, _nvrtc])
def test_the_fence_stands_before_the_store(
    compiler: Callable[[Path, int, Path], str], architecture: int, tmp_path: Path
) -> None:
    assert breaches(compiler(KERNEL_SOURCE, architecture, tmp_path)) == []


PLANTED = [
    (
        r"^\t__threadfence_system\(\);\n(.*\n)",
        r"\1\t__threadfence_system();\n",
        "no fence of the system before",
    ),
    (r"__threadfence_system", "__threadfence", "no fence of the system before"),
    (r"^\t__threadfence_system\(\);\n", "", "no fence of the system before"),
    (r"\*\(volatile unsigned long long \*\)\((.*?)\)", r"*(\1)", "0 stores to a word"),
    (r"^(\ttotals.*\n)(\t__thread.*\n)", r"\2\1", "between its fence and its store"),
]


@pytest.mark.parametrize(("pattern", "instead", "word"), PLANTED)
@pytest.mark.parametrize("compiler", [_nvcc, _nvrtc])
def test_a_kernel_that_fences_wrongly_is_caught(
    compiler: Callable[[Path, int, Path], str], pattern: str, instead: str, word: str, tmp_path: Path
) -> None:
    text, changed = re.subn(pattern, instead, KERNEL_SOURCE.read_text(), flags=re.MULTILINE)
    assert changed
    planted = tmp_path / "planted.cu"
    planted.write_text(text)
    assert any(word in breach for breach in breaches(compiler(planted, 90, tmp_path)))
