"""`kvstore sessions`: lists a user's sessions on a node, exports or imports one, or copies them to the user's home.

It changes nothing unless it imports or copies, which it does to the user's home. The node knows users only by
digests, so the user has to be named.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from kvcli.progress import bars
from kvcli.running import Status
from kvstore.client import Client, Nodes, Stored
from kvstore.client.blocks import KnownLayout
from kvstore.client.session_file import Reader
from kvstore.clock import SystemClock
from kvstore.commands.whole_file import whole_file
from kvstore.config import counted, printable
from kvstore.errors import ConfigError, NoSession, SessionFileError, SessionRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.client import ListedSession
    from kvstore.client.blocks import HasFingerprint
    from kvstore.client.session_export import Progress
    from kvstore.reach import Reach

__all__ = ["Asked", "copy_all", "export_one", "import_one", "list_all"]

_HEADS = ("session", "turns", "blocks", "tokens", "last turn (UTC)")


class Asked(NamedTuple):
    """The node to ask, and the user whose sessions are meant."""

    reach: Reach
    user: str

    def client(self, layout: HasFingerprint | bytes = b"") -> Client:
        """A client of that node."""
        return Client(self.reach, layout=layout)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Name the node in its error if there is no session."""
        try:
            yield
        except NoSession as error:
            raise NoSession(f"On {self.reach.node}: {error}") from None


def list_all(asked: Asked, *, as_json: bool = False) -> int:
    """Print them; returns the exit status."""
    with asked.client() as client:
        sessions = sorted(client.sessions(asked.user), key=lambda one: (one.last_turn_unix_ms, one.session))
    print(json.dumps(list(map(asdict, sessions)), indent=2) if as_json else _table(sessions))  # noqa: T201 - its output
    return 0


def export_one(asked: Asked, session: str, path: Path, *, as_json: bool = False) -> int:
    """Write a session into a file, which appears only when it is complete; returns the exit status."""
    with whole_file(path) as file, bars() as progress:
        blocks = _export(asked, session, file, lambda done, of: progress("exporting blocks", done, of))
    print(json.dumps({"blocks": blocks}) if as_json else f"{counted(blocks, 'block')} exported")  # noqa: T201
    return 0


def _export(asked: Asked, session: str, file: BinaryIO, progress: Progress | None = None) -> int:
    with asked.client() as client, asked.naming():
        keys = client.session(asked.user, session).keys()
        first = client.exists(keys[:1], any_layout=True)[0] if keys else None
    if not isinstance(first, Stored):
        raise SessionFileError(
            "The session has no blocks, or its first one is missing; there is nothing to export."
        )
    with asked.client(KnownLayout(first.fingerprint)) as client:
        return client.session(asked.user, session).export(file, progress=progress)


def import_one(asked: Asked, session: str, path: Path, *, as_json: bool = False) -> int:
    """Import the session in a file under an unused name; returns the exit status."""
    try:
        with path.open("rb") as file, bars() as progress:
            blocks = _import(asked, session, file, lambda done, of: progress("importing blocks", done, of))
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}.") from error
    except SessionFileError as error:
        raise ConfigError(f"{path}: {error}") from error
    print(json.dumps({"blocks": blocks}) if as_json else f"{counted(blocks, 'block')} imported")  # noqa: T201
    return 0


def _import(
    asked: Asked, session: str, file: BinaryIO, progress: Progress | None = None, ends_unix_ms: int = 0
) -> int:
    fingerprint = Reader(file).content.fingerprint
    file.seek(0)
    with Nodes(asked.reach, layout=KnownLayout(fingerprint)) as nodes:
        home = nodes.of(asked.user)
        imported = home.import_session(file, asked.user, session, progress=progress)
        if ends_unix_ms:
            imported.limit(max(1, ends_unix_ms - SystemClock().wall_ms()))
        return imported.info().blocks


def copy_all(asked: Asked, session: str | None, *, as_json: bool = False) -> int:
    """Copy sessions that the user's home lacks from the given nodes to it: all, or one; returns the exit status.

    One that can't be copied is named, and the others are copied.
    """
    with Nodes(asked.reach) as nodes:
        home = nodes.home(asked.user)
        there = {one.session for one in nodes.of(asked.user).sessions(asked.user)}
    copied, failed, known = list[str](), dict[str, str](), set[str]()
    for node in asked.reach.nodes:
        source = asked._replace(reach=asked.reach.at(node))
        with source.client() as client:
            found = [one for one in client.sessions(asked.user) if session in (None, one.session)]
        known.update(one.session for one in found)
        for one in sorted(found, key=lambda one: one.session):
            if one.session in there:
                continue
            try:
                with TemporaryFile() as file:
                    _export(source, one.session, file)
                    file.seek(0)
                    _import(asked, one.session, file, ends_unix_ms=one.expires_unix_ms)
            except (SessionFileError, SessionRefused) as error:
                failed[one.session] = str(error)
            else:
                copied.append(one.session)
                there.add(one.session)
    if session is not None and not known:
        raise NoSession(
            f"The user {asked.user!r} has no session {session!r} on {', '.join(asked.reach.nodes)}."
        )
    document = {"home": home, "copied": copied, "failed": failed}
    lines = [f"{printable(name)} was not copied: {why}" for name, why in failed.items()]
    lines.append(f"{counted(len(copied), 'session')} copied to {home}")
    print(json.dumps(document, indent=2) if as_json else "\n".join(lines))  # noqa: T201
    return Status.NO if failed else Status.DONE


def _table(sessions: Sequence[ListedSession]) -> str:
    rows = [_HEADS, *map(_row, sessions)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS))]
    rule = tuple("-" * width for width in widths)
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        first, *numbers, last = row
        shown = [first.ljust(widths[0])]
        shown += [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join((*shown, last)))
    return "\n".join(lines)


def _row(one: ListedSession) -> tuple[str, ...]:
    when = "-"
    if one.last_turn_unix_ms:
        when = f"{datetime.fromtimestamp(one.last_turn_unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    return printable(one.session), str(one.turns), str(one.blocks), str(one.tokens), when
