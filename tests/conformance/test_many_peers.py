"""One fabric, many peers, one counter: all fire at one store, and a dead peer affects no other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nic_offload.fabric import EventKind
from tests.conformance.backends import Stage, end_or_late, lands
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import PAGE, Side, Way, after_ms

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

PEERS = 32
FEW = 6  # where each takes a sixth of a second to open
LENGTH = 3001


def test_one_counter_serves_all_peers_and_one_is_dead(backend: Backend) -> None:
    """Each through an endpoint of its own: some bytes, a flag, and a notify chained to everybody's count."""
    count = FEW if backend.provider == "tcp;ofi_rxm" else PEERS
    with Stage(backend) as stage, Far(backend.provider, 1 << 20) as dead:
        node = stage.near
        gate, moved = stage.gate(), stage.counter()
        first = Side(backend.provider, PEERS * 2 * PAGE, remote_read=True)
        peers = [first] + [Side.more(first) for _ in range(count - 1)]
        blocks = [os.urandom(LENGTH) for _ in peers]
        ways = [Way.between(Side.more(node), peer) for peer in peers]
        try:
            to_dead = way_to(Side.more(node), dead.said)
            to_dead.fence()
            dead.kill()
            deadline_ns = after_ms(300)
            to_dead.arm(
                *(
                    to_dead.put(9000 + i, LENGTH, fires=(gate.counter, 1), deadline_ns=deadline_ns)
                    for i in range(5)
                )
            )
            for turn in range(1, 4):
                for i, (way, block) in enumerate(zip(ways, blocks, strict=True)):
                    node.fill(i * PAGE, block)
                    way.arm(
                        way.put(
                            100 * turn + i,
                            LENGTH,
                            source=i * PAGE,
                            target=i * PAGE,
                            flag=(i, turn),
                            fires=(gate.counter, turn),
                            completion=moved,
                        ),
                        way.notify(1000 * turn + i, 100 + i, turn, fires=(moved, count * turn)),
                    )
                gate.raise_to(turn)
                for i, (peer, block) in enumerate(zip(peers, blocks, strict=True)):
                    lands(peer.word(100 + i), turn)
                    assert peer.word(i).load() == turn
                    assert peer.bytes_at(i * PAGE, LENGTH) == block
                finals = node.all_final([100 * turn + i for i in range(count)])
                assert all(finals[100 * turn + i].kind == EventKind.DONE for i in range(count))
            for i in range(5):
                end_or_late(node, 9000 + i)
            to_dead.endpoint.close()
            stage.holds_no_work()
            assert not moved.failed
        finally:
            node.fabric.close()
            first.close()


def test_many_peers_put_into_one(backend: Backend) -> None:
    """Each has its own counter and its own fabric; the words of one region receive them all."""
    count = 3 if backend.provider == "tcp;ofi_rxm" else 8
    with Stage(backend) as stage:
        sides = [Side(backend.provider, 64 * PAGE, deferred_work=backend.deferred_work) for _ in range(count)]
        try:
            ways = [Way.between(side, stage.far) for side in sides]
            gates = [stage.gate(side) for side in sides]
            for i, (side, way) in enumerate(zip(sides, ways, strict=True)):
                side.fill(0, bytes([i + 1]) * PAGE)
                way.arm(
                    *(
                        way.put(
                            j,
                            PAGE,
                            target=(i * 10 + j) * PAGE,
                            flag=(i * 10 + j, 7),
                            fires=(gates[i].counter, j + 1),
                        )
                        for j in range(10)
                    )
                )
            for gate in gates:
                gate.raise_to(10)
            for i in range(10 * count):
                lands(stage.far.word(i), 7)
                assert stage.far.bytes_at(i * PAGE, PAGE) == bytes([i // 10 + 1]) * PAGE
            for side in sides:
                assert {event.kind for event in side.all_final(range(10)).values()} == {EventKind.DONE}
        finally:
            for side in sides:
                side.close()
