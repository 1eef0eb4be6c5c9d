"""The base of all handles: closed once, explicitly or by a `with` block."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Handle"]


class Handle:
    """An object that is open until `close`. Garbage collection alone closes nothing."""

    @abstractmethod  # for mypy; `ABC` would show in `help` of each handle
    def close(self) -> None:
        """Release it; safe to call again."""

    def __enter__(self) -> Self:
        """Begin a `with` block, whose end closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
