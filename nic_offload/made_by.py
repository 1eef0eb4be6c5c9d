"""For classes that applications don't construct: `help` says what makes their objects, and shows no constructor."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["made_by"]

T = TypeVar("T")
_SELF = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)])


def made_by(what: str) -> Callable[[type[T]], type[T]]:
    """Document what makes a class's objects. Its constructor is used, and checked by mypy, as before."""

    def hide(kind: type[T]) -> type[T]:
        begin = vars(kind)["__init__"]
        begin.__doc__, begin.__signature__ = f"{what} makes it.", _SELF
        return kind

    return hide
