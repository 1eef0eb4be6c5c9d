"""Ends a node's process when handling an event of the fabric or a drive hits a bug.

What always holds: if handling such an event, or a timer, raises an unexpected exception, the process ends at once with
`Status.BUG`, and the traceback is in its log. Whatever was acknowledged is on the drives, and the next start finds it.
If the process went on, the rows after the failed one would be lost: acknowledged blocks that no get finds.
What it doesn't do: end the process for a failed call, which fails by itself, or for one of our own errors (`KvError`),
which are logged. Before `arm` it does nothing, so nodes inside a test's process raise.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from kvcli.running import Status
from kvstore.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["arm", "or_stop"]

log = logging.getLogger(__name__)

_armed = False


def arm() -> None:
    """Make bugs end this process from now on."""
    global _armed  # noqa: PLW0603 - it is the process's
    _armed = True


def or_stop(handle: Callable[..., object]) -> Callable[..., None]:
    """Wrap a handler so that a bug in it ends the process."""

    @functools.wraps(handle)
    def handled(*arguments: Any) -> None:
        try:
            handle(*arguments)
        except KvError:
            raise
        except Exception:
            if not _armed:
                raise
            log.critical(
                "A bug: the node stops. After a restart it has all acknowledged blocks.",
                exc_info=True,
            )
            logging.shutdown()
            os._exit(Status.BUG)

    return handled
