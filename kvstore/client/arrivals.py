"""Requests on the compute side: each is matched, and its user's KV is fetched, ideally while the user still types.

    with Arrivals(nodes, table) as arrivals:
        chat = arrivals.session("ada", "chat 7")         # whose transfers the requester's catalogue follows
        ...
        arrivals.arrived(request)                        # Ada begins to type: her KV goes into the nodes' memory
        back = arrivals.arrived(request, place).whole()  # her prompt is there: into registered memory

A request is matched against the rules by tenant, user, context, model and 5-tuple. A hit's action points to all KV of
the user, and the requester asks the user's node for it. With a `place`, the blocks of the session that the context
names go there, and are whole or a MISS; all others go into the node's memory.

What always holds: a request that no rule permits, above all one from a 5-tuple that isn't bound to the user, causes no
call. A denial and a MISS are answers, not errors. The catalogue records each acknowledged put and each block found to
be gone, and drops a user when something of theirs is deleted; for anything it doesn't know it asks the node. A node
that is away, or doesn't know either, is a MISS with its reason. Waits have deadlines. Each request also removes entries
of the table that have not been hit for their idle timeout.
What it doesn't do: run a thread. `poll` and every wait process arrived results. Any thread may call; calls are served
one at a time. It trusts the 5-tuple it is given, which must come from the connection.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.arguments import checks_arguments
from kvstore.client.blocks import Hit
from kvstore.client.checks import check_memory, check_placed
from kvstore.client.client import Client, session_calls_of
from kvstore.client.fetcher import Fetcher, Placing
from kvstore.client.matched import RuleCounts, matched_by
from kvstore.client.one_node import OneNode
from kvstore.client.resuming import Manifest, Resumed
from kvstore.client.sessions import Session, manifest_of, resume_span_of
from kvstore.client.transfer_watch import within
from kvstore.clock import SystemClock
from kvstore.errors import Closed, DeadlineExceeded, KvError, NodeUnavailable, Overloaded
from kvstore.limits import (
    ARRIVAL_GRACE_MS,
    BATCH_BLOCKS_MAX,
    BLOCK_BYTES_MAX,
    LEARNT_SESSIONS_MAX,
    REPORTS_SLICE_MS,
    SESSIONS_FOLLOWED_MAX,
    SESSIONS_LISTED_MAX,
    TRANSFERS_WAITING_MAX,
)
from kvstore.miss import Miss, MissReason
from kvstore.steps import Step
from nic_offload.handle import Handle
from nic_offload.made_by import made_by
from nic_offload.match_action import perform
from nic_offload.requester import KvRequester
from nic_offload.requester_catalogue import Extent, User
from nic_offload.requester_hits import At
from nic_offload.requester_terms import Limits, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.fetcher import Report
    from kvstore.client.matched import Matched
    from kvstore.client.nodes import Nodes
    from kvstore.client.one_node import Homes
    from kvstore.client.trace import Notes
    from nic_offload.match_action import Counters, Entry, Request, Table
    from nic_offload.requester_terms import Statistics

__all__ = ["Arrival", "Arrivals"]

_LIMITS = Limits(extent_bytes_max=BLOCK_BYTES_MAX, gets_per_ticket_max=BATCH_BLOCKS_MAX)
_NS_PER_MS = 1_000_000
_LOOK_S = REPORTS_SLICE_MS / 1000


class _StoreChange(NamedTuple):
    """A transfer, for the catalogue; without a key, something of the user was deleted."""

    user: str
    key: bytes
    length: int  # 0: it is gone
    number: int  # reports are processed in this order


class _Reason(NamedTuple):
    """Why a user's KV is fetched: the entry that was hit, and the recorder of events."""

    entry: Entry
    notes: Notes


@made_by("`Arrivals.arrived`")
@checks_arguments
class Arrival(Handle):
    """The outcome of a request that arrived.

    >>> arrival = arrivals.arrived(request, lambda number, key: Block(key, kv, offset=0, length=4096))
    >>> arrival.rule, arrival.denied, arrival.miss
    ('tenant=acme,user=ada', False, None)
    """

    def __init__(
        self,
        arrivals: Arrivals,
        entry: Entry | None,
        *,
        denied: bool = False,
        miss: Miss | None = None,
        manifest: Manifest | None = None,
        placing: Placing | None = None,
        request: tuple[User, int | None] | None = None,
    ) -> None:
        self.rule = None if entry is None else entry.name
        self.denied = denied
        self.miss = miss  # why not everything is fetched; None: the answer is
        self.request = request  # the requester's
        self.placing = placing
        self.held = ExitStack()
        self._arrivals = arrivals
        self._manifest = manifest

    def wait(self, timeout_s: float) -> bool:
        """Wait until every requested block has arrived or failed; False on timeout.

        >>> arrival.wait(timeout_s=10)
        True
        """
        return self._arrivals.wait(self, timeout_s)

    def whole(self) -> Resumed:
        """Wait for the session's blocks. The result is all of them, or a MISS with the blocks usable before it.

        >>> arrival.whole().usable_tokens
        16
        """
        manifest, placing = self._manifest, self.placing
        if manifest is None or placing is None:
            return Resumed(
                0,
                0,
                0,
                0,
                self.miss or Miss(MissReason.UNKNOWN, "The request gave no destination for blocks."),
            )
        self._arrivals.settle(self)
        outcomes = [placing.outcomes.get(key) for key in manifest.keys]
        usable = next((at for at, one in enumerate(outcomes) if not isinstance(one, Hit)), len(outcomes))
        miss = self.miss
        if usable < len(outcomes):
            late = Miss(MissReason.NODE_AWAY, "The block did not arrive in time.")
            first = outcomes[usable]
            miss = first if isinstance(first, Miss) else self.miss or late
        resumed = manifest.resumed(usable, miss)
        placing.notes.resumed(resumed)
        if placing.span is not None:
            placing.span.resumed(resumed)
        return resumed

    def close(self) -> None:
        """Wait until nothing is written into memory any more.

        >>> arrival.close()
        """
        self._arrivals.settle(self)
        if self.placing is not None and self.placing.span is not None:
            self.placing.span.closed(sum(isinstance(one, Hit) for one in self.placing.outcomes.values()))


@checks_arguments
class Arrivals(Handle):
    """Fetches the KV of users whose requests match a rule, and reports when it has arrived.

    >>> from kvstore.client import Arrivals, Block, ClusterBlock, Nodes
    >>> from nic_offload.match_action import Request, Table
    >>> from nic_offload.match_file import parse_rules
    >>> table = Table()
    >>> _ = table.replace(parse_rules('rule = [{ tenant = "acme", user = "ada", actions = ["fetch"] }]'))
    >>> nodes = Nodes(["127.0.0.1:7070"], tenant="acme")
    >>> arrivals = Arrivals(nodes, table, tenant="acme")
    >>> chat = arrivals.session("ada", "chat 7")
    >>> everywhere = nodes.register(memory)
    >>> _ = chat.arm([ClusterBlock(key, everywhere, offset=0, length=4096)]).wait(timeout_s=10)
    >>> _ = chat.append([key], tokens=16)
    >>> addresses = (0, 0, 0, 0, 0)  # of the connection: both addresses, both ports, the protocol
    >>> request = Request("acme", "ada", "chat 7", "my model", *addresses)
    >>> kv = everywhere.at(nodes.of("ada"))
    >>> place = lambda number, key: Block(key, kv, offset=0, length=4096)
    >>> arrivals.arrived(request, place).whole().is_whole
    True
    """

    def __init__(self, nodes: Nodes | Client, rules: Table, *, tenant: str, limits: Limits = _LIMITS) -> None:
        """`tenant` is the rules' name for the tenant of the nodes' clients. A client is its node's, for all users."""
        self.rules = rules
        self._tenant = tenant
        self._nodes: Homes = OneNode(nodes) if isinstance(nodes, Client) else nodes
        self._clock = SystemClock()
        self._fetcher = Fetcher(self._nodes, self._clock)
        self._counts = RuleCounts()
        self._requester = KvRequester(self._fetcher, limits)
        self._lock = threading.RLock()
        self._sessions: dict[tuple[str, str], Session] = {}  # unused longest first
        self._reasons: dict[User, _Reason] = {}
        self._running: dict[User, set[int]] = {}  # the requester's requests that have not ended
        self._closed = False
        self._changes: deque[_StoreChange] = deque(maxlen=TRANSFERS_WAITING_MAX)
        self._numbers = itertools.count(1)

    # --- reports to the catalogue, from any thread

    def session(self, user: str, context: str) -> Session:
        """A user's session of a context, on the user's home: always the same object. The catalogue follows it.

        >>> arrivals.session("ada", "chat 7") is chat
        True
        """
        with self._lock:
            chat = self._sessions.pop((user, context), None)
            if chat is None:
                chat = Session(lambda: session_calls_of(self._nodes.of(user)), user, context, self)
                if len(self._sessions) >= SESSIONS_FOLLOWED_MAX:
                    del self._sessions[next(iter(self._sessions))]  # its users keep using it
            self._sessions[user, context] = chat
            return chat

    def stored(self, user: str, key: bytes, length: int) -> None:
        """A put was acknowledged."""
        self._changes.append(_StoreChange(user, key, length, next(self._numbers)))

    def dropped(self, user: str, key: bytes) -> None:
        """A block is gone: deleted, evicted, or broken."""
        self._changes.append(_StoreChange(user, key, 0, next(self._numbers)))

    def forgotten(self, user: str) -> None:
        """Something of the user was deleted; the rest is looked up at their next request."""
        self._changes.append(_StoreChange(user, b"", 0, next(self._numbers)))

    def known(self, user: str) -> tuple[Extent, ...]:
        """Where the user's KV is stored, as far as this process knows.

        >>> [extent.length for extent in arrivals.known("ada")]
        [4096]
        """
        with self._lock:
            self._take_in()
            return self._requester.extents(User(self._tenant, user))

    def statistics(self) -> Statistics:
        """The requester's counts.

        >>> arrivals.statistics().users
        1
        """
        with self._lock:
            return self._requester.statistics()

    # --- requests

    def arrived(
        self,
        request: Request,
        place: Callable[[int, bytes], Block] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Arrival:
        """Match a request, and start to fetch what the rule says. It waits for look-ups on a node, but for no block.

        With `place(number, key)`, the blocks of the request's session go into registered memory.

        >>> arrivals.arrived(request).rule
        'tenant=acme,user=ada'
        """
        return self.fetch(self.match(request), place, timeout_s=timeout_s)

    def match(self, request: Request) -> Matched:
        """What the rules say of a request, without a call. It counts as a hit; `fetch` does what the rule says.

        >>> arrivals.match(request).denied
        False
        """
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            if self._closed:
                raise Closed("The arrivals are closed.")
            self.rules.age(now_ns)
            entry = self.rules.match(request, now_ns)
            if entry is not None:
                self._counts.add(entry, hits=1, now_ns=now_ns)
        return matched_by(request, entry, self._tenant)

    def fetch(
        self,
        matched: Matched,
        place: Callable[[int, bytes], Block] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Arrival:
        """The second half of `arrived`, for a request that was matched before.

        >>> arrivals.fetch(arrivals.match(request)).rule
        'tenant=acme,user=ada'
        """
        request, entry, owner = matched
        with self._lock:
            if self._closed:
                raise Closed("The arrivals are closed.")
            self._take_in()
        if entry is None:
            return Arrival(self, None, miss=Miss(MissReason.UNKNOWN, "No rule matches this request."))
        if owner is None:
            return Arrival(self, entry, denied=True)
        if timeout_s is None:
            timeout_s = self._nodes.reach.get_timeout_s
        return self._allowed(entry, request, owner, place, timeout_s)

    def counts(self) -> dict[str, Counters]:
        """What each entry has seen through these arrivals, by name, also if it has left the table.

        The first names are kept, a bounded number; what all others have seen is under "".

        >>> arrivals.counts()["tenant=acme,user=ada"].hits > 0
        True
        """
        with self._lock:
            self._take_in()
            return self._counts.all()

    def _allowed(
        self,
        entry: Entry,
        request: Request,
        owner: User,
        place: Callable[[int, bytes], Block] | None,
        timeout_s: float,
    ) -> Arrival:
        """Make the pending look-ups without holding a lock: a node that hangs must not delay others."""
        until_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        chat = self.session(owner.user, request.context)
        actions = ", ".join(map(str, entry.actions))
        chat.notes.note(Step.ARRIVED, detail=f"rule {entry.name}: {actions}")
        manifest = None
        span = None if place is None else resume_span_of(chat)
        try:
            with within(span):
                if place is not None:
                    chat.notes.note(Step.RESUMING)
                    manifest = manifest_of(chat, timeout_s)
                found, gone = self._look_up(owner, () if manifest is None else manifest.keys)
        except KvError as error:
            if span is not None:
                span.failed(error)
            return Arrival(self, entry, miss=_miss(error))
        placing, pin = None, ExitStack()
        if manifest is not None and place is not None:
            places = _places(manifest, place, gone)
            blocks = [block for some in places.values() for block in some]
            check_memory(self._nodes.of(owner.user).fabric, blocks)
            if blocks:
                chat.notes.registered(blocks[0].region)
            placing = Placing(places, chat.notes, until_ns, outcomes=dict(gone), span=span)
            with suppress(KvError):  # unpinned blocks may miss, which is reported
                time_to_live_ms = int(timeout_s * 1000) + 1
                pin.enter_context(
                    self._nodes.of(owner.user).pin(list(placing.blocks), time_to_live_ms=time_to_live_ms)
                )
        with self._lock:
            for extent in found:
                self._requester.stored(owner, extent)
            if placing is not None:
                self._requester.cancel_user(owner)  # blocks being prefetched would not be requested again
                self._fetcher.placings[owner] = placing
            arrival = self._begin(entry, request, owner, chat.notes, until_ns, manifest, placing)
            arrival.held.push(pin)
            self._pump()
        return arrival

    def _begin(
        self,
        entry: Entry,
        request: Request,
        owner: User,
        notes: Notes,
        until_ns: int,
        manifest: Manifest | None,
        placing: Placing | None,
    ) -> Arrival:
        now_ms = self._now_ms()
        at = At(self._requester, now_ms, until_ns // _NS_PER_MS + ARRIVAL_GRACE_MS)
        perform(entry, request, at)
        number = next((answer.number for answer in at.answers if answer.number is not None), None)
        miss = None if manifest is None else manifest.miss
        if number is not None:
            self._running.setdefault(owner, set()).add(number)
            self._reasons[owner] = _Reason(entry, notes)
            self._fetcher.notes[owner] = notes
        else:
            miss = miss or _refusal([answer.outcome for answer in at.answers])
        return Arrival(self, entry, miss=miss, manifest=manifest, placing=placing, request=(owner, number))

    # --- what the node knows

    def _look_up(self, owner: User, keys: Sequence[bytes]) -> tuple[list[Extent], dict[bytes, Hit | Miss]]:
        """Ask the node about blocks, or whole users, that are not in the catalogue.

        Returns the blocks found, and those removed with the reason.
        """
        client = self._nodes.of(owner.user)
        with self._lock:
            known = {extent.key for extent in self._requester.extents(owner)}
        wanted = list(keys)
        if not known:
            listed = list(itertools.islice(client.sessions(owner.user), SESSIONS_LISTED_MAX))
            listed.sort(key=lambda one: one.last_turn_unix_ms, reverse=True)
            for one in listed[:LEARNT_SESSIONS_MAX]:
                wanted += client.session(owner.user, one.session).keys()
        new = [key for key in dict.fromkeys(wanted) if key not in known]
        number = next(self._numbers)  # reports that arrive meanwhile are newer
        found: list[Extent] = []
        gone: dict[bytes, Hit | Miss] = {}
        for key, state in zip(new, client.exists(new), strict=True):
            if isinstance(state, Miss):
                gone[key] = state
            else:
                found.append(self._extent(owner.user, key, state.length, number))
        return found, gone

    def _extent(self, user: str, key: bytes, length: int, number: int) -> Extent:
        # Only the node knows the drive, and the place on it.
        return Extent(self._nodes.home(user), 0, 0, length, key, number)

    # --- arrived results

    def poll(self) -> None:
        """Process arrivals, and request what there is room for now.

        >>> arrivals.poll()
        """
        with self._lock:
            self._take_in()

    def wait(self, arrival: Arrival, timeout_s: float) -> bool:
        """Wait until a request's fetch has ended; False on timeout.

        >>> arrivals.wait(arrivals.arrived(request), timeout_s=10)
        True
        """
        return self._until(lambda: self._has_ended(arrival), timeout_s)

    def _has_ended(self, arrival: Arrival) -> bool:
        if arrival.request is None:
            return True
        owner, number = arrival.request
        return number not in self._running.get(owner, ())

    def settle(self, arrival: Arrival) -> None:
        """Wait until a request's blocks are in memory or have failed; each get has its own deadline.

        >>> arrivals.settle(arrivals.arrived(request))
        """
        placing = arrival.placing
        if placing is None:
            return

        def is_over() -> bool:
            return not placing.under_way and (placing.left == 0 or self._has_ended(arrival))

        left_ms = max(0, placing.until_ns - self._clock.monotonic_ns()) / _NS_PER_MS + ARRIVAL_GRACE_MS
        self._until(is_over, left_ms / 1000 + 1.0)
        with self._lock:
            for owner in [owner for owner, one in self._fetcher.placings.items() if one is placing]:
                del self._fetcher.placings[owner]
        arrival.held.close()

    def _until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        until_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            changes = self._fetcher.changes()
            with self._lock:
                self._take_in()
                if is_over():
                    return True
            left_s = (until_ns - self._clock.monotonic_ns()) / 1e9
            if left_s <= 0:
                return False
            self._fetcher.wait(changes, min(left_s, _LOOK_S))

    def _take_in(self) -> None:
        """Process the reports that arrived since, in order; then request more."""
        with suppress(IndexError):
            while True:
                self._apply(self._changes.popleft())
        with suppress(IndexError):
            while True:
                self._finished(self._fetcher.reports.popleft())
        self._pump()

    def _apply(self, change: _StoreChange) -> None:
        owner = User(self._tenant, change.user)
        if not change.key:
            self._requester.forget(owner)
        elif change.length:
            self._requester.stored(owner, self._extent(change.user, change.key, change.length, change.number))
        else:
            self._requester.dropped(owner, change.key, change.number)

    def _finished(self, report: Report) -> None:
        finished = self._requester.finished(report.ticket, missing=report.missing, failed=report.failed)
        reason = self._reasons.get(finished.user)
        if reason is not None:
            self.rules.add_bytes(reason.entry, finished.moved_bytes)
            self._counts.add(reason.entry, moved_bytes=finished.moved_bytes)

    def _pump(self) -> None:
        if self._closed:
            return
        for ended in self._requester.pump(self._now_ms()):
            running = self._running[ended.user]
            running.discard(ended.number)
            if not running:
                del self._running[ended.user], self._reasons[ended.user], self._fetcher.notes[ended.user]

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // _NS_PER_MS

    def close(self) -> None:
        """Fetch nothing more. The nodes stay open; the caller owns them.

        >>> Arrivals(nodes, table, tenant="acme").close()
        """
        with self._lock:
            if self._closed:
                return
            for owner in list(self._reasons):
                self._requester.cancel_user(owner)
            self._closed = True
            self._running.clear()
        self._fetcher.close()


def _places(
    manifest: Manifest, place: Callable[[int, bytes], Block], gone: Mapping[bytes, object]
) -> dict[bytes, list[Block]]:
    places: dict[bytes, list[Block]] = {}
    for number, key in enumerate(manifest.keys):
        if key in gone:
            continue
        block = place(number, key)
        check_placed(block, number, key)
        places.setdefault(key, []).append(block)
    return places


def _miss(error: KvError) -> Miss:
    """Return a failed look-up as a miss if the node was away; raise any other error."""
    if isinstance(error, Overloaded):
        return Miss(MissReason.BUSY, str(error))
    if isinstance(error, (NodeUnavailable, DeadlineExceeded)):
        return Miss(MissReason.NODE_AWAY, str(error))
    raise error


def _refusal(outcomes: Sequence[Outcome]) -> Miss:
    """Why the requester fetches nothing."""
    if not outcomes:
        return Miss(MissReason.UNKNOWN, "The rule has no fetch or prefetch.")
    reason = MissReason.UNKNOWN if outcomes[0] is Outcome.MISS else MissReason.BUSY
    return Miss(reason, f"{outcomes[0].value[0].upper()}{outcomes[0].value[1:]}.")
