"""A client's calls about stored blocks that move no bytes: exists, prefix, explain, pin, prefetch, delete.

What always holds: a call ends within `call_timeout_ms`, with an answer or with one typed error. A batch may have any
length; it is split into calls of the maximum number of blocks, in order. Such a batch is not atomic: later calls see
what other clients did meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from kvstore.client.checks import check_lengths, check_number
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, KvError
from kvstore.limits import BATCH_BLOCKS_MAX
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.wire import blocks_pb2 as pb
from kvstore.wire import blocks_pb2_grpc, kvstore_pb2
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import grpc

    from kvstore.client.request_ids import ClientLookups
    from kvstore.reach import Reach

__all__ = ["BlockCalls", "Deleted", "Explained", "Pin", "Prefix", "Stored", "batches", "durability_message"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """A block that could be got at the time of the look-up."""

    key: bytes
    length: int
    expires_unix_ms: int = 0  # 0: the block doesn't expire
    fingerprint: bytes = b""  # of its layout


@dataclass(frozen=True, slots=True)
class Prefix:
    """How many blocks could be got without a gap, and why the next one, if any, could not."""

    blocks: int
    miss: Miss | None
    is_shared: bool = False  # all of them are in memory that this client shares with the node


@dataclass(frozen=True, slots=True)
class Explained:
    """Where a block is, or why it was removed. `reason` is one of `kvstore/v1/blocks.proto`."""

    key: bytes
    stored: bool
    reason: str | None
    removed_unix_ms: int
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@made_by("`Client.pin`")
class Pin(Handle):
    """Blocks protected from eviction until this is closed or expires. The time counts from the request.

    >>> pin = client.pin([key])
    >>> pin.pinned
    [True]
    """

    def __init__(self, calls: BlockCalls, numbers: Sequence[int], pinned: Sequence[bool]) -> None:
        self._calls = calls
        self._numbers = list(numbers)
        self.pinned = list(pinned)  # one per key; a block that is not stored can't be pinned

    def close(self) -> None:
        """Release the blocks. On a node that can't be reached the pin ends when it expires.

        >>> pin.close()
        """
        numbers, self._numbers = self._numbers, []
        if numbers:
            with suppress(KvError):
                self._calls.unpin(numbers)


class Deleted(NamedTuple):
    """What a node has deleted."""

    found: list[bool]
    digests: set[int]  # of its map; 0: it is in no cluster
    nodes: set[str]  # its name, "" of an earlier version


class BlockCalls:
    """The calls of one client. Any thread."""

    def __init__(
        self,
        channel: grpc.Channel,
        calling: Callable[[str], AbstractContextManager[None]],
        reach: Reach,
        fingerprint: bytes,
        lookups: ClientLookups,
    ) -> None:
        self._lookups = lookups
        self._stub = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        self._calling = calling
        self._tenant, self._timeout_s = reach.tenant, reach.call_timeout_s
        self._fingerprint = fingerprint

    def _within(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def exists(
        self,
        keys: Sequence[bytes],
        *,
        lengths: Sequence[int] | None = None,
        any_layout: bool = False,
        timeout_s: float | None = None,
    ) -> list[Stored | Miss]:
        """As `Client.exists`."""
        check_lengths(lengths, keys)
        fingerprint = b"" if any_layout else self._fingerprint
        names = [
            kvstore_pb2.BlockName(key=key, fingerprint=fingerprint, length=length)
            for key, length in zip(keys, lengths or [0] * len(keys), strict=True)
        ]
        states: list[pb.BlockState] = []
        for some in batches(names):
            request = pb.ExistsRequest(tenant=self._tenant, blocks=some)
            recorded = nullcontext() if any_layout else self._lookups.looking(Kind.EXISTS, len(some))
            with recorded as metadata, self._calling("Looking up blocks"):
                states += self._stub.Exists(
                    request, timeout=self._within(timeout_s), metadata=metadata
                ).blocks
        return [
            Stored(key, state.length, state.expires_unix_ms, state.fingerprint)
            if state.stored
            else _miss(state.miss)
            for key, state in zip(keys, states, strict=True)
        ]

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """As `Client.prefix`."""
        blocks = 0
        for some in batches(keys):
            request = pb.PrefixRequest(tenant=self._tenant, fingerprint=self._fingerprint, keys=some)
            with (
                self._lookups.looking(Kind.PREFIX, len(some)) as metadata,
                self._calling("Looking up a prefix"),
            ):
                answer = self._stub.Prefix(request, timeout=self._within(timeout_s), metadata=metadata)
            blocks += answer.blocks
            if answer.HasField("miss"):
                return Prefix(blocks, _miss(answer.miss))
        return Prefix(blocks, None)

    def delete(self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN) -> list[bool]:
        """As `Client.delete`."""
        return self.delete_detailed(keys, durability=durability).found

    def delete_detailed(
        self,
        keys: Sequence[bytes],
        *,
        durability: Durability = Durability.WRITTEN,
        session: tuple[str, str] = ("", ""),
    ) -> Deleted:
        """Like `Client.delete`; also returns what the node reports of itself.

        With the user and name of a session: blocks that another session there lists stay.
        """
        found: list[bool] = []
        digests, nodes = set[int](), set[str]()
        for some in batches(keys):
            with self._calling("Deleting blocks"):
                kept = durability_message(durability)
                request = pb.DeleteRequest(tenant=self._tenant, keys=some, durability=kept)
                request.user, request.session = session
                answer = self._stub.Delete(request, timeout=self._timeout_s)
            found += answer.found
            digests.add(answer.members_digest)
            nodes.add(answer.node)
        return Deleted(found, digests, nodes)

    def explain(self, keys: Sequence[bytes]) -> list[Explained]:
        """As `Client.explain`."""
        explanations: list[pb.Explanation] = []
        for some in batches(keys):
            with self._calling("Explaining blocks"):
                request = pb.ExplainRequest(tenant=self._tenant, keys=some)
                explanations += self._stub.Explain(request, timeout=self._timeout_s).explanations
        return [_explained(key, one) for key, one in zip(keys, explanations, strict=True)]

    def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> Pin:
        """As `Client.pin`."""
        check_number("A pin's time to live in ms", time_to_live_ms)
        numbers: list[int] = []
        pinned: list[bool] = []
        try:
            for some in batches(keys):
                with self._calling("Pinning blocks"):
                    request = pb.PinRequest(tenant=self._tenant, keys=some, time_to_live_ms=time_to_live_ms)
                    answer = self._stub.Pin(request, timeout=self._timeout_s)
                numbers += [answer.pin] if answer.pin else []
                pinned += answer.pinned
        except KvError:
            Pin(self, numbers, pinned).close()
            raise
        return Pin(self, numbers, pinned)

    def unpin(self, pins: Sequence[int]) -> int:
        """End pins by their numbers."""
        with self._calling("Ending pins"):
            request = pb.UnpinRequest(tenant=self._tenant, pins=pins)
            return int(self._stub.Unpin(request, timeout=self._timeout_s).ended)


def durability_message(durability: Durability) -> kvstore_pb2.Durability:
    """The proto's word for it; the numbers are the same."""
    if not isinstance(durability, Durability):
        raise InvalidArgument(f"A durability is a Durability, such as WRITTEN, not {durability!r}.")
    return cast("kvstore_pb2.Durability", int(durability))


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a batch of any length into those of calls."""
    for first in range(0, len(items), BATCH_BLOCKS_MAX):
        yield items[first : first + BATCH_BLOCKS_MAX]


def _miss(message: kvstore_pb2.GetMiss) -> Miss:
    return Miss(MissReason(message.reason), message.detail)


def _explained(key: bytes, explanation: pb.Explanation) -> Explained:
    reason = pb.GoneReason.Name(explanation.gone).removeprefix("GONE_REASON_") if explanation.gone else None
    return Explained(key, explanation.stored, reason, explanation.gone_unix_ms, explanation.sentence)
