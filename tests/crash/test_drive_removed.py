"""A drive is removed from a node's folder while the node is killed, end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import NodeUnavailable
from kvstore.miss import Miss, MissReason
from tests.conftest import ClientWithBuffers

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Block

BLOCKS = 16
WAIT_S = 30.0


def put(rig: ClientWithBuffers, blocks: list[Block]) -> None:
    rig.flags[0].store(0)
    puts = rig.client.arm(blocks, rig.flags[0])
    rig.flags[0].store(BLOCKS)
    assert all(result.error is None for result in puts.wait(WAIT_S))


def got(rig: ClientWithBuffers, blocks: list[Block]) -> list[Hit | Miss]:
    """The outcomes of a get of all blocks, with every hit exact."""
    outcomes = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
    for block, outcome in zip(blocks, outcomes, strict=True):
        assert isinstance(outcome, Miss) or rig.is_exact(block)
    return outcomes


def test_a_removed_drive_affects_only_its_own_blocks(tmp_path: Path) -> None:
    drives = [tmp_path / "a.kv", tmp_path / "b.kv"]
    node = NodeProcess(
        tmp_path / "node", arguments=[word for drive in drives for word in ("--drive", f"{drive}:64MiB")]
    )
    try:
        rig = ClientWithBuffers(node)
        blocks = [rig.block(number) for number in range(BLOCKS)]
        put(rig, blocks)
        each = [drive.blocks for drive in rig.client.status().drives]
        assert sum(each) == BLOCKS
        assert all(each), "of 16 blocks, some are on each"
        node.kill()
        drives[1].rename(tmp_path / "taken")
        node.arguments = []
        with pytest.raises(NodeUnavailable, match=r"Drive 1 cannot be used.*--without-drive 1"):
            node.start()
        node.arguments = ["--without-drive", "1"]
        node.start()
        status = rig.client.status(wait_s=WAIT_S)
        assert [(drive.number, drive.takes_puts) for drive in status.drives] == [(0, True), (1, False)]
        assert "left out" in status.drives[1].failure
        outcomes = got(rig, blocks)
        assert sum(isinstance(one, Hit) for one in outcomes) == each[0]
        assert {one.reason for one in outcomes if isinstance(one, Miss)} == {MissReason.UNKNOWN}
        missing = [block for block, one in zip(blocks, outcomes, strict=True) if isinstance(one, Miss)]
        put(rig, missing[:1])
        node.kill()
        (tmp_path / "taken").rename(drives[1])
        node.arguments = []
        node.start()
        status = rig.client.status(wait_s=WAIT_S)
        assert [drive.takes_puts for drive in status.drives] == [True, True]
        assert [drive.blocks for drive in status.drives] == [each[0] + 1, 0], "it comes back empty"
        assert sum(isinstance(one, Hit) for one in got(rig, blocks)) == each[0] + 1
        rig.close()
    finally:
        node.kill()
