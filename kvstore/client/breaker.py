"""The circuit breaker: a node that is away costs the first call its deadline, and later ones nothing.

After a failure calls are refused at once, for a period that doubles with each failure up to `BREAKER_MS_MAX`. When it
ends, one call is let through as a trial, and its outcome decides for all.

What always holds: calls are refused only if one has failed since the last success; at most one trial is under way; a
refusal names the failure and the time of the next trial.
A failure means that the node could not be reached, or did not answer for `late_ms` in all, over one call or several in
succession. A shorter deadline says nothing about the node, nor do two that are far apart. A node that refuses a call is
up.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable
from kvstore.limits import BREAKER_LATE_MS, BREAKER_MS_MAX, BREAKER_MS_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.clock import Clock

__all__ = ["Breaker"]


class Breaker:
    """The circuit breaker of a node. Safe to use from any thread."""

    def __init__(self, clock: Clock, late_ms: int = BREAKER_LATE_MS) -> None:
        self._clock = clock
        self._late_ms_max = late_ms
        self._lock = threading.Lock()
        self._failure: KvError | None = None
        self._pause_ms = 0
        self._until_ns = 0
        self._late_ns = 0  # how long calls have waited since the last answer; simultaneous ones count once
        self._late_until_ns = 0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether a call would be refused now."""
        with self._lock:
            return self._refuses()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Make a call and record its outcome; NodeUnavailable, without a call, while the breaker is open."""
        self._enter()
        began_ns = self._clock.monotonic_ns()
        try:
            yield
        except DeadlineExceeded as error:
            self._was_late(error, began_ns)
            raise
        except KvError as error:
            self.failed(error)
            raise
        except BaseException:
            self.succeeded()  # any other error is not the node's
            raise
        self.succeeded()

    def check(self) -> None:
        """NodeUnavailable if a call would be refused now."""
        with self._lock:
            self._refuse()

    def _enter(self) -> None:
        with self._lock:
            self._refuse()
            self._trying = self._failure is not None

    def _refuse(self) -> None:
        if self._refuses():
            left_ms = max(0, self._until_ns - self._clock.monotonic_ns()) // 1_000_000
            refusal = NodeUnavailable(
                f"The node is down; the next attempt is in {left_ms} ms. {self._failure}"
            )
            refusal.was_tried = False
            raise refusal

    def succeeded(self) -> None:
        """The node has answered."""
        with self._lock:
            self._failure, self._pause_ms, self._trying = None, 0, False
            self._late_ns = 0

    def _was_late(self, error: DeadlineExceeded, began_ns: int) -> None:
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            self._late_ns += now_ns - max(began_ns, self._late_until_ns)
            self._late_until_ns = now_ns
            is_failure = self._late_ns >= self._late_ms_max * 1_000_000
            if not is_failure:
                self._trying = False  # the next caller may try
        if is_failure:
            self.failed(error)

    def failed(self, error: KvError) -> None:
        """A call has ended with this error."""
        if not isinstance(error, (NodeUnavailable, DeadlineExceeded)):
            self.succeeded()
            return
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            if self._failure is None or self._trying:  # calls that were under way together are one failure
                self._pause_ms = min(max(BREAKER_MS_MIN, 2 * self._pause_ms), BREAKER_MS_MAX)
                self._until_ns = now_ns + self._pause_ms * 1_000_000
            self._failure, self._trying = error, False

    def _refuses(self) -> bool:
        return self._failure is not None and (self._trying or self._clock.monotonic_ns() < self._until_ns)
