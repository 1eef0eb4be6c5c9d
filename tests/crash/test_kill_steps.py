"""A node killed at any step of a put or a get costs the client a miss, and nothing else.

The node is a real process. At a step it is stopped (SIGSTOP), so that it is certainly not past it, and killed then, or
it is killed at once. After each: the call has ended in its time, with a result or one typed error; the memory around
what was asked for is untouched; every block that is said to have come is exact; after a restart the client goes on.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Arrivals, Block, Nodes, Resumed
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable
from kvstore.miss import MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.match_action import Action, ActionKind, Pattern, Request, Rule, Table
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client import ArmedPuts, PutResult, Session
    from kvstore.demo.node_process import NodeProcess

BLOCKS = 6
SIZE = 50_000
PAGE = 4096
CANARY = b"\xc5" * PAGE
WAIT_S = 20.0
STOPPED_S = 0.05  # how long a stopped node is left alone before it is killed
FROM = {
    "user": "ada",
    "context": "chat",
    "model": "m",
    "protocol": "tcp",
    "source": "10.0.0.1",
    "destination": "10.0.0.2",
    "source_port": 1,
    "destination_port": 2,
}


def key(number: int) -> bytes:
    return block_key(b"killed", number.to_bytes(4))


def kv_of(number: int) -> bytes:
    return bytes([number + 1]) * SIZE


class StepsRig:
    """A client of a tenant's own with one buffer between canaries, and a chat that arrivals follow."""

    def __init__(self, node: NodeProcess, tenant: str) -> None:
        self.node = node
        self.request = Request.parse({"tenant": tenant, **FROM})
        self.nodes = Nodes([self.node.target], tenant=tenant, slots=BLOCKS, block_bytes_max=SIZE)
        table = Table()
        table.add(Rule(Pattern(tenant=tenant), (Action(ActionKind.FETCH),)))
        self.arrivals = Arrivals(self.nodes, table, tenant=tenant)
        self.client = self.nodes.of("ada")
        self.memory = mmap.mmap(-1, 2 * PAGE + BLOCKS * SIZE)
        self.memory[:PAGE] = self.memory[PAGE + BLOCKS * SIZE :] = CANARY
        self.region = self.client.register(self.memory)
        self.flags = FlagWords.create(1)
        self.chat: Session = self.arrivals.session("ada", "chat")

    def blocks(self) -> list[Block]:
        return [self.place(number, key(number)) for number in range(BLOCKS)]

    def place(self, number: int, name: bytes) -> Block:
        return Block(name, self.region, PAGE + number * SIZE, SIZE, threshold=number + 1)

    def fill(self) -> None:
        self.memory[PAGE : PAGE + BLOCKS * SIZE] = b"".join(map(kv_of, range(BLOCKS)))

    def clear(self) -> None:
        self.memory[PAGE : PAGE + BLOCKS * SIZE] = bytes(BLOCKS * SIZE)

    def check(self, usable: int) -> None:
        """The first blocks are exact, and the canaries intact."""
        for number in range(usable):
            assert self.memory[PAGE + number * SIZE : PAGE + (number + 1) * SIZE] == kv_of(number)
        assert self.memory[:PAGE] == self.memory[PAGE + BLOCKS * SIZE :] == CANARY

    @contextmanager
    def dying(self) -> Iterator[None]:
        """Stop the node, and kill it while the client waits."""
        stop(self.node.pid)
        killer = threading.Timer(STOPPED_S, self.node.kill)
        killer.start()
        try:
            yield
        finally:
            killer.join()

    def restart(self) -> None:
        self.node.start()
        self.client.status(wait_s=WAIT_S)

    def put(self, durability: Durability = Durability.WRITTEN) -> list[PutResult]:
        self.fill()
        self.flags[0].store(0)
        puts = self.chat.arm(self.blocks(), self.flags[0], durability=durability)
        self.flags[0].store(BLOCKS)
        return puts.wait(WAIT_S)

    def append(self) -> None:
        self.chat.append([key(number) for number in range(BLOCKS)], 16 * BLOCKS)

    def close(self) -> None:
        self.arrivals.close()
        self.nodes.close()
        self.flags.close()


@pytest.fixture
def rig(shared_node: NodeProcess, tenant: str) -> Iterator[StepsRig]:
    if shared_node._process is None:  # the test before this one failed
        shared_node.start()
    rig = StepsRig(shared_node, tenant)
    yield rig
    rig.close()


# --- puts: each of these begins one, and kills the node at its step


def before_the_reservation(rig: StepsRig) -> None:
    rig.node.kill()
    with pytest.raises(NodeUnavailable):
        rig.chat.reserve(rig.blocks())


def in_the_reservation(rig: StepsRig) -> None:
    rig.client.attach()
    with rig.dying(), pytest.raises((NodeUnavailable, DeadlineExceeded)):
        rig.chat.reserve(rig.blocks())


def with_slots_leased(rig: StepsRig) -> None:
    reservation = rig.chat.reserve(rig.blocks())
    rig.node.kill()
    ends(rig, lambda: reservation.arm(rig.flags[0]))


def with_puts_armed(rig: StepsRig) -> None:
    puts = rig.chat.arm(rig.blocks(), rig.flags[0])
    rig.node.kill()
    rig.flags[0].store(BLOCKS)
    ends(rig, lambda: puts)


def with_some_fired(rig: StepsRig) -> None:
    puts = rig.chat.arm(rig.blocks(), rig.flags[0])
    with rig.dying():
        rig.flags[0].store(BLOCKS // 2)
    rig.flags[0].store(BLOCKS)
    ends(rig, lambda: puts)


def with_some_landed(rig: StepsRig) -> None:
    puts = rig.chat.arm(rig.blocks(), rig.flags[0])
    rig.flags[0].store(BLOCKS // 2)
    wait_until(lambda: puts.progress()[1] > 0, "a block has landed")
    rig.node.kill()
    rig.flags[0].store(BLOCKS)
    ends(rig, lambda: puts)


def with_some_written(rig: StepsRig) -> None:
    puts = rig.chat.arm(rig.blocks(), rig.flags[0])
    rig.flags[0].store(1)
    wait_until(lambda: puts.progress()[2] > 0, "a block is on the drive")
    rig.node.kill()
    rig.flags[0].store(BLOCKS)
    results = ends(rig, lambda: puts)
    assert results[0].error is None


def while_syncing(rig: StepsRig) -> None:
    puts = rig.chat.arm(rig.blocks(), rig.flags[0], durability=Durability.SYNCED)
    rig.flags[0].store(BLOCKS)
    wait_until(lambda: puts.progress()[1] > 0, "a block has landed")
    rig.node.kill()
    ends(rig, lambda: puts)


def before_the_append(rig: StepsRig) -> None:
    assert all(result.error is None for result in rig.put())
    rig.node.kill()
    with pytest.raises(NodeUnavailable):
        rig.append()


def in_the_append(rig: StepsRig) -> None:
    assert all(result.error is None for result in rig.put())
    with rig.dying(), pytest.raises((NodeUnavailable, DeadlineExceeded)):
        rig.append()


def behind_the_append(rig: StepsRig) -> None:
    assert all(result.error is None for result in rig.put())
    rig.append()
    rig.node.kill()


PUTS: list[Callable[[StepsRig], None]] = [
    before_the_reservation,
    in_the_reservation,
    with_slots_leased,
    with_puts_armed,
    with_some_fired,
    with_some_landed,
    with_some_written,
    while_syncing,
    before_the_append,
    in_the_append,
    behind_the_append,
]


def ends(rig: StepsRig, begun: Callable[[], ArmedPuts]) -> list[PutResult]:
    """Each put has succeeded, or failed with one typed error, in time."""
    try:
        results = begun().wait(WAIT_S)
    except NodeUnavailable:  # the loss was known before anything was armed
        return []
    for result in results:
        assert result.error is None or isinstance(result.error, KvError)
        assert not isinstance(result.error, DeadlineExceeded), "it was told by the loss, not by the clock"
    rig.check(BLOCKS)  # the source is what it was
    return results


@pytest.mark.parametrize("killed", PUTS, ids=lambda step: step.__name__)
def test_a_node_killed_at_a_step_of_a_put(rig: StepsRig, killed: Callable[[StepsRig], None]) -> None:
    rig.fill()
    killed(rig)
    rig.clear()
    away = rig.chat.resume(rig.place, timeout_s=WAIT_S)
    assert (away.is_whole, away.usable_blocks) == (False, 0)
    assert away.miss is not None
    assert away.miss.reason is MissReason.NODE_AWAY
    rig.restart()
    back = rig.chat.resume(rig.place, timeout_s=WAIT_S)
    rig.check(back.usable_blocks)
    assert back.is_whole == (killed is behind_the_append)
    # The engine computes again, and puts again; what is stored is not sent twice.
    assert all(result.error is None for result in rig.put())
    if not back.is_whole:
        rig.append()
    rig.clear()
    assert rig.chat.resume(rig.place, timeout_s=WAIT_S) == Resumed(
        BLOCKS, 16 * BLOCKS, BLOCKS, 16 * BLOCKS, None
    )
    rig.check(BLOCKS)


# --- gets: each of these resumes, and kills the node at its step


def before_the_get(rig: StepsRig) -> Resumed:
    rig.node.kill()
    return rig.chat.resume(rig.place, timeout_s=WAIT_S)


def while_asking_for_the_session(rig: StepsRig) -> Resumed:
    with rig.dying():
        return rig.chat.resume(rig.place, timeout_s=WAIT_S)


def before_the_blocks_are_asked_for(rig: StepsRig) -> Resumed:
    def place(number: int, name: bytes) -> Block:
        if not number:
            rig.node.kill()
        return rig.place(number, name)

    return rig.chat.resume(place, timeout_s=WAIT_S)


def while_the_blocks_are_asked_for(rig: StepsRig) -> Resumed:
    rig.client.attach()
    with ExitStack() as dying:

        def place(number: int, name: bytes) -> Block:
            if not number:
                dying.enter_context(rig.dying())
            return rig.place(number, name)

        return rig.chat.resume(place, timeout_s=WAIT_S)


def with_the_get_queued(rig: StepsRig) -> Resumed:
    with rig.chat.resuming(rig.place, timeout_s=WAIT_S) as back:
        rig.node.kill()
        return back.whole()


def with_the_first_block_here(rig: StepsRig) -> Resumed:
    with rig.chat.resuming(rig.place, timeout_s=WAIT_S) as back:
        back.wait_blocks(1)
        rig.node.kill()
        return back.whole()


def while_it_is_being_written_to_memory(rig: StepsRig) -> Resumed:
    with rig.chat.resuming(rig.place, timeout_s=WAIT_S) as back, rig.dying():
        return back.whole()


def behind_the_get(rig: StepsRig) -> Resumed:
    back = rig.chat.resume(rig.place, timeout_s=WAIT_S)
    assert back.is_whole
    rig.node.kill()
    return back


def before_the_arrival(rig: StepsRig) -> Resumed:
    rig.node.kill()
    return rig.arrivals.arrived(rig.request, rig.place, timeout_s=WAIT_S).whole()


def in_the_prefetch(rig: StepsRig) -> Resumed:
    with rig.dying():
        typing = rig.arrivals.arrived(rig.request)
        assert typing.wait(WAIT_S)
    return rig.arrivals.arrived(rig.request, rig.place, timeout_s=WAIT_S).whole()


def behind_the_prefetch(rig: StepsRig) -> Resumed:
    assert rig.arrivals.arrived(rig.request).wait(WAIT_S)
    rig.node.kill()
    return rig.arrivals.arrived(rig.request, rig.place, timeout_s=WAIT_S).whole()


def in_the_fetch_of_an_arrival(rig: StepsRig) -> Resumed:
    arrival = rig.arrivals.arrived(rig.request, rig.place, timeout_s=WAIT_S)
    rig.node.kill()
    return arrival.whole()


GETS: list[Callable[[StepsRig], Resumed]] = [
    before_the_get,
    while_asking_for_the_session,
    before_the_blocks_are_asked_for,
    while_the_blocks_are_asked_for,
    with_the_get_queued,
    with_the_first_block_here,
    while_it_is_being_written_to_memory,
    behind_the_get,
    before_the_arrival,
    in_the_prefetch,
    behind_the_prefetch,
    in_the_fetch_of_an_arrival,
]


@pytest.mark.parametrize("killed", GETS, ids=lambda step: step.__name__)
def test_a_node_killed_at_a_step_of_a_get(rig: StepsRig, killed: Callable[[StepsRig], Resumed]) -> None:
    assert all(result.error is None for result in rig.put())
    rig.append()
    rig.clear()
    back = killed(rig)
    rig.check(back.usable_blocks)
    if not back.is_whole:
        assert back.miss is not None
        assert back.miss.reason is MissReason.NODE_AWAY
        assert back.usable_tokens == 16 * back.usable_blocks
    after = rig.memory[:]
    rig.restart()
    assert rig.memory[:] == after, "no late byte"
    rig.clear()
    assert rig.chat.resume(rig.place, timeout_s=WAIT_S).is_whole
    rig.check(BLOCKS)
    rig.clear()
    assert rig.arrivals.arrived(rig.request, rig.place, timeout_s=WAIT_S).whole().is_whole
    rig.check(BLOCKS)
