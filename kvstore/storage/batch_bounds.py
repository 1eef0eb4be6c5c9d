"""Bounds of one batch for a store: how many items it has, and how many blocks a session gets in one step.

What always holds: a batch beyond them is a ProtocolError, and nothing of it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ProtocolError
from kvstore.limits import BATCH_BLOCKS_MAX, SESSION_BLOCKS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.storage.items import SessionItem

__all__ = ["check_batch", "check_steps"]


def check_batch(items: Sequence[object]) -> None:
    """Refuse a batch that is too large."""
    if len(items) > BATCH_BLOCKS_MAX:
        raise ProtocolError(f"A batch has at most {BATCH_BLOCKS_MAX} blocks; this one has {len(items)}.")


def check_steps(items: Sequence[SessionItem]) -> None:
    """Refuse too many steps of sessions, or too large ones."""
    check_batch(items)
    if any(len(item.keys) > SESSION_BLOCKS_MAX for item in items):
        raise ProtocolError(f"At most {SESSION_BLOCKS_MAX} blocks are appended to a session at a time.")
