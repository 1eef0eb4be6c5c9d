"""Fabric, Endpoint, Region: a libfabric domain with its progress thread, and the memory it may access.

What always holds: every handle is a context manager and knows whether it is closed. A region can't be closed while
one of our operations uses it, or while it is held because a peer may write to it. Keys of regions are random. Once an
endpoint is closed, nothing is received through it and nothing reads memory for it. Events are delivered in batches
through one eventfd (`fileno`), never by a callback.

What it doesn't do: touch memory of a GPU, which peers can write to where the provider has FI_HMEM. Puts read the
host's memory only, because the CPU checksums them.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.counter import Counter
from nic_offload.errors import FabricError, NoProvider, PortTaken, RegionBusy
from nic_offload.handle import Handle
from nic_offload.library import load
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from nic_offload.flags import FlagWord

__all__ = [
    "MEMORY",
    "Endpoint",
    "Event",
    "EventKind",
    "Fabric",
    "Region",
    "Statistics",
    "hold",
    "is_idle",
    "region_for",
    "release",
]

MEMORY = "memory"  # a provider of our own: between fabrics of one process, without libfabric

ANSWER_TIMEOUT_MS = 10_000  # for the progress thread; a flush of a whole domain takes a second on Cassini
WORK_MAX = 1 << 18  # puts and watches queued in one fabric at a time
_REAP_MAX = 256
_WORDS_MIN = 64
_given_up: list[Fabric] = []  # not closed: their threads, or the NIC, may touch their memory at any time
_open: set[Fabric] = set()  # open ones stay alive even if unreferenced, because their threads do
_EVENT = struct.Struct("=QQQii")  # struct tk_event, whose fields have no gaps
assert _EVENT.size == ffi.sizeof("struct tk_event")


def _close_at_exit() -> None:
    """End all our threads: libfabric shuts down with the process, and no thread may be inside it then."""
    for fabric in tuple(_open):
        with contextlib.suppress(FabricError):  # a forked child doesn't have the threads
            fabric.close()


class EventKind(enum.IntEnum):
    """The kind of an event; the numbers are the C core's."""

    FIRED = lib.TK_FIRED
    DONE = lib.TK_DONE
    SENT = lib.TK_SENT
    FAILED = lib.TK_FAILED
    LATE = lib.TK_LATE
    LANDED = lib.TK_LANDED
    ACKED = lib.TK_ACKED
    WATCH_FAILED = lib.TK_WATCH_FAILED
    OVER = lib.TK_OVER
    CAME = lib.TK_CAME
    READ = lib.TK_READ


class Event(NamedTuple):
    """One thing that happened to an operation or a watch; the fields' meaning is in `operations.h`."""

    tag: int
    value: int
    time_ns: int
    kind: int
    status: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the fabric was opened, and what is outstanding now."""

    armed: int
    fired: int
    done: int
    failed: int
    cancelled: int
    expired: int
    late: int
    put_bytes: int
    got_bytes: int
    landed: int
    stale_words: int
    acks_sent: int
    served: int
    handed: int
    taken_back: int
    waiting: int
    held: int
    slots_lost: int
    in_flight: int
    watches: int
    loops: int
    sleeps: int
    asleep_ns: int
    cpu_ns: int
    alive_ns: int
    searches: int
    turns: int


@made_by("`Client.register`")
class Region(Handle):
    """Registered memory of `length` bytes, which puts read and gets write."""

    # A peer names a byte of it by `base + offset` and `key`. Revoking the key is not enough while a peer writes: a
    # message whose key was checked before may still be arriving. So a caller that asks a peer to write here holds the
    # region until the peer is done, or the endpoint is closed.

    def __init__(
        self,
        fabric: Fabric,
        memory: Buffer,
        endpoint: Endpoint | None,
        *,
        remote_write: bool,
        remote_read: bool,
        gpu: int | None,
    ) -> None:
        self._pin = ffi.from_buffer(memory, require_writable=remote_write)
        self.address = int(ffi.cast("uintptr_t", self._pin))
        self.length = len(self._pin)
        self._memory, self._rights = memory, {"remote_write": remote_write, "remote_read": remote_read}
        self.gpu = gpu  # whose memory it is; None: the host's
        self._named: dict[Endpoint, Region] = {}
        self._fabric = fabric
        self._lock = threading.Lock()
        self._holds = 0
        out = ffi.new("struct tk_region **")
        pointer = ffi.cast("void *", self.address)
        through = ffi.NULL if endpoint is None else endpoint.handle
        access = (lib.TK_REMOTE_WRITE if remote_write else 0) | (lib.TK_REMOTE_READ if remote_read else 0)
        if fabric.binds_memory and endpoint is None:
            access = 0
        with fabric.closing:
            if fabric.closed:
                raise FabricError("The fabric is closed; no memory can be registered.")
            on = lib.TK_HOST if gpu is None else gpu
            code = lib.tk_region_open(fabric.handle, through, pointer, self.length, access, on, out)
            if code:
                raise FabricError.from_code(f"Registering {self.length} bytes of memory", code)
            self.handle: Any = out[0]
            self.pointer = int(ffi.cast("uintptr_t", self.handle))
            self.key = int(lib.tk_region_key(self.handle))
            self.base = int(lib.tk_region_base(self.handle))
            self.registered_ns = time.monotonic_ns()
            fabric.regions.add(self)

    def _through(self, endpoint: Endpoint) -> Region:
        """The region as peers of this endpoint name it: itself, unless the NIC binds memory to endpoints."""
        if not self._fabric.binds_memory:
            return self
        for other in [other for other in self._named if other.handle is None]:
            self._named.pop(other).close()
        if endpoint not in self._named:
            self._named[endpoint] = self._fabric.register(
                self._memory, endpoint=endpoint, gpu=self.gpu, **self._rights
            )
        return self._named[endpoint]

    def _is_idle(self) -> bool:
        """Whether no operation reads from it or writes to it, and it is not held."""
        with self._fabric.closing, self._lock:
            return not self._holds and (self.handle is None or not lib.tk_region_uses(self.handle))

    def _hold(self) -> None:
        """Keep the region from being closed, for example while a peer writes to it, until a matching `release`."""
        with self._lock:
            if self.handle is None:
                raise FabricError("The region is closed; register the memory again.")
            self._holds += 1

    def _release(self) -> None:
        """Release a hold: nothing more arrives because of it."""
        with self._lock:
            assert self._holds
            self._holds -= 1

    def close(self) -> None:
        """Take the memory back: after this no byte of it is written or read. RegionBusy if one still may be.

        >>> client.register(bytearray(4096)).close()
        """
        with self._fabric.closing, self._lock:
            if self.handle is None:
                return
            if self._holds:
                raise RegionBusy(
                    f"{self._holds} operations still use the region: wait for its puts and gets to end, or close the"
                    " client, which ends them."
                )
            self._close_named()
            code = lib.tk_region_close(self.handle)
            if code == -errno.EBUSY:
                raise RegionBusy(
                    f"Operations still use the region ({code}); wait until they have ended, or cancel them."
                )
            if code:
                raise FabricError.from_code("Closing a region", code)
            self._detach()

    def _close_named(self) -> None:
        for endpoint in list(self._named):
            self._named[endpoint].close()
            del self._named[endpoint]

    def _detach(self, *, release: bool = True) -> None:
        """Mark the handle as closed: the fabric that owned it is closed, or is closing it."""
        self.handle, self.pointer = None, 0
        if release:
            self._fabric.regions.discard(self)
            ffi.release(self._pin)


# For other modules of the project. Underscored in the class, because users of a region don't call them.
hold = Region._hold  # noqa: SLF001
release = Region._release  # noqa: SLF001
is_idle = Region._is_idle  # noqa: SLF001
region_for = Region._through  # noqa: SLF001


class Endpoint(Handle):
    """What one connection sends and receives with. Closing it is the certain way to end a connection."""

    def __init__(self, fabric: Fabric, source: bytes = b"", domain: int = 0) -> None:
        self._fabric = fabric
        self.domain = domain
        out = ffi.new("struct tk_endpoint **")
        message = ffi.new("char[]", lib.TK_MESSAGE_BYTES)
        code = lib.tk_endpoint_open(fabric.handle, source, len(source), domain, out, message)
        if code == lib.TK_STUCK:
            raise FabricError.from_code("Opening an endpoint", code)
        if code == -errno.EADDRINUSE:
            raise PortTaken(f"The provider {fabric.provider} could not open an endpoint: the port is in use.")
        if code:
            why = ffi.string(message).decode() or f"code {code}"
            raise FabricError(f"The provider {fabric.provider} could not open an endpoint: {why}.")
        self._attach(out[0])
        self.tag_bytes = 0  # size of the tag after authenticated bytes

    def address(self) -> bytes:
        """The name by which a peer reaches this endpoint; opaque, provider-specific."""
        out = ffi.new("char[]", lib.TK_ADDRESS_BYTES)
        length = lib.tk_endpoint_address(self.handle, out)
        if length < 0:
            raise FabricError.from_code("Getting the endpoint's address", length)
        return bytes(ffi.buffer(out, length))

    def listener(self) -> int | None:
        """The provider's own descriptor of the TCP socket to which peers connect; None if there is none."""
        fd = int(lib.tk_endpoint_listener(self.handle))
        return fd if fd >= 0 else None

    @property
    def stalled_ns(self) -> int:
        """How long its peer has accepted none of the pending data; 0: nothing is pending."""
        return int(lib.tk_endpoint_stalled_ns(self.handle))

    @property
    def has_broken(self) -> bool:
        """Whether its connection broke, so that sent data may be lost. Detected only when more is to be sent."""
        return bool(lib.tk_endpoint_has_broken(self.handle))

    def seal(self, out: bytes, into: bytes, words: Region | None = None) -> None:
        """From now on tag all that is sent, and accept only what has a valid tag: see `seal.c`.

        Called once, before anything goes through it. `words`: where acknowledgements arrive, if any do.
        """
        assert len(out) == len(into) == lib.TK_SEAL_BYTES
        code = lib.tk_endpoint_seal(self.handle, out, into, ffi.NULL if words is None else words.handle)
        if code:
            raise FabricError.from_code("Sealing an endpoint", code)
        self.tag_bytes = int(lib.TK_TAG_BYTES)

    def tag(self, target: int, target_key: int, generation: int, data: bytes) -> bytes:
        """The tag of bytes that are put into this place at the peer; empty without a seal."""
        tag = int(lib.tk_endpoint_tag(self.handle, target, target_key, generation, data, len(data)))
        return tag.to_bytes(lib.TK_TAG_BYTES, "little")[: self.tag_bytes]

    def believes(self, region: Region, address: int, generation: int, data: bytes, tag: bytes) -> bool:
        """Whether bytes that arrived at this place of ours are from the peer; without a seal all are."""
        said = int.from_bytes(tag, "little")
        matches = lib.tk_endpoint_believes(
            self.handle, region.handle, address, generation, data, len(data), said
        )
        return len(tag) == self.tag_bytes and bool(matches)

    def share_words(self, target: int, target_key: int, words: int, count: int, doorbell: int) -> None:
        """The peer watches `count` of its words, from `target` on, in memory of ours: see `shared_puts.c`."""
        code = lib.tk_endpoint_share_words(self.handle, target, target_key, words, count, doorbell)
        if code:
            raise FabricError.from_code("Sharing words with a peer", code)

    def share_reads(
        self, target: int, target_key: int, rows: int, count: int, memory: Region, *, looks: bool
    ) -> None:
        """The peer reads this memory of ours itself; `count` rows, one for each of its words, give it locations.

        `looks`: it looks for words in these rows, too.
        """
        code = lib.tk_endpoint_share_reads(
            self.handle, target, target_key, rows, count, looks, memory.address, memory.length
        )
        if code:
            raise FabricError.from_code("Sharing memory with a peer", code)

    def close(self) -> None:
        """End everything that goes through this endpoint; its puts and watches are dropped silently.

        If the NIC doesn't drop what it has, this is a FabricError, and the endpoint stays open, with its memory.
        """
        if self.handle is None:
            return
        handle = self.handle
        self.detach()
        code = lib.tk_endpoint_close(handle)
        with self._fabric.closing:
            if code == lib.TK_UNFLUSHED and not self._fabric.closed:
                self._attach(handle)
        if code:
            raise FabricError.from_code("Closing an endpoint", code)

    def _attach(self, handle: Any) -> None:
        self.handle: Any = handle
        self.pointer = int(ffi.cast("uintptr_t", handle))
        self._fabric.endpoints.add(self)

    def detach(self) -> None:
        """Mark the handle as closed: the fabric that owned it is closed, or is closing it."""
        self.handle, self.pointer = None, 0
        self._fabric.endpoints.discard(self)


class Fabric(Handle):
    """A libfabric domain, or up to `domains_max`, with one progress thread and trigger agent.

    With `deferred_work`, operations are handed to libfabric's own (`sockets`, `cxi`) as far as they fit; by default
    only where that is hardware. A call that has to wait for the progress thread waits for `answer_timeout_ms` at
    most; if the provider hangs, this call and all later ones raise `FabricStuck`. The provider `memory` reaches other
    fabrics of the same process, and needs no libfabric. With `device_memory`, a GPU's memory can be registered if the
    provider has FI_HMEM (`takes_devices`).
    """

    def __init__(
        self,
        provider: str | None = None,
        *,
        address: str | None = None,
        work_max: int = WORK_MAX,
        answer_timeout_ms: int = ANSWER_TIMEOUT_MS,
        deferred_work: bool | None = None,
        device_memory: bool = False,
    ) -> None:
        chosen = provider or load().best_provider()
        library = "its own" if chosen == MEMORY else f"libfabric {load().version}"
        node = ffi.NULL if address is None or chosen == "shm" else ffi.new("char[]", address.encode())
        out = ffi.new("struct tk_fabric **")
        message = ffi.new("char[]", lib.TK_MESSAGE_BYTES)
        deferred = chosen == "cxi" if deferred_work is None else deferred_work
        flags = (lib.TK_DEFERRED_WORK if deferred else 0) | (lib.TK_DEVICE_MEMORY if device_memory else 0)
        answer_ns = answer_timeout_ms * 1_000_000
        code = lib.tk_fabric_open(chosen.encode(), node, work_max, answer_ns, flags, out, message)
        if code:
            why = ffi.string(message).decode() or f"code {code}"
            names = (MEMORY, *(one.name for one in load().providers()))
            if chosen not in names:
                raise NoProvider(
                    f"There is no provider {chosen} in {library}, only {', '.join(sorted(names[1:]))}."
                )
            raise FabricError(f"The provider {chosen} of {library} did not open: {why}.")
        self.handle: Any = out[0]
        # Held while the fabric is closed, and by calls of its regions, which any thread may make.
        self.closing = threading.RLock()
        self.regions: set[Region] = set()
        self.endpoints: set[Endpoint] = set()
        self.counters: set[Counter] = set()
        self._words: dict[
            int, FlagWord
        ] = {}  # of closed counters that operations may still wait for, by address
        self._words_max = _WORDS_MIN
        self.deferred_work = deferred
        self._events = ffi.new("struct tk_event[]", _REAP_MAX)
        self._events_view = memoryview(ffi.buffer(self._events))
        name = ffi.new("char[]", lib.TK_PROVIDER_NAME_BYTES)
        traits = lib.tk_fabric_traits(self.handle, name)
        self.flag_in_message = bool(traits & lib.TK_FLAG_IN_MESSAGE)
        self.binds_memory = bool(traits & lib.TK_BINDS_MEMORY)
        self.takes_devices = bool(traits & lib.TK_TAKES_DEVICES)
        self.domains_max = int(lib.TK_DOMAINS_MAX) if traits & lib.TK_HAS_DOMAINS else 1
        # Of the addresses of its endpoints; 0: they are not IP addresses.
        self.ip_version = 4 if traits & lib.TK_IPV4 else 6 if traits & lib.TK_IPV6 else 0
        self.provider: str = ffi.string(name).decode()
        self._fd = int(lib.tk_fabric_event_fd(self.handle))
        if not _open:
            atexit.register(_close_at_exit)
        _open.add(self)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.handle is None

    def open_endpoint(self, source: bytes = b"", domain: int = 0) -> Endpoint:
        """Open another endpoint, which listens on `source`, a socket address of the fabric's family.

        The key of memory registered for an endpoint is invalid at endpoints of other domains.
        """
        return Endpoint(self, source, domain)

    def listen(self, doorbell: int, *, is_pipe: bool) -> None:
        """Let writes to an eventfd or a pipe wake the progress thread, until `ignore`."""
        code = lib.tk_fabric_listen(self.handle, doorbell, is_pipe)
        if code:
            raise FabricError.from_code("Listening to a doorbell", code)

    def ignore(self, doorbell: int) -> None:
        """Undo `listen`. After this nothing reads from the doorbell, and it may be closed."""
        with self.closing:  # the interpreter's exit closes fabrics while other threads close what is theirs
            if self.handle is not None:
                lib.tk_fabric_ignore(self.handle, doorbell)

    def fileno(self) -> int:
        """An eventfd, readable while there are events to reap."""
        return self._fd

    def reap(self) -> list[Event]:
        """Take a batch of events; an empty list means that none are left."""
        count = lib.tk_fabric_reap(self.handle, self._events, _REAP_MAX)
        if count < 0:
            raise FabricError.from_code("Taking events", count)
        return [
            Event._make(fields) for fields in _EVENT.iter_unpack(self._events_view[: count * _EVENT.size])
        ]

    def open_counter(self, word: FlagWord | None = None) -> Counter:
        """Open a counter, over a flag word or with its own value."""
        return Counter(self, word)

    def keep_word(self, word: FlagWord) -> None:
        """Keep a word mapped until no operation waits for it, though its counter is closed."""
        self._words[word.address] = word
        if len(self._words) > self._words_max:
            addresses = ffi.new("uint64_t[]", list(self._words))
            lib.tk_words_watched(self.handle, addresses, len(addresses))
            watched = set(addresses)
            self._words = {address: one for address, one in self._words.items() if address in watched}
            self._words_max = max(_WORDS_MIN, 2 * len(self._words))

    def register(
        self,
        memory: Buffer,
        *,
        remote_write: bool = True,
        remote_read: bool = False,
        endpoint: Endpoint | None = None,
        gpu: int | None = None,
    ) -> Region:
        """Register memory, for our own operations and, if requested, for peers to write to or read from.

        Some NICs (cxi) bind memory to an endpoint: peers can access it only through that one, while it is open.
        There, memory registered without one is for our own operations, and `region_for` names it to peers. `gpu`: the
        memory is that CUDA device's, and no CPU touches it; only gets may name it.
        """
        return Region(self, memory, endpoint, remote_write=remote_write, remote_read=remote_read, gpu=gpu)

    def add_peer(self, address: bytes, domain: int = 0) -> int:
        """Add a peer by the address it gave; the returned number names it for the endpoints of a domain."""
        out = ffi.new("uint64_t *")
        code = lib.tk_peer_add(self.handle, domain, address, len(address), out)
        if code == -errno.EINVAL and self.provider == MEMORY:
            raise FabricError("The provider memory reaches fabrics of its own process only.")
        if code:
            raise FabricError.from_code("Adding a peer", code)
        return int(out[0])

    def remove_peer(self, peer: int, domain: int = 0) -> None:
        """Remove a peer to which nothing is on the wire."""
        with self.closing:
            code = 0 if self.handle is None else lib.tk_peer_remove(self.handle, domain, peer)
        if code:
            raise FabricError.from_code("Removing a peer", code)

    def cancel(self, tags: Sequence[int]) -> int:
        """Cancel waiting operations and watches by tag; returns how many had not gone out.

        It is exact: a counted operation will never be sent, and already has its final event. Operations at a NIC with
        its own counters are first taken back by a flush of the whole domain, which on Cassini takes a second.
        """
        count = lib.tk_cancel(self.handle, ffi.new("uint64_t[]", list(tags)), len(tags))
        if count < 0:
            raise FabricError.from_code("Cancelling", count)
        return int(count)

    def flush(self) -> int:
        """Cancel every operation that has not gone out; returns how many. As exact and as slow as `cancel`."""
        count = lib.tk_flush(self.handle)
        if count < 0:
            raise FabricError.from_code("Flushing", count)
        return int(count)

    def shrink(self) -> None:
        """Free memory for queued operations and watches that was not needed since the last call; cheap."""
        lib.tk_fabric_shrink(self.handle)

    def statistics(self) -> Statistics:
        """Counts so far; cheap, no lock."""
        out = ffi.new("struct tk_statistics *")
        code = lib.tk_fabric_statistics(self.handle, out)
        if code:
            raise FabricError.from_code("Reading the statistics", code)
        return Statistics(*(int(getattr(out, name)) for name in Statistics.__slots__))

    def close(self) -> None:
        """Stop the thread and close everything that belongs to the fabric, endpoints and regions included.

        After this no peer can write to any of its regions, and nothing reads from them. If it raises, because the
        provider hangs or the NIC keeps operations, that is not guaranteed, and the memory of the regions is kept
        until the process ends.
        """
        with self.closing:
            if self.handle is None:
                return
            handle, self.handle = self.handle, None
            _open.discard(self)
            if not _open:
                atexit.unregister(_close_at_exit)
            code = lib.tk_fabric_close(handle)
            is_kept = code in (lib.TK_STUCK, lib.TK_UNFLUSHED)
            if is_kept:
                _given_up.append(self)
            else:
                self._words.clear()
            for endpoint in tuple(self.endpoints):
                endpoint.detach()
            for region in tuple(self.regions):
                region._detach(release=not is_kept)  # noqa: SLF001 - of this module
            for counter in tuple(self.counters):
                counter.detach()
        if code:  # a forked child has neither the thread nor the connections, and must leave both alone
            raise FabricError.from_code("Closing a fabric", code)
