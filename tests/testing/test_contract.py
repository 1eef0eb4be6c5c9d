"""The contract of `kvstore.testing`, and of transports: the same calls have the same results everywhere.

Each scenario runs on a node in memory, on a real one, and on that one over gRPC, and gives what its calls gave,
without times; the results are compared, and what matters most is written out besides, so that what is wrong in the same
way everywhere doesn't pass.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import Block, Client, Durability, FlagWords, Hit, Miss, MissReason, block_key
from kvstore.client import as_request
from kvstore.errors import KvError
from kvstore.testing import LocalNode, MemoryNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client import PutResult, Resumed, Session

SIZE = 4096
WAIT_S = 20.0
MIB = 1 << 20
AnyNode = LocalNode | MemoryNode
Told = list[Any]


class Bench:
    """A client of one of the nodes, as a tenant of its own, with memory of several blocks."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.memory = bytearray(8 * SIZE)
        self.kv = client.register(self.memory)

    def fill(self, text: bytes) -> None:
        self.memory[:] = text * (len(self.memory) // len(text))

    def block(self, number: int, name: bytes = b"block", length: int = SIZE) -> Block:
        key = block_key(name, bytes([number]))
        return Block(key, self.kv, offset=number * SIZE, length=length, threshold=number + 1)

    def place(self, number: int, key: bytes) -> Block:
        return Block(key, self.kv, offset=number * SIZE, length=SIZE)

    def get(self, blocks: Sequence[Block]) -> Told:
        return [
            "Hit" if isinstance(one, Hit) else str(told_everywhere(one)) for one in self.client.get(blocks)
        ]

    def resume(self, chat: Session) -> Resumed:
        back = chat.resume(self.place)
        return back if back.miss is None else replace(back, miss=told_everywhere(back.miss))


def told_everywhere(miss: Miss) -> Miss:
    """A miss without its detail, which only gRPC carries."""
    return Miss(miss.reason)


def of_put(results: Sequence[PutResult]) -> Told:
    return [
        (one.key, one.durability, type(one.error).__name__, str(one.error or ""), one.already_stored)
        for one in results
    ]


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(KvError) as raised:
        call()
    return type(raised.value).__name__, str(raised.value)


def puts_and_gets(bench: Bench) -> Told:
    bench.fill(b"KV! ")
    blocks = [bench.block(number) for number in range(4)]
    told: Told = [of_put(bench.client.put(blocks))]
    bench.fill(b"____")
    told += [bench.get([*blocks, bench.block(5)]), bytes(bench.memory)]
    assert told[1] == ["Hit"] * 4 + ["MISS(not stored)"]
    assert bench.memory == b"KV! " * (SIZE) + b"____" * SIZE
    return told


def a_key_is_written_once(bench: Bench) -> Told:
    bench.fill(b"once")
    block = bench.block(0)
    told: Told = [of_put(bench.client.put([block])), of_put(bench.client.put([block]))]
    bench.fill(b"else")
    told.append(of_put(bench.client.put([block])))
    assert told[-1][0][2] == "KeyTaken"
    told.append(error_of(lambda: bench.client.put_inline(block.key, b"other bytes")))
    told.append(bench.client.get_inline(block.key, SIZE))
    assert told[-1] == b"once" * (SIZE // 4)
    return told


def durabilities(bench: Bench) -> Told:
    told: Told = []
    for number, durability in enumerate(Durability):
        (result,) = bench.client.put([bench.block(number)], durability=durability)
        assert result.durability is not None
        assert result.durability >= durability
        told.append((durability, result.error, bench.get([bench.block(number)])))
    told.append(bench.client.put_inline(block_key(b"inline"), b"KV", durability=Durability.SYNCED))
    return told


def reasons_of_misses(bench: Bench) -> Told:
    client = bench.client
    bench.fill(b"miss")
    client.put([bench.block(number) for number in range(3)])
    soon_ms = int(time.time() * 1000) + 1500
    client.put_inline(block_key(b"short"), b"KV", expires_unix_ms=soon_ms)
    told: Told = [client.delete([bench.block(0).key, bench.block(7).key])]
    told.append(bench.get([bench.block(0), bench.block(1, length=SIZE - 1)]))
    until = time.monotonic() + WAIT_S
    while isinstance(client.get_inline(block_key(b"short"), 2), bytes):
        assert time.monotonic() < until
    gone = client.get_inline(block_key(b"short"), 2)
    assert isinstance(gone, Miss)
    told.append(gone.reason)
    stored = client.exists([bench.block(0).key, block_key(b"short")])
    told.append([one.reason for one in stored if isinstance(one, Miss)])
    told.append([(one.stored, one.reason) for one in client.explain([bench.block(n).key for n in range(4)])])
    told.append(str(client.prefix([bench.block(n).key for n in (1, 2, 0)])))
    with Client(client.reach, layout=b"another") as other:
        told.append(str(other.get_inline(bench.block(1).key, SIZE)))
    assert told[1:3] == [["MISS(not stored)", "MISS(length)"], MissReason.EXPIRED]
    assert told[-1] == "MISS(layout)"
    return told


def flags_fire_what_they_reach(bench: Bench) -> Told:
    bench.fill(b"flag")
    blocks = [bench.block(number) for number in range(4)]
    with FlagWords.create(1) as flags:
        puts = bench.client.arm(blocks, flags[0])
        told: Told = [puts.progress(), bench.get(blocks)]
        flags[0].store(3)
        until = time.monotonic() + WAIT_S
        while puts.progress() != (3, 3, 3):
            assert time.monotonic() < until
        told += [bench.get(blocks), puts.has_ended, puts.cancel(), of_put(puts.wait(WAIT_S))]
        assert told[2] == ["Hit"] * 3 + ["MISS(not stored)"]
        named = bench.client.arm([replace(blocks[3], key=b"")], flags[0], lease_ms=2)
        told.append(of_put(named.wait(WAIT_S)))
        late = bench.client.arm([bench.block(5)], flags[0], lease_ms=1)
        told.append(of_put(late.wait(WAIT_S)))
        assert told[-1][0][2] == "DeadlineExceeded"
    return told


def sessions_are_whole_or_a_prefix(bench: Bench) -> Told:
    client = bench.client
    bench.fill(b"chat")
    blocks = [bench.block(number) for number in range(4)]
    client.put(blocks)
    chat = client.session("ada", "chat 1")
    told: Told = [chat.append([one.key for one in blocks[:2]], tokens=32)]
    told.append(chat.append([one.key for one in blocks[2:]], tokens=20))
    told.append(error_of(lambda: chat.append([block_key(b"never put")], tokens=16)))
    bench.fill(b"____")
    again = client.session("ada", "chat 1")
    told += [again.info().tokens, again.keys(), bench.resume(again)]
    assert again.resume(bench.place).is_whole
    assert bytes(bench.memory[: 4 * SIZE]) == b"chat" * SIZE
    fork = again.fork("chat 2", blocks=3)
    told.append(sorted((one.session, one.blocks, one.turns, one.tokens) for one in client.sessions("ada")))
    again.truncate(1)
    told.append(again.info().blocks)
    told.append(client.delete([blocks[1].key]))
    told.append(bench.resume(fork))
    assert fork.resume(bench.place).usable_blocks == 1
    fork.remove()
    told.append(error_of(fork.info))
    return told


def misses_can_be_explained(bench: Bench) -> Told:
    block, unknown = bench.block(0), bench.block(1)
    bench.client.put([block])
    with as_request("request 1"):
        bench.client.get([block, unknown])
    until = time.monotonic() + WAIT_S
    while not (found := bench.client.looked_up("request 1").lookups):
        assert time.monotonic() < until
    where = (
        "DRIVE" if bench.client.transport == "grpc" else "MEMORY"
    )  # what landed is there until it is needed
    runs = [(run.outcome.name, run.blocks) for run in found[0].runs]
    assert runs == [(where, 1), ("NEVER", 1)]
    return [[(one.blocks, one.size_bytes, len(one.runs)) for one in found]]


def blocks_inside_grpc(bench: Bench) -> Told:
    client = bench.client
    pages = [(block_key(b"page", bytes([number])), bytes([number]) * 3000) for number in range(3)]
    told: Told = [of_put(client.put_many_inline(pages))]
    told.append(list(client.get_many_inline([(key, 3000) for key, _ in pages])))
    assert told[-1] == [data for _, data in pages]
    with client.pin([key for key, _ in pages]) as pin:
        told.append(pin.pinned)
    told.append([(one.unread, one.missing) for one in [client.prefetch([key for key, _ in pages])]])
    return told


def mistakes_of_the_caller(bench: Bench) -> Told:
    return [
        error_of(lambda: bench.client.put([bench.block(7, length=2 * SIZE)])),
        error_of(lambda: bench.client.put([Block(b"short", bench.kv, 0, SIZE)])),
        error_of(lambda: bench.client.put_inline(b"short", b"KV")),
        error_of(lambda: bench.client.session("ada", "none").info()),
        error_of(lambda: bench.client.put_inline(block_key(b"past"), b"KV", expires_unix_ms=1)),
    ]


def events_are_seen(bench: Bench) -> Told:
    events = bench.client.watch(timeout_s=WAIT_S)
    assert next(events) is None
    bench.client.put_inline(block_key(b"seen"), b"KV")
    bench.client.delete([block_key(b"seen")])
    seen = []
    for event in events:
        if event is not None:
            seen.append((event.what, event.key))
        if len(seen) == 2:
            break
    events.close()
    return seen


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[AnyNode]]:
    with MemoryNode() as memory, LocalNode() as process:
        yield [memory, process]


SCENARIOS = (
    puts_and_gets,
    a_key_is_written_once,
    durabilities,
    reasons_of_misses,
    flags_fire_what_they_reach,
    sessions_are_whole_or_a_prefix,
    misses_can_be_explained,
    blocks_inside_grpc,
    mistakes_of_the_caller,
    events_are_seen,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_all_nodes_give_the_same_results(nodes: list[AnyNode], scenario: Callable[[Bench], Told]) -> None:
    memory, process = nodes
    told: Told = []
    for node, more, transport in (
        (memory, {}, "memory"),
        (process, {}, "fabric"),
        (process, {"transport": "grpc"}, "grpc"),
    ):
        with node.client(tenant=secrets.token_hex(8), **more) as client:
            assert client.transport == transport
            told.append(scenario(Bench(client)))
    assert told[0] == told[1] == told[2]


def test_a_full_drive_evicts_the_same_blocks() -> None:
    told: Told = []
    for kind in (MemoryNode, LocalNode):
        with kind(drive="16MiB") as node, node.client() as client:
            keys = [block_key(b"full", bytes([number])) for number in range(24)]
            for key in keys:
                client.put_inline(key, key * (MIB // 32))
            stored = [str(one) if isinstance(one, Miss) else "stored" for one in client.exists(keys)]
            told.append((stored, [one.reason for one in client.explain(keys)]))
    assert told[0] == told[1]
    assert told[0][0][0].startswith("MISS(evicted)")


def test_blocks_are_found_after_a_restart_and_a_stopped_node_is_a_miss() -> None:
    told: Told = []
    for kind in (MemoryNode, LocalNode):
        with kind() as node, node.client(get_timeout_ms=2_000) as client:
            bench = Bench(client)
            bench.fill(b"stay")
            client.put([bench.block(0)])
            client.session("ada", "chat").append([bench.block(0).key], tokens=16)
            node.stop()
            (miss,) = client.get([bench.block(0)])
            with suppress(KvError):  # the session's own call finds it away, too
                client.session("ada", "chat").info()
            node.start()
            client.status(wait_s=WAIT_S)
            assert isinstance(miss, Miss)
            back = client.session("ada", "chat").resume(bench.place)
            told.append((miss.reason, bench.get([bench.block(0)]), back))
    assert told[0] == told[1]
    assert told[0][:2] == (MissReason.NODE_AWAY, ["Hit"])
