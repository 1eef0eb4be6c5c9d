"""A node's memory is in no core dump, and other processes of its user can't read it."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nic_offload.memory import allocate, populate, set_aside, undumped

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

TIMEOUT_S = 30
MIB = 1 << 20


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping at an address."""
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)[1:]:
        first, last = (int(end, 16) for end in part.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return set(part.rpartition("VmFlags:")[2].split())
    raise AssertionError(f"nothing is at {address:x}")


def test_memory_for_blocks_is_in_no_core_dump() -> None:
    with allocate(MIB) as whole, set_aside(4 * MIB) as part, undumped(MIB) as records:
        assert "dd" in flags_at(ctypes.addressof(ctypes.c_char.from_buffer(records)))
        populate(part, MIB, MIB)
        starts = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (whole, part)]
        assert "dd" in flags_at(starts[0])
        assert "dd" in flags_at(starts[1] + MIB)
        assert "dd" not in flags_at(starts[1])


def test_a_process_excluded_from_core_dumps_says_so() -> None:
    code = (
        "import ctypes, resource; from kvstore.node.core_dumps import keep_out_of_dumps; keep_out_of_dumps();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True
    )
    assert ran.stdout.split(maxsplit=1) == ["0", "(0, 0)\n"]


def test_a_node_excludes_itself_from_core_dumps(node: NodeProcess) -> None:
    limits = Path(f"/proc/{node.pid}/limits").read_text()
    assert re.search(r"Max core file size +0 +0 ", limits)
