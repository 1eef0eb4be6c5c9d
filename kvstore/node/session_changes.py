"""One change of a session: given to the store, and awaited.

What always holds: a change of many blocks is a long step, of which a tenant has one at a time; one that has begun
continues when its caller gives up.
What it doesn't do: decide whether this node may change the session.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import KvError
from kvstore.limits import SESSION_STEP_BLOCKS
from kvstore.node.calls import Ends
from kvstore.storage.items import SessionStep

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvstore.node.node import Node
    from kvstore.storage.items import SessionDone, SessionItem

__all__ = ["change", "to_its_end"]

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T], under_way: set[asyncio.Task[T]]) -> T:
    """Execute work that continues when its caller gives up; until its end it is among those `under_way`."""
    task = asyncio.create_task(work)
    under_way.add(task)
    task.add_done_callback(under_way.discard)
    return await asyncio.shield(task)


async def change(node: Node, item: SessionItem) -> SessionDone:
    """Execute a step; raises its error."""
    ends: Ends[SessionDone] = Ends(1)
    if _blocks_changed(node, item) <= SESSION_STEP_BLOCKS:
        node.store.change_sessions([item], ends.collect)
    else:
        over = await node.turns.long(item.name.tenant)

        def collect(ended: Sequence[SessionDone]) -> None:
            over()  # not when the caller cancels: a step that has begun continues
            ends.collect(ended)

        try:
            node.store.change_sessions([item], collect)
        except KvError:
            over()
            raise
    (done,) = await ends.all()
    if done.error is not None:
        raise done.error
    return done


def _blocks_changed(node: Node, item: SessionItem) -> int:
    if item.step in (SessionStep.APPEND, SessionStep.FORK, SessionStep.TAKE):
        return max(len(item.keys), item.blocks)
    stored = node.store.manifests.get(item.name)
    return 0 if stored is None else stored.manifest.blocks
