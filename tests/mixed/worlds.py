"""The nodes on which callers mix their operations, and what happens to each node meanwhile.

`WORLDS` lists them: a plain node, an encrypting one, one whose drive is too small, one whose tenant has a quota that
changes, one with two drives, one with damage on its drive, some of these together, and one in the test's own process
whose drive pretends to have a full queue. `run_history` makes a node of one, lets six callers use its keys in a few
phases, and ends some phases by SIGKILL or a clean stop. A client's process may be killed in the middle of its puts.

What always holds, beside what `tests.mixed.key_history` checks:

- a call ends in time, and with an error only if it may fail; nothing writes to a caller's memory after its get;
- when the callers are gone, no work is left: no lease, no waiting call;
- when everything has been removed, nothing is left of it: no block, no pin, no quota or hot memory in use, and as many
  bytes of the drive are free as before;
- a stop succeeds, and the folder is then without a fault for `kvstore fsck --payloads`;
- the node's log has no traceback.

What it doesn't do: power loss (`tests/storage/test_crashes.py` simulates it), clusters (`tests/cluster`), full disks.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.errors import NoSession, Overloaded, StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.names import SHARED, UNSAID, block_key, domain_of, in_domain
from kvstore.node.logs import _CALLER_HAS_GONE
from kvstore.node.tenants import token_digest
from tests.commands.here import run_here
from tests.conftest import SMALL_DRIVE, small_client, small_node, with_master_key
from tests.mixed.callers import KINDS, ROOM_BYTES, Caller, Key, Shared, contents, crowd_of
from tests.mixed.key_history import Event, History, Kind, Outage, Way, report
from tests.mixed.operations import Operation, erase_user, fill, read_everything, weighted
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.client import Client

__all__ = ["WORLDS", "World", "run_history"]

PHASE_S: Final = (0.8, 1.4)
JOIN_S: Final = 90.0  # of a caller whose time is over
QUIET_S, EMPTY_S, STOP_S_MAX = 15.0, 40.0, 19.0
LENGTHS: Final = (64, 100, 4096, 5000, 20_000, 70_000, 300_000)
TENANT: Final = "small"
QUOTAS: Final = (0, 1 << 18, 1 << 20, 1 << 21, 1 << 23)
QUOTA_LARGE: Final = 1 << 23
DEPARTING_BLOCKS: Final = 40
DAMAGE_BYTES: Final = 24 << 20  # of a drive, within which it is damaged
IN_LOG: Final = ("Traceback", "CRITICAL", "A bug", "never awaited")
HOT_BYTES: Final = 128 << 20
LOG_END: Final = 3000  # characters of a log that are shown
FULL_QUEUE: Final = {
    "put": (0.2, 0.7),
    "delete": (0.1, 0.1),
    "change_sessions": (0.1, 0.1),
}  # one item, several
WAITING: Final = (
    "fetches_waiting",
    "puts_waiting",
    "puts_waiting_for_room",
    "puts_waiting_for_quota",
    "gets_waiting",
    "deletes_waiting",
    "session_steps_waiting",
    "wipes_waiting",
    "leases",
)


@dataclass(frozen=True)
class World:
    """A node's settings, and what its callers do more or less often than usual."""

    is_encrypted: bool = False
    evicts: bool = False  # its drive is too small for what is put
    has_quota: bool = False
    is_damaged: bool = False
    has_full_queue: bool = False  # its store refuses some puts and deletions as Overloaded
    drives: int = 1
    keys: tuple[int, ...] = (2, 3, 6, 12)
    weights: dict[Operation, int] = field(default_factory=dict)


WORLDS: Final = {
    "plain": World(),
    "encrypted": World(is_encrypted=True, weights={erase_user: 3}),
    "evicting": World(evicts=True, weights={fill: 4}),
    "evicting-encrypted": World(is_encrypted=True, evicts=True, weights={fill: 12}),
    "quota": World(has_quota=True, weights={fill: 4}),
    "quota-encrypted": World(is_encrypted=True, has_quota=True, weights={fill: 4}),
    "two-drives": World(drives=2),
    "two-drives-encrypted": World(is_encrypted=True, drives=2),
    "damage": World(is_damaged=True),
    "full-queue": World(has_full_queue=True, keys=(2, 3)),
}


class AnyNode(Protocol):
    """A node, in a process of its own or in the test's."""

    @property
    def target(self) -> str: ...
    def start(self) -> None: ...
    def stop(self) -> int: ...
    def kill(self) -> None: ...
    def log(self) -> str: ...


class _NodeWithFullQueue(logging.Handler):
    """A node in the test's process, which can only be stopped; its store pretends to be full at random."""

    def __init__(self, data: Path, dice: random.Random) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger().addHandler(self)
        self._node: NodeInProcess | None = NodeInProcess(data, hot_bytes=HOT_BYTES, shares_memory=True)
        self.target = self._node.target
        for name, chances in FULL_QUEUE.items():
            self._refuse(name, chances, dice)

    def _refuse(self, name: str, chances: tuple[float, float], dice: random.Random) -> None:
        assert self._node is not None
        store = self._node.node.store
        real = getattr(store, name)

        def some(items: Sequence[Any], done: Any) -> Any:
            if dice.random() < chances[len(items) > 1]:
                raise Overloaded("The drive's queue is full, the test pretends.")
            return real(items, done)

        vars(store)[name] = some

    def has_room(self) -> None:
        """Pretend no more."""
        assert self._node is not None
        for name in FULL_QUEUE:
            vars(self._node.node.store).pop(name, None)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith(_CALLER_HAS_GONE):  # nor does a node's own log have that
            self._lines.append(self.format(record))

    def start(self) -> None:
        raise AssertionError("it is not started again")

    def stop(self) -> int:
        node, self._node = self._node, None
        if node is not None:
            node.close()
            logging.getLogger().removeHandler(self)
        return 0

    def kill(self) -> None:
        self.stop()

    def log(self) -> str:
        return "\n".join(self._lines)


class MixedWorld:
    """One node of a world with its callers, and their history."""

    def __init__(self, world: World, folder: Path, seed: int) -> None:
        self.world, self.folder = world, folder
        self.dice = dice = random.Random(seed)
        evicts = world.evicts or world.has_quota  # while there is no quota, the drive is filled
        history = History(evicts=evicts, has_quota=world.has_quota, is_damaged=world.is_damaged)
        self.shared = Shared(
            keys=[self._new_key(number) for number in range(dice.choice(world.keys))],
            history=history,
            client={"token": TENANT} if world.has_quota else {},
            operations=weighted(world.weights),
            seed=seed,
            filler_domain=SHARED if world.is_encrypted else UNSAID,
        )
        self._master = with_master_key(folder) if world.is_encrypted else ()
        self.node: AnyNode = self._new_node()
        self.shared.target = self.node.target

    def _new_key(self, number: int) -> Key:
        name, length = block_key(b"mixed", bytes([number])), self.dice.choice(LENGTHS)
        if not self.world.is_encrypted:
            return Key(name, UNSAID, length)
        domain = self.dice.choice((domain_of("ada"), domain_of("bob"), SHARED))
        return Key(in_domain(name, domain), domain, length)

    def _new_node(self) -> AnyNode:
        data, world = self.folder / "node", self.world
        if world.has_full_queue:
            return _NodeWithFullQueue(data, random.Random(self.dice.random()))
        arguments = ["--log-level", "warning", *self._master]
        if world.has_quota:
            self.set_quota(QUOTAS[2], reload=False)
            arguments += ["--tenants", str(self.folder / "tenants.toml")]
        if world.drives > 1:
            places = [f"{self.folder / f'drive-{number}.kv'}:{SMALL_DRIVE}" for number in range(world.drives)]
            arguments += [word for place in places for word in ("--drive", place)]
        return small_node(data, arguments=arguments)

    # --- what happens to the node

    def set_quota(self, quota_bytes: int, *, reload: bool = True) -> None:
        """Give the tenant another quota; 0: none."""
        quota = f"bytes = {quota_bytes}\n" if quota_bytes else ""
        new = self.folder / "tenants.new"
        new.write_text(f'[{TENANT}]\ntokens_sha256 = ["{token_digest(TENANT)}"]\n{quota}')
        new.replace(self.folder / "tenants.toml")
        if reload:
            os.kill(self.node.pid, signal.SIGHUP)  # type: ignore[attr-defined] # a process

    def _rotate(self) -> None:
        """Wrap the tenants' keys by new ones."""
        run_here("keys", "rotate-tenant", "--data", f"{self.folder / 'node'}", "--yes", *self._master)

    def _damage(self) -> None:
        """Change a few bytes of a record on the drive."""
        with (self.folder / "node" / "drive-0.kv").open("r+b", buffering=0) as drive:
            data = os.pread(drive.fileno(), DAMAGE_BYTES, 0)
            used = [at for at in range(1 << 20, len(data), PAGE_BYTES) if data[at]]
            if used:
                at = self.dice.choice(used) + self.dice.choice((0, 16, 64, 128, 2000, 4095))
                os.pwrite(drive.fileno(), self.dice.randbytes(self.dice.choice((1, 8, 512))), at)

    def _kill_a_client(self) -> None:
        """Let another process put blocks in all ways, and kill it while it does."""
        shared, plan, puts = self.shared, [], []
        for _ in range(DEPARTING_BLOCKS):
            key = self.dice.randrange(len(shared.keys))
            value, one = shared.value(self.dice, key), shared.keys[key]
            put = Event(Kind.PUT, key, value, time.monotonic(), way=Way.KILLED)
            puts.append(shared.history.add(put))
            plan.append((one.name.hex(), contents(value, one.length).hex(), one.domain.hex()))
        with subprocess.Popen(
            [sys.executable, "-m", "tests.mixed.departing_client", shared.target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            json.dump({"client": shared.client, "blocks": plan}, client.stdin)
            client.stdin.close()
            client.stdout.readline()
            time.sleep(self.dice.random() * 0.3)
            client.kill()
        for put in puts:
            put.ended_s = time.monotonic()

    def _outage(self, how: str) -> None:
        """Stop or kill the node, check its folder if it was stopped, and start it again."""
        began_s = time.monotonic()
        self.shared.is_away.set()
        self._end(how)
        if how == "stop":
            self._check_folder()
        self.node.start()
        self.shared.history.outages.append(Outage(began_s, time.monotonic(), is_clean=how == "stop"))

    def _end(self, how: str) -> None:
        began_s = time.monotonic()
        if how == "kill":
            self.node.kill()
        elif status := self.node.stop():
            self.shared.troubles.append(f"a stop ended with status {status}: {self.node.log()[-LOG_END:]}")
        if (took_s := time.monotonic() - began_s) > STOP_S_MAX:
            self.shared.troubles.append(f"a stop took {took_s:.1f} s")

    # --- phases

    def phase(self, number: int) -> None:
        """Let callers call for a while; then check the history so far."""
        shared, dice = self.shared, self.dice
        shared.is_away.clear()
        callers = [Caller(shared, at, number) for at in range(len(KINDS))]
        length_s = dice.uniform(*PHASE_S)
        how = "" if self.world.has_full_queue else dice.choice(("", "", "kill", "stop"))
        end_s = length_s * dice.uniform(0.3, 1) if how else length_s
        shared.until_s = time.monotonic() + length_s
        for caller in callers:
            caller.start()
        self._meanwhile(time.monotonic() + end_s)
        if how:
            self._outage(how)
        for caller in callers:
            caller.join(max(0.0, shared.until_s - time.monotonic()) + JOIN_S)
            if caller.is_alive():
                caller.trouble(f"has not ended after {time.monotonic() - caller.since_s:.0f} s")
        for caller in callers:
            caller.close()
        with self.client() as client:
            self._wait_until_quiet(client)
        self.check()

    def _meanwhile(self, until_s: float) -> None:
        """What happens beside the callers: damage, rotations, other quotas, a client that is killed."""
        world, dice = self.world, self.dice
        does = [self._kill_a_client] * (dice.random() < 0.3)
        if world.is_encrypted and dice.random() < 0.5:
            does.append(self._rotate)
        if world.is_damaged:
            does += [self._damage] * 20
        if world.has_quota:
            does += [lambda: self.set_quota(dice.choice(QUOTAS))] * 3
        dice.shuffle(does)
        pause_s = max(0.0, until_s - time.monotonic()) / (len(does) + 1)
        for one in does:
            time.sleep(max(0.0, min(pause_s, until_s - time.monotonic())))
            one()
        time.sleep(max(0.0, until_s - time.monotonic()))

    def client(self) -> Client:
        return small_client(self.node.target, slots=4, block_bytes_max=ROOM_BYTES, **self.shared.client)

    def restart(self, phase: int) -> None:
        """Without callers: end the node, start it, and read everything."""
        self._outage(self.dice.choice(("kill", "stop")))
        with self.client() as client:
            client.status(wait_s=JOIN_S)
        reader = Caller(self.shared, 3, phase)
        try:
            read_everything(reader)
        finally:
            reader.close()
        self.check()

    # --- checks

    def check(self) -> None:
        """Raise AssertionError with the first faults of the history, and with what went wrong beside it."""
        faults = self.shared.history.faults()
        words = [report(self.shared.history, fault) for fault in faults[:2]]
        if len(faults) > len(words):
            words.append(f"and {len(faults) - len(words)} more faults")
        words += self.shared.troubles[:5]
        assert not words, "\n\n".join(words)

    def _wait_until_quiet(self, client: Client) -> None:
        def waiting() -> dict[str, int]:
            statistics = client.statistics()
            return {name: number for name in WAITING if (number := getattr(statistics, name))}

        with suppress(AssertionError):
            wait_until(lambda: not waiting(), "quiet", QUIET_S)
        if left := waiting():
            self.shared.troubles.append(f"nobody calls, and this is left: {left}")

    def end(self, free_bytes: int) -> None:
        """Remove everything, check that nothing of it is left, and stop."""
        if isinstance(self.node, _NodeWithFullQueue):
            self.node.has_room()
        if self.world.has_quota:
            self.set_quota(QUOTA_LARGE)
        with self.client() as client:
            self._remove_everything(client)
            self._check_nothing_is_left(client, free_bytes)
        self._end("stop")
        self._check_folder()
        log = self.node.log()
        for word in IN_LOG:
            if word in log:
                at = log.index(word)
                self.shared.troubles.append(f"the log has:\n{log[max(0, at - 300) : at + 2500]}")
        self.check()

    def _remove_everything(self, client: Client) -> None:
        for user in self.shared.users:
            for listed in list(client.sessions(user)):
                with suppress(NoSession, StorageError):
                    client.session(user, listed.session).remove()
        with suppress(StorageError):
            crowds = [name for number in range(len(KINDS)) for name in crowd_of(number)]
            client.delete([*(key.name for key in self.shared.keys), *crowds])
        if self.world.evicts or self.world.has_quota:
            client.erase_tenant(timeout_s=EMPTY_S)

    def _check_nothing_is_left(self, client: Client, free_bytes: int) -> None:
        def left() -> dict[str, int]:
            now = client.statistics()
            numbers = {
                "blocks": now.blocks,
                "hot memory": now.memory_kept_bytes,
                "leases": now.leases,
                "pins": now.pins,
                "protected sessions": now.sessions_protected,
                "quota": now.quota_used_bytes,
                "bytes of the drive": free_bytes - now.free_bytes,
            }
            return {name: number for name, number in numbers.items() if number}

        with suppress(AssertionError):
            wait_until(lambda: not left(), "nothing is left", EMPTY_S)
        if rest := left():
            self.shared.troubles.append(f"everything is removed, and this is left: {rest}")

    def _check_folder(self) -> None:
        if self.world.is_damaged:
            return
        done = run_here("fsck", "--payloads", f"{self.folder / 'node'}", *self._master)
        if done.returncode:
            self.shared.troubles.append(f"fsck after a clean stop: {done.stdout}{done.stderr}")


@contextmanager
def _mixed(world: World, folder: Path, seed: int) -> Iterator[MixedWorld]:
    with ExitStack() as last:
        mixed = MixedWorld(world, folder, seed)
        last.callback(mixed.node.kill)
        yield mixed


def run_history(world: World, folder: Path, seed: int, phases: int) -> History:
    """Run one history and check it; AssertionError describes its faults."""
    folder.mkdir()
    with _mixed(world, folder, seed) as mixed:
        with mixed.client() as client:
            free_bytes = client.statistics().free_bytes
        for number in range(phases):
            mixed.phase(number)
            if not world.has_full_queue and mixed.dice.random() < 0.5:
                mixed.restart(number)
        mixed.end(free_bytes)
        return mixed.shared.history
