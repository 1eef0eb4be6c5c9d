"""Whether this node may order the sessions of a user now, and in which epoch: at most one node may, at any moment.

Users fall into the lots of the cluster. For each lot that was ever used etcd has a record: the node that orders
its sessions, and the lot's epoch, which is one higher with each change of that node. A session records the epoch in
which it was written (`kvstore.wire.manifest`); a session of another epoch counts as missing, so a node that was away
never serves a stale one when it is back.

A node orders the sessions of a lot while both of these hold:

1. It is the home of the lot by the list of members, which it knows to be the latest: less than SESSIONS_KNOWN_MS ago it
began a request in which etcd confirmed that. The list contains its own record, under its own lease.
2. The record of the lot names it, under that lease, as read after the last change of the list.

It takes a lot that another process has ordered only when it has been the lot's home for SESSIONS_TAKING_MS, without a
gap in 1. By then no other process can still believe it is the home: etcd would have to have confirmed that less than
SESSIONS_KNOWN_MS ago. It takes the lot in one transaction that fails if a member's record was written since, or its own
is gone. A later home finds that the lot was taken.

If etcd has lost its data, the epochs there begin again. Sessions are compared on one node only, so each node adds to
them the number of histories of etcd that its folder has seen the end of, as the higher bits: what it stored in an
earlier history counts as missing (`kvstore.cluster.etcd_history`). A lot without a record may have been ordered in an
earlier history: it is taken when the node has known this one for SESSIONS_TAKING_MS.

With two copies, the record also names the lot's *standby*: the node that has, in the epoch `copies`, all acknowledged
steps of its sessions (`kvstore.node.session_standbys`). A lot's next epoch is higher than both. So what a former
standby has left counts for nothing, and a new home that can't ask the old one asks the node that the record names.
A node that takes a lot names the one that it takes it from, until the first step may be acknowledged: if it is lost
before, nothing is.

A term that began when this node took the lot from another is a *takeover*: that node has the last state of each
session in its own epoch, and the users whose first step here has come are noted, on the drive
(`kvstore.cluster.takeovers`, `kvstore.node.session_moves`).

What always holds: times are of a clock that runs while a process is stopped; the right to order is checked before and
after each step, so a step of a process that was stopped in between is not acknowledged.
What it doesn't do: order anything while etcd has not answered for SESSIONS_KNOWN_MS; blocks are not affected.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.cluster.etcd import EtcdAway
from kvstore.cluster.takeovers import Takeover
from kvstore.errors import DeadlineExceeded, WrongEpoch
from kvstore.limits import (
    CLUSTER_CONFIRM_MS,
    SESSIONS_EPOCHS_MAX,
    SESSIONS_KNOWN_MS,
    SESSIONS_RETRY_MS,
    SESSIONS_TAKING_MS,
)
from kvstore.task_ends import drop_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.etcd import Found
    from kvstore.cluster.etcd_options import EtcdReach
    from kvstore.cluster.map import Map
    from kvstore.cluster.takeovers import Takeovers

__all__ = ["Primacy", "Record", "Term"]

_NEVER = -(1 << 62)


class Term(NamedTuple):
    """An epoch in which a node orders the sessions of a lot."""

    lot: int
    epoch: int


class Record(NamedTuple):
    """The record of a lot in etcd: of earlier versions, and without a standby so far, its first three fields."""

    node: str
    lease: int
    epoch: int
    standby: str = ""  # has all acknowledged steps; "": no other node has
    copies: int = 0  # the epoch of its sessions
    top: int = 0  # the highest epoch that was given to a home or to copies

    @property
    def is_untouched(self) -> bool:
        """Whether no step of this epoch was acknowledged: the standby is one that had the lot before."""
        return bool(self.standby) and self.copies < self.epoch

    @property
    def next_epoch(self) -> int:
        """One that no session of the lot has, on any node."""
        return max(self.epoch, self.top) + 1

    def encoded(self) -> bytes:
        """The value in etcd."""
        return json.dumps(self if self.top else self[:3], separators=(",", ":")).encode()


class _Etcd(Protocol):
    reach: EtcdReach

    async def latest(self, prefix: bytes, there: bytes) -> tuple[int, int] | None: ...
    async def value(self, key: bytes) -> Found: ...
    async def claim(
        self, key: bytes, value: bytes, was: int, *, within: bytes, top: int, there: Sequence[bytes]
    ) -> bool: ...


class Primacy:
    """The lots in which a node orders sessions. Used in its event loop only."""

    def __init__(self, etcd: _Etcd, clock: Clock, takeovers: Takeovers) -> None:
        self._etcd, self._clock, self._takeovers = etcd, clock, takeovers
        self._name, self._lease, self._own = "", 0, b""
        self._history, self._losses = b"", 0  # the key of etcd's history, and how many have ended
        self._history_ns = 0  # when it was first listed
        self._top = self._count = -1  # of the list: its latest change, and how many records it has
        self._known_ns = self._asked_ns = (
            _NEVER  # the list is known to be the latest until; and was asked for at
        )
        self._since_ns = _NEVER  # we are on the list under this lease, without a gap
        self._views: deque[tuple[int, Map]] = deque()  # since when, within the time that counts
        self._terms: dict[int, int] = {}  # epochs, by lot, as of this list
        self._taking: dict[int, asyncio.Task[int]] = {}  # by lot

    # --- changes of the members

    def listed(
        self,
        now: Map,
        *,
        top: int,
        count: int,
        has_gap: bool,
        own: tuple[str, int, bytes],
        history: bytes,
        losses: int,
    ) -> None:
        """Process a list: its latest change, its number of records, and whether an earlier one may have been missed."""
        at_ns = self._clock.monotonic_ns()
        if history != self._history:  # what was known of the list, and of the lots, is of another history
            self._history, self._losses, self._history_ns = history, losses, at_ns
            self._top = self._count = -1
            self._known_ns = self._since_ns = _NEVER
            has_gap = True
        is_new = (top, count) != (self._top, self._count)
        if (is_new and has_gap) or own != (self._name, self._lease, self._own):
            self._since_ns = at_ns
        self._name, self._lease, self._own = own
        if not is_new and self._views:
            return
        self._top, self._count = top, count
        self._terms.clear()
        self._views.append((at_ns, now))
        while len(self._views) > 1 and self._views[1][0] < at_ns - 2 * SESSIONS_TAKING_MS * 1_000_000:
            self._views.popleft()

    async def follow(self) -> None:
        """Keep asking etcd whether the list is the latest."""
        while True:
            asked_ns, pause_ms = self._clock.monotonic_ns(), CLUSTER_CONFIRM_MS
            try:
                history = self._history
                latest = await self._etcd.latest(self._etcd.reach.folder, history) if history else None
            except EtcdAway:
                latest = None
            if latest == (self._top, self._count) and history == self._history:
                if self._clock.monotonic_ns() > self._known_ns:
                    self._since_ns = self._clock.monotonic_ns()
                    self._terms.clear()
                self._asked_ns, self._known_ns = asked_ns, asked_ns + SESSIONS_KNOWN_MS * 1_000_000
            else:
                pause_ms = SESSIONS_RETRY_MS
            await asyncio.sleep(pause_ms / 1000)

    # --- the right to order

    async def enter(self, tenant: str, user: str) -> Term:
        """The term in which this node orders a user's sessions; WrongEpoch if it doesn't now."""
        self._check_home(tenant, user)
        lot = self._views[-1][1].lot_of(tenant.encode(), user.encode())
        if (epoch := self._terms.get(lot)) is None:
            if (task := self._taking.get(lot)) is None:
                # Of two attempts, one could note the takeover anew after the other has let users begin.
                task = self._taking[lot] = asyncio.create_task(self._take(lot, tenant, user))
                task.add_done_callback(lambda _: self._taking.pop(lot))
                task.add_done_callback(drop_failure)
            epoch = await asyncio.shield(task)
        return Term(lot, epoch)

    async def check(self, term: Term, tenant: str, user: str) -> None:
        """Check that a completed step was done in its term; DeadlineExceeded if that can no longer be known."""
        try:
            now = await self.enter(tenant, user)
        except WrongEpoch:
            now = None
        if now != term:
            raise DeadlineExceeded(
                "The step was done too late: another node may order the user's sessions by now."
                " The step may have taken effect or not."
            )

    # --- what was taken over

    def untaken(self, term: Term, tenant: str, user: str) -> Takeover | None:
        """What was taken over with the term, if a user's sessions may still be there."""
        return self._takeovers.untaken(*term, tenant, user)

    async def note_taken(self, term: Term, tenant: str, user: str) -> None:
        """Note that a user's sessions have been taken, or are lost; WrongEpoch if that can't be done."""
        await self._takeovers.note(*term, tenant, user)

    def taken_over(self, term: Term) -> tuple[Takeover, list[str]] | None:
        """What was taken over with a term, and the digests of the users whose sessions have been taken since."""
        return self._takeovers.of(*term)

    async def copy_takeover(self, term: Term, takeover: Takeover, users: Sequence[str]) -> None:
        """Note what a home took over, of whose sessions this node gets copies; WrongEpoch if that can't be done."""
        await self._takeovers.copy(*term, takeover, users)

    async def learn(self, lot: int, epoch: int, takeover: Takeover, users: Sequence[str]) -> None:
        """Note what a former home took over, by its epoch in the record: it may be lost before all users have come."""
        await self._takeovers.copy(~lot, self.own_epoch(epoch), takeover, users)

    def learnt(self, lot: int, epoch: int, tenant: str, user: str) -> Takeover | None:
        """What that home took over, if it had not taken a user's sessions."""
        return self._takeovers.untaken(~lot, self.own_epoch(epoch), tenant, user)

    def term_of(self, lot: int, epoch: int) -> Term:
        """A term of this node, in an epoch by etcd's record; it may be over."""
        return Term(lot, self.own_epoch(epoch))

    async def amend(
        self, term: Term, standby: str | None = None, copies: int = 0, *, new: bool = False
    ) -> Record:
        """Change who is the standby of a lot that this node orders, or with `new` reserve an epoch; returns the record.

        WrongEpoch if that was not done, or may not have been: then the record is as it was, or as it was to be.
        """
        list_now, key = (self._top, self._history), self._etcd.reach.lots + b"%04d" % term.lot
        try:
            found = await self._etcd.value(key)
            was = _record(found.value)
            if was is None or was[:2] != (self._name, self._lease) or self.own_epoch(was.epoch) != term.epoch:
                raise WrongEpoch("The node does not order this user's sessions.")
            now = was if standby is None else was._replace(standby=standby, copies=copies)
            now = now._replace(top=now.next_epoch) if new else now
            if now != was and not await self._etcd.claim(
                key,
                now.encoded(),
                found.revision,
                within=self._etcd.reach.folder,
                top=list_now[0],
                there=(self._own, self._history),
            ):
                raise WrongEpoch("The members of the cluster have changed.")
        except EtcdAway as error:
            raise WrongEpoch(
                f"The node can't change which node has copies of this user's sessions: {error}"
            ) from error
        if list_now != (self._top, self._history):
            raise WrongEpoch("The members of the cluster have changed.")
        return now

    async def record(self, lot: int) -> Record | None:
        """The record of a lot, now; WrongEpoch if etcd does not answer."""
        history = self._history
        try:
            found = await self._etcd.value(self._etcd.reach.lots + b"%04d" % lot)
        except EtcdAway as error:
            raise WrongEpoch(
                f"The node can't find out which node orders this user's sessions: {error}"
            ) from error
        if history != self._history:  # its epochs may be of an earlier one
            raise WrongEpoch(
                "etcd has lost its data since the node asked which one orders this user's sessions."
            )
        return _record(found.value)

    @property
    def history(self) -> str:
        """The id of the history of etcd's data that this node goes by; "" before the first list."""
        return self._history.rpartition(b"/")[2].decode()

    def check_history(self, history: str) -> None:
        """Raise WrongEpoch if epochs of another history are meant; "", of an earlier version, is not compared."""
        if self._history and history not in {"", self.history}:
            raise WrongEpoch("The node goes by another history of etcd's data.")

    @property
    def lease(self) -> int:
        """That of the node's record, as of the latest list."""
        return self._lease

    @property
    def view(self) -> Map | None:
        """The latest list of members, which the published map may not have yet."""
        return self._views[-1][1] if self._views else None

    def recorded_epoch(self, term: Term) -> int:
        """The epoch of a term by etcd's record; WrongEpoch if it was of an earlier history."""
        if (epoch := term.epoch - self._losses * SESSIONS_EPOCHS_MAX) < 0:
            raise WrongEpoch("etcd has lost its data since the node ordered this user's sessions.")
        return epoch

    def own_epoch(self, epoch: int) -> int:
        """The epoch in which this node's sessions are, for one of etcd's record; WrongEpoch before the first list."""
        if not self._history:
            raise WrongEpoch("The node has just started, and does not know its cluster yet.")
        return epoch + self._losses * SESSIONS_EPOCHS_MAX

    # --- checks

    def _check_home(self, tenant: str, user: str) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._known_ns or not self._views:
            raise WrongEpoch(
                "The node has had no recent answer from etcd, and orders no sessions until it has one."
            )
        home = self._views[-1][1].home(tenant, user)
        if not self._lease or home is None or home.name != self._name:
            there = "no node" if home is None else home.node
            raise WrongEpoch(f"The node is not the home of this user; {there} is.")

    def _is_settled(self, tenant: str, user: str) -> bool:
        """Whether it has been the user's home for long enough, as of the last request for the list."""
        from_ns = self._asked_ns - SESSIONS_TAKING_MS * 1_000_000
        if self._since_ns > from_ns:
            return False
        for at, (_, view) in enumerate(self._views):
            until_ns = self._views[at + 1][0] if at + 1 < len(self._views) else self._asked_ns
            home = view.home(tenant, user)
            if until_ns > from_ns and (home is None or home.name != self._name):
                return False
        return True

    def _is_history_known(self) -> bool:
        """Whether it has known this history of etcd's data for long enough: no process goes by an earlier one."""
        return self._clock.monotonic_ns() - self._history_ns >= SESSIONS_TAKING_MS * 1_000_000

    async def _take(self, lot: int, tenant: str, user: str) -> int:
        """Make sure that the lot's record names this node."""
        list_now, top, lease = (self._history, self._top, self._count), self._top, self._lease
        key = self._etcd.reach.lots + b"%04d" % lot
        try:
            found = await self._etcd.value(key)
            was = _record(found.value)
            if was is None or was[:2] != (self._name, lease):
                if not (self._is_settled(tenant, user) if was is not None else self._is_history_known()):
                    raise WrongEpoch("The node takes this user's sessions over in a moment.")
                if was is None:
                    new = Record(self._name, lease, 0)
                elif was.node == self._name:  # it continues, and so does its standby
                    new = was._replace(lease=lease)
                else:
                    new = self._taken_from(was)
                    taken = Takeover(was.node, was.epoch, was.standby, was.copies)
                    await self._takeovers.begin(lot, self.own_epoch(new.epoch), taken)
                epoch, record = new.epoch, new.encoded()
                within, there = self._etcd.reach.folder, (self._own, self._history)
                if not await self._etcd.claim(
                    key, record, found.revision, within=within, top=top, there=there
                ):
                    raise WrongEpoch("The members of the cluster have changed.")
            else:
                epoch = was.epoch
        except EtcdAway as error:
            raise WrongEpoch(
                f"The node can't find out which node orders this user's sessions: {error}"
            ) from error
        if list_now != (self._history, self._top, self._count) or lease != self._lease:
            raise WrongEpoch("The members of the cluster have changed.")
        self._check_home(tenant, user)
        self._terms[lot] = epoch = self.own_epoch(epoch)
        return epoch

    def _taken_from(self, was: Record) -> Record:
        """The record of a lot that this node takes: it names who has all until the first step."""
        view, epoch = self._views[-1][1], was.next_epoch
        new = Record(self._name, self._lease, epoch)
        if not view.knows_standbys:
            return new
        has_all, copies = (was.node, was.epoch) if was.node in view.names else (was.standby, was.copies)
        return new._replace(standby=has_all, copies=copies, top=epoch) if has_all else new


def _record(value: bytes) -> Record | None:
    """Parse a record; an unreadable one belongs to no node, in a new epoch."""
    if not value:
        return None
    try:
        node, lease, epoch, *more = json.loads(value)
        standby, copies, top = more or ("", 0, 0)
        return Record(str(node), int(lease), int(epoch), str(standby), int(copies), int(top))
    except (ValueError, TypeError) as error:
        raise WrongEpoch("The record of the node that orders this user's sessions can't be read.") from error
