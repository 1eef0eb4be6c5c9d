"""A user's sessions of all epochs, for upkeep: read in steps, with other work between them.

What it doesn't do: hold a view. A session that is added or removed meanwhile may be missing or listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import SESSIONS_LISTED_STEP
from kvstore.names import user_name
from kvstore.node.upkeep_service import UPKEEP

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.node.node import Node
    from kvstore.storage.manifests import Listed

__all__ = ["listed_sessions"]


async def listed_sessions(node: Node, tenant: bytes, user: str) -> AsyncIterator[Listed]:
    """Yield each of a user's sessions that is stored here."""
    named, behind = user_name(tenant, user), b""
    while True:
        async with node.turns.of(UPKEEP):
            found = node.store.manifests.of_user(tenant, named, behind, SESSIONS_LISTED_STEP)
        for one in found:
            yield one
        if len(found) < SESSIONS_LISTED_STEP:
            return
        behind = found[-1].session
