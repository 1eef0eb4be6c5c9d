"""`--sweep NAME=a,b,c`: run a command with several values of one number, and show which results are worth their cost.

What always holds: a name is an option of the command or a number of its cluster, and an invalid value is refused as it
is without a sweep. The values are used in the order given.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pareto", "points"]

_VALUES_MAX = 100


def points(arguments: argparse.Namespace, options: Sequence[str]) -> list[tuple[str, argparse.Namespace]]:
    """The arguments with each value in turn, and NAME=VALUE; unchanged without a sweep."""
    if arguments.sweep is None:
        return [("", arguments)]
    found = []
    name, equals, listed = (part.strip() for part in arguments.sweep.partition("="))
    values = [value.strip() for value in listed.split(",")]
    if not equals or not name or not all(values) or len(values) > _VALUES_MAX:
        accepted = f"written NAME=a,b,c with at most {_VALUES_MAX} values"
        raise OutOfRange("--sweep", repr(arguments.sweep), "a name and its values", accepted)
    for value in values:
        one = argparse.Namespace(**vars(arguments))
        one.sweep = None
        option = name.replace("-", "_")
        if option in options:
            setattr(one, option, _like(getattr(arguments, option), name, value))
        else:
            one.set = [*(arguments.set or ()), f"{name}={value}"]
        found.append((f"{name}={value}", one))
    return found


def _like(now: object, name: str, value: str) -> object:
    """The value as the option's own type."""
    kind = type(now)
    try:
        return kind(value)  # type: ignore[call-arg]
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise OutOfRange(f"--sweep {name}", repr(value), what, "as the option itself takes it") from None


def pareto(costs: Sequence[tuple[float, float]]) -> list[bool]:
    """For each pair, where less is better, whether it is Pareto-optimal."""
    return [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in costs) for x, y in costs]
