"""Random operations over random counters; their guarantees are checked whenever nothing is in flight.

The model doesn't predict unspecified outcomes (if an operation's counter is reached and fails at the same time, either
end is correct). It takes how each operation ended, and checks that this is possible, given how all others ended.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove, TriggeredGet
from tests.nic_offload.rig import Side, Way, after_ms, wait_until

if TYPE_CHECKING:
    from nic_offload.fabric import Event
    from nic_offload.trigger import Operation
    from tests.conformance.backends import Gate, Stage

OPERATIONS_MAX = 400
GATES = 4  # moved by the test
COUNTERS = 8  # these and those that operations move, each only by what waits for an earlier one
GET_AT = 512 * 1024
NOTHING_WENT_OUT = {-errno.ECANCELED, -errno.ETIMEDOUT, -errno.EPIPE, -errno.EBADMSG}


@dataclass(eq=False)
class Count:
    """A counter, and the value that it must have."""

    gate: Gate
    by_hand: int = 0
    movers: list[Armed] = field(default_factory=list)

    @property
    def expected(self) -> int:
        return self.by_hand + sum(op.step for op in self.movers if op.end == EventKind.DONE)

    @property
    def spoiled(self) -> bool:
        """Note that an operation that would have moved it has failed."""
        return any(op.dropped or op.end == EventKind.FAILED for op in self.movers)


@dataclass(eq=False)
class Armed:
    """One operation, as it was armed and as it ended."""

    index: int
    tag: int
    trigger: Count
    threshold: int
    completion: Count | None
    step: int
    kind: str
    way: int | None
    broken: bool
    deadline: bool
    event: Event | None = None
    dropped: bool = False

    @property
    def end(self) -> int | None:
        return None if self.event is None else self.event.kind

    @property
    def over(self) -> bool:
        return self.dropped or self.event is not None


class Model:
    """One run. `check` holds after each step; the stage may be used for another run afterwards."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.rng = random.Random(seed)
        self.base = seed * 1000
        self.counts = [Count(stage.gate()) for _ in range(COUNTERS)]
        self.ways = [stage.there, Way.between(Side.more(stage.near), stage.far)]
        self.ops: list[Armed] = []
        stage.near.fill(0, bytes(stage.near.length))
        stage.far.fill(0, bytes(8 * OPERATIONS_MAX))
        for index in range(OPERATIONS_MAX):
            stage.far.word(index).store(0)
            stage.near.fill(8 * index, self._bytes(index))
            stage.far.fill(GET_AT + 8 * index, self._bytes(index))
        stage.near.fabric.reap()
        stage.near.events.clear()

    def _value(self, index: int) -> int:
        return (self.base + 1) << 20 | (index + 1)

    def _bytes(self, index: int) -> bytes:
        return self._value(index).to_bytes(8, "little")

    # -- steps

    def step(self) -> None:
        actions = [self.arm, self.arm, self.arm, self.move, self.move, self.move, self.cancel, self.reset]
        if self.stage.provider not in {"tcp;ofi_rxm", "shm"}:
            actions.append(self.close_endpoint)
        for _ in range(self.rng.randrange(1, 4)):
            self.rng.choice(actions)()
        self.check()

    def arm(self) -> None:
        room = OPERATIONS_MAX - len(self.ops)
        some = [self._random(len(self.ops) + i) for i in range(min(room, self.rng.randrange(1, 25)))]
        if some:
            self.stage.there.arm(*(self._operation(op) for op in some))
            self.ops += some
            for op in some:
                if op.completion:
                    op.completion.movers.append(op)

    def _random(self, index: int) -> Armed:
        rng = self.rng
        first = rng.randrange(COUNTERS - 1)
        later = [None, *self.counts[max(GATES, first + 1) :]]
        kind = rng.choice(["put", "put", "put and flag", "notify", "get", "get and flag", "add", "set"])
        moves = kind in ("add", "set")
        trigger = self.counts[first]
        completion = rng.choice(later[1:] if moves else later)
        value = trigger.gate.at if first < GATES else trigger.expected
        return Armed(
            index=index,
            tag=self.base * 1000 + index,
            trigger=trigger,
            threshold=max(0, value + rng.randrange(-2, 12)),
            completion=completion,
            step=rng.randrange(1, 4) if moves else 1,
            kind="add" if moves else kind,
            way=None if moves else rng.randrange(len(self.ways)),
            broken=kind in ("put", "put and flag", "get") and rng.random() < 0.03,
            deadline=rng.random() < 0.1,
        )

    def _operation(self, op: Armed) -> Operation:
        late_ns = after_ms(60_000) if op.deadline else 0
        fires = (op.trigger.gate.counter, op.threshold)
        completion = op.completion.gate.counter if op.completion else None
        if op.way is None:
            assert completion is not None
            trigger, threshold = fires
            return CounterMove(op.tag, completion, op.step, trigger=trigger, threshold=threshold)
        way = self.ways[op.way]
        flag = (op.index, self._value(op.index)) if "flag" in op.kind else None
        at, crc32c = 8 * op.index, 1 if op.broken else None  # no eight bytes here have that checksum
        if op.kind == "notify":
            notify = way.notify(op.tag, op.index, self._value(op.index), fires=fires, completion=completion)
            return notify._replace(deadline_ns=late_ns)
        if op.kind.startswith("put"):
            put = way.put(op.tag, 8, source=at, target=at, flag=flag, fires=fires, completion=completion)
            return put._replace(deadline_ns=late_ns, crc32c=crc32c)
        get: TriggeredGet = way.get(
            op.tag, 8, source=GET_AT + at, target=GET_AT + at, flag=flag, fires=fires, completion=completion
        )
        return get._replace(deadline_ns=late_ns, crc32c=crc32c)

    def move(self) -> None:
        count = self.rng.choice(self.counts[:GATES])
        count.gate.raise_to(count.gate.at + self.rng.randrange(1, 6))
        count.by_hand = count.gate.at

    def cancel(self) -> None:
        some = self.rng.sample(self.ops, min(len(self.ops), self.rng.randrange(1, 12)))
        self._take()
        over = [op for op in some if op.over]
        before = self.stage.near.fabric.statistics().cancelled
        count = self.stage.near.fabric.cancel([op.tag for op in some])
        self._take()
        cancelled = [op for op in some if op.event and op.event.status == -errno.ECANCELED]
        fresh = [op for op in cancelled if op not in over]
        assert len(fresh) == count == self.stage.near.fabric.statistics().cancelled - before
        assert not any(self._landed(op) for op in fresh)

    def close_endpoint(self) -> None:
        way = self.rng.randrange(1, len(self.ways))
        self.ways[way].endpoint.close()
        self._take()
        for op in self.ops:  # a provider may give some back before it closes, and those are told of
            if op.way == way and (op.event is None or op.event.status not in {0, *NOTHING_WENT_OUT}):
                op.dropped = True
        self.ways[way] = Way.between(Side.more(self.stage.near), self.stage.far)

    def reset(self) -> None:
        self.check()
        for count in self.counts:
            used = [op for op in self.ops if count in (op.trigger, op.completion) and not op.over]
            if used or self.rng.random() < 0.5:
                continue
            count.gate.counter.reset()
            count.gate.at = count.by_hand = 0
            count.movers.clear()
            assert not count.gate.counter.failed
            assert count.gate.counter.value() == 0

    # -- what holds

    def _take(self) -> None:
        near = self.stage.near
        near.reap()
        for event in near.events:
            index = event.tag - self.base * 1000
            if 0 <= index < len(self.ops):
                op = self.ops[index]
                assert event.kind in (EventKind.DONE, EventKind.FAILED), f"{event} of {op.kind}"
                assert not op.over, f"{event} is one end too many of {op.kind} {op.index}"
                op.event = event
        near.events.clear()

    def _must_end(self, op: Armed) -> bool:
        counter = op.trigger.gate.counter
        return not op.over and (counter.failed or counter.value() >= op.threshold)

    def _at_rest(self) -> bool:
        """Everything that must end has ended, and the counters have counted it."""
        self._take()
        if any(self._must_end(op) for op in self.ops):
            return False
        return all(
            count.gate.counter.failed == count.spoiled
            and (count.spoiled or count.gate.counter.value() == count.expected)
            for count in self.counts
        )

    def _landed(self, op: Armed) -> bool:
        """Whether any part of it is visible; of a get, only its flag is."""
        stage, at = self.stage, 8 * op.index
        flagged = stage.far.word(op.index).load() == self._value(op.index)
        if op.kind.startswith("put"):
            return flagged or stage.far.bytes_at(at, 8) == self._bytes(op.index)
        return flagged

    def _is_whole(self, op: Armed) -> bool:
        stage, at = self.stage, 8 * op.index
        if op.kind.startswith("put") and stage.far.bytes_at(at, 8) != self._bytes(op.index):
            return False
        if op.kind.startswith("get") and stage.near.bytes_at(GET_AT + at, 8) != self._bytes(op.index):
            return False
        flagged = "flag" in op.kind or op.kind == "notify"
        return not flagged or stage.far.word(op.index).load() == self._value(op.index)

    def check(self) -> None:
        wait_until(self._at_rest, "what has to end to have ended, and what is done to be counted")
        self.stage.settle()
        self._take()
        for op in self.ops:
            self._could_be(op)

    def _could_be(self, op: Armed) -> None:
        said = f"{op.kind} {op.index}: {op.event}"
        event = op.event
        if op.dropped:
            return  # with its endpoint: it may have gone out, or not
        if event is None:
            assert not self._landed(op), f"early: {said}"
        elif event.kind == EventKind.DONE:
            assert not op.broken, said
            wait_until(lambda: self._is_whole(op), said)  # without a count, done means sent
        else:
            assert event.status in NOTHING_WENT_OUT, said
            assert not self._landed(op), f"after its end: {said}"
            if event.status == -errno.EBADMSG:
                assert op.broken, said
            if event.status == -errno.EPIPE:
                assert event.value not in (0, errno.EPIPE), said

    def finish(self) -> None:
        """Fire or flush everything; nothing is left."""
        for count in self.counts[:GATES]:
            if self.rng.random() < 0.6:
                count.gate.raise_to(count.gate.at + 50)
                count.by_hand = count.gate.at
        self.check()
        self.stage.near.fabric.flush()
        self._take()
        assert all(op.over for op in self.ops)
        for op in self.ops:
            self._could_be(op)
        self.stage.holds_no_work()
        for way in self.ways[1:]:
            way.endpoint.close()
        now = self.stage.near.fabric.statistics()
        assert now.late == 0
        for count in self.counts:
            count.gate.counter.close()
