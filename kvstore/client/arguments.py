"""Types of the arguments of public methods, checked against their annotations before a method runs.

What always holds: an argument of a wrong type raises InvalidArgument, and nothing has happened. Whole numbers arrive as
`int`, and timeouts as seconds from 0 to the longest possible one.
What it doesn't do: check ranges, which differ from method to method (`kvstore.client.checks`), or the number of
arguments, which Python does.
"""

from __future__ import annotations

import inspect
import io
from functools import partial, wraps
from operator import index
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from kvstore.client.checks import (
    check_buffer,
    check_how,
    check_key,
    check_keys,
    check_list,
    checked_timeout,
)
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument
from kvstore.limits import TIMEOUT_S_MAX
from kvstore.names import check_domain_name
from nic_offload.flags import FlagWord

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHECKED", "UNCHECKED", "checked", "checks_arguments"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _refused(name: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"The argument {name} is {wanted}, not {type(value).__name__}.")


def _whole(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise _refused(name, "a whole number", value) from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, "True or False", value)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(name, "a str", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"The argument {name}, {value!a:.60}, is not valid text: it has half of a surrogate pair."
        ) from None
    return value


def _bytes(name: str, value: Any) -> bytes:
    if name == "key":
        check_key(value)
    elif name == "domain":
        check_domain_name(value)
    elif not isinstance(value, bytes):
        raise _refused(name, "bytes", value)
    return bytes(value)


def _timeout(name: str, value: Any) -> float:
    if type(value) is float and 0 <= value <= TIMEOUT_S_MAX:
        return value
    return checked_timeout(value, f"The argument {name}")


def _file(name: str, value: Any) -> Any:
    if isinstance(value, io.TextIOBase) or not (hasattr(value, "read") or hasattr(value, "write")):
        raise _refused(name, 'a binary file, as open(path, "rb") or "wb" returns it', value)
    return value


def _layout(name: str, value: Any) -> Any:
    if not isinstance(getattr(value, "fingerprint", None), bytes):
        raise _refused(name, "a Layout", value)
    return value


def _durability(_: str, value: Any) -> Any:
    check_how(None, value)
    return value


def _named(kind: str) -> Callable[[str, Any], Any]:
    """An object of a class of this name, which need not be imported for the check."""

    def check(name: str, value: Any) -> Any:
        if all(one.__name__ != kind for one in type(value).__mro__):
            raise _refused(name, f"a {kind}", value)
        return value

    return check


def _function(*arguments: object) -> Callable[[str, Any], Any]:
    """A function that can be called with as many arguments."""

    def check(name: str, value: Any) -> Any:
        if not callable(value):
            raise _refused(name, f"a function of {len(arguments)} arguments", value)
        try:
            inspect.signature(value).bind(*arguments)
        except ValueError:  # one of C, which has no signature
            pass
        except TypeError:
            raise InvalidArgument(
                f"The argument {name} is a function that is called with {len(arguments)} arguments; this one can't be."
            ) from None
        return value

    return check


def _list_of(what: str) -> Callable[[str, Any], Any]:
    def check(_: str, value: Any) -> Any:
        check_list(value, what)
        return value

    return check


def _with(check: Callable[..., object], *more: object) -> Callable[[str, Any], Any]:
    def also(_: str, value: Any) -> Any:
        check(value, *more)
        return value

    return also


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "BinaryIO": _file,
    "Buffer": _with(check_buffer),
    "Callable[[int, bytes], Block]": _function(0, b""),
    "Callable[[int], int]": _function(0),
    "Durability": _durability,
    "Ended": _function([]),
    "FlagWord | Counter": _with(check_how, Durability.WRITTEN),
    "Layout": _layout,
    "Progress": _function(0, 0),
    "Sequence[Block | ClusterBlock]": _list_of("blocks"),
    "Sequence[Block]": _list_of("blocks"),
    "Sequence[ClusterBlock]": _list_of("blocks"),
    "Sequence[Wanted]": _list_of("blocks"),
    "Sequence[bytes]": _with(check_keys),
    "bool": _flag,
    "bytes": _bytes,
    "float": _timeout,
    "int": _whole,
    "str": _text,
} | {kind: _named(kind) for kind in ("Arrival", "Client", "FlagWord", "Map", "Matched", "Request", "Step")}
CHECKED: Final = frozenset(_CHECKS)
# Values of exactly these types always pass.
_PASS: Final[dict[str, type]] = {
    "Durability": Durability,
    "FlagWord | Counter": FlagWord,
    "Sequence[Block | ClusterBlock]": list,
    "Sequence[Block]": list,
    "bool": bool,
    "int": int,
}
# Looked at by the method, block by block or beside another argument.
UNCHECKED: Final = {"Data", "Iterable[tuple[bytes, Data]]", "Sequence[int]", "Sequence[tuple[bytes, int]]"}


def _rule(name: str, check: Callable[[str, Any], Any], *, may_be_none: bool) -> Callable[[Any], Any]:
    if not may_be_none:
        return partial(check, name)
    return lambda value: None if value is None else check(name, value)


def _kind(parameter: inspect.Parameter) -> str:
    return str(parameter.annotation).removesuffix(" | None")


def _rules(method: Callable[..., Any]) -> dict[str, Callable[[Any], Any] | None]:
    """By the names of the parameters after `self`; None if one is not checked here."""
    rules: dict[str, Callable[[Any], Any] | None] = {}
    for one in list(inspect.signature(method).parameters.values())[1:]:
        kind = _kind(one)
        check = _CHECKS.get(kind)
        rules[one.name] = check and _rule(one.name, check, may_be_none=kind != one.annotation)
    return rules


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of one method.

    Its wrapper is compiled, as those of dataclasses are: it names each argument, and calls only the checks of those
    that were given. A loop over them would cost each call more than the checks do.
    """
    rules = _rules(method)
    names: dict[str, Any] = {"_method": method}
    parameters, passed, is_named = ["self"], ["self"], False
    for one in list(inspect.signature(method).parameters.values())[1:]:
        rule, value = rules[one.name], one.name
        if one.kind is one.KEYWORD_ONLY and not is_named:
            parameters.append("*")
            is_named = True
        names[f"_check_{one.name}"] = rule
        if rule is not None:
            value = f"_check_{one.name}({one.name})"
        if (kind := _PASS.get(_kind(one))) is not None:
            names[f"_pass_{one.name}"] = kind
            value = f"{one.name} if type({one.name}) is _pass_{one.name} else {value}"
        if one.default is one.empty:
            parameters.append(one.name)
        else:
            names[f"_default_{one.name}"] = one.default
            parameters.append(f"{one.name}=_default_{one.name}")
            value = f"{one.name} if {one.name} is _default_{one.name} else {value}"
        passed.append(f"{one.name}={value}" if is_named else value)
    source = f"def {method.__name__}({', '.join(parameters)}):\n    return _method({', '.join(passed)})\n"
    exec(compile(source, f"<arguments of {method.__qualname__}>", "exec"), names)  # noqa: S102 - made of our signatures
    return cast("Callable[P, R]", wraps(method)(names[method.__name__]))


def checks_arguments(kind: type[T]) -> type[T]:
    """Check the arguments of a class's public methods by their annotations; `help` shows the methods as before."""
    for name, method in list(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(kind, name, checked(method))
    return kind
