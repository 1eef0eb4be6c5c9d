"""Page faults, which cost as much as a put: the core has the memory that puts touch before the first one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Block
from kvstore.durability import Durability
from tests.conftest import ClientWithBuffers, small_node

if TYPE_CHECKING:
    import pytest

BATCHES, BATCH, LENGTH = 20, 16, 4096
FAULTS_A_PUT_MAX = 0.2  # its heap grows now and then
WAIT_S = 20.0


def faults(pid: int) -> int:
    """Those of a node's progress thread so far, none of which read from a drive."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if thread.name != str(pid) and (thread / "comm").read_text() == "triggerkv\n":
            return int((thread / "stat").read_text().rpartition(")")[2].split()[7])
    raise AssertionError("it has no progress thread")


def test_a_put_finds_all_memory_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it is a node that allocates memory when it is used (`tests.warm_start`).
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with small_node(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)

        def put(batch: int) -> None:
            keys = [rig.key(batch * BATCH + i) for i in range(BATCH)]
            blocks = [Block(key, rig.from_region, i * LENGTH, LENGTH) for i, key in enumerate(keys)]
            rig.flags[0].store(0)
            puts = rig.client.arm(blocks, rig.flags[0], durability=Durability.WRITTEN)
            rig.flags[0].store(1)
            assert not any(one.error for one in puts.wait(WAIT_S))

        put(0)
        before = faults(node.pid)
        for batch in range(1, 1 + BATCHES):
            put(batch)
        assert faults(node.pid) - before < FAULTS_A_PUT_MAX * BATCHES * BATCH
        rig.close()
