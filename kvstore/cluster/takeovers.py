"""What a node took over with a lot of users, and whose sessions it has taken since; in a file, for its next process.

A node that takes a lot over writes down first which node ordered the lot's sessions until then. Before the first step
of each of the lot's users it takes their sessions from there, and writes down that it has. Its standby writes down the
same, for the epoch of its copies. And the next home does, under ~lot, when it hears of it: the home may be lost before
all users have come.

What always holds: both are on the drive (fdatasync) before they count: a takeover before the lot is claimed, so that
also a claim whose answer was lost has one, and a user before their first step. After a restart a user who has begun
never counts as one who has not: what was removed here does not come back from the former home. If it can't be known
any more who has begun, because the file is damaged or names are too many, the takeover is forgotten as a whole; then
sessions that were not taken are missing. An unfinished last line was not acknowledged, and is ignored.
What it doesn't do: keep names of users, of which it has digests; say whether a takeover succeeded: that is so if
etcd's record names this node in its epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from zlib import crc32

from kvstore.errors import WrongEpoch
from kvstore.limits import SESSIONS_USERS_TAKEN_MAX
from kvstore.synced_files import replace_file
from kvstore.task_ends import drop_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Takeover", "Takeovers"]

log = logging.getLogger(__name__)

_SLACK_LINES = 1024  # that may be out of date before the file is written anew
_TAKEOVER, _USER, _FORGOTTEN = "takeover", "user", "forgotten"


class Takeover(NamedTuple):
    """Which node ordered a lot's sessions before, in which epoch by etcd's record, and who has all of them too."""

    node: str  # its name
    epoch: int
    standby: str  # the name of the node that has copies of all that was acknowledged; "": none
    copies: int  # their epoch

    @classmethod
    def told(cls, message: Any) -> Self:
        """The one that a message names."""
        return cls(
            message.earlier_node, message.earlier_epoch, message.earlier_standby, message.earlier_copies
        )

    def tell(self, message: Any) -> None:
        """Name it in a message."""
        message.earlier_node, message.earlier_epoch, message.earlier_standby, message.earlier_copies = self


class _Noted(NamedTuple):
    takeover: Takeover
    users: set[str]  # digests of those whose first step has come


_Entry = tuple[int, int]  # a lot, and our epoch


class Takeovers:
    """A node's takeovers, by lot and by the epoch in which the node's own sessions are. Used in its event loop only."""

    def __init__(self, cluster: str, file: Path | None = None) -> None:
        self._file, self._header = file, ["triggerkv takeovers", 1, cluster]
        self._noted: OrderedDict[_Entry, _Noted] = OrderedDict()  # the latest last
        self._users = 0  # noted in them
        self._lines: list[list[Any]] = []  # to be written
        self._file_lines = 0
        self._is_whole = False  # the file has all that is noted, and ends with a whole line
        self._writing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._load()

    def untaken(self, lot: int, epoch: int, tenant: str, user: str) -> Takeover | None:
        """What was taken over, if a user's sessions may still be there."""
        noted = self._noted.get((lot, epoch))
        return None if noted is None or _digest(tenant, user) in noted.users else noted.takeover

    def of(self, lot: int, epoch: int) -> tuple[Takeover, list[str]] | None:
        """What was taken over, and the digests of the users who have begun."""
        noted = self._noted.get((lot, epoch))
        return None if noted is None else (noted.takeover, sorted(noted.users))

    async def begin(self, lot: int, epoch: int, takeover: Takeover) -> None:
        """Note a takeover, before the lot is claimed; WrongEpoch if that can't be written."""
        await self._write([_TAKEOVER, lot, epoch, *takeover])

    async def copy(self, lot: int, epoch: int, takeover: Takeover, users: Sequence[str]) -> None:
        """Note another node's takeover, of whose sessions this one gets copies in that epoch; WrongEpoch as above."""
        noted = self._noted.get((lot, epoch))
        # It may be of a claim of our own that failed: such an epoch is given again.
        if noted is None or noted.takeover != takeover:
            await self.begin(lot, epoch, takeover)
        noted = self._noted.get((lot, epoch))
        new = [one for one in users if noted is None or one not in noted.users]
        await asyncio.gather(*(self._write([_USER, lot, epoch, one]) for one in new))

    async def note(self, lot: int, epoch: int, tenant: str, user: str) -> None:
        """Note that a user's sessions have been taken, or are lost; WrongEpoch if that can't be written."""
        if self.untaken(lot, epoch, tenant, user) is not None:
            await self._write([_USER, lot, epoch, _digest(tenant, user)])

    # --- what is noted

    def _apply(self, kind: str, lot: int, epoch: int, *more: Any) -> None:
        noted = self._noted.get((lot, epoch))
        if kind == _USER:
            if noted is not None and more[0] not in noted.users:
                noted.users.add(more[0])
                self._users += 1
            return
        if noted is not None:
            del self._noted[lot, epoch]
            self._users -= len(noted.users)
        if kind == _TAKEOVER:
            self._noted[lot, epoch] = _Noted(Takeover(*more), set())

    def _beyond(self, more: int) -> Iterator[list[Any]]:
        """The earliest takeovers, which are forgotten when there is this much more."""
        over = len(self._noted) + self._users + more - SESSIONS_USERS_TAKEN_MAX
        for (lot, epoch), noted in self._noted.items():
            if over <= 0:
                break
            over -= 1 + len(noted.users)
            yield [_FORGOTTEN, lot, epoch]

    # --- the file

    def _load(self) -> None:
        try:
            *whole, rest = self._read().split(b"\n")
            lines = [_decoded(line) for line in whole]
            if lines[:1] != [self._header]:
                if lines:
                    log.info("%s is of another cluster, and begins anew.", self._file)
                return
            for line in lines[1:]:
                self._apply(*line)
            self._file_lines, self._is_whole = len(lines), not rest
        except (OSError, ValueError, TypeError) as error:
            self._noted.clear()
            self._users = 0
            log.warning(
                "%s can't be read (%s): sessions that this node has not taken from their former homes are missing.",
                self._file,
                error,
            )

    async def _write(self, line: list[Any]) -> None:
        """Append a line, together with others that wait while earlier ones are written."""
        self._lines.append(line)
        if self._next is None:
            self._next = asyncio.create_task(self._write_after(self._writing))
            self._next.add_done_callback(drop_failure)
        try:
            await asyncio.shield(self._next)
        except OSError as error:
            raise WrongEpoch(
                f"The node can't write which sessions it has taken over: {error.strerror}."
            ) from error

    async def _write_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._writing, self._next = self._next, None
        lines, self._lines = self._lines, []
        lines += list(self._beyond(len(lines)))
        is_new = not self._is_whole or self._file_lines > 2 * (len(self._noted) + self._users) + _SLACK_LINES
        written = [self._header, *self._all(), *lines] if is_new else lines
        self._is_whole = False  # should this fail
        await self._save(b"".join(map(_encoded, written)), is_new=is_new)
        self._is_whole = True
        self._file_lines = len(written) + (0 if is_new else self._file_lines)
        for line in lines:
            self._apply(*line)

    def _all(self) -> list[list[Any]]:
        found = list[list[Any]]()
        for (lot, epoch), (takeover, users) in self._noted.items():
            found.append([_TAKEOVER, lot, epoch, *takeover])
            found += ([_USER, lot, epoch, one] for one in users)
        return found

    def _read(self) -> bytes:
        with suppress(FileNotFoundError):
            return self._file.read_bytes() if self._file is not None else b""
        return b""

    async def _save(self, data: bytes, *, is_new: bool) -> None:
        if self._file is not None:
            await asyncio.to_thread(replace_file if is_new else _append, self._file, data)


def _digest(tenant: str, user: str) -> str:
    return blake2b(f"{len(tenant)} {tenant}{user}".encode(), digest_size=16).hexdigest()


def _encoded(line: Sequence[Any]) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _decoded(line: bytes) -> Any:
    digits, _, text = line.partition(b" ")
    if int(digits, 16) != crc32(text):
        raise ValueError("a line is damaged")
    return json.loads(text)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab", buffering=0) as opened:
        if opened.write(data) != len(data):
            raise OSError(28, "No space left on device")
        os.fdatasync(opened.fileno())
