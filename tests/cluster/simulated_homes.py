"""Nodes that order sessions, in simulated time: the real code, over drives and connections that are simulated.

Each node keeps sessions on a drive of its own, for all its lives. A client asks any node, whatever the map says, and
each step takes its time: the node may be stopped in the middle of it.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc

from kvstore.cluster.etcd import EtcdAway
from kvstore.cluster.etcd_history import EtcdMemory, History
from kvstore.cluster.map import DRAINING, Member
from kvstore.cluster.membership import Membership
from kvstore.cluster.takeovers import Takeovers
from kvstore.errors import DeadlineExceeded, KvError, WrongEpoch
from kvstore.limits import SESSIONS_MOVE_MS, SESSIONS_TAKING_MS
from kvstore.node.session_copies import SessionCopies
from kvstore.node.session_leftovers import Leftovers
from kvstore.node.session_moves import SessionMoves
from kvstore.node.session_standbys import Standbys, _common
from kvstore.wire import upkeep_pb2 as pb
from tests.cluster.history import Call, End, Kind
from tests.cluster.simulated import HISTORY, FakeClient, FakeEtcd, LoopClock
from tests.cluster.simulated_nodes import rpc_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.cluster.primacy import Primacy

TENANT: Any = SimpleNamespace(name="", id=b"")
SEEDS = int(os.environ.get("TRIGGERKV_CLUSTER_SEEDS", "40"))
STEPS, USERS, CLIENTS = 20, 3, 3
FAILOVER_S = 5 + 15 + SESSIONS_TAKING_MS / 1000 + 10  # a lease, a map that is held back, a take-over, answers


class SimulatedLeftovers(Leftovers):
    """The real code, which removes what is over at once."""

    _node: Any

    def note(self, tenant: str, user: str, epoch: int) -> None:
        del tenant
        own = self._node.own
        if not own.is_dead and own.drive.get(user, (epoch, []))[0] < epoch:
            del own.drive[user]
            self._node.world.removed += 1


class SimulatedMoves(SessionMoves):
    """How a node takes and sends sessions: the real code, over a drive and connections that are simulated."""

    def __init__(self, node: Node, world: SimulatedHomes) -> None:
        self.own, self.world = node, world
        waited = SimpleNamespace(may_lack_more=True)
        real: Any = SimpleNamespace(replicas=world.replicas, clock=LoopClock(), waited=waited)
        tenants: Any = SimpleNamespace(
            placed_as=lambda name: name, replicas=lambda _: 0, copied=lambda _: TENANT
        )
        peers: Any = SimpleNamespace(stub=self._stub, metadata=())
        super().__init__(real, tenants, node.membership, peers, real)
        self.hand_overs: Any = SimpleNamespace(
            note=self._note, note_copy=self._note_copy, queue=nothing, close=self._nothing
        )
        self.copied: dict[
            str, tuple[str, int, int]
        ] = {}  # users with copies here: their homes, as those know it
        self.standbys = SimulatedStandbys(real, tenants, node.membership, peers, self)
        self.copies = SimulatedCopies(real, tenants, node.membership, self)
        self.leftovers = SimulatedLeftovers(cast("Any", self), tenants, node.membership)
        self.standbys.start()
        self.pending: set[asyncio.Task[Any]] = set()

    def _note(self, tenant: str, user: str) -> None:
        """Offer a user to their home in a while, if that is another node then."""
        del tenant
        task = asyncio.create_task(self._offer(user))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    def _as_home(self, name: str) -> tuple[str, int, int]:
        return name, self.own.membership.lease_of.get(name, 0), self.own.membership.lease

    def _note_copy(self, tenant: str, user: str, home: str) -> None:
        del tenant
        if not self.world.offers_copies:
            return
        if not self.copied:
            self.pending.add(asyncio.create_task(self._offer_copies()))
        self.copied[user] = self._as_home(home)

    @property
    def unknowing_homes(self) -> dict[str, Member]:
        """Homes of users with copies here that may not know of these, as `HandOvers` finds them, by user."""
        homes = {user: self.own.membership.map.home("", user) for user in self.copied}
        return {
            user: home
            for user, home in homes.items()
            if home is not None and self.copied[user] != self._as_home(home.name)
        }

    async def _offer_copies(self) -> None:
        while True:
            await asyncio.sleep(self.world.rng.random() * 10)
            for user, home in self.unknowing_homes.items():
                now = self._as_home(home.name)
                if home.name == self.own.name:
                    is_taken = not await self._take_named("", user)
                else:
                    is_taken = await self._offer_to(home.node, user) is not None
                if is_taken:
                    self.copied[user] = now

    async def _offer_to(self, target: str, user: str) -> pb.TakeSessionsResponse | None:
        request = pb.TakeSessionsRequest(user=user)
        with suppress(grpc.aio.AioRpcError):
            stub = self._stub(target)
            answer = await stub.TakeSessions(request, timeout=SESSIONS_MOVE_MS / 1000, metadata=())
            return None if answer.refused else cast("pb.TakeSessionsResponse", answer)
        return None

    async def _offer(self, user: str) -> None:
        await asyncio.sleep(self.world.rng.random() * 60)
        home = self.own.membership.map.home("", user)
        if home is not None and home.name != self.own.name and not self.own.is_dead:
            answer = await self._offer_to(home.node, user)
            if answer is not None:
                await self.leftovers.note_taken("", user, home.name, answer.epoch)

    def _stub(self, target: str) -> Any:
        return SimpleNamespace(
            SendSessions=partial(
                self._call, target, lambda other, request: other.moves.send(TENANT, request)
            ),
            TakeSessions=partial(
                self._call, target, lambda other, request: other.moves.take(TENANT, request.user)
            ),
            TakeSession=partial(self._call, target, self._take),
            FollowSessions=partial(
                self._call, target, lambda other, request: other.moves.copies.follow(request)
            ),
            CopySessions=partial(self._call, target, lambda other, request: other.moves.copies.keep(request)),
        )

    async def _nothing(self) -> None:
        """Close nothing."""

    @staticmethod
    async def _take(other: Node, request: pb.TakeSessionRequest) -> pb.TakeSessionResponse:
        return pb.TakeSessionResponse(taken=await other.moves.take_one(request))

    async def _call(
        self,
        target: str,
        does: Any,
        request: Any,
        *,
        timeout: float,  # noqa: ASYNC109 - as gRPC names it
        metadata: object,
    ) -> Any:
        del metadata
        rng, delays_s = self.world.rng, self.world.delays_s
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(rng.random() * rng.choice(delays_s))
                other = next((one for one in self.world.nodes.values() if one.target == target), None)
                if other is None or self.own.is_dead or {self.own.name, other.name} & self.world.cut_off:
                    await asyncio.Future()
                assert other is not None
                task = asyncio.create_task(does(other, request))
                other.moves.pending.add(task)
                task.add_done_callback(other.moves.pending.discard)
                await asyncio.wait([task])  # it goes on without its caller
                if task.cancelled():
                    raise rpc_error(grpc.StatusCode.UNAVAILABLE, "it has died")
                answer = task.result()
                await asyncio.sleep(rng.random() * rng.choice(delays_s))
                return answer
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        except KvError as error:
            raise rpc_error(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    async def sessions_of(self, tenant: Any, request: Any) -> AsyncIterator[pb.TakeSessionRequest]:
        del tenant
        epoch, values = self.own.drive.get(request.user, (-1, []))
        if epoch == self.own.primacy.own_epoch(request.epoch):
            yield pb.TakeSessionRequest(ticket=request.ticket, session="chat", keys=map(str.encode, values))

    async def _store(self, expected: Any, request: pb.TakeSessionRequest) -> bool:
        rng, (_, user, term, *_) = self.world.rng, expected
        await asyncio.sleep(rng.random() * rng.choice((0.01, 0.1, 3)))
        if self.own.is_dead or self.own.drive.get(user, (-1, []))[0] >= term.epoch:
            return False
        self.own.drive[user] = (term.epoch, [key.decode() for key in request.keys])
        self.world.moved += 1
        return True


class SimulatedStandbys(Standbys):
    """The real code, over a drive that is simulated."""

    _moves: SimulatedMoves

    def _stored(self, one: Any, session: str) -> Any:
        del session
        epoch, values = self._moves.own.drive.get(one.user, (-1, []))
        return epoch, tuple(values)

    async def _difference(self, one: Any, session: str, before: Any) -> pb.SessionCopy:
        epoch, values = self._stored(one, session)
        first = _common(before[1], values) if epoch == before[0] else 0
        keys = map(str.encode, values[first:])
        return pb.SessionCopy(user=one.user, session=session, first_block=first, keys=keys)


class SimulatedCopies(SessionCopies):
    """The same on the standby."""

    _moves: SimulatedMoves

    async def _store(self, followed: Any, copy: pb.SessionCopy) -> bool:
        own, rng = self._moves.own, self._moves.world.rng
        self._moves.hand_overs.note_copy("", copy.user, followed.node)
        await asyncio.sleep(rng.random() * rng.choice(self._moves.world.delays_s))
        epoch, values = own.drive.get(copy.user, (-1, []))
        if own.is_dead or epoch > followed.copies:
            return False
        if copy.is_list:
            if not copy.listed and epoch == followed.copies:
                del own.drive[copy.user]
            if copy.is_complete:
                await self._note_complete("", copy.user, followed)
            return True
        if copy.first_block and (epoch < followed.copies or len(values) < copy.first_block):
            return False
        values = [*values[: copy.first_block], *(key.decode() for key in copy.keys)]
        own.drive[copy.user] = followed.copies, values
        self._moves.world.copied += 1
        return True


class SimulatedTakeovers(Takeovers):
    """The real code, over a simulated file: of what a process was writing when it died all is there, or nothing."""

    def __init__(self, node: Node, world: SimulatedHomes, data: list[bytes]) -> None:
        self._node, self._world, self._data = node, world, data
        super().__init__("test")

    def _read(self) -> bytes:
        return b"".join(self._data)

    async def _save(self, data: bytes, *, is_new: bool) -> None:
        rng, delays_s = self._world.rng, self._world.drive_delays_s
        await asyncio.sleep(rng.random() * rng.choice(delays_s))
        if self._node.is_dead:
            raise asyncio.CancelledError
        self._data[:] = [data] if is_new else [*self._data, data]
        await asyncio.sleep(rng.random() * rng.choice(delays_s))


class Node:
    """One node's process; its drive outlives it."""

    def __init__(
        self,
        etcd: FakeEtcd,
        rng: random.Random,
        name: str,
        drive: dict[str, tuple[int, list[str]]],
        memory: EtcdMemory | None = None,
        world: SimulatedHomes | None = None,
        file: list[bytes] | None = None,
    ) -> None:
        self.way, self.drive, self.name, self.is_dead = FakeClient(etcd, rng), drive, name, False
        self.target = f"10.0.0.1:{1000 + int(name[-1])}"
        world = world or SimulatedHomes(0)
        self.takeovers = SimulatedTakeovers(self, world, [] if file is None else file)
        self.membership = Membership(self.way, LoopClock(), memory or EtcdMemory("test"), self.takeovers)
        self.membership.start()
        self.membership.join(Member(name, self.target, replicas=world.replicas, standbys=1))
        self.moves = SimulatedMoves(self, world)

    @property
    def primacy(self) -> Primacy:
        return self.membership.primacy

    async def end(self, *, kindly: bool) -> None:
        self.is_dead = True
        for task in self.moves.pending:
            task.cancel()
        await self.moves.close()
        for task in () if kindly else self.membership._tasks:
            task.cancel()
        if kindly:
            await self.membership.close()
        self.way.is_away = True  # for what of it goes on


@dataclass
class _Step:
    kind: Kind
    value: str | None = None
    first: int | None = None
    has_changed: bool = False


class SimulatedHomes:
    replicas = 1  # on how many nodes sessions are
    delays_s: tuple[float, ...] = (0.01, 0.01, 0.3, 2.0)  # of a message between nodes, up to one of these
    offers_copies = False  # standbys offer what they have to homes that may not know of it
    pause_s = 1.5  # of a client between two calls, at most
    drive_delays_s: tuple[float, ...] = (0.01, 0.01, 0.5)  # of a write to a node's folder

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.etcd = FakeEtcd()
        self.drives: dict[str, dict[str, tuple[int, list[str]]]] = {
            f"node{number}": {} for number in range(4)
        }
        chance = random.Random(seed)
        self.memories = {name: EtcdMemory("test", chance=chance) for name in self.drives}
        self.files: dict[str, list[bytes]] = {name: [] for name in self.drives}
        self.backup: tuple[Any, ...] | None = None
        self.nodes: dict[str, Node] = {}
        self.history: list[Call] = []
        self.values = self.moved = self.copied = self.removed = 0
        self.cut_off: set[str] = set()  # nodes that no other node reaches
        self.is_over = False

    def begin(self, name: str) -> None:
        self.nodes[name] = Node(
            self.etcd, self.rng, name, self.drives[name], self.memories[name], self, self.files[name]
        )

    async def harm(self) -> None:
        rng = self.rng
        name = rng.choice(sorted(self.drives))
        node = self.nodes.get(name)
        if rng.random() < 0.1:
            self.backup = self.etcd.state()
        if rng.random() < 0.1:
            await self.lose(self.backup if self.backup and rng.random() < 0.5 else None)
        if node is None:
            self.begin(name)
        elif rng.random() < 0.3:
            del self.nodes[name]
            await node.end(kindly=rng.random() < 0.5)
        elif rng.random() < 0.3:
            with suppress(EtcdAway):
                await node.membership.announce("" if node.membership.state else DRAINING)
        else:
            node.way.is_away = not node.way.is_away
        await asyncio.sleep(rng.random() * rng.choice((0.1, 3, 12)))

    async def lose(self, backup: tuple[Any, ...] | None) -> None:
        """Take all data from etcd, or all since a backup, if a node that reaches it knows more, and says so.

        Otherwise nobody can tell that a backup is old: a node that was down since then takes it for the latest.
        """
        if backup is None or not self.is_known_to_be_old(backup):
            await self.etcd.restore()
            return
        was = History.of(backup[1], HISTORY)
        await self.etcd.restore(backup)
        for _ in range(200):
            if History.of(self.etcd.values, HISTORY) != was:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("no node has said that the backup is old")

    def is_known_to_be_old(self, backup: tuple[Any, ...]) -> bool:
        """Whether a node that reaches etcd knows of more changes than are made before it looks again."""
        revision, values, *_ = backup
        number = History.of(values, HISTORY).offset + revision
        return any(
            self.memories[name].revision > number + 2 * len(self.drives)
            for name, node in self.nodes.items()
            if not node.way.is_away
        )

    # --- clients

    async def client(self, number: int) -> None:
        rng = random.Random(f"{number} {self.rng.random()}")
        while not self.is_over:
            await asyncio.sleep(rng.random() * self.pause_s)
            if self.nodes:
                await self.call(
                    rng, number, self.nodes[rng.choice(sorted(self.nodes))], f"user{rng.randrange(USERS)}"
                )

    async def call(self, rng: random.Random, number: int, node: Node, user: str) -> None:
        loop = asyncio.get_running_loop()
        began_s, kind = loop.time(), rng.choice((Kind.APPEND, Kind.RESUME, Kind.RESUME, Kind.DELETE))
        one, end = _Step(kind), End.UNKNOWN
        try:
            await self.step(rng, node, user, one)
            if not node.is_dead:
                end = End.DONE
        except WrongEpoch:
            assert not one.has_changed, "what was done is not said to have not been done"
            return
        except asyncio.CancelledError:
            if not node.is_dead:
                raise
            if not one.has_changed:
                return
        except DeadlineExceeded:
            pass
        if kind is not Kind.RESUME or end is End.DONE:
            call = Call(number, kind, user, one.value, began_s, loop.time(), end, one.first)
            self.history.append(call)

    async def step(self, rng: random.Random, node: Node, user: str, one: _Step) -> None:
        """A step, as a node makes it: WrongEpoch if it does not."""
        term = await node.primacy.enter("", user)
        await node.moves.arrive(term, TENANT, user)
        standbys = node.moves.standbys
        async with (
            standbys.reading(term, TENANT, user)
            if one.kind is Kind.RESUME
            else standbys.changing(term, TENANT, user, "chat")
        ):
            await asyncio.sleep(rng.random() * rng.choice((0.01, 0.1, 8)))
            epoch, values = node.drive.get(user, (0, []))
            if node.is_dead or epoch > term.epoch:
                raise WrongEpoch("It has ended before it did anything, or was refused by the store.")
            values = values if epoch == term.epoch else []
            if one.kind is Kind.RESUME:
                one.value = "/".join(values)
            else:
                self.values += 1
                if one.kind is Kind.APPEND:
                    one.value, one.first = f"v{self.values}", len(values)
                node.drive[user] = (term.epoch, [*values, one.value] if one.value else [])
                one.has_changed = True
            await asyncio.sleep(rng.random() * rng.choice((0.01, 0.1, 8)))
        await node.primacy.check(term, "", user)

    async def settle(self) -> None:
        for node in self.nodes.values():
            node.way.is_away = False
        for name in sorted(self.drives.keys() - self.nodes.keys()):
            self.begin(name)
        await asyncio.sleep(FAILOVER_S)

    async def check(self) -> None:
        """Each user has one node that orders its sessions."""
        for user in (f"user{number}" for number in range(USERS)):
            orders = 0
            for node in self.nodes.values():
                try:
                    await node.primacy.enter("", user)
                except WrongEpoch:
                    continue
                orders += 1
            assert orders == 1, user


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


async def orders(node: Node, user: str) -> bool:
    try:
        await node.primacy.enter("", user)
    except WrongEpoch:
        return False
    return True
