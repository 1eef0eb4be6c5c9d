"""One client's puts and gets over the fabric: arming, reserving, fetching.

What always holds: an invalid batch is refused with one typed error before anything is sent; a get gives exact
bytes, or a Miss with its reason, and never raises because a node is away; once a call has ended, nothing of it writes
to the caller's memory.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from kvstore.client.blocks import Hit, pieces_of, put_into
from kvstore.client.call_routes import Reserving
from kvstore.client.checks import (
    are_pieces,
    check_armed,
    check_gets,
    check_lease,
    check_number,
    check_reserved,
    checked_timeout,
)
from kvstore.client.gets import EndedGet, Get, read_directly
from kvstore.client.link import ARMED_BLOCKS_MAX
from kvstore.client.puts import ArmedPuts, Said
from kvstore.client.request_ids import current_request
from kvstore.client.reserved import Reservation, lease_deadline_ns
from kvstore.client.windows import get_in_windows, needs_windows
from kvstore.errors import (
    DomainRequired,
    FabricUnavailable,
    InvalidArgument,
    KvError,
    NodeUnavailable,
    NotEncrypted,
    Overloaded,
)
from kvstore.limits import BATCH_BLOCKS_MAX, DIRECT_AHEAD_BYTES_MAX, DIRECT_BYTES_MAX, GET_BLOCKS_MAX
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, UNSAID
from kvstore.reach import GRPC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.core import Core
    from kvstore.client.gets import Ended
    from kvstore.client.link import Link
    from kvstore.client.spans import PutSpan
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from kvstore.layout import Layout
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

__all__ = ["FabricTransport"]

_EXPIRES = "The time at which a block expires"
_domain = attrgetter("domain")
_NOTHING = b"", b""
_said = partial(tuple.__new__, Said)  # its own constructor takes three times as long


class FabricTransport:
    """The fabric transport of a client. Safe to use from any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._domain = core.reach.domain

    def reserve(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
    ) -> Reservation:
        """As `Client.reserve`."""
        core = self._core
        if core.transport == GRPC:
            raise FabricUnavailable("Slots are leased over a fabric, and this client has none: use `arm`.")
        blocks = put_into(blocks, self._domain)
        check_reserved(core.open_fabric, blocks)
        check_lease(lease_ms, "A lease lasts")
        check_number(_EXPIRES, expires_unix_ms, 64)
        span = None if core.spans is None else core.spans.put(blocks, durability)
        try:
            return self._reserve(blocks, durability, lease_ms, expires_unix_ms, watch, span)
        except KvError as error:
            if span is not None:
                span.failed(error)
            raise

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None,
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
        attach_s: float | None,
    ) -> ArmedPuts:
        """As `Client.arm`."""
        core = self._core
        fabric = core.open_fabric
        blocks = put_into(blocks, self._domain)
        check_armed(fabric, blocks, ARMED_BLOCKS_MAX, core.block_bytes_max)
        check_lease(lease_ms, "A put waits for its flag")
        if expires_unix_ms:
            check_number(_EXPIRES, expires_unix_ms, 64)
        link = core.attached(None if attach_s is None else min(core.reach.call_timeout_s, attach_s))
        _refuse_domains(link, blocks)
        # It needs the slot beforehand, and contiguous bytes.
        by_nic = flag is not None and fabric.deferred_work and not any(map(pieces_of, blocks))
        if link.sender is None or by_nic:
            return self.reserve(
                blocks, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms, watch=watch
            ).arm(flag)
        span = None if core.spans is None else core.spans.put(blocks, durability)
        metadata = _NOTHING if watch is None and span is None else core.asking.said_of_puts(watch, span)
        said = _said((core.fingerprint, expires_unix_ms, metadata))
        deadline_ns = time.monotonic_ns() + lease_ms * 1_000_000
        try:
            return ArmedPuts(core, link, blocks, durability, flag, deadline_ns, watch, span, said)
        except KvError as error:
            if span is not None:
                span.failed(error)
            raise

    def _reserve(
        self,
        blocks: Sequence[Block],
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
        span: PutSpan | None,
    ) -> Reservation:
        core = self._core
        link = core.attached()
        _refuse_domains(link, blocks)
        with core.lock:
            words = link.take_words(len(blocks))
        asked_ns = time.monotonic_ns()
        try:
            wanted = Reserving(blocks, words, core.fingerprint, durability, lease_ms, expires_unix_ms, watch)
            leases = core.asking.reserve(link, wanted, span)
        except KvError:
            with core.lock:
                link.give_back_words(words)
            raise
        except BaseException:  # such as a signal's: the node may have granted slots that nothing gives back
            core.lose(link, NodeUnavailable("A reservation was interrupted, and its slots are given back."))
            raise
        if span is not None:
            span.reserved()
        deadline_ns = lease_deadline_ns(asked_ns, lease_ms)
        return Reservation(core, link, blocks, leases, words, durability, deadline_ns, watch, span)

    def get(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None,
        timeout_s: float | None,
    ) -> list[Hit | Miss]:
        """As `Client.get`."""
        core = self._core
        if needs_windows(blocks):
            check_gets(core.open_fabric, blocks, GET_BLOCKS_MAX)
            timeout_s = checked_timeout(core.reach.get_timeout_s if timeout_s is None else timeout_s)
            return get_in_windows(
                core.slabs,
                blocks,
                lambda some, left_s: self._getting(some, layout, left_s, None, None, is_awaited=True),
                timeout_s,
            )
        get = self._getting(blocks, layout, timeout_s, None, None, is_awaited=True)
        try:
            return get.wait()
        except BaseException:  # such as a signal's: the get still has to be waited for, to be ended
            threading.Thread(target=get.wait, name="kvstore-get", daemon=True).start()
            raise

    def getting(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None,
        timeout_s: float | None,
        watch: Watch | None,
        ended: Ended | None,
    ) -> Get | EndedGet:
        """As `Client.getting`."""
        if are_pieces(blocks):
            raise InvalidArgument("A block of pieces can't be fetched in the background: use `get`.")
        return self._getting(blocks, layout, timeout_s, watch, ended, is_awaited=False)

    def _getting(
        self,
        blocks: Sequence[Block],
        layout: Layout | None,
        timeout_s: float | None,
        watch: Watch | None,
        ended: Ended | None,
        *,
        is_awaited: bool,
    ) -> Get | EndedGet:
        core = self._core
        check_gets(core.open_fabric, blocks, BATCH_BLOCKS_MAX)
        fingerprint = core.fingerprint if layout is None else layout.fingerprint
        began_ns, request_id = time.monotonic_ns(), current_request()
        span = None if core.spans is None else core.spans.get(blocks, request_id)
        if span is not None:
            ended = span.before(ended)
        timeout_s = checked_timeout(core.reach.get_timeout_s if timeout_s is None else timeout_s)
        deadline_ns = began_ns + int(timeout_s * 1e9)
        try:
            # A watch and a span learn each step of the call, and reports of earlier look-ups go along with it.
            if watch is None and span is None and timeout_s > 0 and not core.lookups:
                bytes_max = DIRECT_BYTES_MAX if is_awaited else DIRECT_AHEAD_BYTES_MAX
                scattered = read_directly(core.proved, blocks, fingerprint, request_id, bytes_max)
                if scattered is not None:
                    return EndedGet([Hit(block.key) for block in blocks], scattered, ended)
            link = core.attached(timeout_s)
            with core.lock:
                if link.error is not None:
                    raise link.error
                get = Get(core, link, blocks, ended, is_awaited=is_awaited)
        except KvError as error:
            core.lookups.failed(request_id, Kind.FETCH, len(blocks), began_ns, error)
            reason = MissReason.BUSY if isinstance(error, Overloaded) else MissReason.NODE_AWAY
            return EndedGet.missed(len(blocks), Miss(reason, str(error)), ended)
        core.asking.fetch(link, get, fingerprint, request_id, deadline_ns, watch, span)
        return get


def _refuse_domains(link: Link, blocks: Sequence[Block]) -> None:
    """A block may land, and be acknowledged, before a node finds that it has no key for it.

    A node that encrypts refuses blocks without a domain itself; this check saves sending them.
    """
    if link.encrypts:
        if UNSAID in map(_domain, blocks):
            raise DomainRequired
    elif any(map(_domain, blocks)) and not {UNSAID, SHARED}.issuperset(map(_domain, blocks)):
        raise NotEncrypted
