"""Puts blocks of a cluster back to an owner that lacked them when another node had them.

A node that was replaced, or has just joined, has none of its blocks. Blocks read from another node are put to it, so it
fills up with those in use.

What always holds: the bytes are copied before the get returns, so the caller may reuse its memory. At most
`REPAIR_BYTES_MAX` are held; the rest is left to the next get. No caller waits for a repair; a failed one is dropped.
A block that was deleted after it was requested is not put back: the node knows its deletions, and is told how long ago
the request was. It is put back with the time to live that it has on the node it was read from, and not at all if that
has lost it, or doesn't answer.
What it doesn't do: look for blocks that nobody reads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.block_calls import Stored
from kvstore.errors import KvError
from kvstore.limits import REPAIR_BYTES_MAX, REPAIR_CALL_MS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kvstore.client.client import Client

__all__ = ["Repairs"]

log = logging.getLogger(__name__)


class _Repair(NamedTuple):
    node: str
    source: str  # the node that sent it
    key: bytes
    data: bytes
    read_ns: int  # when it was requested


class Repairs:
    """A client's repairs, in a thread that starts with the first one. Safe to use from any thread."""

    def __init__(self, calling: Callable[[str], AbstractContextManager[Client]]) -> None:
        self._calling = calling
        self._changed = threading.Condition()
        self._waiting: deque[_Repair] = deque()
        self._names: set[tuple[str, bytes]] = set()  # bytes of those, and of the one under way
        self._held_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def has_room(self) -> bool:
        """Whether one more block may be copied."""
        return not self._closed and self._held_bytes < REPAIR_BYTES_MAX

    def add(self, node: str, source: str, key: bytes, data: bytes, read_ns: int) -> None:
        """Put a block to a node in the background; it was read from the source at `read_ns` or later."""
        with self._changed:
            if not self.has_room or (node, key) in self._names:
                return
            self._names.add((node, key))
            self._waiting.append(_Repair(node, source, key, data, read_ns))
            self._held_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-repairs", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                one = self._waiting.popleft()
            try:
                self._put(one)
            except KvError as error:
                log.debug("A block was not restored to %s: %s", one.node, error)
            with self._changed:
                self._names.discard((one.node, one.key))
                self._held_bytes -= len(one.data)

    def _put(self, one: _Repair) -> None:
        with self._calling(one.source) as client:
            (found,) = client.exists([one.key], any_layout=True, timeout_s=REPAIR_CALL_MS / 1000)
        if not isinstance(found, Stored):
            return
        with self._calling(one.node) as client:
            client._inline.put(  # noqa: SLF001 - of this package
                one.key,
                one.data,
                expires_unix_ms=found.expires_unix_ms,
                timeout_s=REPAIR_CALL_MS / 1000,
                read_ns=one.read_ns,
            )

    def close(self) -> None:
        """Drop what is waiting. The clients are closed already, so pending puts end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
