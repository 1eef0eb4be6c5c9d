"""The request that a look-up belongs to, and a record of this process's look-ups that the node doesn't see.

    with as_request("cmpl-7"):
        client.prefix(keys)
        client.get(blocks)

Look-ups carry the request's id, which the caller gives or this module makes. Those that did not reach the node,
or that it refused, wait here and are sent along with a later one.

What always holds: at most `LOOKUPS_WAITING_MAX` wait, the oldest are dropped first; a call carries at most
`LOOKUPS_REPORTED_BYTES_MAX` of them; they cost no call of their own. If the call fails, they wait again.
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
from kvstore.limits import LOOKUP_RUNS_REPORTED_MAX, LOOKUPS_REPORTED_BYTES_MAX, LOOKUPS_WAITING_MAX
from kvstore.lookups import Lookup, Outcome, Run, clean_id, outcome_of_miss, runs_of
from kvstore.miss import Miss
from kvstore.wire import lookups_pb2 as pb
from kvstore.wire.fabric_call import header_bytes
from kvstore.wire.lookup_messages import LOOKUPS_HEADER, REQUEST_HEADER, lookup_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.lookups import Kind

__all__ = ["Asked", "ClientLookups", "Metadata", "as_request", "current_request", "header_of"]

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

_request: ContextVar[str] = ContextVar("kvstore_request", default="")
_process = secrets.token_hex(4)
_numbers = itertools.count(1)


def current_request() -> str:
    """The id of the request that this thread or task works for; a generated one if none was given."""
    return _request.get() or f"{_process}-{next(_numbers)}"


@contextmanager
def as_request(request_id: str = "") -> Iterator[str]:
    """Record all look-ups of this thread or task under this request's id, which is generated if not given.

    An id is printable ASCII without spaces, at most 128 characters; other characters become question marks.

    >>> from kvstore.client import as_request
    >>> with as_request("request-7") as request_id:
    ...     _ = client.get([block])
    >>> request_id
    'request-7'
    """
    request_id = clean_id(request_id) or current_request()
    token = _request.set(request_id)
    try:
        yield request_id
    finally:
        _request.reset(token)


def header_of(request_id: str) -> bytes:
    """The metadata of a get or look-up that needs no call."""
    return header_bytes(((REQUEST_HEADER, request_id),))


class Asked:
    """A look-up in progress."""

    def __init__(
        self,
        lookups: ClientLookups,
        kind: Kind,
        blocks: int,
        request_id: str,
        message: pb.LookupsByCaller | None,
    ) -> None:
        self._lookups = lookups
        self._kind, self._blocks, self._request_id, self._reported = kind, blocks, request_id, message
        self._began_ns = lookups.clock.monotonic_ns()
        self.metadata: Metadata = ((REQUEST_HEADER, request_id),)
        if message is not None:
            self.metadata = (*self.metadata, (LOOKUPS_HEADER, message.SerializeToString()))

    def failed(self, error: KvError) -> None:
        """The look-up was not answered, or was refused."""
        self._lookups.failed(self._request_id, self._kind, self._blocks, self._began_ns, error)
        if self._reported is not None:
            self._lookups.again(self._reported)


class ClientLookups:
    """A client's look-ups. Safe to use from any thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[pb.Lookup] = deque(maxlen=LOOKUPS_WAITING_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, kind: Kind, blocks: int, request_id: str = "") -> Asked:
        """Begin a look-up; the result has its metadata."""
        return Asked(self, kind, blocks, request_id or current_request(), self._take())

    @contextmanager
    def looking(self, kind: Kind, blocks: int, request_id: str = "") -> Iterator[Metadata]:
        """Make a look-up with this metadata; if the node can't be reached, that is recorded."""
        asked = self.begin(kind, blocks, request_id)
        try:
            yield asked.metadata
        except KvError as error:
            asked.failed(error)
            raise

    def failed(self, request_id: str, kind: Kind, blocks: int, began_ns: int, error: KvError) -> None:
        """A look-up failed; if the node could not be reached, that is recorded."""
        if isinstance(error, (NodeUnavailable, DeadlineExceeded, Overloaded)):
            outcome = Outcome.BUSY if isinstance(error, Overloaded) else Outcome.NODE_AWAY
            self._note(request_id, kind, began_ns, [Run(blocks, outcome)], error)

    def again(self, message: pb.LookupsByCaller) -> None:
        """Reports carried by a failed call wait for the next one."""
        with self._lock:
            left = LOOKUPS_WAITING_MAX - len(self._waiting)
            self._waiting.extendleft(reversed(message.lookups[max(0, len(message.lookups) - left) :]))

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
        self._note(request_id, kind, began_ns, runs_of(codes), error)

    def _note(self, request_id: str, kind: Kind, began_ns: int, runs: list[Run], error: KvError) -> None:
        blocks = sum(run.blocks for run in runs)
        if len(runs) > LOOKUP_RUNS_REPORTED_MAX:
            rest = sum(run.blocks for run in runs[LOOKUP_RUNS_REPORTED_MAX - 1 :])
            runs[LOOKUP_RUNS_REPORTED_MAX - 1 :] = [Run(rest, Outcome.UNSPECIFIED)]
        took_us = max(0, self.clock.monotonic_ns() - began_ns) // 1000
        at_ms = self.clock.wall_ms() - took_us // 1000
        lookup = Lookup(
            clean_id(request_id), kind, at_ms, took_us, blocks, runs, by_caller=True, detail=str(error)
        )
        with self._lock:
            self._waiting.append(lookup_message(lookup))

    def _take(self) -> pb.LookupsByCaller | None:
        """As many waiting reports as one call carries."""
        if not self._waiting:  # without the lock: a call that misses one reports it next time
            return None
        with self._lock:
            message = pb.LookupsByCaller(sent_unix_ms=self.clock.wall_ms())
            left_bytes = LOOKUPS_REPORTED_BYTES_MAX - message.ByteSize()
            while self._waiting and (left_bytes := left_bytes - self._waiting[0].ByteSize() - 4) >= 0:
                message.lookups.append(self._waiting.popleft())
        return message
