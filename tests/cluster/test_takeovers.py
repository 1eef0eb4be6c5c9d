"""The file of what a node took over: what it has after a crash, damage, a full drive, and many users."""

# ruff: noqa: ASYNC240 - nothing else runs in these loops

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster import takeovers as module
from kvstore.cluster.etcd import Found
from kvstore.cluster.takeovers import Takeover, Takeovers
from kvstore.errors import WrongEpoch
from kvstore.limits import SESSIONS_TAKING_MS
from tests.cluster.simulated import FakeEtcd
from tests.cluster.simulated import run as run_simulated
from tests.cluster.simulated_homes import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
FROM = Takeover("node1", 3, "node2", 5)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "takeovers"


async def filled(file: Path) -> Takeovers:
    """Two lots were taken over, and one of two users has begun."""
    takeovers = Takeovers("c", file)
    await takeovers.begin(7, 4, FROM)
    await takeovers.begin(8, 9, FROM._replace(node="node3"))
    await takeovers.note(7, 4, "acme", "ada")
    return takeovers


def known(takeovers: Takeovers) -> list[str]:
    """The nodes that still have sessions of users, or ""."""
    asked = [(7, 4, "acme", "ada"), (7, 4, "acme", "bob"), (7, 4, "acm", "eada"), (8, 9, "acme", "ada")]
    found = [takeovers.untaken(*one) for one in asked]
    return ["" if one is None else one.node for one in found]


KNOWN = ["", "node1", "node1", "node3"]


@in_loop
async def test_the_next_process_knows_who_has_begun(file: Path) -> None:
    one = await filled(file)
    assert known(one) == known(Takeovers("c", file)) == KNOWN
    assert one.untaken(7, 4, "acme", "bob") == FROM
    assert one.untaken(7, 5, "acme", "bob") is None, "of another epoch"
    again = Takeovers("c", file)
    await again.note(7, 4, "acme", "bob")
    assert known(Takeovers("c", file)) == ["", "", "node1", "node3"]


@in_loop
async def test_a_takeover_in_the_same_epoch_begins_anew(file: Path) -> None:
    """Its claim was refused: nobody has begun in it."""
    takeovers = await filled(file)
    await takeovers.begin(7, 4, FROM._replace(node="node9"))
    assert known(takeovers) == known(Takeovers("c", file)) == ["node9", "node9", "node9", "node3"]


@in_loop
async def test_another_clusters_file_counts_for_nothing(file: Path) -> None:
    await filled(file)
    other = Takeovers("d", file)
    assert known(other) == [""] * 4
    await other.begin(7, 4, FROM)
    assert known(Takeovers("d", file)) == ["node1"] * 3 + [""]


@in_loop
async def test_an_unfinished_line_is_ignored_and_a_damaged_one_ends_all(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(file)
    data = file.read_bytes()
    for cut in range(1, len(data.splitlines(keepends=True)[-1])):
        file.write_bytes(data[:-cut])
        again = Takeovers("c", file)
        assert known(again) == ["node1", *KNOWN[1:]], cut
    assert not caplog.records
    await again.note(7, 4, "acme", "bob")
    assert known(Takeovers("c", file)) == ["node1", "", "node1", "node3"], (
        "the line before it has an end again"
    )
    for at in range(0, len(data) - 1, 7):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert known(Takeovers("c", file)) == [""] * 4, at
    assert "sessions that this node has not taken" in caplog.text


@in_loop
async def test_what_can_not_be_written_has_not_begun(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takeovers = await filled(file)

    def full(*_: object) -> None:
        with file.open("ab") as opened:
            opened.write(b"half a l")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(module, "_append", full)
        with pytest.raises(WrongEpoch, match="No space left on device"):
            await takeovers.note(7, 4, "acme", "bob")
        assert known(takeovers) == KNOWN
        assert known(Takeovers("c", file)) == KNOWN
    await takeovers.note(7, 4, "acme", "bob")
    assert known(takeovers) == known(Takeovers("c", file)) == ["", "", "node1", "node3"]


def test_an_append_of_which_a_part_was_written_is_a_failure(file: Path) -> None:
    file.write_bytes(b"whole\n")
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, was[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            module._append(file, b"a line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)


@in_loop
async def test_what_many_write_at_once_is_synced_together(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takeovers, synced, real = await filled(file), [], os.fdatasync

    def sync(fd: int) -> None:
        real(fd)
        synced.append(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    await asyncio.gather(*(takeovers.note(7, 4, "acme", f"user {number}") for number in range(500)))
    assert 1 <= len(synced) <= 3
    again = Takeovers("c", file)
    assert all(again.untaken(7, 4, "acme", f"user {number}") is None for number in range(500))


@in_loop
async def test_a_caller_that_gives_up_takes_nobodys_line_along(file: Path) -> None:
    takeovers = await filled(file)
    first, second = (asyncio.create_task(takeovers.note(7, 4, "acme", user)) for user in ("bob", "eve"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    for one in (takeovers, Takeovers("c", file)):
        assert one.untaken(7, 4, "acme", "eve") is None


@in_loop
async def test_beyond_the_limit_the_earliest_takeovers_are_forgotten_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SESSIONS_USERS_TAKEN_MAX", 5)
    takeovers = await filled(file)
    await takeovers.note(8, 9, "acme", "bob")
    await takeovers.note(8, 9, "acme", "eve")
    assert known(takeovers) == KNOWN
    await takeovers.note(8, 9, "acme", "zoe")
    assert known(takeovers) == known(Takeovers("c", file)) == ["", "", "", "node3"]


@in_loop
async def test_a_file_of_lines_out_of_date_is_written_anew(file: Path) -> None:
    takeovers = await filled(file)
    sizes = []
    for number in range(3 * module._SLACK_LINES):
        takeovers._lines += [[module._TAKEOVER, 1, 1, *FROM]] * 99
        await takeovers.begin(1, 1, FROM._replace(epoch=number))
        sizes.append(file.stat().st_size)
        if sizes[-1] < max(sizes):
            break
    assert sizes[-1] < max(sizes) / 2
    for one in (takeovers, Takeovers("c", file)):
        assert known(one) == KNOWN
        assert one.untaken(1, 1, "", "") == FROM._replace(epoch=number)


def test_a_first_step_stays_noted_while_a_second_call_still_reads_who_had_the_lot() -> None:
    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        node = Node(etcd, rng, "node1", {})
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        lot = node.membership.map.lot_of(b"", b"ada")
        etcd.lots[node.way.reach.lots + b"%04d" % lot] = Found(b'["another",7,3]', 1)
        value, calls, has_begun = node.way.value, list[bytes](), asyncio.Event()

        async def value_late(key: bytes) -> Found:
            calls.append(key)
            is_late = len(calls) > 1
            found = await value(key)
            if is_late:
                await has_begun.wait()
            return found

        node.way.value = value_late  # type: ignore[method-assign]

        first, second = (asyncio.create_task(node.primacy.enter("", "ada")) for _ in range(2))
        term = await first
        assert term.epoch == 4
        await node.primacy.note_taken(term, "", "ada")
        has_begun.set()
        await asyncio.wait([second])
        assert node.primacy.untaken(term, "", "ada") is None, "what it removed here would be back"
        assert node.primacy.untaken(term, "", "bob") == ("another", 3, "", 0)
        assert second.result() == term
        leases.cancel()

    run_simulated(history())
