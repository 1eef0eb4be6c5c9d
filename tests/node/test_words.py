"""Acknowledgement words: once its client may reuse a word, the node doesn't write to it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.failures import Failures
from kvstore.durability import Durability
from kvstore.errors import KvError, NodeUnavailable, NoSpace, QuotaExceeded, ReadOnly, StorageError
from kvstore.limits import ACK_WORDS, FABRIC_CALL_PLACES
from kvstore.node.connection import Connection
from kvstore.storage.items import PutDone
from kvstore.wire.ack import AckCode, code_of_error, error_of_code
from nic_offload.flags import FlagWord
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from kvstore.client.link import Link
    from kvstore.node.node import Node
    from tests.conftest import ClientWithBuffers
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
ERRORS = (
    StorageError("The drive burns."),
    NoSpace("The drive has no room for 8 KiB: all of it is pinned."),
    ReadOnly("The drive could not be written: Input/output error; it takes no more puts."),
    QuotaExceeded("The tenant has 4096 of 4096 bytes."),
)


def link_of(rig: ClientWithBuffers) -> Link:
    rig.client.attach()
    assert rig.client._core.link is not None
    return rig.client._core.link


def burn(node: NodeInProcess, *kinds: StorageError) -> None:
    """Make all puts from now on fail, with these errors in turn."""
    errors = itertools.cycle(kinds)

    def fail_puts(inside: Node) -> None:
        def put(items: Any, done: Any) -> None:
            done([PutDone(item.tag, next(errors), item.durability) for item in items])

        vars(inside.store)["put"] = put

    node.call(fail_puts)


def test_a_client_that_returns_an_expired_lease_learns_that_it_expired(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """Its word has been written then, and is awaited."""
    link = link_of(rig)
    free = len(link._free_words)
    ended = rig.client.reserve([rig.block(0)], lease_ms=10)
    wait_until(lambda: node.call(lambda inside: inside.counters.leases_expired) == 1, "the lease is over")
    standing = rig.client.reserve([rig.block(1)])
    assert len(link._free_words) == free - 2
    leases = [(lease.slot, lease.generation) for one in (ended, standing) for lease in one._leases]

    def abort(inside: Node) -> tuple[int, list[int]]:
        (connection,) = inside.connections.values()
        return inside.abort(connection, leases)

    assert node.call(abort) == (2, [leases[0][1]])
    assert node.call(lambda inside: inside.counters.leases_expired) == 1, "it was counted when it expired"
    ended.give_back()
    standing.give_back()
    wait_until(lambda: len(link._free_words) == free, "both words can be used again")
    assert len(set(link._free_words)) == free


@pytest.mark.parametrize("durability", [Durability.LANDED, Durability.WRITTEN])
def test_a_reserved_block_that_was_not_stored_is_reported_in_its_last_word(
    node: NodeInProcess, rig: ClientWithBuffers, durability: Durability
) -> None:
    link, block = link_of(rig), rig.block(0, 1000)
    burn(node, StorageError("The drive burns."))
    word = link._free_words[-1]
    puts = rig.client.reserve([block], durability=durability).arm(None)
    (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, StorageError)
    wait_until(lambda: node.call(lambda inside: inside.leases) == 0, "the node is done with it")
    with rig.client._core.lock:
        assert link.take_words(1) == [word]
    rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)  # its answer comes behind whatever was put
    assert FlagWord(link.word_address(word)).load() & 0xFF == AckCode.STORAGE_FAILED


def fail(rig: ClientWithBuffers, count: int) -> list[KvError]:
    """Put blocks that fail; returns their errors. Nothing of the puts is left."""
    link = link_of(rig)
    puts = rig.client.reserve([rig.block(number) for number in range(count)]).arm(rig.flags[0])
    rig.flags[0].store(count)
    results = puts.wait(WAIT_S)
    assert rig.client._core.link is link  # a put that failed costs its connection nothing
    with rig.client._core.lock:
        assert len(set(link._free_words)) == len(link._free_words) == ACK_WORDS - FABRIC_CALL_PLACES
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == count
    return errors


def test_the_reason_of_a_failed_put_reaches_its_client(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    burn(node, *ERRORS)
    for _ in range(2):
        errors = fail(rig, len(ERRORS))
        assert sorted((type(error).__name__, str(error)) for error in errors) == sorted(
            (type(error).__name__, str(error)) for error in ERRORS
        )
    connection = node.call(lambda inside: next(iter(inside.connections.values())))
    assert not connection._failures  # each is told once


def test_a_failed_put_ends_with_its_code_if_the_node_reports_no_more(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    burn(node, *ERRORS)
    monkeypatch.setattr(Connection, "why_failed", lambda *_: [])
    errors = fail(rig, len(ERRORS))
    assert {type(error) for error in errors} == {type(error) for error in ERRORS}
    for error in errors:
        assert str(error) == str(error_of_code(code_of_error(error), b""))
        assert "code" not in str(error)


def test_the_source_of_a_failed_put_is_free_before_its_words_arrive(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    burn(node, *ERRORS)
    link = link_of(rig)
    monkeypatch.setattr(Failures, "_call", lambda _: None)
    puts = rig.client.reserve([rig.block(0)]).arm(rig.flags[0])
    land = puts._group.land
    landed: list[int] = []

    def noted(row: int, now_ns: int) -> None:
        landed.append(row)
        land(row, now_ns)

    monkeypatch.setattr(puts._group, "land", noted)  # a word that says so comes before, and is seen or not
    rig.flags[0].store(1)
    wait_until(lambda: bool(link.failures._asking), "it has failed")
    assert landed == [0]
    assert puts.wait_landed(0)
    puts.abandon()
    assert not puts.has_ended
    assert rig.client._core.link is link


def test_a_put_that_failed_as_its_link_was_lost_ends_with_its_code(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    burn(node, *ERRORS)
    link = link_of(rig)

    def lose(failures: Failures) -> None:
        assert failures._asking
        rig.client._core.lose(link, NodeUnavailable("The node went away."))

    monkeypatch.setattr(Failures, "_call", lose)
    puts = rig.client.reserve([rig.block(0)]).arm(rig.flags[0])
    rig.flags[0].store(1)
    (result,) = puts.wait(WAIT_S)
    assert type(result.error) is StorageError


def test_a_node_remembers_as_many_failures_as_puts_may_be_in_flight(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """For a client that never asks."""
    link_of(rig)
    connection = node.call(lambda inside: next(iter(inside.connections.values())))
    for generation in range(1, 2 * link_of(rig).slots + 1):
        connection.failed(generation, ERRORS[0])
    assert list(connection._failures) == list(range(link_of(rig).slots + 1, 2 * link_of(rig).slots + 1))
