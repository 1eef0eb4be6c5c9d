"""The base of all handles: closed once, explicitly or by a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Handle"]


class Handle(ABC):
    """Something that is open until `close`. Nothing happens when it is merely forgotten."""

    @abstractmethod
    def close(self) -> None:
        """Release it; safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
