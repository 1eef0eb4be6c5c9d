"""A progress bar with an estimate of the time left.

What always holds: it is written to stderr, only if that is a terminal and only after a second, and is erased when the
work is done. So piped output is the result alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Progress", "bar", "bars"]

Progress = Callable[[str, int, int], None]  # the name of the work, how much is done, and the total

_BAR_CELLS = 40
_SHOWN_AFTER_S = 1.0


def bar(what: str, clock_s: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """A callback for the progress, from 0 to 1; at 1 the bar is erased.

    The time left is extrapolated from the time taken and the share done.
    """
    shown = -1
    begun_s = clock_s()

    def progress(share: float) -> None:
        nonlocal shown
        if not sys.stderr.isatty():
            return
        percent = int(100 * share)
        took_s = clock_s() - begun_s
        if share >= 1:
            if shown >= 0:
                sys.stderr.write("\r\033[K")
            shown = -1
        elif percent != shown and took_s >= _SHOWN_AFTER_S:
            cells = int(_BAR_CELLS * share)
            left = f", {took_s * (1 - share) / share:,.0f} s left" if percent else ""
            sys.stderr.write(f"\r{what} [{'#' * cells}{'.' * (_BAR_CELLS - cells)}] {percent} %{left}\033[K")
            shown = percent
        sys.stderr.flush()

    return progress


@contextmanager
def bars(clock_s: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """A callback for work of several parts, with a bar for each. All are erased, however the work ends."""
    doing, at = "", 0
    show = bar(doing, clock_s)

    def update(what: str, done: int, total: int) -> None:
        nonlocal doing, at, show
        if what != doing or done < at:
            show(1.0)
            show = bar(what, clock_s)
        doing, at = what, done
        show(done / total if total else 1.0)

    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    try:
        yield update
    finally:
        show(1.0)
