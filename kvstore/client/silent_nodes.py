"""Finds nodes of a cluster that have stopped answering, so that they cost a client one short wait in all.

If a call has been under way for `CLUSTER_PROBE_AFTER_MS`, or has failed for want of an answer, its node is probed
beside it. A node that doesn't answer a probe within `CLUSTER_PROBE_MS` is silent: its client is closed, so all calls to
it end, and it is not called again until it has answered a probe. The probes are made in the background, with pauses.
If the probing thread was itself late, the answer may have been too, because this machine is busy: then the node is
probed again, `CLUSTER_PROBES_LATE_MAX` times at most.

What always holds: no caller waits for a probe. A node that answers with an error is not silent.
What it doesn't do: change the map. A node that is slow but answers is used, whatever its calls cost.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvstore.client.channel import close_channel, open_channel
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, NodeUnavailable
from kvstore.limits import (
    BREAKER_MS_MIN,
    CLUSTER_PROBE_AFTER_MS,
    CLUSTER_PROBE_LATE_MS,
    CLUSTER_PROBE_MS,
    CLUSTER_PROBE_PAUSE_MS_MAX,
    CLUSTER_PROBES_LATE_MAX,
)
from kvstore.wire import kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.reach import Reach

__all__ = ["SilentNodes"]

_CLOCK = SystemClock()
_SILENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


@dataclass
class _Probe:
    """A probe that has not been answered."""

    channel: grpc.Channel
    answer: grpc.Future[kvstore_pb2.StatusResponse]
    late_ms: int = 0  # by which this thread was late at most, since it began


class SilentNodes:
    """The silent nodes of one client. Safe to use from any thread; a thread of its own probes."""

    def __init__(self, reach: Callable[[str], Reach], drop: Callable[[str], None]) -> None:
        """`reach` says how a node is reached; `drop` closes its client."""
        self._reach, self._drop = reach, drop
        self._changed = threading.Condition()
        self._waiting = Counter[str]()  # calls under way
        self._heard_ms: dict[
            str, int
        ] = {}  # when the oldest of these began, or a probe has been answered since
        self._suspects: set[str] = set()  # to be probed now
        self._silent: dict[str, int] = {}  # the pause before its next probe
        self._due_ms: dict[str, int] = {}  # when that is
        self._thread: threading.Thread | None = None
        self._is_idle = True  # the thread waits for a call, a suspect or the end
        self._closed = False

    def check(self, node: str) -> None:
        """NodeUnavailable if a node is silent."""
        if node in self._silent:
            refusal = NodeUnavailable(f"{node} does not answer. It is called again when it does.")
            refusal.was_tried = False
            raise refusal

    @contextmanager
    def waiting(self, nodes: Sequence[str]) -> Iterator[None]:
        """Wait for these nodes' answers."""
        with self._changed:
            for node in nodes:
                self._waiting[node] += 1
                self._heard_ms.setdefault(node, _now_ms())
            if self._is_idle:  # else it sees the call in time, and is not woken for each
                self._wake()
        try:
            yield
        finally:
            with self._changed:
                for node in nodes:
                    self._waiting[node] -= 1
                    if not self._waiting[node]:
                        del self._waiting[node], self._heard_ms[node]

    def suspect(self, node: str) -> None:
        """Probe a node: a call has not been answered."""
        with self._changed:
            if node not in self._silent:
                self._suspects.add(node)
                self._wake()

    def close(self) -> None:
        """Stop probing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="kvstore-probes", daemon=True)
            self._thread.start()
        self._changed.notify()

    # --- in the thread

    def _run(self) -> None:
        probes: dict[str, _Probe] = {}
        inconclusive = Counter[str]()  # unanswered probes in a row that say nothing
        while True:
            with self._changed:
                self._is_idle = not (self._waiting or self._suspects or self._silent or probes)
                began_ms = _now_ms()
                if not self._closed:
                    self._changed.wait(None if self._is_idle else BREAKER_MS_MIN / 1000)
                if self._closed:
                    break
                now_ms = _now_ms()
                due = self._suspects | {one for one, due_ms in self._due_ms.items() if now_ms >= due_ms}
                due |= {
                    one for one, ms in self._heard_ms.items() if now_ms - ms >= CLUSTER_PROBE_AFTER_MS
                } - self._silent.keys()
                self._suspects.clear()
            for probe in probes.values():
                probe.late_ms = max(probe.late_ms, now_ms - began_ms - BREAKER_MS_MIN)
            for node in due - probes.keys():
                if (begun := self._probe(node)) is not None:
                    probes[node] = begun
            for node in [node for node, probe in probes.items() if probe.answer.done()]:
                probe = probes.pop(node)
                close_channel(probe.channel)
                error = probe.answer.exception()
                says_nothing = _is_late(error) and probe.late_ms >= CLUSTER_PROBE_LATE_MS
                if says_nothing and inconclusive[node] < CLUSTER_PROBES_LATE_MAX:
                    inconclusive[node] += 1
                    self.suspect(node)
                else:
                    del inconclusive[node]
                    self._probed(node, error)
        for probe in probes.values():
            close_channel(probe.channel)

    def _probe(self, node: str) -> _Probe | None:
        try:
            channel = open_channel(self._reach(node))
        except ConfigError:  # a file with a token that can't be read now
            return None
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Status.future(kvstore_pb2.StatusRequest(), timeout=CLUSTER_PROBE_MS / 1000)
        return _Probe(channel, answer)

    def _probed(self, node: str, error: BaseException | None) -> None:
        is_silent = isinstance(error, grpc.Call) and error.code() in _SILENT
        with self._changed:
            was_silent, now_ms = node in self._silent, _now_ms()
            if is_silent:
                pause_ms = min(2 * self._silent.get(node, BREAKER_MS_MIN), CLUSTER_PROBE_PAUSE_MS_MAX)
                self._silent[node], self._due_ms[node] = pause_ms, now_ms + pause_ms
            else:
                self._silent.pop(node, None)
                self._due_ms.pop(node, None)
            if node in self._heard_ms:
                self._heard_ms[node] = now_ms + CLUSTER_PROBE_PAUSE_MS_MAX - CLUSTER_PROBE_AFTER_MS
        if is_silent and not was_silent:
            self._drop(node)


def _is_late(error: BaseException | None) -> bool:
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _now_ms() -> int:
    return _CLOCK.monotonic_ns() // 1_000_000
