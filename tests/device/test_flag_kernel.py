"""flag_kernel.cu compiled by NVRTC: each kernel has the right store, and the right fence. No GPU is needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from nic_offload.errors import CudaUnavailable
from nic_offload.nvrtc import KERNEL_SOURCE, _library, compiled

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = (75, 80, 90, 100, 120)  # the oldest that CUDA 13 knows, Ampere, Hopper, and the Blackwells
RELEASE, MMIO = "st.release.sys.global.u64", "st.mmio.relaxed.sys.global.u64"
STORE_OF = {"tk_ring": RELEASE, "tk_ring_next": RELEASE, "tk_ring_doorbell": MMIO}
FENCE = re.compile(r"fence\.(?:acq_rel|sc)\.sys;")
PLAIN = re.compile(r"st\.global\.[bu]64$")
WRITES = re.compile(r"\b((?:st|red|atom)\.[\w.]+)\s+\[(%\w+)\]")


def breaches(ptx: str) -> list[str]:
    """The defects in the kernels of a PTX text."""
    found: list[str] = []
    kernels = dict(re.findall(r"\.entry (\w+)\(.*?\{(.*?)\n\}", ptx, re.DOTALL))
    if kernels.keys() != STORE_OF.keys():
        found.append(f"the kernels are {sorted(kernels)}")
    if "volatile" in ptx:
        found.append("a volatile access")
    for name, body in kernels.items():
        # A total is the GPU's own; all else that a kernel writes is a word, and the last thing it does.
        plain: list[re.Match[str]] = []
        writes: list[re.Match[str]] = []
        for match in WRITES.finditer(body):
            (plain if PLAIN.match(match[1]) else writes).append(match)
        if [match[1] for match in writes] != [STORE_OF.get(name)]:
            found.append(f"{name} stores by {[match[1] for match in writes]}")
            continue
        if any(match.start() > writes[0].start() for match in WRITES.finditer(body)):
            found.append(f"{name} stores something after its word")
        fences = [match.start() for match in FENCE.finditer(body)]
        if writes[0][1] == MMIO and not (len(fences) == 1 and fences[0] < writes[0].start()):
            found.append(f"{name} has no fence of the system before its store")
        if len(plain) != (name == "tk_ring_next"):
            found.append(f"{name} has a plain store")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flags_are_released_and_doorbells_fenced(architecture: int) -> None:
    ptx, machine_code = compiled(architecture)
    assert breaches(ptx) == []
    assert machine_code.startswith(b"\x7fELF"), "the assembler takes it too"


FENCED = r"^\tasm volatile\(\"fence.*\n"
PLANTED = {
    "a doorbell without a fence": (FENCED, "", "no fence of the system before"),
    "a fence of the GPU only": (r"fence\.acq_rel\.sys", "fence.acq_rel.gpu", "no fence of the system before"),
    "a fence behind the store": (rf"({FENCED})((?:.*\n){{2}})", r"\2\1", "no fence of the system before"),
    "a relaxed flag": (r"st\.release\.sys", "st.relaxed.sys", "tk_ring_next stores by"),
    "a flag released to the GPU only": (r"st\.release\.sys", "st.release.gpu", "tk_ring stores by"),
    "a volatile flag": (r"st\.release\.sys", "st.volatile", "a volatile access"),
    "a plain flag": (r"^\tasm volatile\(\"st.release.*\n", "\t*word = value;\n", "tk_ring stores by"),
    "a doorbell that is ordinary memory": (r"st\.mmio\.relaxed", "st.relaxed", "tk_ring_doorbell stores by"),
    "a plain doorbell": (
        r"^\tasm volatile\(\"st.mmio.*\n.*\n",
        "\t*doorbell = step;\n",
        "tk_ring_doorbell stores by",
    ),
    "a total that is counted on too late": (
        r"^(\ttotals.*\n)(\trelease.*\n)",
        r"\2\1",
        "stores something after its word",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_kernel_that_stores_incorrectly_is_detected(name: str, tmp_path: Path) -> None:
    pattern, instead, word = PLANTED[name]
    text, changed = re.subn(pattern, instead, KERNEL_SOURCE.read_text(), flags=re.MULTILINE)
    assert changed
    planted = tmp_path / "planted.cu"
    planted.write_text(text)
    assert any(word in breach for breach in breaches(compiled(90, planted).ptx))


def test_the_error_has_the_compilers_message(tmp_path: Path) -> None:
    planted = tmp_path / "planted.cu"
    planted.write_text("this is no kernel")
    with pytest.raises(CudaUnavailable, match=r"did not compile planted.cu for sm_90 .*error"):
        compiled(90, planted)


def test_a_missing_compiler_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nic_offload.nvrtc._path", lambda: None)
    monkeypatch.setattr("nic_offload.nvrtc._library", _library.__wrapped__)
    with pytest.raises(CudaUnavailable, match="install the package's extra 'cuda'"):
        compiled.__wrapped__(90)
