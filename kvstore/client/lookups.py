"""Which request a look-up is for, and what this process knows of those that the node does not know of.

    with as_request("cmpl-7"):
        client.prefix(keys)
        client.get(blocks)

Look-ups are told by the request's id, which the caller gives or this module makes. Those that did not reach the node,
or that it refused, wait here and ride to it on a later one.

What always holds: at most `LOOKUPS_WAITING_MAX` wait, the oldest go first; a call carries at most
`LOOKUPS_TOLD_BYTES_MAX` of them; they cost no call of their own. What rode on a call that failed waits again.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable, Overloaded
from kvstore.limits import LOOKUPS_TOLD_BYTES_MAX, LOOKUPS_WAITING_MAX
from kvstore.lookups import Lookup, Outcome, Run, clean_id, outcome_of_miss, runs_of
from kvstore.miss import Miss
from kvstore.wire import lookups_pb2 as pb
from kvstore.wire.looked import LOOKUPS_HEADER, REQUEST_HEADER, lookup_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.lookups import Kind

__all__ = ["ClientLookups", "Metadata", "as_request", "current_request"]

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

_RUNS_TOLD_MAX = 8
_request: ContextVar[str] = ContextVar("kvstore_request", default="")
_process = secrets.token_hex(4)
_numbers = itertools.count(1)


def current_request() -> str:
    """The id of the request that this thread, or task, works for; one of its own if nobody gave it any."""
    return _request.get() or f"{_process}-{next(_numbers)}"


@contextmanager
def as_request(request_id: str = "") -> Iterator[str]:
    """Let all look-ups in this thread, or task, be told as this request's; gives its id, made here if none is given.

    An id is printable ASCII of at most 128 letters; what is not is told as a question mark.
    """
    request_id = clean_id(request_id) or current_request()
    token = _request.set(request_id)
    try:
        yield request_id
    finally:
        _request.reset(token)


class ClientLookups:
    """Of one client. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[pb.Lookup] = deque(maxlen=LOOKUPS_WAITING_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def looking(self, kind: Kind, blocks: int, request_id: str = "") -> Iterator[Metadata]:
        """Make a look-up with this metadata; if it fails for want of the node, that is noted."""
        request_id = request_id or current_request()
        told = self._take()
        metadata: Metadata = ((REQUEST_HEADER, request_id),)
        if told is not None:
            metadata = (*metadata, (LOOKUPS_HEADER, told.SerializeToString()))
        try:
            with self.noting(kind, blocks, request_id):
                yield metadata
        except KvError:
            if told is not None:
                with self._lock:
                    left = LOOKUPS_WAITING_MAX - len(self._waiting)
                    self._waiting.extendleft(reversed(told.lookups[max(0, len(told.lookups) - left) :]))
            raise

    @contextmanager
    def noting(self, kind: Kind, blocks: int, request_id: str) -> Iterator[None]:
        """Do what a look-up needs before its call; if that fails for want of the node, it is noted as the look-up's."""
        at_ms, began_ns = self._clock.wall_ms(), self._clock.monotonic_ns()
        try:
            yield
        except (NodeUnavailable, DeadlineExceeded, Overloaded) as error:
            outcome = Outcome.BUSY if isinstance(error, Overloaded) else Outcome.NODE_AWAY
            self._note(request_id, kind, at_ms, began_ns, [Run(blocks, outcome)], error)
            raise

    def lost(
        self,
        request_id: str,
        kind: Kind,
        began_ns: int,
        outcomes: Sequence[object | Miss],
        error: KvError,
    ) -> None:
        """The node went away while it sent blocks, or did not send them in time; the outcomes say which."""
        codes = bytes(
            outcome_of_miss(one.reason) if isinstance(one, Miss) else Outcome.MEMORY for one in outcomes
        )
        ago_ms = (self._clock.monotonic_ns() - began_ns) // 1_000_000
        self._note(request_id, kind, self._clock.wall_ms() - ago_ms, began_ns, runs_of(codes), error)

    def _note(
        self, request_id: str, kind: Kind, at_ms: int, began_ns: int, runs: list[Run], error: KvError
    ) -> None:
        blocks = sum(run.blocks for run in runs)
        if len(runs) > _RUNS_TOLD_MAX:
            rest = sum(run.blocks for run in runs[_RUNS_TOLD_MAX - 1 :])
            runs[_RUNS_TOLD_MAX - 1 :] = [Run(rest, Outcome.UNSPECIFIED)]
        took_us = max(0, self._clock.monotonic_ns() - began_ns) // 1000
        lookup = Lookup(
            clean_id(request_id), kind, at_ms, took_us, blocks, runs, by_caller=True, detail=str(error)
        )
        with self._lock:
            self._waiting.append(lookup_message(lookup))

    def _take(self) -> pb.LookupsByCaller | None:
        """As many of those that wait as one call carries."""
        if not self._waiting:  # without the lock: who comes a moment too early tells of it next time
            return None
        with self._lock:
            told = pb.LookupsByCaller(sent_unix_ms=self._clock.wall_ms())
            left_bytes = LOOKUPS_TOLD_BYTES_MAX - told.ByteSize()
            while self._waiting and (left_bytes := left_bytes - self._waiting[0].ByteSize() - 4) >= 0:
                told.lookups.append(self._waiting.popleft())
        return told
