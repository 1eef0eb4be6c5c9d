"""Sealed connections: a forger with a connection's valid memory keys against a client and its node.

It has its own fabric, writes from the client's own address, and knows each generation that is due: everything that can
be overheard or guessed.
"""

from __future__ import annotations

import itertools
import secrets
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Hit
from kvstore.client.link import Link
from kvstore.errors import KvError, ProtocolError
from kvstore.limits import ACK_WORDS, FABRIC_ANSWER_BYTES, FABRIC_CALL_PLACES, GRANTED_SLOTS
from kvstore.miss import Miss
from kvstore.wire import fabric_call
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.ack import AckCode, ack_word
from kvstore.wire.seal import Seal
from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind, Fabric
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredNotify, TriggeredPut, arm
from tests.client.test_fabric_caller import get, link_of
from tests.client.test_promises import put
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.nic_offload.test_granted import head_of
from tests.node.in_process import NodeInProcess
from tests.wire.calls import due_generation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nic_offload.fabric import Event

# A node in a process of its own has a connection guard, which lets nobody else connect to the client's endpoint.
pytestmark = pytest.mark.node("in process")

PAGE = 4096


class Forger:
    """Writes to any memory whose key it has."""

    def __init__(self, provider: str, address: bytes) -> None:
        self.fabric = Fabric(provider, address="127.0.0.1")
        self._endpoint = self.fabric.open_endpoint()
        self._memory = allocate(MIB)
        self._region = self.fabric.register(self._memory, remote_write=False)
        self._peer = self.fabric.add_peer(address)
        self._tags = itertools.count(1)

    def write(self, target: int, key: int, data: bytes) -> None:
        self._memory[: len(data)] = data
        tag = next(self._tags)
        region = self._region
        self._end(
            TriggeredPut(tag, self._endpoint, self._peer, region, region.address, len(data), target, key)
        )

    def word(self, target: int, key: int, value: int) -> None:
        self._end(TriggeredNotify(next(self._tags), self._endpoint, self._peer, target, key, value))

    def _end(self, operation: TriggeredPut | TriggeredNotify) -> None:
        arm(self.fabric, [operation])
        events: list[Event] = []

        def is_over() -> bool:
            events.extend(self.fabric.reap())
            return any(event.tag == operation.tag for event in events)

        wait_until(is_over, "the write has ended")
        assert {event.kind for event in events} == {EventKind.DONE}, "its key is a true one"

    def close(self) -> None:
        self.fabric.close()


@pytest.fixture
def at_node(rig: ClientWithBuffers) -> Iterator[Forger]:
    """A forger that writes to the connection's memory at the node."""
    link = link_of(rig.client)
    forger = Forger(rig.client.fabric.provider, link.node_address)
    yield forger
    forger.close()


@pytest.fixture
def at_client(rig: ClientWithBuffers) -> Iterator[Forger]:
    """A forger that writes to the client's own memory."""
    link = link_of(rig.client)
    forger = Forger(rig.client.fabric.provider, link.endpoint.address())
    yield forger
    forger.close()


def is_well(rig: ClientWithBuffers, link: Link, number: int) -> None:
    """Whether the connection is the same, and works."""
    block = rig.block(number)
    put(rig, [block])
    assert get(rig, [block]) == [Hit(block.key)]
    assert rig.is_exact(block)
    assert rig.client._core.link is link
    assert link.error is None


def areas(monkeypatch: pytest.MonkeyPatch) -> list[pb.AttachResponse]:
    """The answers that clients get when they attach from now on."""
    told: list[pb.AttachResponse] = []
    first_answer = Link._first_answer

    def heard(self: Link, *arguments: Any) -> pb.AttachResponse:
        told.append(first_answer(self, *arguments))
        return told[-1]

    monkeypatch.setattr(Link, "_first_answer", heard)
    return told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[pb.AttachResponse]:
    return areas(monkeypatch)


def test_a_forged_put_is_not_stored_and_the_connection_continues(
    told: list[pb.AttachResponse], rig: ClientWithBuffers, at_node: Forger
) -> None:
    link = link_of(rig.client)
    puts = told[0].puts
    payload = secrets.token_bytes(500)
    for slot in range(GRANTED_SLOTS):  # each with the generation that is due in it, but for the last used
        head = head_of(payload, generation=puts.first_generation)
        start = puts.slots + slot * puts.slot_bytes + PAGE - len(head)
        at_node.write(start, puts.key, head + payload)
        at_node.word(puts.flags + 8 * slot, puts.key, puts.first_generation)
    key = (1).to_bytes(32, "little")  # as head_of has it
    is_well(rig, link, 1)
    assert not isinstance(rig.client.exists([key])[0], Hit)
    assert isinstance(rig.client.exists([key])[0], Miss)


def test_a_forged_call_is_not_answered_and_the_connection_continues(
    rig: ClientWithBuffers, at_node: Forger
) -> None:
    """It requests a block of the tenant for the forger's address. Its seal is invalid, so it is ignored."""
    link = link_of(rig.client)
    block = rig.block(0)
    put(rig, [block])
    assert link.calls is not None
    area = link.calls._area
    memory = allocate(MIB)
    target = rig.client.register(memory)
    for place in range(FABRIC_CALL_PLACES):
        generation = due_generation(link, place)
        row = struct.pack("<32sIIQQQ", block.key, block.length, 1, 1, target.base, target.key)
        head = struct.pack(
            "<IQBBBBIIIIIQ16s", 128, generation, 1, 0, 0, 0, 0, 1, 2, 0, 0, 0, rig.client.fingerprint
        )
        data = crc32c(head + row).to_bytes(4, "little") + head + row
        at_node.write(area.base + fabric_call.call_offset(place), area.key, data + bytes(8))
        at_node.word(area.base + fabric_call.flag_offset(place), area.key, generation)
    is_well(rig, link, 1)
    assert memory[:] == bytes(MIB)


def test_a_call_overwritten_in_flight_ends_the_connection_with_one_sentence(
    rig: ClientWithBuffers, caplog: pytest.LogCaptureFixture, at_node: Forger
) -> None:
    """Under its own flag. A forger can do this to a connection whose keys it has; the next one has others."""
    link = link_of(rig.client)
    assert link.calls is not None
    area, generation = link.calls._area, due_generation(link, 0)
    at = area.base + fabric_call.flag_offset(0), area.key
    data = bytes([0] * 4) + (64).to_bytes(4, "little") + generation.to_bytes(8, "little") + bytes(48)
    at_node.write(area.base + fabric_call.call_offset(0), area.key, data + bytes(8))
    flag = TriggeredNotify(1 << 40, link.endpoint, link.peer, *at, generation)  # as the client's own
    arm(rig.client.fabric, [flag])
    wait_until(lambda: link.error is not None, "the link has ended")
    assert "did not come from the connection's client" in caplog.text
    block = rig.block(0)
    put(rig, [block])
    assert get(rig, [block]) == [Hit(block.key)]


def test_the_node_counts_invalid_seals(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        link = link_of(rig.client)

        def foreign() -> int:
            return int(node.call(lambda one: one.fabric.statistics().stale_words))

        is_well(rig, link, 1)
        assert foreign() == 0
        assert link.calls is not None
        area = link.calls._area
        forger = Forger(rig.client.fabric.provider, link.node_address)
        for number in range(1, 4):
            forger.word(area.base + fabric_call.flag_offset(2), area.key, number)
            wait_until(lambda number=number: foreign() == number, "it is counted")  # type: ignore[misc]
        forger.close()
        is_well(rig, link, 2)
        rig.close()


def test_forged_words_settle_neither_a_put_nor_a_get(rig: ClientWithBuffers, at_client: Forger) -> None:
    """All words of the client are forged as success; none is accepted."""
    link = link_of(rig.client)
    key = link._acks.key
    for word in range(ACK_WORDS - 64, ACK_WORDS + 64):
        value = ack_word(link._generation, AckCode.SERVED)
        at_client.word(link._acks.base + 8 * word, key, value)
    is_well(rig, link, 1)
    missing = rig.block(99)
    assert [isinstance(one, Miss) for one in get(rig, [missing])] == [True]


def test_a_forged_answer_is_an_error_and_leases_nothing(
    rig: ClientWithBuffers, at_client: Forger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overwrites the node's answer before its client reads it."""
    link = link_of(rig.client)
    calls = link.calls
    assert calls is not None
    answer = calls.answer

    def forged(place: int, generation: int) -> bytes:
        there = calls._region.base + calls._start + place * FABRIC_ANSWER_BYTES
        leased = [fabric_call.Leased(1, False, 77, 0, 0)]
        data = fabric_call.leases_bytes(generation, leased)
        at_client.write(there, calls._region.key, data + secrets.token_bytes(8))
        return answer(place, generation)

    monkeypatch.setattr(calls, "answer", forged)
    with pytest.raises(ProtocolError, match="did not come from the node"):
        rig.client.reserve([rig.block(0)])
    monkeypatch.undo()
    is_well(rig, link, 1)


def test_either_side_of_an_earlier_version_is_served_without_seals(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that doesn't set `seals` gets none, and one that gets none checks none, as in both earlier versions."""
    request = pb.AttachRequest

    def earlier(**fields: Any) -> pb.AttachRequest:
        fields.pop("seals")
        return request(**fields)

    monkeypatch.setattr("kvstore.client.link.pb.AttachRequest", earlier)
    link = link_of(rig.client)
    assert link.endpoint.tag_bytes == 0
    is_well(rig, link, 1)
    assert rig.client.reserve([rig.block(5)]).already_stored == 0


def test_the_secret_of_a_connection_is_not_readable_anywhere(
    told: list[pb.AttachResponse],
    rig: ClientWithBuffers,
    node: NodeInProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    link = link_of(rig.client)
    is_well(rig, link, 1)
    secret = told[0].seal
    assert len(secret) == 16
    assert "attached" in caplog.text
    assert secret.hex() not in caplog.text
    assert str(secret) not in repr(Seal(secret))
    second = ClientWithBuffers(node)
    link_of(second.client)
    second.close()
    assert told[1].seal != secret


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(KvError, match="16 bytes"):
        Seal(b"short")
