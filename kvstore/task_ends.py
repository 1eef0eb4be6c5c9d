"""Callbacks of asyncio tasks that nobody may be awaiting when they fail; asyncio would mention that much later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import logging
    from collections.abc import Callable

__all__ = ["drop_failure", "logs_failure"]


def logs_failure(log: logging.Logger, consequence: str) -> Callable[[asyncio.Task[Any]], None]:
    """For a task that runs until it is cancelled: its failure is a bug, which is logged with the consequence."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(consequence, exc_info=error)

    return ended


def drop_failure(task: asyncio.Task[Any]) -> None:
    """For a task whose failure its callers are told, if one still waits."""
    if not task.cancelled():
        task.exception()
