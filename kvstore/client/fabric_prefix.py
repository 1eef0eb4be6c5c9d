"""Look-ups over the fabric: how many blocks are stored, from the first one on, asked of the node's memory.

A client on the node's machine sees by itself if all are in memory (`nic_offload.direct`). Else the node's C core
answers a call whose blocks are all in memory, and the node's Python any other one. The calls of a long look-up are
under way together.

What always holds: a look-up ends by its deadline, with an answer or with one typed error. Calls that can't be made
over the fabric, or whose link is lost before an answer, are left to gRPC, and mean the same there.
What it doesn't do: attach. A client that has put and got nothing looks up over gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.block_calls import Prefix, batches
from kvstore.client.request_ids import current_request, header_of
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, FabricError, KvError
from kvstore.lookups import Kind
from kvstore.wire.fabric_call import AnswerCode, CallKind
from nic_offload.group import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.block_calls import BlockCalls
    from kvstore.client.core import Core
    from kvstore.client.link import Link
    from kvstore.client.request_ids import Asked
    from kvstore.miss import Miss

__all__ = ["Prefixes"]


class _Call:
    """The call for some blocks."""

    def __init__(self, blocks: int, asked: Asked, tag: int) -> None:
        self.blocks, self.asked, self.tag = blocks, asked, tag
        self.count: tuple[int, Miss | None] | None = None  # what the node said; None: all are in its memory
        self.error: KvError | None = None

    def counted(self, count: tuple[int, Miss | None]) -> None:
        """The node's answer."""
        self.count = count

    def failed(self, error: KvError) -> None:
        """The node refused it, or it is unknown what became of it."""
        self.error = error
        self.asked.failed(error)


class Prefixes:
    """The look-ups of one client. Safe to use from any thread."""

    def __init__(self, core: Core, over_grpc: BlockCalls) -> None:
        self._core, self._over_grpc = core, over_grpc
        self._late: list[tuple[Link, Group, list[_Call]]] = []  # looked up, and answered too late

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None) -> Prefix:
        """As `Client.prefix`."""
        known = self._over_fabric(keys, self._core.reach.call_timeout_s if timeout_s is None else timeout_s)
        if known.miss is not None or known.blocks == len(keys):
            return known
        rest = self._over_grpc.prefix(keys[known.blocks :], timeout_s=timeout_s)
        return Prefix(known.blocks + rest.blocks, rest.miss)

    def _over_fabric(self, keys: Sequence[bytes], timeout_s: float) -> Prefix:
        """Count the stored blocks; with fewer than all and no miss, the rest is to be asked for over gRPC."""
        link = self._core.proved
        if not keys or link is None or link.calls is None or not link.answers_prefixes:
            return Prefix(0, None)
        if self._are_here(link, keys):
            return Prefix(len(keys), None, is_shared=True)
        try:
            with self._core.breaker.call():
                return self._look(link, keys, timeout_s)
        except FabricError:  # the fabric is full, or being closed
            return Prefix(0, None)

    def _are_here(self, link: Link, keys: Sequence[bytes]) -> bool:
        """Whether all are in memory that the node shares with this client: that needs no call."""
        core = self._core
        if link.direct is None or core.spans is not None or core.lookups:
            return False
        return link.direct.has_all(core.fingerprint, keys, header_of(current_request()))

    def _look(self, link: Link, keys: Sequence[bytes], timeout_s: float) -> Prefix:
        core = self._core
        with core.lock:
            self._forget_late()
            if link.error is not None:
                return Prefix(0, None)
            group, calls = self._begin(link, keys)
        if calls and not group.wait(len(calls), timeout_s):
            late = DeadlineExceeded(f"The node did not answer a look-up within {timeout_s:.1f} s.")
            with core.lock:
                self._late.append((link, group, calls))
                for at, call in enumerate(calls):
                    if not group.row(at).over:
                        call.asked.failed(late)
            raise late
        with core.lock:
            self._end(link, calls)
        return self._counted(link, group, calls)

    def _begin(self, link: Link, keys: Sequence[bytes]) -> tuple[Group, list[_Call]]:
        """Make as many of the calls as go over the fabric now."""
        core, fabric_calls, some = self._core, link.calls, list(batches(keys))
        assert fabric_calls is not None
        until_ns = SystemClock().monotonic_ns() + core.reach.call_timeout_ms * 1_000_000
        group = Group(core.fabric, core.next_tags(), len(some), is_awaited=True)
        header = None if core.spans is None else core.spans.header()
        traced = () if header is None else (header,)
        calls: list[_Call] = []
        for row, of_call in enumerate(some):
            call = _Call(len(of_call), core.lookups.begin(Kind.PREFIX, len(of_call)), core.next_tags())
            made = fabric_calls.begin(
                CallKind.PREFIX,
                core.fingerprint,
                (*call.asked.metadata, *traced),
                call.blocks,
                b"".join(of_call),
                until_ns,
                call.tag,
                group,
                row,
                call.failed,
                good_code=AnswerCode.DONE,
                counted=call.counted,
            )
            if made is None:
                break
            link.operations[call.tag] = made
            calls.append(call)
        return group, calls

    @staticmethod
    def _end(link: Link, calls: Sequence[_Call]) -> None:
        for call in calls:
            link.operations.pop(call.tag, None)

    def _forget_late(self) -> None:
        late, self._late = self._late, []
        for link, group, calls in late:
            if all(row.over for row in group.rows(len(calls))):
                self._end(link, calls)
            else:
                self._late.append((link, group, calls))

    @staticmethod
    def _counted(link: Link, group: Group, calls: Sequence[_Call]) -> Prefix:
        blocks, is_shared = 0, link.mapped.hot is not None
        for call, code in zip(calls, group.codes(len(calls)), strict=True):
            if call.error is not None and link.error is None:
                raise call.error
            if code == AnswerCode.DONE:
                blocks += call.blocks
            elif call.count is None:  # the link was lost
                break
            else:
                stored, miss = call.count
                blocks, is_shared = blocks + stored, False
                if miss is not None:
                    return Prefix(blocks, miss)
        return Prefix(blocks, None, is_shared)
