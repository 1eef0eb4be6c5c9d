"""An entry of the match-action table, and how a rule is compiled to one.

A rule is compiled to a mask (the given fields, each with what is compared of it), the key under that mask, a level
(priority and specificity in one number), and conditions for what a key can't express, such as a ragged range of ports,
or bindings.

What always holds: two rules that compile to the same entry are the same rule; an entry returns the pattern it was
compiled from.

What it doesn't do: store entries (`match_space`), count (`match_ledger`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from nic_offload.match_fields import (
    PORT_BITS,
    PORT_MAX,
    PROTOCOL_BITS,
    SPECIFICITY_BITS,
    FiveTuple,
    Pattern,
    Ports,
    Prefix,
    Ternary,
)
from nic_offload.match_ledger import ROW_BITS, ROW_MASK

if TYPE_CHECKING:
    from collections.abc import Hashable

    from nic_offload.match_fields import Request
    from nic_offload.match_rule import Action

__all__ = ["Compiled", "Entry", "Plan", "compile_rule"]

# Index of a request's field, and the bits shifted out of it, or, below 0, the ternary mask that is left of it.
Mask = tuple[tuple[int, int], ...]

_SOURCE, _SOURCE_PORT, _PROTOCOL = 4, 6, 8
_FIELDS = _PROTOCOL + 1
_DISTINCT = (1, 2)  # users and contexts; there are few tenants and models, so one string of each is shared


class Compiled(NamedTuple):
    """Where a rule belongs in the table, and its identity: two rules with equal fields are the same."""

    mask: Mask
    key: Hashable
    level: int  # priority and specificity in one number
    conditions: tuple[FiveTuple, ...] | None  # one of them must hold
    bound: bool  # the conditions are bindings


class Plan:
    """The part that entries may share: most exact ones differ only in their key."""

    __slots__ = (
        "actions",
        "bound",
        "conditions",
        "guard",
        "idle_ns",
        "level",
        "mask",
        "name",
        "sessions",
        "users",
    )

    def __init__(
        self,
        compiled: Compiled,
        actions: tuple[Action, ...],
        sessions: str | None = None,
        name: str | None = None,
        *,
        idle_ns: int | None = None,
        guard: bool = False,
    ) -> None:
        self.mask, _, self.level, self.conditions, self.bound = compiled
        self.actions = actions
        self.sessions = sessions
        self.name = name
        self.idle_ns = idle_ns
        self.guard = guard
        self.users = 0  # entries in the space; a shared plan is removed with the last of them

    def admits(self, request: Request) -> bool:
        """Whether the conditions hold; a guard's list the requests that it lets pass."""
        if self.conditions is None:
            return True
        for condition in self.conditions:
            if condition.matches(request):
                return not self.guard
        return self.guard


class Entry:
    """A rule in the table. Callers read it and pass it back; only the table changes it."""

    __slots__ = ("key", "plan", "stamp")

    def __init__(self, plan: Plan, key: Hashable, row: int, age: int) -> None:
        self.plan = plan
        self.key = key
        self.stamp = age << ROW_BITS | row  # two numbers in one object, which is a sixth of an entry's size

    @property
    def age(self) -> int:
        """Smaller is older; entries of a file are older than all added ones."""
        return self.stamp >> ROW_BITS

    @property
    def row(self) -> int:
        """Its row of the ledger; the void row once the entry has left the table."""
        return self.stamp & ROW_MASK

    def leave(self) -> int:
        """Count into the void row from now on; returns the row that is now free."""
        row = self.row
        self.stamp ^= row
        return row

    @property
    def actions(self) -> tuple[Action, ...]:
        """What to do, in this order."""
        return self.plan.actions

    @property
    def priority(self) -> int:
        """The rule's priority; for a guard, one above all rules."""
        return self.plan.level >> SPECIFICITY_BITS

    @property
    def is_guard(self) -> bool:
        """Whether the table made this entry, to deny a bound user from anywhere else."""
        return self.plan.guard

    @property
    def name(self) -> str:
        """The rule's name, or one made from what it matches."""
        if self.plan.guard:
            tenant, user = self.pattern[:2]
            return f"guard of {tenant}/{user}"
        if self.plan.name is not None:
            return self.plan.name
        return ",".join(f"{field}={text}" for field, text in self.pattern.show().items()) or "any"

    @property
    def pattern(self) -> Pattern:
        """Return its pattern, reconstructed. A guard's bindings are the 5-tuples that it lets pass."""
        values: list[Any] = [None] * _FIELDS
        mask, conditions = self.plan.mask, self.plan.conditions or ()
        for (index, shift), value in zip(mask, _parts(mask, self.key), strict=True):
            if shift < 0:
                values[index] = Ternary(value, ~shift, _bits_of(index, value))
            elif index < _SOURCE or index == _PROTOCOL:
                values[index] = value
            elif index < _SOURCE_PORT:
                values[index] = Prefix(value, shift)
            else:
                values[index] = Ports(value << shift, ((value + 1) << shift) - 1)
        tenant, user, context, model = values[:_SOURCE]
        if self.plan.bound or self.plan.guard:
            return Pattern(tenant, user, context, model, bind=conditions)
        five = conditions[0] if conditions else FiveTuple(*values[_SOURCE:])
        return Pattern(tenant, user, context, model, five)

    def sessions_of(self, request: Request) -> str:
        """The handle of all KV of the user: the rule's own, or one made from the request's tenant and user."""
        if self.plan.sessions is not None:
            return self.plan.sessions
        return f"{quote(request.tenant, safe='')}/{quote(request.user, safe='')}"

    def beats(self, other: Entry) -> bool:
        """Whether this one comes first where both match: priority, then specificity, then age."""
        if self.plan.level != other.plan.level:
            return self.plan.level > other.plan.level
        return self.stamp < other.stamp

    def __repr__(self) -> str:
        return f"<Entry {self.name!r} priority {self.priority}>"


def _parts(mask: Mask, key: Any) -> tuple[Any, ...]:
    return (key,) if len(mask) == 1 else key


def _bits_of(index: int, value: int) -> int:
    """How many bits a field has; an address has its leading one above them."""
    if index < _SOURCE_PORT:
        return value.bit_length() - 1
    return PROTOCOL_BITS if index == _PROTOCOL else PORT_BITS


def compile_rule(pattern: Pattern, priority: int) -> Compiled:
    """Mask, key, level and conditions."""
    names, five = (pattern.tenant, pattern.user, pattern.context, pattern.model), pattern.five
    mask: list[tuple[int, int]] = []
    key: list[str | int] = []
    for index in range(_SOURCE):
        text = names[index]
        if text is not None:
            mask.append((index, 0))
            key.append(text if index in _DISTINCT else sys.intern(text))
    for index, part in enumerate(five, _SOURCE):
        if isinstance(part, Ternary):
            mask.append((index, ~part.open))
            key.append(part.value)
        elif isinstance(part, Prefix):
            mask.append((index, part.shift))
            key.append(part.value)
        elif isinstance(part, int):
            mask.append((_PROTOCOL, 0))
            key.append(part)
        elif isinstance(part, Ports) and (part.low >> part.block_shift or PORT_MAX >> part.block_shift):
            mask.append((index, part.block_shift))
            key.append(part.low >> part.block_shift)
    ragged = any(isinstance(part, Ports) and not part.is_block for part in five)
    conditions = pattern.bind or ((five,) if ragged else None)
    level = priority << SPECIFICITY_BITS | pattern.specificity
    return Compiled(
        tuple(mask), key[0] if len(key) == 1 else tuple(key), level, conditions, bool(pattern.bind)
    )
