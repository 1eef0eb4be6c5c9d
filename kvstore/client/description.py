"""The `repr` of clients: what each is connected to, on one line.

What always holds: no token is in it, and making it opens and calls nothing.
What it doesn't do: describe sessions, which name themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.reach import Reach

__all__ = ["described"]


def described(client: object, nodes: str | Sequence[str], reach: Reach, **settings: object) -> str:
    """A client of these nodes as its constructor would be called, without settings that are None."""
    settings["tenant"] = reach.tenant or None
    named = (f"{name}={value!r}" for name, value in settings.items() if value is not None)
    return f"{type(client).__name__}({', '.join((repr(nodes), *named))})"
