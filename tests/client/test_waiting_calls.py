"""Calls for which the node has no free place wait: until their deadline at most, and never past the link's end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit
from kvstore.client.gets import Get
from kvstore.errors import DeadlineExceeded, NodeUnavailable
from kvstore.limits import FABRIC_CALL_PLACES
from kvstore.miss import Miss, MissReason
from tests.client.test_fabric_caller import forbid_grpc, get, link_of, served
from tests.client.test_promises import put
from tests.conftest import ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client.reserved import Reservation
    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
CANCEL_S = 5  # longer than a busy machine stands still


@contextmanager
def stopped(node: NodeProcess) -> Iterator[None]:
    """Stop the node: the kernel accepts bytes for it, and it answers nothing."""
    stop(node.pid)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def ask_in_all_places(rig: ClientWithBuffers, block: Block, timeout_s: float = WAIT_S) -> list[Get]:
    calls = link_of(rig.client).calls
    assert calls is not None
    gets = [get_of(rig, block, timeout_s) for _ in range(FABRIC_CALL_PLACES)]
    assert calls.caller.free_places == 0
    return gets


def get_of(rig: ClientWithBuffers, block: Block, timeout_s: float = WAIT_S) -> Get:
    get = rig.client.getting([rig.wanted(block)], timeout_s=timeout_s)
    assert isinstance(get, Get)
    return get


def test_gets_beyond_the_places_wait_for_one_and_none_goes_over_grpc(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [rig.block(number) for number in range(16)]
    put(rig, blocks)
    link = link_of(rig.client)
    free = len(link._free_words)
    forbid_grpc(rig.client, monkeypatch)
    with stopped(node):
        gets = [get_of(rig, block) for block in blocks]
    assert [get.wait() for get in gets] == [[Hit(block.key)] for block in blocks]
    assert all(map(rig.is_exact, blocks))
    assert rig.client._core.link is link
    assert len(link._free_words) == free


def test_a_get_whose_deadline_passes_while_it_waits_is_a_miss_without_a_call(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, other = rig.block(0), rig.block(1)
    put(rig, [block, other])
    link = link_of(rig.client)
    free = len(link._free_words)
    forbid_grpc(rig.client, monkeypatch)
    monkeypatch.setattr("kvstore.client.gets.FETCH_CANCEL_MS", 1000 * CANCEL_S)
    rig.target[:] = bytes(len(rig.target))
    with stopped(node):
        long = ask_in_all_places(rig, block)
        late = [get_of(rig, other, 0.05) for _ in range(3)]
        behind = get_of(rig, block)
        before, began_s = rig.client.calls, time.monotonic()
        outcomes = [get.wait()[0] for get in late]
        took_s = time.monotonic() - began_s
        assert rig.client.calls == before, "there was nothing to cancel"
        assert rig.client._core.link is link
        assert len(link._free_words) == free - len(long) - 1
    for outcome in outcomes:
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.NODE_AWAY
        assert "before the node was called" in outcome.detail
    assert took_s < CANCEL_S
    assert [get.wait() for get in (*long, behind)] == [[Hit(block.key)]] * (len(long) + 1)
    assert get(rig, [block]) == [Hit(block.key)]
    assert not any(rig.target[other.offset : other.offset + other.length]), "it never went out"
    assert rig.client._core.link is link
    assert len(link._free_words) == free


def test_a_waiting_reserve_ends_at_its_deadline_and_keeps_the_link(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(0)
    put(rig, [block])
    link = link_of(rig.client)
    with stopped(node):
        gets = ask_in_all_places(rig, block)
        monkeypatch.setattr(rig.client._core.asking, "_timeout_ns", 100_000_000)
        with pytest.raises(DeadlineExceeded, match="before the node was called"):
            rig.client.reserve([rig.block(1)])
        monkeypatch.undo()
        assert rig.client._core.link is link
    assert [get.wait() for get in gets] == [[Hit(block.key)]] * len(gets)
    put(rig, [rig.block(1)])
    assert rig.client._core.link is link


def test_waiting_reserves_are_sent_and_each_has_its_own_answer(
    rig: ClientWithBuffers, node: NodeProcess
) -> None:
    """Answers with bytes: a place is free once they are read, and each is where its own call was."""
    link = link_of(rig.client)
    count = 2 * FABRIC_CALL_PLACES + 3
    made: list[Reservation] = []

    def reserve(number: int) -> None:
        made.append(rig.client.reserve([rig.block(number, 100)]))

    threads = [threading.Thread(target=reserve, args=(number,)) for number in range(count)]
    with stopped(node):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(link.operations) == count, "all are asked for")
    for thread in threads:
        thread.join(WAIT_S)
    assert len(made) == count
    slots = {lease.slot for one in made for lease in one._leases}
    assert len(slots) == count
    assert rig.client._core.link is link


def test_a_stopped_node_ends_the_link_through_the_calls_that_it_accepted(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(0)
    put(rig, [block])
    link = link_of(rig.client)
    monkeypatch.setattr(rig.client._core.asking, "_timeout_ns", 300_000_000)
    with stopped(node):
        began_s = time.monotonic()
        gets = ask_in_all_places(rig, block)
        monkeypatch.undo()
        gets += [get_of(rig, block) for _ in range(20)]
        outcomes = [get.wait()[0] for get in gets]
        assert time.monotonic() - began_s < 5
    assert {one.reason for one in outcomes if isinstance(one, Miss)} == {MissReason.NODE_AWAY}
    assert not any(isinstance(one, Hit) for one in outcomes)
    assert link.error is not None
    wait_until(lambda: get(rig, [block]) == [Hit(block.key)], "the node goes on")


@pytest.mark.parametrize("way", ["closed", "lost"])
def test_waiting_calls_end_with_their_link(rig: ClientWithBuffers, node: NodeProcess, way: str) -> None:
    block = rig.block(0)
    put(rig, [block])
    with stopped(node):
        gets = ask_in_all_places(rig, block)
        gets += [get_of(rig, block) for _ in range(20)]
        errors: list[BaseException] = []

        def reserve() -> None:
            with pytest.raises(NodeUnavailable) as caught:
                rig.client.reserve([rig.block(1)])
            errors.append(caught.value)

        thread = threading.Thread(target=reserve)
        thread.start()
        link = link_of(rig.client)
        wait_until(lambda: len(link.operations) == len(gets) + 1, "all wait")
        began_s = time.monotonic()
        if way == "closed":
            rig.client.close()
        else:
            rig.client._core.lose(link, NodeUnavailable("The node went away."))
        outcomes = [get.wait()[0] for get in gets]
        thread.join(WAIT_S)
        assert time.monotonic() - began_s < 5
    assert {one.reason for one in outcomes if isinstance(one, Miss)} == {MissReason.NODE_AWAY}
    assert len(errors) == 1
    rig.to_region.close()  # nothing holds it
    if way == "lost":
        rig.to_region = rig.client.register(rig.target)
        assert get(rig, [block]) == [Hit(block.key)]


def test_two_hundred_gets_in_flight_on_eight_threads_are_exact_and_none_goes_over_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and from the drive, each into its own memory, three times over."""
    threads_count, each, length = 8, 25, 20_000
    with NodeInProcess(tmp_path / "node") as node, closing(ClientWithBuffers(node)) as rig:
        blocks = [rig.block(number, length, offset=number * length) for number in range(threads_count * each)]
        for start in range(0, len(blocks), 10):
            put(rig, blocks[start : start + 10])
        link = link_of(rig.client)
        forbid_grpc(rig.client, monkeypatch)
        wrong: list[object] = []

        def use(mine: list[Block]) -> None:
            for _ in range(3):
                gets = [get_of(rig, block) for block in mine]
                outcomes = [get.wait() for get in gets]
                exact = [rig.is_exact(block) for block in mine]
                for block in mine:
                    rig.target[block.offset : block.offset + length] = bytes(length)
                if outcomes != [[Hit(block.key)] for block in mine] or not all(exact):
                    wrong.append((outcomes, exact))

        parts = [blocks[start : start + each] for start in range(0, len(blocks), each)]
        threads = [threading.Thread(target=use, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert rig.client._core.link is link
        assert link.calls is not None
        assert link.calls.caller.free_places == FABRIC_CALL_PLACES
        assert served(node) > 0


def impatient(
    rig: ClientWithBuffers, mine: list[Block], dice: random.Random
) -> tuple[list[Hit | Miss], bool]:
    """Get neighbouring blocks with hardly any time; returns the outcomes, and whether all bytes match them."""
    gets = [rig.client.getting([rig.wanted(block)], timeout_s=dice.random() * 0.01) for block in mine]
    outcomes = [get.wait()[0] for get in gets]
    exact = [rig.is_exact(b) for b, one in zip(mine, outcomes, strict=True) if isinstance(one, Hit)]
    whole = slice(mine[0].offset, mine[-1].offset + mine[-1].length)
    rig.target[whole] = nothing = bytes(whole.stop - whole.start)
    time.sleep(dice.random() * 0.005)  # some time for what must not come
    return outcomes, all(exact) and rig.target[whole] == nothing


def test_gets_whose_deadlines_end_at_any_moment_write_nothing_afterwards_and_keep_nothing(
    tmp_path: Path,
) -> None:
    """Many at a time, so that some end while they wait, some while they are sent, and some at the node."""
    threads_count, each, turns, length = 6, 6, 40, 20_000
    with NodeInProcess(tmp_path / "node") as node, closing(ClientWithBuffers(node)) as rig:
        blocks = [rig.block(number, length, offset=number * length) for number in range(threads_count * each)]
        for start in range(0, len(blocks), 9):
            put(rig, blocks[start : start + 9])
        link = link_of(rig.client)
        free = len(link._free_words)
        told: list[Hit | Miss] = []
        were_right: list[bool] = []

        def use(mine: list[Block], seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(turns):
                outcomes, was_right = impatient(rig, mine, dice)
                told.extend(outcomes)
                were_right.append(was_right)

        parts = [blocks[start : start + each] for start in range(0, len(blocks), each)]
        threads = [threading.Thread(target=use, args=(part, number)) for number, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert were_right == [True] * (threads_count * turns)
        assert any(isinstance(one, Hit) for one in told)
        assert any("before the node was called" in one.detail for one in told if isinstance(one, Miss))
        now = link_of(rig.client)
        assert get(rig, blocks[:3]) == [Hit(block.key) for block in blocks[:3]]
        if now is link:  # or the machine stood still for longer than a node has to confirm
            wait_until(lambda: len(link._free_words) == free, "all words are free")
            assert link.calls is not None
            assert link.calls.caller.free_places == FABRIC_CALL_PLACES
        rig.to_region.close()  # nothing holds it
