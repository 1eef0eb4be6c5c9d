"""The contenders: each runs one round of its operations, for blocks of one size, and records it in the cells."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from benchmarks.peers.client_process import Timed, cpu_ns, settled_cpu_ns
from kvstore.limits import HEADER_BYTES
from kvstore.storage.disk import DiskOpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.peers.cells import Cells, Shape
    from benchmarks.peers.client_process import Worker
    from benchmarks.peers.redis import Redis
    from benchmarks.plain import PlainFabric
    from kvstore.bench.bare import BareDrive
    from kvstore.demo.node_process import NodeProcess

__all__ = ["Contender", "Drive", "OnFabric", "Ours", "Redises"]

_NEWER_BYTES = 192 << 20  # more than the half of the hot memory that a started node fills
_OPERATIONS = {"written": DiskOpKind.WRITE, "cold": DiskOpKind.READ}


class Contender(Protocol):
    """One of the contenders that take turns."""

    def round(self, shapes: Sequence[Shape], cells: Cells) -> None:
        """Run each operation once."""


class _Served:
    """A server in one process, and a client in another."""

    def __init__(self, name: str, server: NodeProcess | Redis, client: Worker) -> None:
        self._name, self._server, self._client = name, server, client

    def _measure(self, cells: Cells, shape: Shape, kind: str, *words: object) -> None:
        """The server's time includes work after its last answer."""
        before_ns = settled_cpu_ns(self._server.pid)
        timed = self._client.timed(*words)
        server_ns = settled_cpu_ns(self._server.pid) - before_ns
        cells.at(self._name, shape, kind).took(shape.bytes, timed, server_ns)

    def _put(self, cells: Cells, shape: Shape, kind: str) -> None:
        self._measure(cells, shape, kind, *self._put_words(shape, kind))

    def _get(self, cells: Cells, shape: Shape, kind: str) -> None:
        self._measure(cells, shape, kind, *self._get_words(shape))

    def _forget(self, shape: Shape) -> None:
        self._client.ask("forget", shape.name)

    @staticmethod
    def _put_words(shape: Shape, kind: str) -> tuple[object, ...]:
        return "put", shape.name, kind, shape.batch, shape.window, shape.calls

    @staticmethod
    def _get_words(shape: Shape) -> tuple[object, ...]:
        return "get", shape.name, shape.batch, shape.window


class Ours(_Served):
    """A node, restarted before its cold blocks are read; the plain drive's operations are next to the node's."""

    def __init__(self, node: NodeProcess, client: Worker, drive: Drive) -> None:
        super().__init__("us", node, client)
        self._node, self._drive = node, drive

    def round(self, shapes: Sequence[Shape], cells: Cells) -> None:
        """Run each shape landed, written and hot; then all of them cold, in a restarted node that has warmed up others.

        After a restart the memory that a client shares with the node is allocated when it is first used, which takes
        half a second per GB. That is not timed, since Redis is not restarted either.
        """
        for shape in shapes:
            self._client.ask(*self._put_words(shape, "landed"))
            self._forget(shape)
            self._put(cells, shape, "landed")
            self._forget(shape)
            self._drive.beside(
                self._node, cells, shape, "written", partial(self._put, cells, shape, "written")
            )
            self._client.ask(*self._get_words(shape))  # hot from now on, if it was not before
            self._get(cells, shape, "hot")
            self._forget(shape)
        for shape in shapes:
            self._client.ask(*self._put_words(shape, "written"))
        last = shapes[-1]
        calls = -(-_NEWER_BYTES // (last.size * last.batch))
        self._client.ask("put", "newer", "written", last.batch, 1, calls)
        self._node.stop()
        self._node.start()
        self._client.ask("ready")
        for shape in shapes:
            self._drive.beside(self._node, cells, shape, "cold", partial(self._get, cells, shape, "cold"))
            self._forget(shape)
        self._client.ask("forget", "newer")
        self._drive.goes_first = not self._drive.goes_first


class Redises(_Served):
    """Servers of Redis: one with a file is compared with `written`, one without is compared with the others."""

    def __init__(self, name: str, server: Redis, client: Worker) -> None:
        super().__init__(name, server, client)
        self._redis = server

    def round(self, shapes: Sequence[Shape], cells: Cells) -> None:
        """Set and get each shape, or set it only."""
        for shape in shapes:
            self._put(cells, shape, "written" if self._redis.keeps else "landed")
            if not self._redis.keeps:
                self._get(cells, shape, "hot")
            self._forget(shape)
        self._redis.flush()


class OnFabric:
    """Plain writes and a word in return: one block at a time, and in batches."""

    def __init__(self, fabric: PlainFabric) -> None:
        self._fabric = fabric

    def round(self, shapes: Sequence[Shape], cells: Cells) -> None:
        """Run each shape that keeps one call under way."""
        near, far = self._fabric.pids
        for shape in shapes:
            if shape.window > 1:
                continue
            before_ns = cpu_ns(near), cpu_ns(far)
            calls_ns = [self._fabric.write_ns(shape.size, shape.batch) for _ in range(shape.calls)]
            timed = Timed(0, sum(calls_ns), cpu_ns(near) - before_ns[0], calls_ns)
            cells.at("fabric", shape, "landed").took(shape.bytes, timed, cpu_ns(far) - before_ns[1])


class Drive:
    """io_uring over a file next to the node's, with records of the same size, before or after the node's own operation.

    A drive that has rested is faster for a moment, so it is measured next to what it is compared with.
    """

    def __init__(self, drive: BareDrive) -> None:
        self._drive = drive
        self.goes_first = False

    def beside(
        self, node: NodeProcess, cells: Cells, shape: Shape, kind: str, ours: Callable[[], None]
    ) -> None:
        """Run an operation of the node, and the same of the drive, each once the node is idle."""
        if self.goes_first:
            settled_cpu_ns(node.pid)
            self._run(cells, shape, kind)
        ours()
        if not self.goes_first:
            self._run(cells, shape, kind)

    def _run(self, cells: Cells, shape: Shape, kind: str) -> None:
        """Run one operation at a time, or at depth 16."""
        if shape.window > 1:
            return
        record, operation = shape.size + HEADER_BYTES, _OPERATIONS[kind]
        cell = cells.at("drive", shape, kind)
        start_ns, start_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        if shape.batch == 1:
            one_ns = self._drive.operation_ns(operation, record, 1)
            cell.gbps.append(shape.size / one_ns)
            cell.calls_us.append(one_ns / 1e3)
        else:
            cell.gbps.append(self._drive.gbps(operation, record))
            spent_ns = time.monotonic_ns() - start_ns
            moved_gb = cell.gbps[-1] * spent_ns / 1e9
            cell.client_s_per_gb.append((time.process_time_ns() - start_cpu_ns) / 1e9 / moved_gb)
