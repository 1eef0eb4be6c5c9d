"""A bug in handling a drive's event ends the process, and the next one has all acknowledged blocks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from kvcli.running import Status
from kvstore.client import Block, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import Overloaded
from kvstore.names import block_key
from kvstore.node import fail_stop
from kvstore.node.fail_stop import or_stop
from nic_offload.memory import allocate
from tests.conftest import SMALL_DRIVE, SMALL_HOT, small_client

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
BUGGY = """
import sys, time
from kvstore.cli import main
from kvstore.node.lane_blocks import LaneBlocks
take = LaneBlocks.take
def buggy(self, drive, rows):
    if self._node.counters.landed:
        time.sleep(2)  # the C core goes on meanwhile
        raise AssertionError("planted")
    return take(self, drive, rows)
LaneBlocks.take = buggy
sys.exit(main(sys.argv[1:]))
"""


class Buggy(NodeProcess):
    """A node with a bug after a write, which is fixed in its second life."""

    def start(self) -> None:
        plain = self._command
        if not self._log.exists():
            self._command = [sys.executable, "-c", BUGGY, *plain[3:]]
        super().start()
        self._command = plain


def test_acknowledged_blocks_survive_a_bug_that_ends_the_node(tmp_path: Path) -> None:
    keys = [block_key(b"before a bug", bytes([at])) for at in range(16)]
    node = Buggy(tmp_path / "node", capacity=SMALL_DRIVE, arguments=("--hot", SMALL_HOT))
    try:
        with small_client(node.target) as client:
            memory = allocate(len(keys) * PAGE)
            region = client.register(memory)
            memory[:] = b"".join(key * (PAGE // len(key)) for key in keys)
            blocks = [Block(key, region, at * PAGE, PAGE) for at, key in enumerate(keys)]
            (first,) = client.put(blocks[:1])
            assert first.error is None
            assert client.exists(keys[:1])  # Python has heard of it
            ended = client.put(blocks[1:], durability=Durability.WRITTEN)
            kept = [block for block, one in zip(blocks[1:], ended, strict=True) if one.error is None]
        assert kept, "the C core acknowledges before Python hears of it"
        process = node._process
        assert process is not None
        assert process.wait(20) == Status.BUG
        assert "A bug: the node stops" in node.log()
        assert "AssertionError: planted" in node.log()
        node.kill()
        node.start()
        with small_client(node.target) as client:
            memory = allocate(len(keys) * PAGE)
            region = client.register(memory)
            found = client.get([Block(one.key, region, one.offset, PAGE) for one in kept])
            assert all(isinstance(one, Hit) for one in found)
            for one in kept:
                assert memory[one.offset : one.offset + PAGE] == one.key * (PAGE // len(one.key))
    finally:
        node.stop()


def test_an_expected_error_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fail_stop, "_armed", True)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"it ended with {status}"))

    def fail() -> None:
        raise Overloaded("The fabric takes nothing more.")

    with pytest.raises(Overloaded):
        or_stop(fail)()


def test_before_the_node_is_armed_a_bug_is_raised() -> None:
    def fail(why: str) -> None:
        raise ValueError(why)

    with pytest.raises(ValueError, match="this"):
        or_stop(fail)("this")
