"""Tuple-space search: entries with the same mask share one hash map, and a lookup probes one map per mask.

Exact entries have a mask without shifts and need no special case. Conditions beyond the key are tested on the few
entries under it.

What always holds: the entries under one key are ordered best first. Values that a reader may be using are replaced by
one assignment into a dict, never modified. No entry of a space has a level above the space's `bound`, and none a
source network, a tenant or a user that is not among its `networks`, `tenants` or `users`.

What it doesn't do: lock, count, or know other layers: the table does. Choose what to probe: `match_probing` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.errors import RuleError, TableFull
from nic_offload.match_entry import Compiled, Entry, Mask, Plan
from nic_offload.match_fields import SPECIFICITY_BITS, V4_BITS
from nic_offload.match_rule import DENY, PRIORITY_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from typing import Any

    from nic_offload.match_fields import FiveTuple
    from nic_offload.match_rule import Action, Rule

__all__ = ["Bucket", "Layer", "Space"]

ENTRIES_PER_KEY_MAX = 256  # entries under one key are tried one by one
BINDINGS_PER_USER_MAX = 256  # and so are these
NETWORKS_PER_MASK_MAX = 1024  # a mask with more of them, or of tenants or users, is not left out by them
NETWORK_BITS = 16  # a network is the first bits of a source, at most so many of an IPv4 address

_GUARD_MASK: Mask = ((0, 0), (1, 0))  # tenant and user
_GUARD_LEVEL = (PRIORITY_MAX + 1) << SPECIFICITY_BITS  # above every rule

TENANT, USER, SOURCE = 0, 1, 4  # their indices in a request

Bucket = Entry | tuple[Entry, ...]


class Space:
    """The hash map of one mask."""

    __slots__ = (
        *("_place", "_shift", "bound", "levels", "map"),
        *("mask", "network_shift", "networks", "plans", "tenants", "users"),
    )

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        # The networks that sources of its entries begin with, and how many do; None: any source.
        self.networks: dict[int, int] | None = None
        self.network_shift = 0  # from an address to its network
        self._place = next((at for at, (index, _) in enumerate(mask) if index == SOURCE), None)
        self._shift = 0 if self._place is None else mask[self._place][1]
        if self._place is not None and self._shift >= 0:
            self.networks = {}
            self.network_shift = max(self._shift, V4_BITS - NETWORK_BITS)
        # The same of tenants and users, if parts of other fields are compared; other maps need no more than one look.
        is_counted = any(shift for _, shift in mask)
        self.tenants: dict[Hashable, int] | None = {} if is_counted and (TENANT, 0) in mask else None
        self.users: dict[Hashable, int] | None = {} if is_counted and (USER, 0) in mask else None
        self.map: dict[Hashable, Bucket] = {}
        self.levels: dict[int, int] = {}  # how many entries each level has
        self.bound = -1
        self.plans: dict[tuple[int, tuple[Action, ...], int | None], Plan] = {}

    def behind(self, key: Hashable) -> tuple[Entry, ...]:
        """The entries under a key, best first."""
        found = self.map.get(key, ())
        return found if isinstance(found, tuple) else (found,)

    def put(self, entry: Entry) -> None:
        """Add an entry, in its position under its key."""
        there = self.behind(entry.key)
        place = sum(other.beats(entry) for other in there)
        self.map[entry.key] = (*there[:place], entry, *there[place:]) if there else entry
        plan = entry.plan
        plan.users += 1
        self.levels[plan.level] = self.levels.get(plan.level, 0) + 1
        self.bound = max(self.bound, plan.level)
        if self.networks is not None:
            self.networks = _with(self.networks, self.network_of(entry))
        if self.tenants is not None:
            self.tenants = _with(self.tenants, self.name_of(entry, TENANT))
        if self.users is not None:
            self.users = _with(self.users, self.name_of(entry, USER))

    def network_of(self, entry: Entry) -> int:
        """The first bits of the source that an entry of this space has."""
        assert self._place is not None
        key: Any = entry.key
        value: int = key if len(self.mask) == 1 else key[self._place]
        return value >> (self.network_shift - self._shift)

    def name_of(self, entry: Entry, index: int) -> Hashable:
        """The tenant or user that an entry of this space names."""
        key: Any = entry.key
        name: Hashable = key if len(self.mask) == 1 else key[self.mask.index((index, 0))]
        return name

    def drop(self, entry: Entry) -> None:
        """Remove an entry; the bound falls when the last one of the highest level is removed."""
        rest = tuple(other for other in self.behind(entry.key) if other is not entry)
        if rest:
            self.map[entry.key] = rest if len(rest) > 1 else rest[0]
        else:
            del self.map[entry.key]
        if self.networks is not None:
            _without(self.networks, self.network_of(entry))
        if self.tenants is not None:
            _without(self.tenants, self.name_of(entry, TENANT))
        if self.users is not None:
            _without(self.users, self.name_of(entry, USER))
        plan = entry.plan
        plan.users -= 1
        shared = (plan.level, plan.actions, plan.idle_ns)
        if not plan.users and self.plans.get(shared) is plan:
            del self.plans[shared]
        self.levels[plan.level] -= 1
        if not self.levels[plan.level]:
            del self.levels[plan.level]
            if plan.level == self.bound:
                self.bound = max(self.levels, default=-1)

    def plan(self, compiled: Compiled, rule: Rule) -> Plan:
        """A plan for the rule: that of equal rules if they share everything."""
        idle_ns = None if rule.idle_timeout_ms is None else rule.idle_timeout_ms * 1_000_000
        if rule.sessions is not None or rule.name is not None or compiled.conditions is not None:
            return Plan(compiled, rule.actions, rule.sessions, rule.name, idle_ns=idle_ns)
        shared = (compiled.level, rule.actions, idle_ns)
        if shared not in self.plans:
            self.plans[shared] = Plan(compiled, rule.actions, idle_ns=idle_ns)
        return self.plans[shared]


def _with(counts: dict[Any, int], value: Any) -> dict[Any, int] | None:
    counts[value] = counts.get(value, 0) + 1
    return counts if len(counts) <= NETWORKS_PER_MASK_MAX else None


def _without(counts: dict[Any, int], value: Any) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]


class Layer:
    """Spaces that are changed together: the rules of a file, or the entries added one by one."""

    def __init__(self, guards_age: int = 0) -> None:
        self._guards_age = guards_age
        self.spaces: dict[tuple[Mask, bool], Space] = {}  # by mask, guards apart
        self.bindings: dict[Hashable, dict[FiveTuple, int]] = {}  # of each bound user, refcounted
        self.count = 0  # without guards, of which there are no more than bound entries

    def __iter__(self) -> Iterator[Entry]:
        for space in self.spaces.values():
            for key in list(space.map):
                yield from space.behind(key)

    def find(self, compiled: Compiled) -> Entry | None:
        """The entry with this pattern and priority."""
        space = self.spaces.get((compiled.mask, False))
        for entry in space.behind(compiled.key) if space else ():
            plan = entry.plan
            if (plan.level, plan.conditions, plan.bound) == compiled[2:]:
                return entry
        return None

    def guard(self, key: Hashable) -> Entry | None:
        """The guard of (tenant, user)."""
        space = self.spaces.get((_GUARD_MASK, True))
        entries = space.behind(key) if space else ()
        return entries[0] if entries else None

    def add(self, compiled: Compiled, rule: Rule, row: int, age: int) -> Entry:
        """Add a rule; refused, with nothing changed, if it could never win or its key is full."""
        self.check(compiled, rule)
        space = self._space(compiled.mask, guard=False)
        entry = Entry(space.plan(compiled, rule), compiled.key, row, age)
        space.put(entry)
        self.count += 1
        return entry

    def check(self, compiled: Compiled, rule: Rule) -> None:
        """Refuse what `add` would refuse."""
        space = self.spaces.get((compiled.mask, False))
        if space is None or compiled.key not in space.map:
            return
        if (twin := self.find(compiled)) is not None:
            raise RuleError(
                f"{rule} has the same match and priority as {twin.name!r}; give one of them another priority."
            )
        if len(space.behind(compiled.key)) >= ENTRIES_PER_KEY_MAX:
            raise TableFull(
                f"{rule} would be one of more than {ENTRIES_PER_KEY_MAX} that differ only in priority, bindings"
                f" or a range of ports; merge some of their ranges."
            )

    def remove(self, entry: Entry) -> None:
        """Remove an entry of this layer."""
        self._drop((entry.plan.mask, False), entry)
        self.count -= 1

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry is in this layer."""
        space = self.spaces.get((entry.plan.mask, entry.plan.guard))
        return space is not None and any(other is entry for other in space.behind(entry.key))

    def space_of(self, entry: Entry) -> Space:
        """The space of an entry of this layer."""
        return self.spaces[entry.plan.mask, entry.plan.guard]

    def bind(self, who: Hashable, bindings: tuple[FiveTuple, ...], new_row: Callable[[], int]) -> None:
        """Let the user (tenant, user) pass from these 5-tuples too, and from no unbound ones."""
        counts = dict(self.bindings.get(who, {}))
        for binding in bindings:
            counts[binding] = counts.get(binding, 0) + 1
        if len(counts) > BINDINGS_PER_USER_MAX:
            raise TableFull(
                f"User {who} would be bound to more than {BINDINGS_PER_USER_MAX} 5-tuples; bind them to prefixes."
            )
        self.bindings[who] = counts
        old = self.guard(who)
        new = self._guard_entry(who, tuple(counts), old.row if old else new_row())
        space = self._space(_GUARD_MASK, guard=True)
        if old is None:
            space.put(new)
        else:
            space.map[who] = new

    def unbind(self, who: Hashable, bindings: tuple[FiveTuple, ...]) -> Entry | None:
        """Undo `bind`; returns the guard if it was removed with the last of the bindings."""
        counts = {
            binding: count - bindings.count(binding)
            for binding, count in self.bindings[who].items()
            if count > bindings.count(binding)
        }
        old = self.guard(who)
        assert old is not None
        if counts:
            self.bindings[who] = counts
            self.spaces[_GUARD_MASK, True].map[who] = self._guard_entry(who, tuple(counts), old.row)
            return None
        del self.bindings[who]
        self._drop((_GUARD_MASK, True), old)
        return old

    def _guard_entry(self, who: Hashable, bindings: tuple[FiveTuple, ...], row: int) -> Entry:
        compiled = Compiled(_GUARD_MASK, who, _GUARD_LEVEL, bindings, bound=False)
        return Entry(Plan(compiled, (DENY,), guard=True), who, row, self._guards_age)

    def _space(self, mask: Mask, *, guard: bool) -> Space:
        space = self.spaces.get((mask, guard))
        if space is None:
            space = self.spaces[mask, guard] = Space(mask)
        return space

    def _drop(self, where: tuple[Mask, bool], entry: Entry) -> None:
        space = self.spaces[where]
        space.drop(entry)
        if not space.map:
            del self.spaces[where]
