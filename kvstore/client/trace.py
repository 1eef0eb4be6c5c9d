"""A compute process's record of a session's steps, sent to the node with calls that are made anyway.

What always holds: at most `STEPS_REPORTED_MAX` steps wait, and the oldest are dropped first. Recording costs no call,
and for a put no more than for its batch. Times are CLOCK_MONOTONIC: a node on the same machine uses them as they are;
another node converts them by their age when they were sent.
What it doesn't do: guarantee delivery. Steps are lost if their call fails, or the process is killed before.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.client.firings import firings
from kvstore.durability import Durability
from kvstore.limits import STEP_PUTS_FOLLOWED_MAX, STEPS_REPORTED_MAX
from kvstore.miss import Miss, MissReason
from kvstore.steps import Seen, Step
from kvstore.wire import steps_pb2 as pb
from kvstore.wire.step_messages import STEPS_HEADER, machine_clock, seen_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client.blocks import Block, PutResult
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.resuming import Resumed
    from kvstore.client.transfer_watch import Metadata
    from kvstore.clock import Clock
    from nic_offload.fabric import Region

__all__ = ["Follower", "Notes", "Trace"]

_NOT_GONE = {MissReason.NODE_AWAY, MissReason.BUSY, MissReason.UNREADABLE, MissReason.LAYOUT}


class Follower(Protocol):
    """Keeps a list of where a user's blocks are. Called from any thread; must not block."""

    def stored(self, user: str, key: bytes, length: int) -> None:
        """A put of a block was acknowledged, or the block was already stored."""
        ...

    def dropped(self, user: str, key: bytes) -> None:
        """A get has found that the block is gone."""
        ...

    def forgotten(self, user: str) -> None:
        """Something of the user was deleted."""
        ...


class Trace(NamedTuple):
    """A session's recorded steps, earliest first; `at_ns` counts back from `now_unix_ms`."""

    seen: tuple[Seen, ...]
    now_unix_ms: int


class Notes:
    """A process's notes on a session. Safe to use from any thread."""

    def __init__(self, user: str, session: str, clock: Clock, follower: Follower | None = None) -> None:
        self.user = user
        self.session = session
        self.follower = follower
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: deque[Seen] = deque(maxlen=STEPS_REPORTED_MAX)
        self._puts: deque[tuple[Sequence[Block], ArmedPuts]] = deque(maxlen=STEP_PUTS_FOLLOWED_MAX)
        self._registered_ns = 0  # of the region that was noted last

    def note(
        self,
        step: Step,
        *,
        blocks: int = 0,
        size_bytes: int = 0,
        tokens: int = 0,
        detail: str = "",
        at_ns: int | None = None,
    ) -> None:
        """Record an event, now unless a time is given."""
        at_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        with self._lock:
            self._seen.append(Seen(step, at_ns, blocks, size_bytes, tokens, detail))

    def registered(self, region: Region) -> None:
        """The session's blocks are, or will be, in this region."""
        if region.registered_ns != self._registered_ns:
            self._registered_ns = region.registered_ns
            self.note(Step.REGISTERED, size_bytes=region.length, at_ns=region.registered_ns)

    def resumed(self, resumed: Resumed) -> None:
        """A resume has ended."""
        step = Step.WHOLE if resumed.is_whole else Step.MISSED
        self.note(
            step,
            blocks=resumed.usable_blocks,
            tokens=resumed.usable_tokens,
            detail="" if resumed.miss is None else str(resumed.miss),
        )

    def missed(self, key: bytes, miss: Miss) -> None:
        """A block did not arrive."""
        if self.follower is not None and miss.reason not in _NOT_GONE:
            self.follower.dropped(self.user, key)

    # --- as the watch of transfers

    def armed(self, blocks: Sequence[Block], puts: ArmedPuts) -> None:
        """Puts have been armed; their outcome is reported when they have ended."""
        thresholds = [block.threshold for block in blocks]
        self.note(
            Step.ARMED,
            blocks=len(blocks),
            size_bytes=sum(block.length for block in blocks),
            detail=f"one counter, {_thresholds(min(thresholds), max(thresholds))}",
        )
        with self._lock:
            self._puts.append((blocks, puts))

    def put_ended(self, block: Block, result: PutResult) -> None:
        """A put has ended."""
        if self.follower is not None and result.error is None:
            self.follower.stored(self.user, block.key, block.length)

    def metadata(self) -> Metadata:
        """Events to send with a call; they count as reported."""
        return ((STEPS_HEADER, self.message().SerializeToString()),)

    def message(self) -> pb.SeenByCaller:
        """The same events as a message."""
        with self._lock:
            followed, self._puts = self._puts, deque(maxlen=STEP_PUTS_FOLLOWED_MAX)
        fired: list[Seen] = []
        for blocks, puts in followed:
            results = puts.ended()
            if results is not None:
                fired += _firings(blocks, results)
            else:
                with self._lock:
                    self._puts.append((blocks, puts))
        with self._lock:
            seen = sorted([*self._seen, *fired], key=lambda one: one.at_ns)[-STEPS_REPORTED_MAX:]
            self._seen.clear()
        return pb.SeenByCaller(
            user=self.user,
            session=self.session,
            clock=machine_clock(),
            sent_ns=self._clock.monotonic_ns(),
            seen=map(seen_message, seen),
        )


def _thresholds(low: int, high: int) -> str:
    return f"threshold {low}" if low == high else f"thresholds {low} to {high}"


def _firings(blocks: Sequence[Block], results: Sequence[PutResult]) -> Iterator[Seen]:
    """Yield the events of each threshold that fired."""
    for one in firings(blocks, results):
        details = [_thresholds(one.low, one.high)]
        if one.failed:
            details.append(f"{one.failed} failed")
        else:
            details.append(f"landed after {_ms(one.landed_ns - one.fired_ns)}")
            if one.durability > Durability.LANDED:
                details.append(f"{one.durability.name.lower()} after {_ms(one.durable_ns - one.fired_ns)}")
        yield Seen(Step.FIRED, one.fired_ns, one.blocks, one.size_bytes, detail=", ".join(details))


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.2f} ms"
