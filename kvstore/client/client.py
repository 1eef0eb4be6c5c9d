"""A client of one node. Each method is one delegation; the work is done by the modules beside it.

What always holds: every call ends within its deadline; a get returns exact bytes, or a Miss with its reason, and never
raises because a node is away; a failed put has one typed error; once a call has ended, nothing of it writes to the
caller's memory. A mistake of the caller's is a `UsageError`, and nothing is sent.

It talks to one node, by one transport; `Nodes` and `ClusterClient` talk to several.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from kvstore.client.arguments import checks_arguments
from kvstore.client.block_calls import BlockCalls
from kvstore.client.blocks import fingerprint_of
from kvstore.client.checks import check_slots
from kvstore.client.core import Core
from kvstore.client.description import described
from kvstore.client.erasing import ErasingCalls
from kvstore.client.fabric_prefix import Prefixes
from kvstore.client.fabric_transport import FabricTransport
from kvstore.client.gets import Ended, survivable
from kvstore.client.grpc_blocks import InlineCalls
from kvstore.client.grpc_transport import GrpcTransport
from kvstore.client.observing import ObservingCalls
from kvstore.client.session_calls import SessionCalls
from kvstore.client.sessions import Session
from kvstore.client.step_calls import StepCalls
from kvstore.client.transfer_watch import current_watch
from kvstore.durability import Durability
from kvstore.limits import ERASE_TIMEOUT_S, LEASE_TIMEOUT_MS, LEASE_TIMEOUT_MS_MAX
from kvstore.names import UNSAID
from kvstore.reach import GRPC, Reach, reach_of_arguments
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from opentelemetry.trace import TracerProvider
    from typing_extensions import Buffer

    from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
    from kvstore.client.blocks import Block, HasFingerprint, Hit, PutResult
    from kvstore.client.erasing import Erasure
    from kvstore.client.gets import EndedGet, Get
    from kvstore.client.grpc_blocks import Data
    from kvstore.client.grpc_gets import GrpcGet
    from kvstore.client.observing import Happened, LookedUp
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.reserved import Reservation
    from kvstore.client.session_export import Progress
    from kvstore.client.session_info import ListedSession
    from kvstore.client.step_calls import ReadAhead
    from kvstore.client.transport import Transport
    from kvstore.layout import Layout
    from kvstore.miss import Miss
    from kvstore.wire.kvstore_pb2 import StatusResponse
    from kvstore.wire.observing_pb2 import StatisticsResponse
    from nic_offload.counter import Counter
    from nic_offload.fabric import Fabric, Region
    from nic_offload.flags import FlagWord

__all__ = ["Client", "session_calls_of"]


@checks_arguments
class Client(Handle):
    """A client of one node. Its methods may be called from any thread.

    It attaches to the node at the first call that needs it, and again after a loss.

    >>> from kvstore.client import Block, Client
    >>> from kvstore.names import block_key
    >>> client = Client("127.0.0.1:7070", layout=b"my model, bf16")
    >>> memory = bytearray(b"KV! " * 4096)
    >>> kv = client.register(memory)
    >>> key = block_key(b"my model", b"the tokens of the first page")
    >>> block = Block(key, kv, offset=0, length=4096)
    >>> [result.durability.name for result in client.put([block])]
    ['WRITTEN']
    """

    def __init__(
        self,
        node: str | Reach | None = None,
        *,
        tenant: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        tls: bool | None = None,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        key: Path | str | None = None,
        fabric_address: str | None = None,
        fabric_ports: str | None = None,
        transport: str | None = None,
        provider: str | None = None,
        connect_timeout_ms: int | None = None,
        call_timeout_ms: int | None = None,
        get_timeout_ms: int | None = None,
        user: str | None = None,
        shared: bool | None = None,
        layout: HasFingerprint | bytes = b"",
        slots: int = 64,
        block_bytes_max: int = 4 << 20,
        tracer_provider: TracerProvider | None = None,
        device_memory: bool = False,
    ) -> None:
        """Open the channel. The node is not called yet; the fabric is opened when it is first needed.

        Arguments not given here come from the environment or the file of the client's settings (`kvstore.reach`). A
        `Reach` replaces all of them. `transport` says how blocks are carried: "fabric" (remote writes through
        libfabric), "grpc" (copied by the CPU), "memory" (to a `MemoryNode` of this process), or "auto", the default:
        the fabric, or gRPC where there is no libfabric. `provider` is libfabric's; by default the best available.
        `user` or `shared` says who owns the blocks that it puts without a domain: this user, with keys of
        `in_domain(key, domain_of(user))`, or all users together. A node that encrypts refuses a put that says neither.
        `layout` identifies how a block's bytes are laid out, preferably as a `Layout`; a get under another layout is a
        miss. `slots` times `block_bytes_max` is the node's memory that this client's puts may take at a time.
        With a `tracer_provider` of OpenTelemetry, its puts, gets and resumes are spans, and its calls carry them.
        `device_memory` opens the fabric so that gets can go into a GPU's memory, if the provider is able to.
        """
        given = {
            "tenant": tenant,
            "token": token,
            "token_file": token_file,
            "tls": tls,
            "ca": ca,
            "certificate": certificate,
            "key": key,
            "fabric_address": fabric_address,
            "fabric_ports": fabric_ports,
            "transport": transport,
            "provider": provider,
            "connect_timeout_ms": connect_timeout_ms,
            "call_timeout_ms": call_timeout_ms,
            "get_timeout_ms": get_timeout_ms,
            "user": user,
            "shared": shared,
        }
        check_slots(slots, block_bytes_max)
        fingerprint = fingerprint_of(layout)
        reach = reach_of_arguments(node, given)  # last: a mistake in the call is named even if no node is set
        core = Core(reach, fingerprint, slots, block_bytes_max, tracer_provider, device_memory=device_memory)
        self._core = core
        self._blocks = BlockCalls(core.channel, core.calling, reach, fingerprint, core.lookups)
        self._inline = InlineCalls(core.channel, core.calling, reach, fingerprint, core.lookups, core.spans)
        self._by_fabric, self._by_grpc = FabricTransport(core), GrpcTransport(core, self._inline)
        self._prefixes = Prefixes(core, self._blocks)
        self._observing = ObservingCalls(core.channel, core.calling, reach)
        self._erasing = ErasingCalls(core.channel, core.calling, reach)
        self._steps = StepCalls(core.channel, core.calling, reach)
        self._sessions = SessionCalls(self, core, self._steps)

    # --- the client itself

    @property
    def reach(self) -> Reach:
        """How the node is reached, and how long a call may take."""
        return self._core.reach

    @property
    def target(self) -> str:
        """The node's address, HOST:PORT."""
        return self._core.reach.node

    @property
    def tenant(self) -> str:
        """The tenant in its settings. A node that requires tokens uses the token's tenant instead."""
        return self._core.reach.tenant

    @property
    def fingerprint(self) -> bytes:
        """The digest of its layout."""
        return self._core.fingerprint

    @property
    def transport(self) -> str:
        """How blocks are carried: "fabric", "grpc" or "memory"."""
        return self._core.transport

    @property
    def fabric(self) -> Fabric:
        """The fabric of all its links; over gRPC, one that has only registered memory and flags."""
        return self._core.fabric

    @property
    def calls(self) -> int:
        """The number of calls made to the node. Arming a put makes none."""
        return self._core.calls

    @property
    def is_attached(self) -> bool:
        """Whether there is a link to the node now."""
        return self._core.link is not None

    def __repr__(self) -> str:
        """Its node, transport and tenant, without the token; it opens nothing."""
        return described(self, self.target, self.reach, transport=self._core._transport)  # noqa: SLF001

    def attach(self) -> None:
        """Attach now, so that the next put or get does not have to. It waits for the node to provide memory.

        With gRPC it only checks that the node can be reached.

        >>> client.attach()
        >>> client.is_attached
        True
        """
        self._core.attach()

    def close(self) -> None:
        """Close the client. Puts that have not been acknowledged fail. In a forked child this does nothing.

        >>> Client(client.target).close()
        """
        if not self._core.is_inherited:
            self._core.close()
            self._by_grpc.close()

    @cached_property
    def _transport(self) -> Transport:
        return self._by_grpc if self._core.transport == GRPC else self._by_fabric

    def register(self, memory: Buffer) -> Region:
        """Register memory to put blocks from and get blocks into. Close the region before the memory is freed.

        >>> with client.register(bytearray(8192)) as region:
        ...     region.length
        8192
        """
        return self._core.open_fabric.register(memory)

    # --- puts and gets of registered memory

    def put(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """Put blocks now, and wait until they are as durable as requested. Returns the result of each, in order.

        >>> (result,) = client.put([block])
        >>> result.durability.name, result.error
        ('WRITTEN', None)
        """
        timeout_s = self._core.reach.get_timeout_s if timeout_s is None else timeout_s
        lease_ms = min(LEASE_TIMEOUT_MS_MAX, max(1, int(timeout_s * 1000)))
        arm = partial(self.arm, durability=durability, lease_ms=lease_ms, timeout_s=timeout_s)
        return arm(blocks, expires_unix_ms=expires_unix_ms).wait(timeout_s) if blocks else []

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> ArmedPuts:
        """Queue a put for each block. It is sent when `flag` reaches the block's threshold; without a flag, at once.

        The node is not called. A call takes up to 32,768 blocks; any number may be armed. A block that is already
        stored is sent nevertheless, and not written again. A put that is not sent within `lease_ms` is never sent. A
        block without a key is given one later, by `ArmedPuts.name`. The first call attaches, within `timeout_s`.

        >>> from nic_offload.flags import FlagWords
        >>> with FlagWords.create(1) as flags:
        ...     puts = client.arm([block], flags[0])
        ...     flags[0].store(1)  # or any other process, or a GPU
        ...     [result.durability.name for result in puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        watch = current_watch()
        return self._transport.arm(blocks, flag, durability, lease_ms, expires_unix_ms, watch, timeout_s)

    def reserve(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> Reservation:
        """Lease a slot on the node for each block, all or none. The result says which blocks are already stored.

        >>> from nic_offload.flags import FlagWords
        >>> with FlagWords.create(1) as flags:
        ...     puts = client.reserve([block]).arm(flags[0])
        ...     flags[0].store(1)
        ...     [result.already_stored for result in puts.wait(timeout_s=10)]
        [True]
        """
        watch = current_watch()
        return self._by_fabric.reserve(
            blocks, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms, watch=watch
        )

    def get(
        self, blocks: Sequence[Block], *, layout: Layout | None = None, timeout_s: float | None = None
    ) -> list[Hit | Miss]:
        """Get blocks into their regions. Returns a Hit or a Miss for each, in order.

        The layout is the client's own unless another is given. Up to 131,072 blocks may be requested, also blocks of
        pieces and parts of blocks.

        >>> unknown = Block(block_key(b"never put"), kv, offset=4096, length=4096)
        >>> hit, miss = client.get([block, unknown])
        >>> type(hit).__name__, str(miss)
        ('Hit', 'MISS(not stored)')
        """
        return self._transport.get(blocks, layout=layout, timeout_s=timeout_s) if blocks else []

    def getting(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
        ended: Ended | None = None,
    ) -> Get | GrpcGet | EndedGet:
        """Start a get without waiting for it. `wait(n)` of the returned object waits for the first `n` blocks.

        The node sends them in order. `ended` is called with all outcomes when they are known, in a thread of the
        client or before this returns, so it must not block. Blocks of pieces need `get`, which scatters them.

        >>> get = client.getting([block])
        >>> [type(outcome).__name__ for outcome in get.wait()]
        ['Hit']
        """
        ended = None if ended is None else survivable(ended)
        return self._transport.getting(
            blocks, layout=layout, timeout_s=timeout_s, watch=current_watch(), ended=ended
        )

    # --- puts and gets over gRPC

    def put_inline(
        self,
        key: bytes,
        data: Data,
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> Durability:
        """Put one block, or the pieces of one, over gRPC. The CPU copies it; no fabric is needed.

        >>> client.put_inline(block_key(b"inline"), b"the KV of a page").name
        'WRITTEN'
        """
        return self._inline.put(
            key,
            data,
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=domain,
            timeout_s=timeout_s,
        )

    def get_inline(self, key: bytes, length: int, *, timeout_s: float | None = None) -> bytes | Miss:
        """Get one block over gRPC.

        >>> _ = client.put_inline(block_key(b"inline"), b"the KV of a page")
        >>> client.get_inline(block_key(b"inline"), length=16)
        b'the KV of a page'
        """
        return self._inline.get(key, length, timeout_s=timeout_s)

    def put_many_inline(
        self,
        blocks: Iterable[tuple[bytes, Data]],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """Put blocks, each a key and its bytes or pieces of them, in one stream. Returns the result of each, in order.

        If the stream breaks, blocks without an answer get its error, and may be stored or not. Those not taken yet from
        an iterator have no result: the list is shorter. If `blocks` raises, so does this call.

        >>> pages = [(block_key(b"many", bytes([i])), bytes([i]) * 4096) for i in range(3)]
        >>> [result.durability.name for result in client.put_many_inline(pages)]
        ['WRITTEN', 'WRITTEN', 'WRITTEN']
        """
        return self._inline.put_many(
            blocks, durability=durability, expires_unix_ms=expires_unix_ms, domain=domain, timeout_s=timeout_s
        )

    def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float | None = None
    ) -> Iterator[bytes | Miss]:
        """Get blocks, each a key and its length, in one stream. Yields bytes or a Miss for each, in order.

        >>> [len(page) for page in client.get_many_inline([(key, 4096), (key, 4096)])]
        [4096, 4096]
        """
        return self._inline.get_many(wanted, timeout_s=timeout_s)

    # --- what is stored

    def exists(
        self,
        keys: Sequence[bytes],
        *,
        lengths: Sequence[int] | None = None,
        any_layout: bool = False,
        timeout_s: float | None = None,
    ) -> list[Stored | Miss]:
        """Look up blocks without getting them. Returns a Stored, or the Miss that a get would return, for each.

        Without `lengths`, any length matches; with `any_layout`, any layout, and `looked_up` doesn't list the call. A
        look-up is not a use: it doesn't delay a block's eviction. The timeout applies to each call to the node.

        >>> stored, miss = client.exists([key, block_key(b"never put")])
        >>> stored.length, str(miss)
        (4096, 'MISS(not stored)')
        """
        return self._blocks.exists(keys, lengths=lengths, any_layout=any_layout, timeout_s=timeout_s)

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """Count the blocks that a get would hit, from the first one up to the first gap.

        The timeout applies to each call to the node.

        >>> client.prefix([key, block_key(b"never put"), key]).blocks
        1
        """
        return self._prefixes.prefix(keys, timeout_s=timeout_s)

    def explain(self, keys: Sequence[bytes]) -> list[Explained]:
        """Report where each block is, or why it was removed, as far as the node remembers.

        >>> (explained,) = client.explain([key])
        >>> explained.stored
        True
        """
        return self._blocks.explain(keys)

    def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> Pin:
        """Protect blocks from eviction until the pin is closed or expires: after 30 s by default, ten minutes at most.

        Beyond a bounded share of the node's drives this raises Overloaded, and nothing is pinned. A pin does not
        prevent deletion or expiry.

        >>> with client.pin([key], time_to_live_ms=60_000) as pin:
        ...     pin.pinned
        [True]
        """
        return self._blocks.pin(keys, time_to_live_ms=time_to_live_ms)

    def prefetch(self, keys: Sequence[bytes]) -> ReadAhead:
        """Have the node read blocks into its memory when it has no gets to serve, and wait until it has.

        The result says which blocks were not read and which are missing; the others are in the node's memory.

        >>> read = client.prefetch([key])
        >>> read.unread, read.missing
        ([], {})
        """
        return self._steps.prefetch(keys, current_watch())

    def delete(self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN) -> list[bool]:
        """Delete blocks permanently. Returns, for each, whether it was stored.

        When this returns, the deletion is as durable on the drives as `durability` says.

        >>> _ = client.put_inline(block_key(b"to go"), b"KV")
        >>> client.delete([block_key(b"to go"), block_key(b"never put")])
        [True, False]
        """
        return self._blocks.delete(keys, durability=durability)

    # --- sessions

    def session(self, user: str, name: str) -> Session:
        """A session by its name, whether it exists or not. The node is not called.

        >>> chat = client.session("ada", "chat 7")
        >>> chat.append([key], tokens=16)  # the session's blocks, now
        1
        """
        return Session(lambda: self._sessions, user, name)

    def sessions(self, user: str) -> Iterator[ListedSession]:
        """All sessions of a user. Sessions removed or created meanwhile may or may not be included.

        >>> _ = client.session("eve", "chat 1").append([key], tokens=16)
        >>> [one.session for one in client.sessions("eve")]
        ['chat 1']
        """
        return self._sessions.of_user(user)

    def import_session(
        self,
        file: BinaryIO,
        user: str,
        name: str,
        *,
        durability: Durability = Durability.WRITTEN,
        progress: Progress | None = None,
    ) -> Session:
        """Store an exported session under an unused name. It belongs to this client's tenant.

        `progress` is called after each block with how many are stored, and of how many.
        Raises SessionFileError, and creates no session, if the file is not complete to its last byte.

        >>> from io import BytesIO
        >>> chat = client.session("bob", "chat 1")
        >>> _ = chat.append([key], tokens=16)
        >>> file = BytesIO()
        >>> chat.export(file)  # its blocks
        1
        >>> _ = file.seek(0)
        >>> client.import_session(file, "bob", "a copy").info().tokens
        16
        """
        return self._sessions.import_one(file, user, name, durability, progress)

    # --- erasing

    def erase_user(self, user: str, *, timeout_s: float = ERASE_TIMEOUT_S) -> Erasure:
        """Erase a user on this node: their sessions, their erase domain, and blocks that no other session has.

        On a node that encrypts, the keys are destroyed first. Later gets of these blocks are `MISS(erased)`.

        >>> _ = client.put_inline(block_key(b"of mallory"), b"KV")
        >>> _ = client.session("mallory", "chat 1").append([block_key(b"of mallory")], tokens=16)
        >>> client.erase_user("mallory").sessions
        1
        """
        return self._erasing.user(user, timeout_s).erasure

    def erase_tenant(self, *, timeout_s: float = ERASE_TIMEOUT_S) -> Erasure:
        """Erase all sessions and blocks of this client's tenant on this node.

        >>> with Client(client.target, tenant="acme") as other:
        ...     _ = other.put_inline(block_key(b"theirs"), b"KV")
        ...     other.erase_tenant().receipt[:10]
        '{"at_ms":1'
        """
        return self._erasing.tenant(timeout_s).erasure

    # --- what the node does

    def status(self, *, wait_s: float = 0.0) -> StatusResponse:
        """The node's status. With `wait_s`, wait that long for a node that can't be reached yet.

        >>> client.status(wait_s=5).read_only
        False
        """
        return self._core.status(wait_s)

    def statistics(self) -> StatisticsResponse:
        """The node's counters and gauges, and the tenant's own quota (`kvstore/v1/observing.proto` has them).

        >>> client.statistics().puts > 0
        True
        """
        return self._observing.statistics()

    def looked_up(
        self, request_id: str = "", user: str = "", session: str = "", *, last: int = 0
    ) -> LookedUp:
        """The outcomes of the tenant's look-ups: of a request, of a session, or the latest ones.

        >>> from kvstore.client import as_request
        >>> with as_request("request-1"):
        ...     _ = client.get([block])
        >>> [look_up.blocks for look_up in client.looked_up("request-1").lookups]
        [1]
        """
        return self._observing.looked_up(request_id, user, session, last=last)

    def watch(self, *, timeout_s: float) -> Generator[Happened | None, None, None]:
        """The tenant's events during the next `timeout_s` seconds. Yields None at the start, and while nothing happens.

        >>> events = client.watch(timeout_s=10)
        >>> next(events)  # it has begun
        >>> _ = client.put_inline(block_key(b"watched"), b"KV")
        >>> next(event.what for event in events if event is not None)
        'STORED'
        >>> events.close()
        """
        return self._observing.watch(timeout_s=timeout_s)


def session_calls_of(client: Client) -> SessionCalls:
    """For `Nodes`, whose sessions follow a user's home: a client's calls, and the map revision they go by."""
    return client._sessions  # noqa: SLF001 - of this module
