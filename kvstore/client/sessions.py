"""Sessions, the client's side: appended turn by turn, resumed on any process, forked, truncated and removed.

What always holds: an append that is retried after its answer was lost is done once. A resume brings every block of the
session into the caller's memory, or gives a Miss with the length of the usable prefix, and never raises because a node
is away. Every call ends within its deadline. An append is done completely or not at all.
What it doesn't do: put blocks, which must be stored before they are appended; know the tokens, except their number.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast, overload

from kvstore.client.arguments import checks_arguments
from kvstore.client.block_calls import durability_message
from kvstore.client.blocks import Block, put_into
from kvstore.client.checks import check_list, check_name, check_number
from kvstore.client.request_ids import as_request
from kvstore.client.resuming import Manifest, Resuming
from kvstore.client.session_calls import asked
from kvstore.client.session_export import export_session
from kvstore.client.session_info import SessionInfo, TurnInfo
from kvstore.client.trace import Notes
from kvstore.client.transfer_watch import watched_by, within
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvError,
    NodeUnavailable,
    NoSession,
    Overloaded,
    SessionRefused,
    StorageError,
)
from kvstore.limits import (
    LEASE_TIMEOUT_MS,
    SESSION_BLOCKS_MAX,
)
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.names import domain_of
from kvstore.steps import Step
from kvstore.wire import sessions_pb2 as pb
from kvstore.wire import steps_pb2
from kvstore.wire.manifest import Turn
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.cluster_puts import ClusterPuts
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.reserved import Reservation
    from kvstore.client.resuming import Resumed
    from kvstore.client.session_calls import SessionCalls
    from kvstore.client.session_export import Progress
    from kvstore.client.spans import ResumeSpan
    from kvstore.client.trace import Follower, Trace
    from kvstore.layout import Layout
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

_LIVES = "A session's time to live in ms"
_SHARED = "The number of a session's blocks"

T = TypeVar("T")

__all__ = ["Session", "manifest_of", "resume_span_of"]


@made_by("`Client.session`")
@checks_arguments
class Session:
    """One session of one user: its blocks in order, turn by turn. `Client.session` makes it.

    `append` names blocks as a turn, `resume` brings all of them back into memory, `fork` begins another session with
    the same blocks. Appends of one such object are made one after the other.

    >>> chat = client.session("grace", "chat 9")
    >>> chat.append([key], tokens=16)  # blocks now
    1
    >>> chat.resume(lambda number, key: Block(key, kv, offset=0, length=4096)).is_whole
    True
    """

    def __init__(
        self, find: Callable[[], SessionCalls], user: str, name: str, follower: Follower | None = None
    ) -> None:
        """`find` returns the calls of the node to use, evaluated for each call."""
        check_name("A session's user", user)
        check_name("A session's name", name)
        self.user = user
        self.notes = Notes(user, name, SystemClock(), follower)
        self.name = name
        self._find = find
        self._blocks: int | None = None  # how many blocks it has, as far as we know
        self._undeleted: list[bytes] = []  # blocks removed with it that other nodes may still have
        self._removing: list[bytes] = []  # its blocks before a removal that was not answered, if it was done

    def __repr__(self) -> str:
        """Its user and name; no node is called."""
        return f"Session(user={self.user!r}, name={self.name!r})"

    @property
    def _name(self) -> pb.SessionName:
        revision = self._calls.home.revision()
        tenant = self._calls.client.tenant
        return pb.SessionName(tenant=tenant, user=self.user, session=self.name, map_revision=revision)

    @property
    def _calls(self) -> SessionCalls:
        return self._find()

    def _ask(self, doing: str, ask: Callable[[float], T]) -> T:
        return asked(self._find, doing, self.user, ask)

    def append(
        self,
        keys: Sequence[bytes],
        tokens: int,
        *,
        time_to_live_ms: int | None = None,
        durability: Durability = Durability.WRITTEN,
    ) -> int:
        """Append stored blocks as a turn of `tokens` tokens; returns how many blocks the session has now.

        With a time to live, the session expires that long from now, as with `limit`.

        SessionRefused, and no change, if the session was changed elsewhere since this object last saw it (`info`
        refreshes that), or if a block is not stored.

        >>> client.session("grace", "chat 10").append([key], tokens=16)
        1
        """
        if not keys:
            raise InvalidArgument("A turn has at least one block.")
        check_number("A turn's tokens", tokens)
        check_number(_LIVES, time_to_live_ms or 0, 64)
        if self._blocks is None:
            self._look()
        first = self._blocks or 0
        if first + len(keys) > SESSION_BLOCKS_MAX:
            raise SessionRefused(
                f"A session has at most {SESSION_BLOCKS_MAX} blocks; this one has {first}, and {len(keys)} were"
                f" to be appended. Nothing was appended."
            )
        request = pb.AppendSessionRequest(
            keys=keys,
            tokens=tokens,
            first_block=first,
            time_to_live_ms=time_to_live_ms,
            durability=durability_message(durability),
        )

        def ask(timeout_s: float) -> None:
            request.name.CopyFrom(self._name)
            self._calls.stub.AppendSession(request, timeout=timeout_s, metadata=self.notes.metadata())

        self._ask("Appending to a session", ask)
        self._blocks = first + len(keys)
        return self._blocks

    def _look(self) -> None:
        try:
            self.info()
        except NoSession:
            self._blocks = 0

    def info(self) -> SessionInfo:
        """Its blocks, tokens and turns; NoSession if it does not exist.

        >>> chat.info().tokens
        16
        """
        answer = self._get(0)
        turns = _turns(answer)
        rows, token = [], 0
        ends = [*(turn.first_block for turn in turns), answer.blocks][1:]
        for turn, end in zip(turns, ends, strict=True):
            rows.append(TurnInfo(range(turn.first_block, end), range(token, token + turn.tokens), turn.at_ms))
            token += turn.tokens
        return SessionInfo(answer.blocks, token, tuple(rows), answer.expires_unix_ms)

    def keys(self) -> list[bytes]:
        """The keys of its blocks, in order.

        >>> chat.keys() == [key]
        True
        """
        return list(self._get(SESSION_BLOCKS_MAX).keys)

    def _get(
        self, blocks: int, timeout_s: float | None = None, *, waits: bool = True
    ) -> pb.GetSessionResponse:
        call_s = self._calls.timeout_s
        if timeout_s is not None:
            call_s = min(timeout_s, call_s)
        with self._calls.core.lookups.looking(Kind.SESSION, 0) as metadata:

            def ask(left_s: float) -> pb.GetSessionResponse:
                answer: pb.GetSessionResponse = self._calls.stub.GetSession(
                    pb.GetSessionRequest(name=self._name, blocks=blocks),
                    timeout=left_s,
                    metadata=(*metadata, *self.notes.metadata()),
                )
                return answer

            answer = asked(self._find, "Reading a session", self.user, ask, call_s, waits=waits)
        self._blocks = answer.blocks
        return answer

    def fork(
        self,
        name: str,
        *,
        user: str | None = None,
        blocks: int | None = None,
        durability: Durability = Durability.WRITTEN,
    ) -> Session:
        """Create a session that shares this one's first blocks, or all. The two change independently.

        >>> fork = chat.fork("another answer")
        >>> fork.keys() == [key]
        True
        """
        check_number(_SHARED, blocks or 0)
        fork = Session(self._find, self.user if user is None else user, name)
        if not self._calls.home.is_here(fork.user):
            raise SessionRefused(
                "The other user's sessions are on another node, and a fork stays on its own."
            )
        request = pb.ForkSessionRequest(blocks=blocks, durability=durability_message(durability))

        def ask(timeout_s: float) -> int:
            request.source.CopyFrom(self._name)
            request.name.CopyFrom(fork._name)
            return int(self._calls.stub.ForkSession(request, timeout=timeout_s).blocks)

        fork._blocks = self._ask("Forking a session", ask)
        return fork

    def truncate(self, blocks: int, *, durability: Durability = Durability.WRITTEN) -> None:
        """Keep only its first blocks. The others stay stored.

        >>> fork = chat.fork("from the start")
        >>> fork.truncate(0)
        >>> fork.keys()
        []
        """
        check_number(_SHARED, blocks)
        kept = durability_message(durability)
        self._blocks = self._ask(
            "Truncating a session",
            lambda timeout_s: (
                self._calls.stub.TruncateSession(
                    pb.TruncateSessionRequest(name=self._name, blocks=blocks, durability=kept),
                    timeout=timeout_s,
                ).blocks
            ),
        )

    def remove(self, *, delete_blocks: bool = False, durability: Durability = Durability.WRITTEN) -> int:
        """Remove the session and, on request, the blocks in no other session; returns how many blocks were deleted.

        In a cluster blocks are deleted as by `Nodes.delete`. NodeUnavailable, before anything is done, if a node is
        absent. If a later error leaves blocks, a repeated call of this object deletes them.

        >>> fork = chat.fork("not needed")
        >>> fork.remove()
        0
        """
        request = pb.RemoveSessionRequest(
            delete_blocks=delete_blocks, durability=durability_message(durability)
        )

        def ask(timeout_s: float) -> pb.RemoveSessionResponse:
            request.name.CopyFrom(self._name)
            answer: pb.RemoveSessionResponse = self._calls.stub.RemoveSession(request, timeout=timeout_s)
            return answer

        nodes = self._calls.home.nodes if delete_blocks else None
        if nodes is not None and nodes.map.absent:
            raise NodeUnavailable(
                f"{nodes.map.absent[0].node} is absent from the cluster, and the session's blocks that it has would"
                " come back with it, so nothing was removed. Remove the session without its blocks, or when that node"
                " is back or forgotten."
            )
        if nodes is not None:
            self._note_removal()
        answer = self._ask("Removing a session", ask)
        self._blocks, self._removing = 0, []
        if delete_blocks and self.notes.follower is not None:
            self.notes.follower.forgotten(self.user)
        if nodes is None or not nodes.map.revision:
            return int(answer.unreferenced)
        self._undeleted += answer.deleted
        if deleted := list(dict.fromkeys(self._undeleted)):
            nodes._puts().delete(deleted, durability, (self.user, self.name))  # noqa: SLF001 - of this package
            self._undeleted = []
        return max(len(deleted), answer.unreferenced)

    def _note_removal(self) -> None:
        """Note the session's blocks, and those that it has no more because it was removed without an answer."""
        try:
            keys = self.keys()
        except NoSession:
            keys = []
        except StorageError:
            return  # a damaged session can be removed too
        there = frozenset(keys)
        self._undeleted += [key for key in self._removing if key not in there]
        self._removing = keys

    def limit(self, time_to_live_ms: int, *, durability: Durability = Durability.WRITTEN) -> int:
        """Set its time to live, 0 for none; returns when it expires, in milliseconds since 1970.

        It is then removed, with its protection. Its blocks stay, subject to eviction.

        >>> fork = chat.fork("for a minute")
        >>> fork.limit(time_to_live_ms=60_000) > 0
        True
        """
        check_number(_LIVES, time_to_live_ms, 64)
        request = pb.LimitSessionRequest(
            time_to_live_ms=time_to_live_ms, durability=durability_message(durability)
        )

        def ask(timeout_s: float) -> int:
            request.name.CopyFrom(self._name)
            return int(self._calls.stub.LimitSession(request, timeout=timeout_s).expires_unix_ms)

        return self._ask("Limiting a session", ask)

    def export(self, file: BinaryIO, *, progress: Progress | None = None) -> int:
        """Write it, with its blocks, into a file that any tenant's client can import; returns how many blocks.

        `progress` is called after each block with how many are written, and of how many.
        Raises SessionFileError if a block can't be read; an import then refuses the file.

        >>> from io import BytesIO
        >>> chat.export(BytesIO())
        1
        """
        return export_session(self._calls.client, self, file, progress)

    def protect(self, blocks: int = 0) -> None:
        """Protect its first blocks from eviction, or all, including later ones, until `unprotect`.

        The session's manifest records it, synced: it survives a restart of the node, a lost index and power loss.

        >>> chat.protect()
        """
        check_number(_SHARED, blocks)
        self._ask(
            "Protecting a session",
            lambda timeout_s: self._calls.stub.ProtectSession(
                pb.ProtectSessionRequest(name=self._name, blocks=blocks), timeout=timeout_s
            ),
        )

    def unprotect(self) -> bool:
        """End the protection; returns whether there was one.

        >>> chat.protect()
        >>> chat.unprotect()
        True
        """
        return self._ask(
            "Ending a session's protection",
            lambda timeout_s: bool(
                self._calls.stub.UnprotectSession(
                    pb.UnprotectSessionRequest(name=self._name), timeout=timeout_s
                ).was_protected
            ),
        )

    def prefetch(self) -> int:
        """Have the node read its first blocks into its memory, without waiting; returns how many it will read.

        >>> chat.prefetch() <= 1
        True
        """
        return self._ask(
            "Prefetching a session",
            lambda timeout_s: int(
                self._calls.stub.PrefetchSession(
                    pb.PrefetchSessionRequest(name=self._name),
                    timeout=timeout_s,
                    metadata=self.notes.metadata(),
                ).blocks
            ),
        )

    def resume(
        self,
        place: Callable[[int, bytes], Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
    ) -> Resumed:
        """Get its blocks, in order, each into what `place(number, key)` returns. The result is all of them, or a MISS.

        They are pinned meanwhile, so that none is evicted, unless there are more than a tenant may pin.

        >>> chat.resume(lambda number, key: Block(key, kv, offset=0, length=4096)).usable_tokens
        16
        """
        with self.resuming(place, layout=layout, timeout_s=timeout_s) as resuming:
            return resuming.whole()

    def resuming(
        self,
        place: Callable[[int, bytes], Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
        layer_of: Callable[[int], int] | None = None,
    ) -> Resuming:
        """Start a resume without waiting for it. The first blocks can be used before the last arrive.

        `layer_of(number)` gives the layer of a block, if it has one; the lowest layers are fetched first.

        >>> with chat.resuming(lambda number, key: Block(key, kv, offset=0, length=4096)) as resuming:
        ...     resuming.wait_blocks(1)
        True
        """
        clock = SystemClock()
        if timeout_s is None:
            timeout_s = self._calls.core.reach.get_timeout_s
        until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
        self.notes.note(Step.RESUMING)
        client, span = self._calls.client, self._resume_span()
        with as_request(), within(span):  # all of it belongs to one request
            manifest = self._manifest(timeout_s)
            return Resuming(client, manifest, place, self.notes, clock, until_ns, layout, layer_of, span)

    def _resume_span(self) -> ResumeSpan | None:
        """A span for a resume; None if the client has no tracer."""
        return None if self._calls.core.spans is None else self._calls.core.spans.resume()

    def _manifest(self, timeout_s: float | None = None) -> Manifest:
        """Its list of blocks, or a Miss with the reason why it is unknown."""
        try:
            session = self._get(SESSION_BLOCKS_MAX, timeout_s, waits=False)
        except NoSession as error:
            return Manifest((), (), Miss(MissReason.UNKNOWN, str(error)))
        except Overloaded as error:
            return Manifest((), (), Miss(MissReason.BUSY, str(error)))
        except (NodeUnavailable, DeadlineExceeded) as error:
            return Manifest((), (), Miss(MissReason.NODE_AWAY, str(error)))
        return Manifest(session.keys, _turns(session))

    # --- puts of its blocks, and its recorded events

    def reserve(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> Reservation:
        """As `Client.reserve`, for blocks of this session; the node traces them as such.

        Those without a domain whose keys are made for one belong to the session's user. With two replicas a cluster
        refuses it: the slots are one node's.

        >>> chat.reserve([block]).give_back()
        """
        self._refuse_one_copy("`Session.reserve`")
        self._registered(blocks)
        with watched_by(self.notes):
            return self._calls.client.reserve(
                put_into(blocks, domain_of(self.user), of_domains=True),
                durability=durability,
                lease_ms=lease_ms,
                expires_unix_ms=expires_unix_ms,
            )

    @overload
    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> ArmedPuts: ...

    @overload
    def arm(
        self,
        blocks: Sequence[ClusterBlock],
        flag: FlagWord | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> ClusterPuts: ...

    def arm(
        self,
        blocks: Sequence[Block | ClusterBlock],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> ArmedPuts | ClusterPuts:
        """As `Client.arm`, for blocks of this session; the node traces them as such.

        Those without a domain whose keys are made for one belong to the session's user. A session found by `Nodes`
        takes `ClusterBlock`s too, and puts them as `Nodes.arm` does. With two replicas it takes no others: the memory
        of a `Block` is registered with one node's client.

        >>> puts = chat.arm([block])
        >>> [result.durability.name for result in puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        self._registered(blocks)
        nodes = self._calls.home.nodes
        with watched_by(self.notes):
            if nodes is not None and blocks and not isinstance(blocks[0], Block):
                return nodes.arm(
                    self.user,
                    cast("Sequence[ClusterBlock]", blocks),
                    cast("FlagWord | None", flag),  # it refuses a Counter
                    durability=durability,
                    lease_ms=lease_ms,
                    expires_unix_ms=expires_unix_ms,
                )
            self._refuse_one_copy("a put of a `Block`")
            return self._calls.client.arm(
                put_into(cast("Sequence[Block]", blocks), domain_of(self.user), of_domains=True),
                flag,
                durability=durability,
                lease_ms=lease_ms,
                expires_unix_ms=expires_unix_ms,
            )

    def _refuse_one_copy(self, doing: str) -> None:
        if self._calls.home.has_standby:
            raise InvalidArgument(
                f"The cluster keeps two copies of each block, and {doing} makes one: use `Session.arm` with"
                f" `ClusterBlock`s in memory of `Nodes.register`."
            )

    def _registered(self, blocks: Sequence[Block | ClusterBlock]) -> None:
        check_list(blocks, "blocks")
        if blocks and isinstance(blocks[0], Block):  # the call itself refuses anything else
            self.notes.registered(blocks[0].region)

    def mark(self, step: Step, *, tokens: int = 0, detail: str = "") -> None:
        """Record a step that only the application knows, such as Step.ANSWERED; the next call or `report` sends it.

        >>> from kvstore.steps import Step
        >>> chat.mark(Step.ANSWERED, tokens=16)
        """
        self.notes.note(step, tokens=tokens, detail=detail)

    def report(self) -> None:
        """Send recorded steps to the node now, not with the next call. Failures are ignored.

        >>> chat.report()
        """
        with suppress(KvError):
            self._calls.steps.report(self.notes)

    def trace(self) -> Trace:
        """What the node and its clients recorded of the session's last turns.

        >>> chat.report()
        >>> len(chat.trace().seen) > 0
        True
        """
        return self._calls.steps.trace(steps_pb2.GetTraceRequest(name=self._name))


manifest_of = Session._manifest  # noqa: SLF001 - this and the next for `Arrivals`
resume_span_of = Session._resume_span  # noqa: SLF001


def _turns(session: pb.GetSessionResponse) -> tuple[Turn, ...]:
    return tuple(Turn(one.first_block, one.tokens, one.began_unix_ms) for one in session.turns)
