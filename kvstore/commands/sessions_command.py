"""`kvstore sessions`: lists a user's sessions on a node, exports one into a file, or imports one.

It changes nothing unless it imports; in a cluster it imports to the user's home. The node knows users only by
digests, so the user has to be named.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from kvcli.progress import bars
from kvstore.client import Client, Nodes, Stored
from kvstore.client.blocks import KnownLayout
from kvstore.client.session_file import Reader
from kvstore.commands.whole_file import whole_file
from kvstore.config import counted, printable
from kvstore.errors import ConfigError, NoSession, SessionFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.client import ListedSession
    from kvstore.client.blocks import HasFingerprint
    from kvstore.reach import Reach

__all__ = ["Asked", "export_one", "import_one", "list_all"]

_HEADS = ("session", "turns", "blocks", "tokens", "last turn (UTC)")


class Asked(NamedTuple):
    """The node to ask, and the user whose sessions are meant."""

    reach: Reach
    user: str

    def client(self, layout: HasFingerprint | bytes = b"") -> Client:
        """A client of that node."""
        return Client(self.reach, layout=layout)

    @contextmanager
    def naming(self, session: str) -> Iterator[None]:
        """Name the session in the node's error if there is none."""
        try:
            yield
        except NoSession:
            raise NoSession(
                f"The user {self.user!r} has no session {session!r} on {self.reach.node}."
            ) from None


def list_all(asked: Asked, *, as_json: bool = False) -> int:
    """Print them; returns the exit status."""
    with asked.client() as client:
        sessions = sorted(client.sessions(asked.user), key=lambda one: (one.last_turn_unix_ms, one.session))
    print(json.dumps(list(map(asdict, sessions)), indent=2) if as_json else _table(sessions))  # noqa: T201 - its output
    return 0


def export_one(asked: Asked, session: str, path: Path, *, as_json: bool = False) -> int:
    """Write a session into a file, which appears only when it is complete; returns the exit status."""
    with asked.client() as client, asked.naming(session):
        keys = client.session(asked.user, session).keys()
        first = client.exists(keys[:1], any_layout=True)[0] if keys else None
    if not isinstance(first, Stored):
        raise SessionFileError(
            "The session has no blocks, or its first one is missing; there is nothing to export."
        )
    with asked.client(KnownLayout(first.fingerprint)) as client, whole_file(path) as file, bars() as tell:
        chat = client.session(asked.user, session)
        blocks = chat.export(file, progress=lambda done, of: tell("exporting blocks", done, of))
    print(json.dumps({"blocks": blocks}) if as_json else f"{counted(blocks, 'block')} exported")  # noqa: T201
    return 0


def import_one(asked: Asked, session: str, path: Path, *, as_json: bool = False) -> int:
    """Import the session in a file under an unused name; returns the exit status."""
    try:
        with path.open("rb") as file:
            fingerprint = Reader(file).content.fingerprint
            file.seek(0)
            with Nodes(asked.reach, layout=KnownLayout(fingerprint)) as nodes, bars() as tell:
                imported = nodes.of(asked.user).import_session(
                    file, asked.user, session, progress=lambda done, of: tell("importing blocks", done, of)
                )
                blocks = imported.info().blocks
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}.") from error
    except SessionFileError as error:
        raise ConfigError(f"{path}: {error}") from error
    print(json.dumps({"blocks": blocks}) if as_json else f"{counted(blocks, 'block')} imported")  # noqa: T201
    return 0


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
