"""Puts that are armed ahead in a cluster: while they wait for their flag, they follow the map.

`PutPlaces` knows the puts of one `ClusterClient.arm`, each at one owner of its block. When the map changes, puts at
nodes that no longer own their blocks are withdrawn, and armed at the new owners behind the same flag. A put whose node
went away is armed again as soon as an owner can be reached: behind the flag if it had not fired, else at once.
`ArmedAhead` is the thread that does this for all of a client's puts.

What always holds:
- A put is armed at a new owner only when it will certainly never be sent to the old one: it was withdrawn, or the
  connection that it was armed on is closed. So of each copy of a block at most one put reads the source at a time.
- Withdrawing is exact. A put that fired first stays where it is, and its node's acknowledgement counts.
- Each copy has one result: that of its last put. A put that waits for an owner is under way, until its deadline.
- Nothing is put again once the caller may have reused the source: after a result that says that the block has landed
  or failed, after `wait_landed` returned True, and after `cancel` or `abandon`.
- An attempt to arm waits for its node as long as `ClusterClient.arm` does. No put is armed after its deadline.
- Of puts whose owners have roles (`user_owners`), only those count that present owners have: if one was replaced, even
  a put that it has acknowledged is armed again at its successor.
What it doesn't do: follow a map that nodes without a cluster don't have, or puts without a flag, which have fired; move
puts behind a `Counter`, which belongs to one client; or take back what a node has already acknowledged.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.client.blocks import PutResult
from kvstore.client.put_results import is_late, may_read, reusable
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, FabricError, KvError, NodeUnavailable, Overloaded, UsageError
from kvstore.limits import CLUSTER_AHEAD_AGAIN_MS, CLUSTER_AHEAD_LOOK_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from kvstore.client.puts import FailedPut
    from kvstore.cluster.map import Map
    from nic_offload.flags import FlagWord

__all__ = ["Ahead", "ArmedAhead", "PutPlaces", "Roles"]

log = logging.getLogger(__name__)

_CLOCK = SystemClock()
_AWAY = (NodeUnavailable, FabricError)  # errors of puts whose node went away
_NOT_ARMED = (*_AWAY, DeadlineExceeded, Overloaded)  # before arming is tried again
_AGAIN_NS = CLUSTER_AHEAD_AGAIN_MS * 1_000_000


class _Armed(Protocol):
    """The part of `ArmedPuts` that is used here."""

    @property
    def has_ended(self) -> bool: ...

    def wait(self, timeout_s: float) -> list[PutResult]: ...

    def wait_landed(self, timeout_s: float) -> bool: ...

    def cancel(self) -> int: ...

    def abandon(self) -> None: ...

    def _abandon(self, numbers: Collection[int]) -> None: ...

    def _withdraw(self, numbers: Iterable[int]) -> None: ...

    def _failed_puts(self, known: Collection[int]) -> dict[int, FailedPut]: ...


class Roles(Protocol):
    """The nodes that must have a user's blocks, as their home names them."""

    @property
    def names(self) -> dict[str, str]:
        """Their names, by address, as of the last answer."""
        ...

    def ask(self, timeout_s: float) -> dict[str, str] | None:
        """Ask the home which they are now; None if it has not answered."""
        ...

    def look(self, away: Collection[str]) -> None:
        """Ask again if they may have changed: the map has, or these nodes don't take puts."""
        ...


class Ahead(NamedTuple):
    """How puts that wait for their flag are armed again."""

    flag: FlagWord | None  # None: they fire when they are armed
    deadline_ns: int
    threshold: Callable[[int], int]  # of a block
    owners: Callable[[Map, int], Sequence[str]]  # of a block
    arm: Callable[
        [Mapping[str, list[int]], bool], Mapping[str, _Armed | KvError]
    ]  # behind the flag, or at once
    suspect: Callable[[str], None]  # finds out whether a node still answers; if it doesn't, its puts fail
    roles: Roles | None = None

    def has_flag(self, at: int) -> bool:
        """Whether the flag has reached a block's threshold."""
        return self.flag is None or self.flag.load() >= self.threshold(at)


@dataclass(eq=False)
class _Part:
    """A batch at one node; its puts have numbers, its blocks places."""

    node: str
    places: list[int]
    puts: _Armed
    failed: set[int] = field(default_factory=set)  # numbers of puts known to have failed
    moved: set[int] = field(default_factory=set)  # those of them that are armed again, or wait for it
    leaving: set[int] = field(default_factory=set)  # that were to be withdrawn
    name: str = ""  # the node's, where owners have roles

    @cached_property
    def numbers(self) -> dict[int, int]:
        return {at: number for number, at in enumerate(self.places)}


@dataclass(eq=False)
class _Waiting:
    """A put that is armed nowhere."""

    error: KvError  # its error at its deadline
    has_fired: bool
    due_ns: int = 0  # when it is tried again
    is_arming: bool = False


class PutPlaces:
    """Where the puts of one call are. Safe to use from any thread."""

    def __init__(
        self,
        keys: Sequence[bytes],
        parts: Sequence[tuple[str, list[int], _Armed | KvError]],
        copies: int,
        ahead: Ahead | None = None,
    ) -> None:
        """Each part is a node, the places of its keys, and what arming returned. Without `ahead` nothing moves."""
        self._keys, self._copies, self._ahead = keys, copies, ahead
        self.lock = threading.RLock()  # held while a caller's results are determined
        self._armed = threading.Condition(self.lock)
        self._moving = threading.Lock()  # held while puts are withdrawn and armed
        self._parts: list[_Part] = []
        self._waiting: dict[int, list[_Waiting]] = {}
        self._failed: dict[int, list[KvError]] = defaultdict(list)  # puts that are not armed any more
        self._reported: set[int] = set()  # blocks whose source the caller may have reused
        self._revision = -1
        self._roles = None if ahead is None else ahead.roles
        self._names = {} if self._roles is None else self._roles.names  # of the nodes whose puts count
        if self._roles is not None:
            self._copies = len(self._names)
        for node, places, answer in parts:
            if not isinstance(answer, KvError):
                self._parts.append(_Part(node, places, answer, name=self._names.get(node, "")))
                continue
            for at in places:
                if (
                    ahead is not None
                    and isinstance(answer, _NOT_ARMED)
                    and not isinstance(answer, Overloaded)
                ):
                    self._waiting.setdefault(at, []).append(_Waiting(answer, has_fired=False))
                else:
                    self._failed[at].append(answer)

    # --- what has become of them

    @property
    def is_following(self) -> bool:
        """Whether puts may still be armed at other nodes."""
        return self._ahead is not None

    @property
    def copies(self) -> int:
        """How many nodes must have a block."""
        return self._copies

    @property
    def roles(self) -> Roles | None:
        """The owners that the user's home names, if their blocks have those."""
        return self._roles

    @property
    def names(self) -> dict[str, str]:
        """The nodes, by address, whose puts count now."""
        return self._names

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        with self.lock:
            are_over = all(part.puts.has_ended for part in self._parts)  # before failures are looked for
            self._look()
            return are_over and not self._waiting

    def open_parts(self) -> dict[str, list[_Armed]]:
        """The batches that have not ended, by node."""
        parts: dict[str, list[_Armed]] = defaultdict(list)
        with self.lock:
            for part in self._parts:
                if not part.puts.has_ended:
                    parts[part.node].append(part.puts)
        return parts

    def all_parts(self) -> list[_Armed]:
        """All batches that may have puts under way."""
        with self.lock:
            return [part.puts for part in self._parts]

    def wait_for_owners(self, timeout_s: float) -> None:
        """Wait until puts that were armed nowhere are armed; if there are none it doesn't wait."""
        with self._armed:
            if self._waiting:
                self._armed.wait(timeout_s)

    def have_landed(self) -> bool:
        """Whether every put has landed or failed; nothing is armed again after that."""
        with self.lock:
            have = all(part.puts.wait_landed(0) for part in self._parts)
            self._look()
            if self._waiting:
                each = self.each()
                for at in list(self._waiting):
                    there = [one for one in each[at] if one.error is None or (is_late(one) and one.landed_ns)]
                    if len(there) >= self._copies:
                        self._drop(at)
            if have and not self._waiting:
                self._ahead = None
                return True
            return False

    def each(self) -> list[list[PutResult]]:
        """For each block the results of its puts, as they are now."""
        with self.lock:
            ended = [(part, part.puts.wait(0)) for part in self._parts]  # before failures are looked for
            self._look()
            each: list[list[PutResult]] = [[] for _ in self._keys]
            for at, some in self._waiting.items():
                late = DeadlineExceeded(f"The put has not ended yet; it continues: {some[0].error}")
                each[at] += [PutResult(self._keys[at], None, late) for _ in some]
            for at, errors in self._failed.items():
                each[at] += [PutResult(self._keys[at], None, error) for error in errors]
            for part, results in ended:
                for number, (at, result) in enumerate(zip(part.places, results, strict=True)):
                    if self._counts(part) and number not in part.moved:
                        each[at].append(result)
            for at in self._read_by_former():
                if at in self._reported:
                    each[at] = [one._replace(landed_ns=0) for one in each[at]]
                else:
                    late = DeadlineExceeded("A put to a former owner still reads the block; it continues.")
                    each[at] = [PutResult(self._keys[at], None, late)]
            return each

    def _read_by_former(self) -> set[int]:
        """Blocks whose source is read by puts at nodes that need not have them any more."""
        if self._roles is None:
            return set()
        unlanded = self._unlanded(range(len(self._keys)))
        return {part.places[at] for part, numbers in unlanded if not self._counts(part) for at in numbers}

    def note_results(self, results: Sequence[PutResult]) -> None:
        """Note the results that the caller gets: it may reuse the sources of blocks that have landed or failed."""
        with self.lock:
            for at in reusable(results) if self._ahead is not None else ():
                self._reported.add(at)
                self._drop(at)

    def still_read(self, results: Sequence[PutResult]) -> set[int]:
        """Blocks whose sources the caller may reuse by these results, but which a put to another owner still reads."""
        with self.lock:
            wanted = reusable(results)
            arming = {at for at in wanted if any(one.is_arming for one in self._waiting.get(at, ()))}
            return arming.union(part.places[n] for part, some in self._unlanded(wanted) for n in some)

    def release(self, read: Collection[int]) -> None:
        """End the puts that still read these blocks. One that is being armed just now continues."""
        with self.lock:
            unlanded = list(self._unlanded(read))
            self._reported.update(read)
            for at in read:
                self._drop(at)
        for part, numbers in unlanded:
            part.puts._abandon(numbers)  # noqa: SLF001 - of this package

    def _unlanded(self, blocks: Collection[int]) -> Iterator[tuple[_Part, list[int]]]:
        """The numbers of these blocks' puts that may still read their sources, by part."""
        for part in self._parts:
            if part.puts.has_ended:
                continue
            failed = part.failed | part.puts._failed_puts(part.failed).keys()  # noqa: SLF001 - of this package
            results = enumerate(zip(part.places, part.puts.wait(0), strict=True))
            late = [
                number
                for number, (at, one) in results
                if at in blocks and number not in failed and may_read(one)
            ]
            if late:
                yield part, late

    def _look(self, ahead: Ahead | None = None) -> None:
        """Find the puts that have failed and may be armed again, and end those that waited for too long."""
        ahead = ahead or self._ahead
        if ahead is None:
            return
        now_ns = _CLOCK.monotonic_ns()
        for part in self._parts:
            for number, failed in part.puts._failed_puts(part.failed).items():  # noqa: SLF001 - of this package
                part.failed.add(number)
                if not self._counts(part):  # present owners have puts of their own
                    part.moved.add(number)
                elif (waiting := self._again(part, number, failed, now_ns)) is not None:
                    part.moved.add(number)
                    self._waiting.setdefault(part.places[number], []).append(waiting)
        self._parts = [part for part in self._parts if len(part.moved) < len(part.places)]
        is_late = now_ns >= ahead.deadline_ns
        for at in list(self._waiting):
            if is_late or not self._can_succeed(at):
                self._drop(at)

    def _again(self, part: _Part, number: int, failed: FailedPut, now_ns: int) -> _Waiting | None:
        """A put that has failed, if it is to be armed again."""
        if part.places[number] in self._reported:
            return None
        if failed.was_withdrawn:
            left = NodeUnavailable(
                f"{part.node} no longer owns the block, and no new owner took the put in time."
            )
            return _Waiting(left, has_fired=False) if number in part.leaving else None
        if not isinstance(failed.error, _AWAY):
            return None
        return _Waiting(failed.error, failed.has_fired, now_ns + _AGAIN_NS if failed.has_fired else 0)

    def _here(self, at: int) -> list[tuple[_Part, int]]:
        """The parts, and the numbers in them, of this block's puts that are armed or have ended."""
        here = [(part, part.numbers.get(at)) for part in self._parts if self._counts(part)]
        return [(part, number) for part, number in here if number is not None and number not in part.moved]

    def _counts(self, part: _Part) -> bool:
        """Whether the copies at a part's node are wanted."""
        return self._roles is None or self._names.get(part.node) == part.name

    def _can_succeed(self, at: int) -> bool:
        """Whether this block may still have enough copies."""
        if self._roles is not None:  # owners that have no put of it yet get one
            return not self._failed.get(at) and all(
                number not in part.failed for part, number in self._here(at)
            )
        good = sum(number not in part.failed for part, number in self._here(at))
        return good + len(self._waiting[at]) >= self._copies

    def _drop(self, at: int) -> None:
        """Fail the puts of this block that wait for an owner; one that is being armed continues."""
        some = self._waiting.pop(at, [])
        self._failed[at] += [self._ended_by(at, one) for one in some if not one.is_arming]
        if going := [one for one in some if one.is_arming]:
            self._waiting[at] = going

    def _ended_by(self, at: int, one: _Waiting) -> KvError:
        ahead = self._ahead
        if ahead is None or one.has_fired or ahead.has_flag(at):
            return one.error
        return DeadlineExceeded("The flag did not reach the put's threshold in time, and it was not sent.")

    # --- following the map

    def follow(self, now: Map) -> bool:
        """Withdraw puts at former owners, and arm those that are armed nowhere; returns whether any may still move."""
        with self._moving:
            with self.lock:
                if (ahead := self._ahead) is None:
                    return False
                self._look()
                away = self._away()
            if self._roles is not None:
                self._roles.look(away)  # it may call the home
            with self.lock:
                leaving = self._leaving(ahead, now)
            for part, numbers in leaving:
                part.puts._withdraw(numbers)  # noqa: SLF001 - of this package
            with self.lock:
                self._look(ahead)
                for part in (one for one, _ in leaving if not one.puts.has_ended):
                    if all(one.node != part.node for one in now.members):
                        ahead.suspect(part.node)  # puts that have fired there wait for their answers
                if self._roles is not None and self._ahead is not None:
                    self._fit_to_roles(ahead)
                wanted = self._wanted(ahead, now)
            for at_once, armings in wanted.items():
                self._arm(ahead, armings, at_once=at_once)
        return not self.has_ended

    def _leaving(self, ahead: Ahead, now: Map) -> list[tuple[_Part, list[int]]]:
        if self._roles is not None:
            names = self._roles.names
            if names == self._names:
                return []
            self._names, self._copies = names, len(names)
        elif now.revision == self._revision:
            return []
        self._revision = now.revision
        leaving = []
        for part in self._parts:
            if part.puts.has_ended:
                continue
            numbers = [
                number
                for number, at in enumerate(part.places)
                if number not in part.leaving
                and (at not in self._reported or self._roles is not None)
                and not (self._counts(part) and part.node in self._owners(ahead, now, at))
            ]
            if numbers:
                part.leaving.update(numbers)
                leaving.append((part, numbers))
        for some in self._waiting.values():
            for one in some:
                one.due_ns = 0
        return leaving

    def _wanted(self, ahead: Ahead, now: Map) -> dict[bool, dict[str, list[tuple[int, _Waiting]]]]:
        """Which waiting puts are armed at which nodes now: those that have fired, and those that have not."""
        wanted: dict[bool, dict[str, list[tuple[int, _Waiting]]]] = {True: {}, False: {}}
        if self._ahead is None:
            return wanted
        now_ns = _CLOCK.monotonic_ns()
        for at, some in self._waiting.items():
            here = {part.node for part, _ in self._here(at)}
            free = [node for node in self._owners(ahead, now, at) if node not in here]
            for one, node in zip(some, free, strict=False):
                if one.due_ns <= now_ns:
                    one.is_arming = True
                    wanted[one.has_fired].setdefault(node, []).append((at, one))
        return wanted

    def _owners(self, ahead: Ahead, now: Map, at: int) -> Iterable[str]:
        return ahead.owners(now, at) if self._roles is None else self._names

    def _away(self) -> set[str]:
        """Owners that puts have been tried at, and are armed at no more."""
        away = set[str]()
        for at, some in self._waiting.items():
            if self._roles is not None and any(one.due_ns for one in some):
                away |= self._names.keys() - {part.node for part, _ in self._here(at)}
        return away

    def _fit_to_roles(self, ahead: Ahead) -> None:
        """See to it that each block has a put, or one that waits, for each of the present owners, and no more."""
        former = [(part, part.puts.wait(0)) for part in self._parts if not self._counts(part)]
        for at in range(len(self._keys)):
            if at in self._reported:
                continue
            some = self._waiting.get(at, [])
            missing = len(self._names) - len(self._here(at)) - len(self._failed.get(at, ())) - len(some)
            for one in [one for one in some if not one.is_arming][: max(0, -missing)]:
                some.remove(one)
            if missing > 0:
                fired = ahead.has_flag(at) or any(
                    results[part.numbers[at]].fired_ns for part, results in former if at in part.numbers
                )
                error = NodeUnavailable("The node that has to have the block now took no put of it in time.")
                some = [*some, *(_Waiting(error, fired) for _ in range(missing))]
            if some:
                self._waiting[at] = some
            else:
                self._waiting.pop(at, None)

    def _arm(self, ahead: Ahead, armings: Mapping[str, list[tuple[int, _Waiting]]], *, at_once: bool) -> None:
        if not armings:
            return
        answers: Mapping[str, _Armed | KvError]
        try:
            answers = ahead.arm({node: [at for at, _ in some] for node, some in armings.items()}, at_once)
        except UsageError as mistake:  # such as memory that was closed
            answers = dict.fromkeys(armings, mistake)
        except RuntimeError as ending:  # the interpreter ends, and starts no more threads
            answers = dict.fromkeys(armings, NodeUnavailable(f"The put was not armed again: {ending}."))
        with self.lock:
            for node, some in armings.items():
                answer = answers[node]
                if not isinstance(answer, KvError):
                    name = self._names.get(node, "")
                    self._parts.append(_Part(node, [at for at, _ in some], answer, name=name))
                for at, one in some:
                    self._answered(at, one, answer)
            self._armed.notify_all()

    def _answered(self, at: int, one: _Waiting, answer: _Armed | KvError) -> None:
        one.is_arming = False
        if isinstance(answer, _NOT_ARMED) and at not in self._reported:
            one.error, one.due_ns = answer, _CLOCK.monotonic_ns() + _AGAIN_NS
            return
        self._waiting[at].remove(one)
        if not self._waiting[at]:
            del self._waiting[at]
        if isinstance(answer, KvError):
            self._failed[at].append(answer)

    # --- the end

    def stop(self, error: KvError) -> int:
        """Stop arming: puts that wait for an owner fail, with this error if they had not fired.

        Returns how many those were.
        """
        with self.lock:
            self._ahead = None
        with self._moving, self.lock:
            unfired = [one for some in self._waiting.values() for one in some if not one.has_fired]
            for one in unfired:
                one.error = error
            for at in list(self._waiting):
                self._drop(at)
            return len(unfired)


class ArmedAhead:
    """The thread that has a client's armed puts follow the map. Safe to use from any thread."""

    def __init__(self, current: Callable[[], Map]) -> None:
        """`current` gives the newest map."""
        self._current = current
        self._changed = threading.Condition()
        self._followed: dict[object, PutPlaces] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def add(self, places: PutPlaces) -> None:
        """Have these puts follow the map until they have ended."""
        with self._changed:
            if self._closed:
                return
            self._followed[object()] = places
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-ahead", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # before the fabrics, which are closed at the interpreter's exit
            elif len(self._followed) == 1:  # it waits for the first; a busy caller must not wake it for each
                self._changed.notify()

    def again(self, places: PutPlaces) -> None:
        """Have puts that have ended follow the present owners: one may have been replaced since."""
        if self._follow(places, self._current()):
            with self._changed:  # anew: the thread may have seen them end, and drops what it has seen
                self._followed = {key: one for key, one in self._followed.items() if one is not places}
                self.add(places)

    def close(self) -> None:
        """Stop following the map, once an attempt that is under way has ended. In a forked child this does nothing."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
            followed, self._followed = self._followed, {}
        for places in followed.values():
            places.stop(NodeUnavailable("The client was closed."))
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._followed or self._closed)
                if self._changed.wait_for(lambda: self._closed, CLUSTER_AHEAD_LOOK_MS / 1000):
                    return
                followed = dict(self._followed)
            now = self._current()
            done = {key for key, places in followed.items() if not self._follow(places, now)}
            with self._changed:
                self._followed = {key: one for key, one in self._followed.items() if key not in done}

    @staticmethod
    def _follow(places: PutPlaces, now: Map) -> bool:
        try:
            return places.follow(now)
        except KvError as error:
            log.warning("Puts that wait for their flag can't follow the cluster's map: %s", error)
            places.stop(error)
            return False
