"""`kvstore stats`, `drives` and `top` against a real node, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block
from kvstore.commands.top_command import Top, risen, view
from kvstore.errors import NodeUnavailable
from kvstore.miss import MissReason
from kvstore.names import block_key
from kvstore.wire.kvstore_pb2 import StatusResponse
from kvstore.wire.observing_pb2 import ReasonCount, StatisticsResponse
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.commands.here import run_here
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.test_tenants import HeldClock

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

PAGE = 4096
KEYS = [block_key(b"show", bytes([number])) for number in range(4)]


def run(node: NodeProcess, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run_here(command, "--node", node.target, *more)


def test_stats_are_shown_as_text_and_json(node: NodeProcess) -> None:
    with small_client(node.target) as client, FlagWords.create(1) as flags:
        client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:2]])
        client.exists(KEYS)
        client.get_inline(KEYS[3], PAGE)
        client.delete(KEYS[:1])
        kv = client.register(allocate(PAGE))
        # Armed, it would be given back when its deadline has passed, and that may reach the node before the lease ends.
        late = client.reserve([Block(KEYS[3], kv, 0, PAGE)], lease_ms=1)
        wait_until(lambda: client.statistics().leases_expired == 1, "the lease is over")
        late.give_back()
        puts = client.reserve([Block(KEYS[2], kv, 0, PAGE, threshold=1)]).arm(flags[0])
        flags[0].store(1)
        assert puts.wait(timeout_s=20)[0].error is None
    told = json.loads(run(node, "stats", "--json").stdout)
    assert (told["puts"], told["put_bytes"], told["blocks"]) == (3, 3 * PAGE, 2)
    assert (told["leased"], told["landed"], told["leases_expired"]) == (2, 1, 1)
    assert told["misses"] == {"unknown": 1}
    assert told["evictions"] == {"deleted": 1}
    assert (told["quota_bytes"], told["quota_used_bytes"]) == (0, None), "it is not counted"
    assert list(told) == [field.name for field in StatisticsResponse.DESCRIPTOR.fields] + ["encryption"]
    assert told["encryption"] == {"on": False, "keys": 0, "keys_damaged": 0, "master_key": ""}
    shown = run(node, "stats")
    assert shown.returncode == 0, shown.stderr
    since, now, mine = (
        shown.stdout.index(head) for head in ("Since the node started:", "Now:", "Of this tenant:")
    )
    assert since < shown.stdout.index("leases_expired") < now < shown.stdout.index("uptime_ms") < mine
    assert "1 deleted" in shown.stdout
    assert "not counted" in shown.stdout[mine:]
    assert ["takes_puts", "yes"] in [line.split() for line in shown.stdout.splitlines()]


def test_drives_are_shown_as_text_and_json(node: NodeProcess) -> None:
    told = json.loads(run(node, "drives", "--json").stdout)
    (drive,) = told["drives"]
    assert (drive["number"], drive["takes_puts"], drive["failure"]) == (0, True, "")
    assert drive["capacity_bytes"] > drive["free_bytes"] > 0
    shown = run(node, "drives").stdout.splitlines()
    assert shown[0].startswith(f"node {told['node']}, version ")
    assert shown[1].split() == ["drive", "blocks", "used", "free", "takes", "puts"]
    assert shown[2].split()[:2] == ["0", "0"]


def test_top_shows_one_interval(node: NodeProcess) -> None:
    shown = run(node, "top", "--once", "--interval", "0.1")
    assert shown.returncode == 0, shown.stderr
    assert f"node {node.target}, up " in shown.stdout
    for head in ("puts", "gets", "blocks", "removed", "triggers", "queues", "memory", "drives", "encryption"):
        assert f"\n{head} " in shown.stdout
    assert "\x1b" not in shown.stdout
    (line,) = run(node, "top", "--once", "--interval", "0.1", "--json").stdout.splitlines()
    told = json.loads(line)
    assert set(told) == {
        *("uptime_ms", "interval_ms", "puts_per_s", "put_bytes_per_s", "puts_failed", "gets_per_s"),
        *("got_bytes_per_s", "refused", "hits", "misses", "evictions", "triggers", "queues", "tiers"),
        *("connections", "encryption"),
    }
    assert set(told["triggers"]) == {"armed", "leased", "landed", "late"}
    wrong = run(node, "top", "--interval", "0")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--interval takes" in wrong.stderr


def test_top_continues_until_its_reader_leaves(node: NodeProcess) -> None:
    command = [sys.executable, "-m", "kvstore", "top", "--node", node.target, "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert process.wait(30) == 0
    assert lines[0]["uptime_ms"] < lines[1]["uptime_ms"] < lines[2]["uptime_ms"]


def test_the_terminal_screen_is_restored(node: NodeProcess) -> None:
    here, there = pty.openpty()
    command = [sys.executable, "-m", "kvstore", "top", "--node", node.target, "--interval", "0.1"]
    # Whoever runs the tests in the background has SIGINT ignored, and children inherit that.
    process = subprocess.Popen(["env", "--default-signal=INT", *command], stdout=there, stderr=there)
    os.close(there)
    shown = b""
    try:
        while shown.count(b"\x1b[H\x1b[J") < 2:
            shown += os.read(here, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # how a terminal's end is told
            while more := os.read(here, 4096):
                shown += more
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(here)
    assert shown.startswith(b"\x1b[?1049h\x1b[?25l")
    assert shown.endswith(b"\x1b[?25h\x1b[?1049l")


def statistics(**more: Any) -> StatisticsResponse:
    return StatisticsResponse(memory_bytes=100, capacity_bytes=1000, free_bytes=250, **more)


def test_an_interval_shows_the_increase_of_its_counters() -> None:
    before = statistics(uptime_ms=1000, puts=5, hits_memory=10, misses=[ReasonCount(reason=9, blocks=4)])
    now = statistics(
        uptime_ms=3000,
        puts=25,
        put_bytes=2048,
        hits_memory=13,
        hits_drive=3,
        leases=2,
        leased=7,
        leases_expired=1,
        fetches_waiting=9,
        memory_kept_bytes=50,
        misses=[ReasonCount(reason=9, blocks=6), ReasonCount(reason=MissReason.CORRUPT, blocks=0)],
    )
    told = risen(before, now, 2.0)
    assert (told["puts_per_s"], told["put_bytes_per_s"], told["gets_per_s"]) == (10.0, 1024.0, 3.0)
    assert (told["hits"], told["misses"]) == ({"memory": 3, "drive": 3}, {"evicted": 2})
    assert told["triggers"] == {"armed": 2, "leased": 7, "landed": 0, "late": 1}
    shown = view(told, "here\x1b", "off")
    assert "75% hit: memory 3, drive 3, MISS evicted 2" in shown
    assert "queues      fetches 9\n" in shown
    assert "[###############...............] 50 B of 100 B" in shown
    assert "which accept no puts" in shown
    assert "\x1b" not in shown
    restarted = risen(now, statistics(uptime_ms=10, puts=4), 2.0)
    assert (restarted["puts_per_s"], restarted["misses"]) == (2.0, {}), "it counts from 0 again"


class Away:
    """A client whose node is sometimes away (`None`); at the end its user interrupts the command."""

    def __init__(self, *answers: StatisticsResponse | None) -> None:
        self._answers = list(answers)

    def statistics(self) -> StatisticsResponse:
        if not self._answers:
            raise KeyboardInterrupt
        answer = self._answers.pop(0)
        if answer is None:
            raise NodeUnavailable("The node was not reached.")
        return answer

    def status(self) -> StatusResponse:
        return StatusResponse()


def test_an_absent_node_is_reported_and_retried() -> None:
    out = io.StringIO()
    client: Any = Away(statistics(uptime_ms=1), None, statistics(uptime_ms=9, puts=3))
    top = Top(client, "n", HeldClock(), lambda _: None, out)
    with pytest.raises(KeyboardInterrupt):
        top.run(1.0, once=False, as_json=True)
    away, back = map(json.loads, out.getvalue().splitlines())
    assert away == {"unreachable": "The node was not reached."}
    assert back["uptime_ms"] == 9
    with pytest.raises(NodeUnavailable):
        Top(Away(statistics(), None), "n", HeldClock(), lambda _: None, out).run(1.0, once=True, as_json=True)  # type: ignore[arg-type]
