"""A forger with a connection's valid memory keys: nothing that it writes is accepted, and no neighbour is affected."""

from __future__ import annotations

import re
import struct
import threading
import urllib.request
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any, Self

import pytest

from kvstore.client import Block, Hit, Stored
from kvstore.client.link import Link
from kvstore.errors import KvError
from kvstore.limits import ACK_WORDS, FABRIC_CALL_PLACES, PAGE_BYTES
from kvstore.names import block_key
from kvstore.wire import fabric_call
from kvstore.wire.ack import AckCode, ack_word
from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind, Fabric
from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress
from nic_offload.trigger import TriggeredPut, arm
from tests.conftest import small_client
from tests.hostile.beside import Beside, check_speed
from tests.nic_offload.rig import wait_until
from tests.nic_offload.test_granted import head_of

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.wire import kvstore_pb2 as pb
    from nic_offload.fabric import Event

pytestmark = pytest.mark.slow

LENGTH = 5000
WORDS = 64
MARK = b"E" * 64
INJECTED_EVERY_S = 0.002
REOPENS = (
    "tcp;ofi_rxm"  # a provider whose endpoints stay open to their client's address, since it connects again
)
FORGED = (1).to_bytes(32, "little")  # the key in what head_of makes


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[pb.AttachResponse]:
    """The answers that clients get when they attach."""
    heard: list[pb.AttachResponse] = []
    first_answer = Link._first_answer

    def hear(self: Link, *arguments: Any) -> pb.AttachResponse:
        heard.append(first_answer(self, *arguments))
        return heard[-1]

    monkeypatch.setattr(Link, "_first_answer", hear)
    return heard


def word(value: int) -> str:
    return value.to_bytes(8, "little").hex()


Written = list[tuple[int, int, str]]  # where, by which key, and what, in hex


def writes(link: Link, puts: pb.PutArea, stolen: bytes, *, idle: bool) -> tuple[Written, Written]:
    """Unsealed puts, calls and words for the node and for its client, in idle places or in all."""
    assert link.calls is not None
    to_node: Written = []
    to_client: Written = []
    payload, area, first = bytes(64), link.calls._area, 1 if idle else 0
    for slot in range(first, puts.count):
        for generation in range(puts.first_generation, puts.first_generation + 4):
            head = head_of(payload, generation=generation)
            start = puts.slots + slot * puts.slot_bytes + PAGE_BYTES - len(head)
            to_node.append((start, puts.key, (head + payload).hex()))
            to_node.append((puts.flags + 8 * slot, puts.key, word(generation)))
    for place in range(first, FABRIC_CALL_PLACES):
        generation = area.first_generation
        row = struct.pack("<32sIIQQQ", stolen, LENGTH, 1, 1, link._acks.base, link._acks.key)
        head = struct.pack("<IQBBBBIIIIIQ16s", 128, generation, 1, 0, 0, 0, 0, 1, 2, 0, 0, 0, bytes(16))
        data = crc32c(head + row).to_bytes(4, "little") + head + row
        to_node.append((area.base + fabric_call.call_offset(place), area.key, data.hex()))
        to_node.append((area.base + fabric_call.flag_offset(place), area.key, word(generation)))
    words = range(ACK_WORDS + WORDS, ACK_WORDS + 2 * WORDS) if idle else range(ACK_WORDS, ACK_WORDS + WORDS)
    for number in words:
        said = word(ack_word(link._generation, AckCode.SYNCED))
        to_client.append((link._acks.base + 8 * number, link._acks.key, said))
    return to_node, to_client


class _InThread(ABC):
    """Runs `_work` in a thread of its own, until the `with` block ends."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.done = 0

    @abstractmethod
    def _work(self) -> None:
        """Work until `_stop` is set."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Working(_InThread):
    """Puts and gets blocks one by one; each acknowledged block must come back exact."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._memory = allocate(1 << 20)
        self._region = client.register(self._memory)
        self.errors: list[str] = []
        self.wrong: list[str] = []

    def one(self) -> bytes:
        """Put one block and get it."""
        key = block_key(b"victim", self.done.to_bytes(8, "little"))
        sent = (key * (LENGTH // 32 + 1))[:LENGTH]
        self._memory[:LENGTH] = sent
        self.done += 1
        try:
            (put,) = self._client.arm([Block(key, self._region, 0, LENGTH)]).wait(10)
            if put.error is not None:
                raise put.error
            at = 8 * PAGE_BYTES
            self._memory[at : at + LENGTH] = bytes(LENGTH)
            (found,) = self._client.get([Block(key, self._region, at, LENGTH)], timeout_s=5)
        except KvError as error:
            self.errors.append(str(error))
            return key
        if not isinstance(found, Hit):
            self.errors.append(str(found))
        elif self._memory[at : at + LENGTH] != sent:
            self.wrong.append(key.hex())
        return key

    def _work(self) -> None:
        while not self._stop.is_set():
            self.one()


def foreign_words(beside: Beside) -> float:
    """The number of words that the node received from other senders than the right peer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{beside.http_port}/metrics", headers={"Authorization": "Bearer evil"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        (found,) = re.findall(r"^kvstore_foreign_words_total (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found)


class Injecting(_InThread):
    """Writes to the node's memory over a client's own connection, as an attacker in its place on the wire could.

    Another process can't: the node lets nobody else connect to the client's endpoint.
    """

    def __init__(self, client: Client, written: Written) -> None:
        super().__init__()
        self._client, self._writes = client, cycle(written)
        self._memory = allocate(PAGE_BYTES)
        self._region = client.register(self._memory)

    def _work(self) -> None:
        link = self._client._core.link
        assert link is not None
        with suppress(KvError):  # once the connection is spoilt, its keys are void
            while not self._stop.wait(INJECTED_EVERY_S):
                target, key, written = next(self._writes)
                data = bytes.fromhex(written)
                self._memory[: len(data)] = data
                source = self._region, self._region.address, len(data)
                tag = self._client._core.next_tags()
                arm(self._client.fabric, [TriggeredPut(tag, link.endpoint, link.peer, *source, target, key)])
                self.done += 1


@pytest.mark.parametrize("idle", [True, False], ids=["idle places", "all places"])
def test_memory_keys_of_another_client_are_refused(
    beside: Beside, told: list[pb.AttachResponse], *, idle: bool
) -> None:
    """Writes to places that the victim doesn't use are not even noticed; elsewhere they can corrupt, and no more."""
    with small_client(beside.node.target, token="evil") as client:
        victim = Working(client)
        stolen = victim.one()
        assert (victim.errors, victim.wrong) == ([], [])
        link = client._core.link
        assert link is not None
        to_node, to_client = writes(link, told[-1].puts, stolen, idle=idle)
        attack = {
            "provider": client.fabric.provider,
            "client": link.endpoint.address().hex(),
            "writes": to_client,
        }
        before = foreign_words(beside)
        with victim, Injecting(client, to_node) as injecting:
            alone, under, did = beside.endure("forge", **attack)
        assert injecting.done > 0
        spoilt = (
            not idle and client._core.link is not link
        )  # by the first that came: there was none to count then
        assert spoilt or foreign_words(beside) > before, "they reached the node"
        assert victim.wrong == []
        wait_until(lambda: not client._core.breaker.is_open, "its victim may ask again")
        assert not isinstance(client.exists([FORGED])[0], Stored)
        if idle:  # else the connection may have been spoilt before anything came to the client
            assert did["landed"] > 0
            assert victim.errors == []
            assert client._core.link is link
        before = len(victim.errors)
        victim.one()
        assert len(victim.errors) == before, "it goes on, whatever was spoilt"
    check_speed(alone, under)


class Stranger:
    """A fabric with its own address that writes to any endpoint that it can reach."""

    def __init__(self, address: str) -> None:
        self._fabric = Fabric("net", address=address)
        self._memory = allocate(PAGE_BYTES)
        self._region = self._fabric.register(self._memory, remote_write=False)

    def write(self, node: bytes, target: int, key: int) -> bool:
        """Write 64 bytes; returns whether the provider confirms them within a second."""
        endpoint, peer = self._fabric.open_endpoint(), self._fabric.add_peer(SocketAddress.of(node).packed(4))
        self._memory[: len(MARK)] = MARK
        put = TriggeredPut(1, endpoint, peer, self._region, self._region.address, len(MARK), target, key)
        arm(self._fabric, [put])
        ended: list[Event] = []

        def has_ended() -> bool:
            ended.extend(self._fabric.reap())
            return bool(ended)

        with suppress(AssertionError):
            wait_until(has_ended, "it ends", 1.0)
        endpoint.close()
        return any(one.kind == EventKind.DONE for one in ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._fabric.close()


def test_a_stranger_can_write_where_nothing_prevents_it() -> None:
    """Otherwise the next test would hold for a client that can't write at all."""
    with Fabric("net", address="127.0.0.1") as fabric:
        endpoint, memory = fabric.open_endpoint(), allocate(PAGE_BYTES)
        region = fabric.register(memory, endpoint=endpoint)
        with Stranger("127.0.0.9") as stranger:
            assert stranger.write(endpoint.address(), region.base, region.key)
        assert memory[: len(MARK)] == MARK


class Slots:
    """The slots granted to a client, mapped by the client itself."""

    def __init__(self, client: Client, puts: pb.PutArea) -> None:
        link = client._core.link
        assert link is not None
        assert link.mapped.slots is not None
        self.link, self.key = link, puts.key
        self.target = puts.slots + (puts.count - 1) * puts.slot_bytes + PAGE_BYTES  # nothing uses it just now
        self._memory, self._at = link.mapped.slots.memory, self.target - puts.flags

    def has_changed(self) -> bool:
        """Whether the mark is there; it is erased again."""
        here = slice(self._at, self._at + len(MARK))
        found = self._memory[here] == MARK
        self._memory[here] = bytes(len(MARK))
        return found


def test_a_valid_key_of_memory_works_only_for_its_own_client(
    beside: Beside, told: list[pb.AttachResponse]
) -> None:
    """Not from another address, not from the client's own while it is connected, nor at another tenant's endpoint."""
    with (
        small_client(beside.node.target, token="good") as victim,
        small_client(beside.node.target, token="evil") as evil,
    ):
        slots = []
        for client in (victim, evil):
            assert Working(client).one()
            slots.append(Slots(client, told[-1].puts))
        whose, theirs = slots
        memory = allocate(PAGE_BYTES)
        memory[: len(MARK)] = MARK
        region = evil.register(memory)

        def lands_from(source: str) -> bool:
            with Stranger(source) as stranger:
                ended_well = stranger.write(whose.link.node_address, whose.target, whose.key)
            return whose.has_changed() or ended_well

        def lands_at_theirs(into: Slots, within_s: float) -> bool:
            """Whether a write over the other tenant's own connection lands."""
            link, tag = theirs.link, evil._core.next_tags()
            written = (region.address, len(MARK), into.target, into.key)
            arm(evil.fabric, [TriggeredPut(tag, link.endpoint, link.peer, region, *written)])
            with suppress(AssertionError):
                wait_until(into.has_changed, "it landed", within_s)
                return True
            return False

        assert not lands_from("127.0.0.9")
        wait_until(lambda: not lands_from("127.0.0.1"), "nobody else can connect", 5)
        assert lands_at_theirs(theirs, 5), "with its own key it can"
        assert not lands_at_theirs(whose, 0.5)
        working = Working(victim)
        working.one()
        assert (working.errors, working.wrong) == ([], [])
        assert victim._core.link is whose.link
