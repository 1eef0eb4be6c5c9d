"""A client of a cluster on its own host: it puts, gets and deletes, and records each call.

What always holds: a block's name and version determine its bytes, so any worker knows what a get may return. A call's
line is in the history before the next call begins. Each value is put once, and a key is put again only after its
deletion was acknowledged.
What it doesn't do: judge the results. A failed call may have taken effect; only a failed get means nothing.
"""

from __future__ import annotations

import json
import mmap
import random
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import ClusterBlock, ClusterClient, Hit
from kvstore.commands.cluster_command import _upkeep
from kvstore.errors import KvError, NoSession, SessionRefused
from kvstore.limits import KEY_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from tests.cluster.history import End, Kind

if TYPE_CHECKING:
    from kvstore.client.sessions import Session

BYTES, BATCH, WAIT_S, VERSIONS, USERS = 4096, 4, 6.0, 3, 4
FILLER_BLOCKS = 140  # of 1 MiB, on a drive of 128 MiB
SAYS_NOTHING = {MissReason.NODE_AWAY, MissReason.BUSY}


def bytes_of(name: str, version: int) -> bytes:
    return random.Random(f"{name} {version}").randbytes(BYTES)


def value_of(name: str, data: bytes) -> str:
    """The version of a block with these bytes."""
    for version in range(VERSIONS):
        if data == bytes_of(name, version):
            return str(version)
    return f"other bytes: {data[:8].hex()}..."


def _keys_of(chat: Session) -> list[bytes]:
    try:
        return chat.keys()
    except NoSession:
        return []


class Worker:
    def __init__(self, told: dict[str, Any]) -> None:
        self._number, self._workers, self._prefix = told["number"], told["workers"], told["prefix"]
        self._dice = random.Random(f"{told['seed']} {self._number}")
        self._history = Path(told["history"]).open("a")  # noqa: SIM115 - until the process ends
        self._client = ClusterClient(
            told["nodes"],
            replicas=2,
            slots=16,
            block_bytes_max=1 << 20,
            call_timeout_ms=4_000,
            **told["more"],
        )
        self._memory = mmap.mmap(-1, 2 * BATCH * BYTES)
        self._kv = self._client.register(self._memory)
        self._users = [f"{self._prefix}.user{number}" for number in range(USERS)]
        self._next = self._appended = 0
        self._stored: dict[str, int] = {}  # by name: the version that is acknowledged
        self._deleted: dict[str, int] = {}

    def _note(
        self, kind: Kind, name: str, value: str | None, began_s: float, end: End, first: int | None = None
    ) -> None:
        row = [self._number, kind.value, name, value, began_s, time.monotonic(), end.value, first]
        print(json.dumps(row), file=self._history, flush=True)

    def _name(self, number: int, worker: int | None = None) -> str:
        return f"{self._prefix}.{self._number if worker is None else worker}.{number}"

    def _block(self, name: str, place: int) -> ClusterBlock:
        return ClusterBlock(block_key(name.encode()), self._kv, place * BYTES, BYTES)

    def step(self) -> None:
        """Make one call, possibly of many blocks."""
        if self._dice.random() < 0.15:
            self._session_step(self._dice.choice(self._users))
            return
        chosen = self._dice.random()
        if chosen < 0.3 or not self._stored:
            names = [self._name(self._next + at) for at in range(BATCH)]
            self._next += BATCH
            self._put(dict.fromkeys(names, 0))
        elif chosen < 0.4:
            self._delete(self._dice.sample(sorted(self._stored), min(2, len(self._stored))))
        elif chosen < 0.45 and self._deleted:
            name = self._dice.choice(sorted(self._deleted))
            version = self._deleted.pop(name) + 1
            if version < VERSIONS:
                self._put({name: version})
        else:
            names = [
                self._name(self._dice.randrange(max(1, self._next)), self._dice.randrange(self._workers))
                for _ in range(BATCH)
            ]
            self._get(sorted(set(names)))

    def _session_step(self, user: str) -> None:
        """Append to a user's session, read it or remove it; all workers do this at the same time."""
        chat, began_s, first = self._client.nodes.session(user, "chat"), time.monotonic(), None
        kind = self._dice.choice(
            [Kind.APPEND, Kind.APPEND, Kind.APPEND, Kind.RESUME, Kind.RESUME, Kind.DELETE]
        )
        value, end = None, End.DONE
        try:
            if kind is Kind.RESUME:
                value = "/".join(key.decode().rstrip(".") for key in _keys_of(chat))
            elif kind is Kind.DELETE:
                chat.remove()
            else:
                _keys_of(chat)
                self._appended += 1
                value = f"{self._number}.{self._appended}"
                key = value.ljust(KEY_BYTES, ".").encode()
                self._client.nodes.of(user).put_inline(key, b"a block of a session")
                began_s, end = time.monotonic(), End.UNKNOWN
                first = chat.append([key], tokens=16) - 1
                end = End.DONE
        except SessionRefused:
            end = End.FAILED
        except KvError:
            is_asked = kind is Kind.DELETE or end is End.UNKNOWN  # what only reads has changed nothing
            end = End.UNKNOWN if is_asked else End.FAILED
        self._note(kind, user, value, began_s, end, first)

    def silent_sessions(self) -> int:
        """The number of users whose session could not be read."""
        silent = 0
        for user in self._users:
            began_s = time.monotonic()
            try:
                value = "/".join(
                    key.decode().rstrip(".") for key in _keys_of(self._client.nodes.session(user, "chat"))
                )
            except KvError:
                silent += 1
            else:
                self._note(Kind.RESUME, user, value, began_s, End.DONE)
        return silent

    def _put(self, versions: dict[str, int]) -> None:
        began_s = time.monotonic()
        errors: list[KvError | None]
        if self._dice.random() < 0.5:
            blocks = []
            for place, (name, version) in enumerate(versions.items()):
                self._memory[place * BYTES : (place + 1) * BYTES] = bytes_of(name, version)
                blocks.append(self._block(name, place))
            try:
                errors = [one.error for one in self._client.put(blocks, timeout_s=WAIT_S)]
            except KvError as error:
                errors = [error] * len(blocks)
        else:
            pages = [
                (block_key(name.encode()), bytes_of(name, version)) for name, version in versions.items()
            ]
            errors = [one.error for one in self._client.put_many_inline(pages, timeout_s=WAIT_S)]
        for (name, version), failed in zip(versions.items(), errors, strict=True):
            self._note(Kind.PUT, name, str(version), began_s, End.UNKNOWN if failed else End.DONE)
            if failed is None:
                self._stored[name] = version

    def _delete(self, names: list[str]) -> None:
        began_s, end = time.monotonic(), End.DONE
        versions = {name: self._stored.pop(name) for name in names}
        try:
            self._client.delete([block_key(name.encode()) for name in names])
        except KvError:
            end = End.UNKNOWN
        for name in names:
            self._note(Kind.DELETE, name, None, began_s, end)
            if end is End.DONE:
                self._deleted[name] = versions[name]

    def _get(self, names: list[str]) -> int:
        """Get blocks; returns how many gets had no answer."""
        began_s, nothing = time.monotonic(), 0
        found: list[bytes | Miss]
        if self._dice.random() < 0.5:
            self._memory[BATCH * BYTES :] = bytes(BATCH * BYTES)
            blocks = [self._block(name, BATCH + place) for place, name in enumerate(names)]
            outcomes = self._client.get(blocks, timeout_s=WAIT_S)
            found = [
                self._memory[block.offset : block.offset + BYTES] if isinstance(outcome, Hit) else outcome
                for block, outcome in zip(blocks, outcomes, strict=True)
            ]
        else:
            wanted = [(block_key(name.encode()), BYTES) for name in names]
            found = list(self._client.get_many_inline(wanted, timeout_s=WAIT_S))
        for name, one in zip(names, found, strict=True):
            if not isinstance(one, Miss):
                self._note(Kind.GET, name, value_of(name, one), began_s, End.DONE)
            elif one.reason in SAYS_NOTHING:
                nothing += 1
                self._note(Kind.GET, name, str(one), began_s, End.FAILED)
            else:
                self._note(Kind.GET, name, None, began_s, End.DONE)
        return nothing

    def members(self) -> int:
        """The number of members on its map that answer; 0 while some are absent."""
        now, there = self._client.nodes.map, 0
        if now.absent:
            return 0
        for one in now.members:
            try:
                self._client.nodes.at(one.node).exists([block_key(b"none")])
            except KvError:
                continue
            there += 1
        return there

    def sessions_alone(self) -> int:
        """How many lots' sessions have one copy, as far as the members report; 1 for each that doesn't."""
        nodes = self._client.nodes
        states = _upkeep(nodes.reach, nodes.map).values()
        return sum(1 if state is None else state.lots_alone for state in states)

    def fill(self, node: str) -> str:
        """Put more to one node than its drive has room for."""
        data = bytes(1 << 20)
        pages = ((block_key(b"filler", at.to_bytes(4)), data) for at in range(FILLER_BLOCKS))
        results = self._client.nodes.at(node).put_many_inline(pages, timeout_s=60)
        errors = {str(one.error) for one in results} - {"None"}
        return ", ".join(errors) or "full"

    def read_all(self) -> int:
        """Get everything stored or deleted; returns how many gets had no answer."""
        names = [*self._stored, *self._deleted]
        return sum(self._get(names[at : at + BATCH]) for at in range(0, len(names), BATCH))


def main() -> None:
    """Work, and answer each line of standard input; `pause` and `go on` stop and continue the work."""
    worker = Worker(json.loads(sys.argv[1]))
    print(json.dumps("here"), flush=True)  # noqa: T201 - the test reads it
    works = True
    while True:
        told, _, _ = select.select([sys.stdin], [], [], 0.05 if works else 60)
        if told:
            word = sys.stdin.readline().strip()
            if not word:
                return
            if word in {"pause", "go on"}:
                works = word == "go on"
                print(json.dumps(word), flush=True)  # noqa: T201
            else:
                name, *more = word.split()
                print(json.dumps(getattr(worker, name)(*more)), flush=True)  # noqa: T201
        elif works:
            worker.step()


if __name__ == "__main__":
    main()
