"""A node's membership: how it joins the map of its cluster, stays there, and follows the map.

What always holds: a published map is never replaced by an older one. While etcd is away the map stays, and for a
lease's time after it is back, unless all members reappear sooner; likewise if a second member disappears within that
time: members are removed one at a time. A lease is kept alive for as long as it exists. A node whose record was
replaced by another process leaves the record to that process, and reports that until it is restarted. Each step ends
within etcd's deadline, and is retried a moment later.
All members place by one number of lots, which the cluster's first member decides and each history of etcd's data has;
if a node of an earlier version was the first, the number is 8,192.
What it doesn't do: affect the path of a block. A node serves the same blocks whether it is a member or not.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.cluster.etcd import EtcdAway, Listed
from kvstore.cluster.etcd_history import History
from kvstore.cluster.map import DRAINED, DRAINING, Map, Member, lots_in, lots_record
from kvstore.cluster.primacy import Primacy
from kvstore.errors import ConfigError
from kvstore.limits import CLUSTER_KEEP_MS, CLUSTER_LEASE_S, CLUSTER_LOTS, CLUSTER_RETRY_MS, ETCD_CALL_MS
from kvstore.placement import LOTS
from kvstore.task_ends import logs_failure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.etcd import Found
    from kvstore.cluster.etcd_history import EtcdMemory
    from kvstore.cluster.etcd_options import EtcdReach
    from kvstore.cluster.takeovers import Takeovers

__all__ = ["NO_MAP_DIGEST", "Membership", "digest_of"]

NO_MAP_DIGEST: Final = 1  # before the first map; the digest of one is 1 with a probability of 2^-64

log = logging.getLogger(__name__)

# After the last time that a lease was kept it may have been away for longer than since a call to it failed.
_LONG_AWAY_MS = CLUSTER_LEASE_S * 1000 - CLUSTER_KEEP_MS - ETCD_CALL_MS
_KNOWN = b"known/"  # all that have been members, for good
# Members, under their leases. Earlier versions know only the first. There a cluster with another number of lots
# has that number: to such nodes the record is a member that can't be reached (`TOO_OLD`).
_EARLY, _MEMBERS = b"nodes/", b"members/"
_LOTS = _EARLY + b"lots"
_GONE = "its folder's node was drained or forgotten: start it with an empty folder"
_REPLACED = "another process has taken its place; perhaps its folder was copied"


def digest_of(members: Iterable[Member], lease_of: Mapping[str, int], absent: Iterable[Member] = ()) -> int:
    """A digest of these members under these leases; never 0.

    A node that left and came back has another lease. Absent nodes count too: a node may have come and gone that another
    map never had.
    """
    rows = "".join(f"{one.name}\0{lease_of[one.name]}\0{one.state}\n" for one in members)
    rows += "".join(f"{one.name}\0absent\n" for one in absent)
    return int.from_bytes(blake2b(rows.encode(), digest_size=8).digest(), "little") or 1


class _Etcd(Protocol):
    """The calls to etcd; tests have an implementation without processes."""

    reach: EtcdReach

    async def grant(self, ttl_s: int) -> int: ...
    async def keep(self, lease: int) -> bool: ...
    async def revoke(self, lease: int) -> None: ...
    async def put(
        self,
        key: bytes,
        value: bytes,
        lease: int,
        *,
        only_new: bool = False,
        lasting: bytes = b"",
        unless: bytes = b"",
        was: int = 0,
        lasting_was: int = 0,
    ) -> int: ...
    async def replace(self, key: bytes, by: bytes, value: bytes, *, unless: bytes) -> bool: ...
    def follow(self, prefix: bytes, again_s: Callable[[], float]) -> AsyncGenerator[Listed, None]: ...
    async def latest(self, prefix: bytes, there: bytes) -> tuple[int, int] | None: ...
    async def value(self, key: bytes) -> Found: ...
    async def claim(
        self, key: bytes, value: bytes, was: int, *, within: bytes, top: int, there: Sequence[bytes]
    ) -> bool: ...
    async def close(self) -> None: ...


class Membership:
    """A node's membership. Used in its event loop only."""

    def __init__(self, etcd: _Etcd, clock: Clock, memory: EtcdMemory, takeovers: Takeovers) -> None:
        self._etcd, self._clock, self.memory = etcd, clock, memory
        self._folder = etcd.reach.folder
        self._unnamed_top: int | None = None  # of a list of a history without a record: its latest change
        self._history = History()  # of the list that was taken last
        self._last = Listed(0, {}, {})  # that list
        self._unrecorded = list[Member]()  # nodes that the map had, and etcd may have lost
        self._member: Member | None = None
        self.map = Map(0)
        self.lots = 0  # of the cluster; 0: not known yet
        self._lacks_lots = False  # etcd has no record of them, and this node must write it
        self._has_list = asyncio.Event()
        self._early: set[bytes] = set()  # records of nodes of an earlier version, which can't be members
        self.primacy = Primacy(etcd, clock, takeovers)  # by what is listed, held back or not
        self.outside = "it has not joined yet"  # why it is no member; "" if it is one
        self._away_since_ns: int | None = None
        self._lease = 0
        self._is_drained = False  # and recorded so
        self._replicas: set[int] = set()  # other members', where they differ
        self.leases: set[int] = set()  # all that were ours
        self._tenure, self._tenure_lease, self._is_tenure_over = 0, 0, True
        self._known_at = (
            0  # the revision of our last write of our lasting record; 0: unknown, or of another history
        )
        self._continued: set[int] = (
            set()
        )  # leases with which we joined while that record was as we had written it
        self._joined_at = 0  # the revision that had our record first
        self._found_lease = 0  # under which a record of our name stands
        self._found_record = b""  # that record
        self._writing = asyncio.Lock()  # our records, one after the other
        self._held_until_s = 0.0  # members are missing that may be back in a moment: the map stays until then
        self._is_holding = False  # what was listed last is not on the map for it
        self._holds_newcomers = False  # and has nodes that the map lacks
        self._missed_s = -math.inf  # when one was taken off the map last
        self.lease_of: dict[str, int] = {}  # by the members' names, as of the map
        self.digest = 0  # of them
        self.since = 0  # the revision of the map with which they came: a digest may come back
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """Our own name, "" before it is known."""
        return "" if self._member is None else self._member.name

    @property
    def state(self) -> str:
        """Our state, as etcd confirmed it last."""
        return "" if self._member is None else self._member.state

    @property
    def reported_digest(self) -> int:
        """The digest of the map for answers: 0 would say that we are in no cluster, and a deletion done.

        No deletion is done either while a newer list is held back that has nodes that the map lacks: they may have the
        blocks.
        """
        return NO_MAP_DIGEST if self._holds_newcomers else self.digest or NO_MAP_DIGEST

    @property
    def is_seen(self) -> bool:
        """Whether our record is on the map as last written."""
        return self._member in self.map.members

    @property
    def lease(self) -> int:
        """The lease of our record on the map; 0 if it is not there, or is another process's."""
        lease = self.lease_of.get(self.name, 0)
        return lease if lease in self.leases and not self.outside else 0

    @property
    def tenure(self) -> int:
        """The number of our present tenure, during which no deletion was acknowledged without us; 0 without a lease.

        `docs/cluster.md` has the argument.
        """
        return self._tenure if self.lease else 0

    @property
    def away_ms(self) -> int:
        """For how long etcd has not answered."""
        since_ns = self._away_since_ns
        return 0 if since_ns is None else (self._clock.monotonic_ns() - since_ns) // 1_000_000

    def start(self) -> None:
        """Follow the map."""
        self._begin(self._follow())
        self._begin(self.primacy.follow())

    def join(self, member: Member) -> None:
        """Join the cluster."""
        self._member = member
        self._begin(self._stay(member))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(task := asyncio.create_task(work))
        task.add_done_callback(
            logs_failure(log, "The cluster is no longer followed, or the lease no longer kept.")
        )

    async def announce(self, state: str) -> None:
        """Change our state on the map; EtcdAway, and the state remains, if etcd did not confirm it.

        etcd may have written it all the same: then `_stay` writes the former state again.
        """
        async with self._writing:
            if self._member is None or not self.lease:
                raise EtcdAway(f"The node is not on the map of its cluster: {self.outside or 'not yet'}.")
            member = replace(self._member, state=state)
            key, known = self._key(member), self._known(member)
            self._known_at = 0
            try:
                self._known_at = await self._etcd.put(key, member.encoded(), self.lease, lasting=known)
            except EtcdAway as error:
                raise EtcdAway(
                    f"The node remains as it was, because etcd has not confirmed the change ({error}). Repeat it when"
                    " `kvstore cluster status` no longer reports that etcd does not answer."
                ) from error
            self._member, self._is_drained = member, False

    async def note_drained(self) -> None:
        """Record that all blocks of this node are on others: if it is lost now, no deletion waits for it."""
        async with self._writing:
            if self._member is None or self._is_drained or self.state != DRAINING:
                return  # or the drain has been cancelled, and the map doesn't have it yet
            drained = replace(self._member, state=DRAINED)
            self._known_at = 0  # deletions don't wait for it any more
            await self._etcd.put(self._known(drained), drained.encoded(), 0)
            self._is_drained = True

    async def forget(self, node: str) -> list[str]:
        """Forget absent nodes with this address or name; returns their names. EtcdAway if etcd did not confirm it."""
        wanted = [one for one in self.map.absent if node in (one.node, one.name)]
        return [
            one.name
            for one in wanted
            if await self._etcd.replace(
                self._known(one), self._gone(one), one.encoded(), unless=self._key(one)
            )
        ]

    async def close(self, *, for_good: bool = False) -> None:
        """Leave: others take over at once, if etcd answers; `for_good` if the others have all of this node's blocks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease:
            with suppress(EtcdAway):
                if for_good and self._member is not None and self.lease:
                    await self._etcd.put(
                        self._known(self._member),
                        self._member.encoded(),
                        self.lease,
                        lasting=self._gone(self._member),
                    )
                await self._etcd.revoke(self._lease)
        await self._etcd.close()

    async def later_than(self, revision: int, timeout_s: float) -> Map:
        """Wait for a map with a later revision, at most this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.map.revision <= revision:
                    await self._changed.wait()
        return self.map

    # --- being a member

    @property
    def _members(self) -> bytes:
        """The prefix of the members' records."""
        return self._folder + (_EARLY if self.lots in {0, LOTS} else _MEMBERS)

    def _key(self, member: Member) -> bytes:
        return self._members + member.name.encode()

    def _known(self, member: Member) -> bytes:
        return self._folder + _KNOWN + member.name.encode()

    def _gone(self, member: Member) -> bytes:
        return self._etcd.reach.gone + member.name.encode()

    async def _stay(self, member: Member) -> None:
        """Write our record.

        The first time it replaces any existing one: of an earlier run, or of a copy. Later it is written only if there
        is none. A lease is kept until etcd reports its end: an etcd that elects a leader may be silent for seconds.
        """
        lease = 0
        while self.outside not in {_REPLACED, _GONE}:
            try:
                if not lease:
                    self._lease = lease = await self._etcd.grant(CLUSTER_LEASE_S)
                    self.leases.add(lease)
                if not await self._etcd.keep(lease):
                    lease = 0
                    continue
                await self._agree_on_lots()
                if self._found_lease != lease:  # else it may be our own of an earlier lease, which has an end
                    again = self._joined_at > 0
                    if not again and await self._was_drained(member):
                        continue
                    async with self._writing:
                        member = self._member or member  # it may be in another state by now
                        self._is_drained = False
                        revision = await self._write(member, lease, again=again)
                    self._joined_at = self._joined_at or revision
                    if not revision and (await self._etcd.value(self._gone(member))).value:
                        self.outside = _GONE
                        log.error("the node is not a member of its cluster: %s", _GONE)
                else:
                    await self._correct()
                self._answered()
                wait_ms = CLUSTER_KEEP_MS if self._found_lease == lease else CLUSTER_RETRY_MS
                await asyncio.sleep(wait_ms / 1000)
            except EtcdAway as error:
                await self._retry(error)

    async def _write(self, member: Member, lease: int, *, again: bool) -> int:
        """Write our record under a lease; returns the revision, 0 if it was refused.

        If our lasting record is still as we last wrote it, we were on every map meanwhile, if only as absent.
        """
        write = partial(
            self._etcd.put,
            self._key(member),
            member.encoded(),
            lease,
            only_new=again,
            lasting=self._known(member),
            unless=self._gone(member),
        )
        known_at, self._known_at = self._known_at, 0
        if known_at:
            self._continued.add(lease)  # now: our record may be listed before the answer is here
            if revision := await write(lasting_was=known_at):
                self._known_at = revision
                return revision
        self._continued.discard(lease)
        self._is_tenure_over = True
        self._known_at = await write()
        return self._known_at

    async def _correct(self) -> None:
        """Write our record again if it has another state: a call to change it failed, and etcd wrote it later."""
        async with self._writing:
            member = self._member
            if member is not None and self._found_record != member.encoded():
                key, known = self._key(member), self._known(member)
                lease, was = self._found_lease, self._last.written[key]
                self._is_drained, self._known_at = False, 0
                self._known_at = await self._etcd.put(key, member.encoded(), lease, lasting=known, was=was)

    async def _agree_on_lots(self) -> None:
        """Wait for the number of lots, which a history has; write it where earlier versions find it."""
        await self._has_list.wait()
        if self._lacks_lots:
            await self._etcd.put(self._folder + _LOTS, lots_record(self.lots), 0, only_new=True)

    async def _was_drained(self, member: Member) -> bool:
        """Whether an earlier process of this node was drained, and lost before it left; then it has left for good."""
        found = (await self._etcd.value(self._known(member))).value
        with suppress(ConfigError):
            if found and Member.decoded(found).state == DRAINED:
                await self._etcd.replace(
                    self._known(member), self._gone(member), found, unless=self._key(member)
                )
                self.outside = _GONE
                log.error("the node is not a member of its cluster: %s", _GONE)
                return True
        return False

    async def _write_again(self) -> None:
        """Name a new history if etcd has lost data; then write what it had: deletions wait for absent nodes."""
        if self._unnamed_top is not None:
            new, folder = self.memory.next(self.lots or CLUSTER_LOTS), self._folder
            key = self._etcd.reach.history + new.id.encode()
            await self._etcd.claim(key, new.record(), 0, within=folder, top=self._unnamed_top, there=())
        for one in list(self._unrecorded):
            known, gone = self._known(one), self._gone(one)
            is_new = await self._etcd.put(known, one.encoded(), 0, only_new=True, unless=gone)
            if not is_new and (await self._etcd.value(gone)).value:
                self._unrecorded = [other for other in self._unrecorded if other != one]

    # --- following the map

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._etcd.follow(self._folder, self._hold_ends_s)) as lists:
                    async for listed in lists:
                        self._answered()
                        self._take(listed)
                        await self._write_again()
            except EtcdAway as error:
                await self._retry(error)

    def _take(self, listed: Listed) -> None:
        try:
            self._take_lots(listed)
        except ConfigError as error:
            self.outside = str(error).rstrip(".")
            log.error("the cluster's map can't be followed: %s", error)  # noqa: TRY400 - it says all
            return
        if not self._take_history(listed):
            return
        number = self._history.offset + listed.revision
        members, known = self._nodes_of(listed)
        if self._member is not None:
            self._look_for_ourselves(self._member, listed)
            found = self._found_lease if self._found_lease in self.leases else 0
            self.primacy.listed(
                Map.of(number, members, absent=known, lots=self.lots or LOTS),
                top=listed.top,
                count=len(listed.values),
                has_gap=not listed.is_told,
                own=(self._member.name, found, self._key(self._member)),
                history=self._etcd.reach.history + self._history.id.encode(),
                losses=self.memory.losses,
            )
        if number <= self.map.revision or self._unrecorded:
            return
        is_held = self._is_held_back(members)
        self._holds_newcomers = is_held and not self.map.names.issuperset(one.name for one in members)
        if is_held:
            return  # it is listed again
        now = Map.of(number, members, absent=known, lots=self.lots or LOTS)
        before, self.map = self.map, now
        self.lease_of = {one.name: listed.values.get(self._key(one), (b"", 0))[1] for one in self.map.members}
        digest, self.digest = self.digest, digest_of(self.map.members, self.lease_of, self.map.absent)
        if self.digest != digest:
            self.since = number
        self._note_tenure()
        if (before.members, before.absent) != (self.map.members, self.map.absent):
            there, absent = (
                ", ".join(one.node for one in some) or "none" for some in (self.map.members, self.map.absent)
            )
            log.info("the cluster's nodes: %s; absent: %s", there, absent)
        self.memory.save()
        self._compare_replicas()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _note_tenure(self) -> None:
        """Note whether we are on a new map with an unbroken tenure."""
        lease = self.lease
        if lease and (self._is_tenure_over or (lease != self._tenure_lease and lease not in self._continued)):
            self._tenure += 1
        self._tenure_lease, self._is_tenure_over = lease, not lease

    def _nodes_of(self, listed: Listed) -> tuple[list[Member], list[Member]]:
        """The members of a list, and all nodes that are known to have been members."""
        members, known, early = list[Member](), list[Member](), set[bytes]()
        for key, (value, _) in listed.values.items():
            if key.startswith(self._etcd.reach.history) or key == self._folder + _LOTS:
                continue
            kind = members if key.startswith(self._members) else known
            if kind is known and key.startswith(self._folder + _EARLY):
                early.add(key)
                continue
            try:
                if (member := Member.decoded(value)).state != DRAINED:
                    kind.append(member)
            except ConfigError:
                log.warning("%s in etcd is not a node's record", key.decode(errors="replace"))
        for key in early - self._early:
            log.error("%s is a node of a version that is too old for this cluster: upgrade it", key.decode())
        self._early = early
        self._unrecorded = [one for one in self._unrecorded if self._known(one) not in listed.values]
        return members, known

    def _compare_replicas(self) -> None:
        """Warn about members with another number of copies: nodes then don't agree on what must be copied."""
        own = 0 if self._member is None else self._member.replicas
        others = {one.replicas for one in self.map.members} - {0, own} if own else set[int]()
        if others - self._replicas:
            log.warning(
                "--cluster-replicas is %d here, and %s on other nodes of the cluster: make it the same on all",
                own,
                " and ".join(map(str, sorted(others))),
            )
        self._replicas = others

    def _take_history(self, listed: Listed) -> bool:
        """Take the history that a list is of; False if a new one must be named first, because etcd has lost data."""
        history, losses = History.of(listed.values, self._etcd.reach.history), self.memory.losses
        is_lost = history == self._history and not listed.may_follow(self._last)
        if is_lost or not self.memory.takes(history, listed.revision):
            self._unnamed_top = listed.top
            return False
        self._unnamed_top, self._history, self._last = None, history, listed
        self._has_list.set()
        if self.memory.losses > losses:
            log.error("etcd has lost data; the node continues with its cluster's last map")
            self._joined_at = 0
            self._known_at = 0
            self._continued.clear()
            self._unrecorded = [*self.map.members, *self.map.absent]
        return True

    def _take_lots(self, listed: Listed) -> None:
        """Take the number of lots; ConfigError if its record can't be read."""
        record, _ = listed.values.get(self._folder + _LOTS, (b"", 0))
        recorded = lots_in(record) if record else 0
        lots = History.of(listed.values, self._etcd.reach.history).lots or recorded
        if lots:
            self.lots = lots
        elif not self.lots and listed.values:
            self.lots = LOTS
        self._lacks_lots = not recorded and self.lots != LOTS

    def _is_held_back(self, members: Iterable[Member]) -> bool:
        """Whether missing members may be back in a moment: all of them after etcd is back, otherwise all but the first.

        If several leases end at once, the cause is more often etcd than the nodes: a stopped former leader ends all
        leases when it continues.
        """
        now_s = asyncio.get_running_loop().time()
        missing = self.map.names - {one.name for one in members}
        was_held, self._is_holding = self._is_holding, False
        if not missing and self.map.revision:
            self._held_until_s = 0.0
        elif now_s < self._held_until_s:
            self._is_holding = True
        elif missing and not was_held and (len(missing) > 1 or now_s < self._missed_s + CLUSTER_LEASE_S):
            self._held_until_s, self._is_holding = now_s + CLUSTER_LEASE_S, True
        elif missing:
            self._missed_s = now_s
        return self._is_holding

    def _hold_ends_s(self) -> float:
        """When the list that is held back, if any, is no longer: by the event loop's time."""
        return self._held_until_s if self._is_holding else 0.0

    def _look_for_ourselves(self, member: Member, listed: Listed) -> None:
        """Check whether our record is there, or that of another process that came after ours."""
        self._found_record, lease = listed.values.get(self._key(member), (b"", 0))
        self._found_lease = lease
        if lease in self.leases:
            self.outside = ""
            self._joined_at = self._joined_at or listed.revision  # the answer to the put may have been lost
        elif lease and 0 < self._joined_at <= listed.revision:
            if self.outside != _REPLACED:
                log.error("the node is not a member of its cluster any more: %s", _REPLACED)
            self.outside = _REPLACED
        elif self.outside not in {_REPLACED, _GONE}:
            self.outside = "its record is not in etcd"

    # --- etcd away

    def _answered(self) -> None:
        if self._away_since_ns is not None:
            log.warning("etcd answers again, after %d ms", self.away_ms)
            if self.away_ms >= _LONG_AWAY_MS:
                self._held_until_s = asyncio.get_running_loop().time() + CLUSTER_LEASE_S
        self._away_since_ns = None

    async def _retry(self, error: EtcdAway) -> None:
        if self._away_since_ns is None:
            self._away_since_ns = self._clock.monotonic_ns()
            log.warning("%s. The node continues with its current map.", error)
        await asyncio.sleep(CLUSTER_RETRY_MS / 1000)
