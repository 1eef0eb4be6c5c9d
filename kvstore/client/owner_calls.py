"""Calls of the nodes that own a client's blocks: made at the same time, each with the blocks that the node owns.

What always holds: each node's share has an answer, what the call returned or one error; a caller's mistake is raised
instead, and what other nodes have done is undone. Blocks of a node that has left the map meanwhile go to their new
owners. A node that does not answer is called no more until it has answered a probe (`silent_nodes`).
What it doesn't do: decide which nodes own a block, or follow the map after the calls.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.client.silent_nodes import SilentNodes
from kvstore.errors import Closed, DeadlineExceeded, KvError, NodeUnavailable, UsageError
from kvstore.limits import CLUSTER_CALLS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from concurrent.futures import Future

    from kvstore.client.client import Client
    from kvstore.client.nodes import Nodes

__all__ = ["Owned", "OwnerCalls"]

R = TypeVar("R")


class Owned(Protocol):
    """Finds the owners of blocks."""

    def __call__(self, some: Iterable[int], called: Container[tuple[str, int]]) -> dict[str, list[int]]:
        """Which of the blocks at these places each node owns, as of now, and was not called for."""
        ...


class OwnerCalls:
    """The calls of one client. Safe to use from any thread."""

    def __init__(self, nodes: Nodes) -> None:
        self.calling, self.is_there = nodes._calling, nodes._has  # noqa: SLF001 - of this package
        self.silent = SilentNodes(nodes.reach.at, nodes._drop)  # noqa: SLF001 - of this package
        self.closing = threading.Event()
        self.threads = ThreadPoolExecutor(CLUSTER_CALLS_AT_ONCE, "kvstore-cluster")
        self._pid = os.getpid()

    def of_owners(
        self,
        count: int,
        owned: Owned,
        call: Callable[[Client, list[int]], R],
        undo: Callable[[R], object] | None = None,
    ) -> list[tuple[str, list[int], R | KvError]]:
        """Call each block's owners, as `each`; the blocks of a node that has left the map go to their new owners."""
        answers = list[tuple[str, list[int], R | KvError]]()
        parts = owned(range(count), ())
        called = {(node, at) for node, some in parts.items() for at in some}
        while parts:
            left = set[int]()
            try:
                replies = self.each(parts, call, undo)
            except UsageError:
                for _, _, answer in answers:
                    if undo is not None and not isinstance(answer, KvError):
                        undo(answer)
                raise
            for node, answer in replies.items():
                if isinstance(answer, NodeUnavailable) and not self.is_there(node):
                    left.update(parts[node])
                else:
                    answers.append((node, parts[node], answer))
            parts = owned(sorted(left), called)
            called |= {(node, at) for node, some in parts.items() for at in some}
        return answers

    def each(
        self,
        parts: Mapping[str, list[int]],
        call: Callable[[Client, list[int]], R],
        undo: Callable[[R], object] | None = None,
    ) -> dict[str, R | KvError]:
        """Call all nodes at the same time and return their results; a caller's mistake is raised, and all is undone."""
        if os.getpid() != self._pid:  # the threads are its parent's, and would never answer
            raise Closed("The client was opened before this process was forked. Open one in the child.")

        def one(node: str) -> R | KvError:
            try:
                self.silent.check(node)
                with self.silent.waiting((node,)), self.calling(node) as client:
                    return call(client, parts[node])
            except (NodeUnavailable, DeadlineExceeded) as error:
                if error.was_tried:
                    self.silent.suspect(node)
                return error
            except KvError as error:
                return error

        first, *others = parts or [""]
        if not first:
            return {}
        waiting = {node: self._begun(one, node) for node in others}
        answers = {first: one(first)} | {node: future.result() for node, future in waiting.items()}
        mistakes = [answer for answer in answers.values() if isinstance(answer, UsageError)]
        if mistakes:
            for answer in answers.values():
                if undo is not None and not isinstance(answer, KvError):
                    undo(answer)
            raise mistakes[0]
        return answers

    def _begun(self, call: Callable[[str], R], node: str) -> Future[R]:
        """A call in another thread, with its caller's request id: so `kvstore explain` finds it on every node."""
        try:
            return self.threads.submit(copy_context().run, call, node)
        except RuntimeError:
            if self.closing.is_set():
                raise Closed("The client is closed.") from None
            raise
