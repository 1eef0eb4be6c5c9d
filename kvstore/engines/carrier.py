"""Carries blocks between an engine's memory and a node, by the client's transport if the memory is registered.

Where several nodes are named, it spreads blocks over them, and keeps each on as many as are asked for; then a block is
stored as soon as one node has it.

It is shared by the adapters of engines that pass addresses and wait (SGLang, LMCache, vLLM's tier). A block that
is larger than `PART_BYTES` is stored in parts, under names made from its own, so a block may have any size.

What always holds: a node's failure never raises here; the result is False, or 0. A call ends by its deadline; once it
has ended, nothing reads or writes the caller's memory any more. True from a get means that the exact bytes are in
place. Blocks belong to the user of the settings, or are shared, under keys of their own. Any thread.

What it doesn't do: keep the memory alive; the caller keeps it until `close`. Blocks in other memory, and larger ones
than announced, are copied and sent over gRPC.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from kvstore.client import Hit, Stored
from kvstore.clock import SystemClock
from kvstore.engines.stores import block_at, is_about_domains, name_of, open_store
from kvstore.errors import KvError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    ENGINE_HALF_BYTES_MIN,
    ENGINE_HALVES,
    ENGINE_SLOTS_BYTES,
    ENGINE_SLOTS_MIN,
    SLOTS_PER_CLIENT_MAX,
)
from kvstore.names import block_key
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.client import Block, ClusterBlock, ClusterPin, Pin, RegisteredMemory
    from kvstore.engines.common_settings import EngineSettings
    from kvstore.engines.stores import Store
    from kvstore.miss import Miss
    from nic_offload.fabric import Region

__all__ = ["PART_BYTES", "Carrier", "Place", "part_keys"]

PART_BYTES = 4 << 20  # of one stored object; part of the names of larger blocks, so it never changes
T = TypeVar("T")

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A block, and where its bytes are or go in this process's memory."""

    key: bytes
    address: int
    length: int


class _Part(NamedTuple):
    """A part that goes over gRPC."""

    block: int  # the index of the place that it is a part of
    key: bytes
    address: int
    length: int


_Placed: TypeAlias = "tuple[int, Block | ClusterBlock]"  # the same index


class _Area(NamedTuple):
    begin: int
    length: int
    region: Region | RegisteredMemory

    def has(self, address: int, size: int) -> bool:
        return 0 <= address - self.begin <= self.length - size


def part_keys(key: bytes, length: int) -> list[bytes]:
    """The keys of a block's parts. The first part has the block's own key, even if it is the only one."""
    count = max(1, -(-length // PART_BYTES))
    return [key] + [block_key(key, b"part %d" % number) for number in range(1, count)]


class Carrier(Handle):
    """A client of one node, or of a cluster's, and an engine's memory."""

    def __init__(self, settings: EngineSettings, layout: bytes, block_bytes_max: int = PART_BYTES) -> None:
        """Open the client; the node is not called yet. Blocks larger than announced are sent over gRPC."""
        self._slot_bytes = max(1, min(block_bytes_max, PART_BYTES))
        self._slots = min(SLOTS_PER_CLIENT_MAX, max(ENGINE_SLOTS_MIN, ENGINE_SLOTS_BYTES // self._slot_bytes))
        self._client: Store = open_store(
            settings, layout, slots=self._slots, block_bytes_max=self._slot_bytes
        )
        self._named = settings.named
        self._lookup_s, self._load_s, self._save_s = (
            ms / 1000
            for ms in (settings.lookup_timeout_ms, settings.load_timeout_ms, settings.save_timeout_ms)
        )
        self._clock = SystemClock()
        self._areas: list[_Area] = []
        self._putting = threading.Lock()  # the client has a fixed number of slots on the node
        self._halves = ThreadPoolExecutor(ENGINE_HALVES, "kvstore-half-load")  # one of a load each

    def register(self, address: int, length: int) -> None:
        """Register memory, so that its blocks are moved without another copy. FabricError if that fails."""
        region = self._client.register((ctypes.c_char * length).from_address(address))
        self._areas = [*self._areas, _Area(address, length, region)]

    @property
    def transport(self) -> str:
        """How blocks in registered memory are carried."""
        return self._client.transport

    @property
    def name(self) -> str:
        """The same, for logs."""
        return name_of(self._client)

    # --- what is there

    def present(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Whether a get would find each block, given as key and length. A length of 0 matches any."""
        names = [
            (number, key, size)
            for number, (block, length) in enumerate(blocks)
            for key, size in self._sized(block, length)
        ]
        here = [True] * len(blocks)
        try:
            until_ns = self._until(self._lookup_s)
            for some in _batches(names):
                answers = self._client.exists(
                    [key for _, key, _ in some],
                    lengths=[size for _, _, size in some],
                    timeout_s=self._left_s(until_ns),
                )
                for (number, _, _), answer in zip(some, answers, strict=True):
                    here[number] &= isinstance(answer, Stored)
        except KvError as error:
            log.debug("%d blocks could not be looked up: %s", len(blocks), error)
            return [False] * len(blocks)
        return here

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Return the lengths of stored objects; 0 for a missing one. For a block in parts, that of the first part."""
        try:
            answers = self._client.exists(list(map(self._named, keys)), timeout_s=self._lookup_s)
        except KvError as error:
            log.debug("%d blocks could not be looked up: %s", len(keys), error)
            return [0] * len(keys)
        return [one.length if isinstance(one, Stored) else 0 for one in answers]

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Count the stored objects, from the first, without a gap."""
        had = 0
        try:
            until_ns = self._until(self._lookup_s)
            for some in _batches(list(map(self._named, keys))):
                count = self._client.prefix(some, timeout_s=self._left_s(until_ns)).blocks
                had += count
                if count < len(some):
                    break
        except KvError as error:
            log.debug("The look-up of %d blocks ended: %s", len(keys), error)
        return had

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete stored objects; returns how many there were. It ends within the time of a save and one call."""
        found = 0
        try:
            until_ns = self._until(self._save_s)
            for some in _batches(list(map(self._named, keys))):
                if not self._left_s(until_ns):
                    break
                found += sum(self._client.delete(some))
        except KvError as error:
            log.warning("Blocks could not be deleted: %s", error)
        return found

    def pin(self, keys: Sequence[bytes], time_to_live_ms: int) -> Pin | ClusterPin | None:
        """Pin stored objects for a while; None if the node can't promise that now."""
        try:
            return self._client.pin(list(map(self._named, keys)), time_to_live_ms=time_to_live_ms)
        except KvError as error:
            log.debug("%d objects were not pinned: %s", len(keys), error)
            return None

    # --- moving

    def put(self, places: Sequence[Place], *, timeout_s: float | None = None) -> list[bool]:
        """Store blocks; returns for each whether all of it is `written`, so that it survives a crash of the node."""
        until_ns = self._until(self._save_s if timeout_s is None else timeout_s)
        done = [True] * len(places)
        placed, inline = self._ways(places)
        if placed:
            if self._putting.acquire(timeout=self._left_s(until_ns)):
                try:
                    self._put_placed(placed, until_ns, done)
                finally:
                    self._putting.release()
            else:
                _failed(placed, done)
        if inline:
            results = self._client.put_many_inline(
                ((part.key, _bytes_at(part.address, part.length)) for part in inline),
                timeout_s=self._left_s(until_ns),
            )
            for result in results:
                is_about_domains(result.error, log)
            stored = [one.has_block for one in results] + [False] * (len(inline) - len(results))
            for part, is_stored in zip(inline, stored, strict=True):
                done[part.block] &= is_stored
        return done

    def _put_placed(self, parts: Sequence[_Placed], until_ns: int, done: list[bool]) -> None:
        for first in range(0, len(parts), self._slots):
            some = parts[first : first + self._slots]
            if not self._left_s(until_ns):
                _failed(some, done)
                continue
            try:
                armed = self._client.arm([block for _, block in some], timeout_s=self._left_s(until_ns))
                results = armed.wait(self._left_s(until_ns))
                armed.abandon()  # blocks that have not landed by now: the caller reuses its memory
            except KvError as error:
                if not is_about_domains(error, log):
                    log.debug("%d blocks were not stored: %s", len(some), error)
                _failed(some, done)
                continue
            for (number, _), result in zip(some, results, strict=True):
                is_about_domains(result.error, log)
                done[number] &= result.has_block

    def get(self, places: Sequence[Place], *, timeout_s: float | None = None) -> list[bool]:
        """Get blocks into memory; returns for each whether its exact bytes are there.

        The memory of others is undefined.
        """
        until_ns = self._until(self._load_s if timeout_s is None else timeout_s)
        here = [True] * len(places)
        placed, inline = self._ways(places)
        try:
            for some in _batches(placed):
                outcomes = self._get_placed([block for _, block in some], until_ns)
                for (number, _), outcome in zip(some, outcomes, strict=True):
                    here[number] &= isinstance(outcome, Hit)
            self._get_inline(inline, until_ns, here)
        except KvError as error:
            log.debug("%d blocks were not fetched: %s", len(places), error)
            return [False] * len(places)
        return here

    def _get_placed(self, blocks: list[Any], until_ns: int) -> Sequence[Hit | Miss]:
        """Get blocks; many of them by two threads, as one doesn't copy as fast as the memory allows."""
        half = len(blocks) // 2

        def get(some: list[Any]) -> Sequence[Hit | Miss]:
            return self._client.get(some, timeout_s=self._left_s(until_ns))

        if sum([block.length for block in blocks[:half]]) < ENGINE_HALF_BYTES_MIN:
            return get(blocks)
        try:
            rest = self._halves.submit(copy_context().run, get, blocks[half:])
        except RuntimeError:  # the carrier has been closed
            return get(blocks)
        try:
            return [*get(blocks[:half]), *rest.result()]
        finally:
            wait([rest])  # it writes to the caller's memory

    def _get_inline(self, parts: Sequence[_Part], until_ns: int, here: list[bool]) -> None:
        if not parts:
            return
        wanted = [(part.key, part.length) for part in parts]
        outcomes = self._client.get_many_inline(wanted, timeout_s=self._left_s(until_ns))
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, bytes) and len(outcome) == part.length:
                _bytes_at(part.address, part.length)[:] = outcome
            else:
                here[part.block] = False

    def _ways(self, places: Sequence[Place]) -> tuple[list[_Placed], list[_Part]]:
        """Cut blocks into parts, and separate those in registered memory."""
        placed: list[_Placed] = []
        inline: list[_Part] = []
        area: _Area | None = None
        for number, (block, begin, length) in enumerate(places):
            offset = 0
            for key, size in self._sized(block, length):
                address = begin + offset
                offset += size
                if area is None or not area.has(address, size):  # mostly it is the same
                    area = next((one for one in self._areas if one.has(address, size)), None)
                if area is None or size > self._slot_bytes:
                    inline.append(_Part(number, key, address, size))
                else:
                    placed.append((number, block_at(key, area.region, address - area.begin, size)))
        return placed, inline

    def _sized(self, key: bytes, length: int) -> Sequence[tuple[bytes, int]]:
        if length <= PART_BYTES:  # almost all are one part
            return ((self._named(key), length),)
        return [
            (self._named(name), min(PART_BYTES, length - number * PART_BYTES))
            for number, name in enumerate(part_keys(key, length))
        ]

    # --- time

    def _until(self, seconds: float) -> int:
        return self._clock.monotonic_ns() + int(seconds * 1e9)

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def close(self) -> None:
        """Release the memory and the client."""
        areas, self._areas = self._areas, []
        self._client.close()  # first: it ends all operations on the memory
        self._halves.shutdown()
        for area in areas:
            area.region.close()


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), BATCH_BLOCKS_MAX):
        yield items[first : first + BATCH_BLOCKS_MAX]


def _failed(parts: Iterable[_Placed], done: list[bool]) -> None:
    for number, _ in parts:
        done[number] = False


def _bytes_at(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
