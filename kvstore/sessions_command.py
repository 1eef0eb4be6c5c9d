"""`kvstore sessions`: a user's sessions on a node, as a table or as JSON.

It asks the node that it is given and changes nothing. The node knows users by digests, so it has to be told which one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvstore.client import Client, Tls
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.client import ListedSession

__all__ = ["read_token", "run"]

_HEADS = ("session", "turns", "blocks", "tokens", "last turn (UTC)")


def run(
    node: str,
    user: str,
    *,
    tenant: str = "",
    token_file: Path | None = None,
    authorities: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print them; the exit status."""
    tls = None if authorities is None else Tls(authorities)
    token = None if token_file is None else read_token(token_file)
    with Client(node, tenant=tenant, token=token, tls=tls) as client:
        sessions = sorted(client.sessions(user), key=lambda one: (one.last_turn_unix_ms, one.session))
    print(json.dumps(list(map(asdict, sessions)), indent=2) if as_json else _table(sessions))  # noqa: T201 - its output
    return 0


def read_token(path: Path) -> str:
    """The token in a file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The token in {path} could not be read.") from error


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
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in one.session)
    return name, str(one.turns), str(one.blocks), str(one.tokens), when
