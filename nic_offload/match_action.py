"""The match-action table: which entry a request hits, and thus what is done with all KV of its user.

Rules have two sources: a file, whose rules are replaced all at once (`replace`), and sessions, whose rules are added
and removed one by one (`add`, `remove`). Of the matching entries the one with the highest priority wins; among equals
the more specific, then the older; a file's entries rank in its order, before all added ones. A rule with bindings
gives its user a guard: a request that claims to be this user from any other 5-tuple is denied, whatever other rules
say. An added binding can narrow what a file binds, but not widen it. An added entry may age: it is removed once it has
not been hit for its idle timeout.

What always holds: a match sees the table before a change or after it, never in between, and waits for no lock. An
entry that stays (same pattern and priority) keeps its counters when the rules are replaced. The table is bounded by
ENTRIES_MAX and MASKS_MAX. A call that raises has changed nothing.

What it doesn't do: execute actions (`Requester` does), read a clock, or verify that the 5-tuple in a request is the
request's real source. Match from one thread, or counts may be lost; change from any.
"""

from __future__ import annotations

import enum
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload.errors import KvError, RuleError, TableFull
from nic_offload.match_ageing import AGED_AT_ONCE, Ageing
from nic_offload.match_entry import Entry, compile_rule
from nic_offload.match_fields import FiveTuple, Pattern, Ports, Prefix, Request
from nic_offload.match_ledger import ROW_BITS, ROW_MASK, VOID_ROW, Counters, Ledger
from nic_offload.match_probing import Probing
from nic_offload.match_rule import Action, ActionKind, Requester, Rule
from nic_offload.match_space import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nic_offload.match_entry import Compiled

__all__ = [
    "Action",
    "ActionKind",
    "Considered",
    "Counters",
    "Entry",
    "FiveTuple",
    "Outcome",
    "Pattern",
    "Ports",
    "Prefix",
    "Replaced",
    "Request",
    "Requester",
    "Rule",
    "Statistics",
    "Table",
    "perform",
]

ENTRIES_MAX = 2_000_000
MASKS_MAX = 128  # each is one more hash map to probe for a request that nothing better matches
_FIRST_ADDED_AGE = ENTRIES_MAX

assert 4 * ENTRIES_MAX < 1 << ROW_BITS


class Outcome(enum.Enum):
    """What became of an entry that was considered."""

    WON = "wins"
    LOWER_PRIORITY = "loses: lower priority"
    LESS_SPECIFIC = "loses: same priority, less specific"
    YOUNGER = "loses: same priority, as specific, but younger"
    OUTSIDE = "does not match: other ports"
    NOT_BOUND_HERE = "does not match: not one of its bindings"
    PASSED = "lets pass: one of the user's bindings"


class Considered(NamedTuple):
    """An entry under the request's keys, and its outcome."""

    entry: Entry
    outcome: Outcome


class Replaced(NamedTuple):
    """What a replacement of the rules did, in entries."""

    kept: int
    added: int
    removed: int


class Statistics(NamedTuple):
    """The table's size."""

    entries: int
    entries_of_file: int
    guards: int
    masks: int


class Table:
    """The table; see the top of this file."""

    def __init__(self, *, entries_max: int = ENTRIES_MAX, masks_max: int = MASKS_MAX) -> None:
        self._entries_max, self._masks_max = entries_max, masks_max
        self._ledger = Ledger()
        self._filed, self._added = Layer(), Layer(_FIRST_ADDED_AGE)
        self._probing = Probing()
        self._ageing = Ageing(self._ledger)
        self._age = _FIRST_ADDED_AGE
        self._replacing = threading.Lock()  # one replacement at a time; taken before the other
        self._changing = threading.Lock()  # held while the layers change, for a moment

    def match(self, request: Request, now_ns: int) -> Entry | None:  # noqa: C901, PLR0912 - a call less is a tenth of it
        """The entry that the request hits, with the hit counted; None is a miss."""
        best: Entry | None = None
        best_level = -1
        view: tuple[Any, ...] = request
        for stage in self._probing.stages:
            if stage.bound < best_level:
                break
            maps = -1
            for at, shift, near, other in stage.selectors:
                maps &= near.get(request[at] >> shift if shift else request[at], other)  # type: ignore[operator]
            derived, masked, steps = stage.made.get(maps) or stage.probes(maps)
            if derived:
                view = request + tuple([request[i] >> shift for i, shift in derived])  # type: ignore[operator]
            if masked:
                view += tuple([request[i] & mask for i, mask in masked])  # type: ignore[operator]
            if best is not None:
                steps = [step for step in steps if step[0] >= best_level]
            for _, below, pick, behind in steps:
                bucket = behind(pick(view))
                if bucket is None:
                    continue
                if isinstance(bucket, tuple) or bucket.plan.conditions is not None:
                    found = _first(bucket, request)
                    if found is None:
                        continue
                else:
                    found = bucket
                level = found.plan.level
                if level > best_level or (level == best_level and found.beats(best)):  # type: ignore[arg-type]
                    best, best_level = found, level
                    if below < best_level:
                        break
        if best is not None:
            row = best.stamp & ROW_MASK
            self._ledger.hits[row] += 1
            self._ledger.last_hit_ns[row] = now_ns
        return best

    def explain(self, request: Request) -> list[Considered]:
        """Every entry behind the request's keys, the winner first; nothing is counted, nothing cut short."""
        found: list[Entry] = []
        for stage in self._probing.stages:
            derived, masked, steps = stage.probes_for(request)
            shifted = [request[i] >> shift for i, shift in derived]  # type: ignore[operator]
            view = (*request, *shifted, *(request[i] & mask for i, mask in masked))  # type: ignore[operator]
            for _, _, pick, behind in steps:
                bucket = behind(pick(view))
                if bucket is not None:
                    found += bucket if isinstance(bucket, tuple) else (bucket,)
        found.sort(key=lambda entry: (-entry.plan.level, entry.stamp))
        matching = [entry for entry in found if entry.plan.admits(request)]
        outcomes = [Considered(entry, _outcome(entry, matching, request)) for entry in found]
        return sorted(outcomes, key=lambda considered: considered.outcome is not Outcome.WON)

    def add(self, rule: Rule, now_ns: int | None = None) -> Entry:
        """Add one entry. The clock of its idle timeout, if it has one, starts now, by the clock of `match`."""
        if rule.idle_timeout_ms is not None and now_ns is None:
            raise RuleError(f"{rule}: an entry that ages needs the time at which it is added.")
        compiled = compile_rule(rule.pattern, rule.priority)
        with self._changing:
            self._check_entries(self._filed.count + self._added.count + 1)
            self._added.check(compiled, rule)
            self._check_masks(self._filed, self._added, compiled)
            before = self._shape()
            if rule.pattern.bind:  # the guard first: the entry is never there without it
                self._added.bind(_who(rule), rule.pattern.bind, self._ledger.allocate)
            self._age += 1
            entry = self._added.add(compiled, rule, self._ledger.allocate(), self._age)
            if self._shape() != before:
                self._probing = Probing((self._filed, self._added))
            else:
                self._probing.added(self._added.space_of(entry), entry)
            if now_ns is not None:
                self._ageing.added(entry, now_ns)
        return entry

    def remove(self, entry: Entry) -> None:
        """Remove an added entry; a file's entries are removed by the next `replace`."""
        with self._changing:
            if not self._added.holds(entry) or entry.is_guard:
                raise RuleError(
                    f"Entry {entry.name!r} was not added at run time; replace the file's rules to remove it."
                )
            self._take_out([entry])

    def age(self, now_ns: int, at_most: int = AGED_AT_ONCE) -> int:
        """Remove added entries that have not been hit for their idle timeout; returns how many. Call it again later."""
        with self._changing:
            idle = self._ageing.idle(now_ns, at_most)
            if idle:
                self._take_out(idle)
        return len(idle)

    def _take_out(self, entries: Sequence[Entry]) -> None:
        before = self._shape()
        for entry in entries:
            self._added.remove(entry)
            self._ageing.removed(entry)
            self._retire(entry)
            if entry.plan.bound:
                guard = self._added.unbind(entry.pattern[:2], entry.pattern.bind)
                if guard is not None:
                    self._retire(guard)
        if self._shape() != before:
            self._probing = Probing((self._filed, self._added))

    def replace(self, rules: Sequence[Rule]) -> Replaced:
        """Replace the file's rules by these, atomically; added entries stay."""
        with self._replacing:
            old, new = self._filed, Layer()
            fresh: list[int] = []
            try:
                kept = self._build(new, rules, old, fresh)
                with self._changing:
                    self._check_entries(new.count + self._added.count)
                    self._check_masks(new, self._added)
                    self._filed = new
                    self._probing = Probing((new, self._added))
            except KvError:
                for row in fresh:
                    self._ledger.release(row)
                raise
            rows = {entry.row for entry in new}
            for entry in old:
                if entry.row not in rows:
                    self._retire(entry)
            return Replaced(kept, new.count - kept, old.count - kept)

    def counters(self, entry: Entry) -> Counters:
        """What the entry has seen so far; zeros once it has left the table."""
        return self._ledger.read(entry.row)

    def add_bytes(self, entry: Entry, moved_bytes: int) -> None:
        """Count bytes moved for the entry; from one thread at a time, like `match`."""
        self._ledger.moved_bytes[entry.row] += moved_bytes

    def statistics(self) -> Statistics:
        """The table's size now."""
        filed, added = self._filed, self._added
        return Statistics(
            entries=filed.count + added.count,
            entries_of_file=filed.count,
            guards=len(filed.bindings) + len(added.bindings),
            masks=len(filed.spaces) + len(added.spaces),
        )

    def __len__(self) -> int:
        return self._filed.count + self._added.count

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, guards included, in no order; don't change the table meanwhile."""
        yield from self._filed
        yield from self._added

    def _build(self, new: Layer, rules: Sequence[Rule], old: Layer, fresh: list[int]) -> int:
        """Fill a layer before it is visible; returns how many entries kept their row."""

        def new_row() -> int:
            fresh.append(self._ledger.allocate())
            return fresh[-1]

        kept = 0
        self._check_entries(len(rules))
        for age, rule in enumerate(rules):
            if rule.idle_timeout_ms is not None:
                raise RuleError(f"{rule}: only entries added at run time age, so leave idle_timeout_ms out.")
            compiled = compile_rule(rule.pattern, rule.priority)
            new.check(compiled, rule)
            if rule.pattern.bind:
                guard = old.guard(_who(rule))
                row = new_row if guard is None else partial(getattr, guard, "row")
                new.bind(_who(rule), rule.pattern.bind, row)
            stays = old.find(compiled)
            kept += stays is not None
            new.add(compiled, rule, new_row() if stays is None else stays.row, age)
        return kept

    def _retire(self, entry: Entry) -> None:
        """Free an entry's row; holders of the entry count into the void row from now on."""
        row = entry.leave()
        if row != VOID_ROW:
            self._ledger.release(row)

    def _shape(self) -> tuple[tuple[int, bool, bool, bool], ...]:
        """The properties of the added entries that the stages depend on."""
        spaces = self._added.spaces.values()
        return tuple(
            (space.bound, space.networks is None, space.tenants is None, space.users is None)
            for space in spaces
        )

    def _check_entries(self, count: int) -> None:
        if count > self._entries_max:
            raise TableFull(
                f"The table would have {count} entries; at most {self._entries_max} are possible."
            )

    def _check_masks(self, filed: Layer, added: Layer, compiled: Compiled | None = None) -> None:
        masks = len(filed.spaces) + len(added.spaces)
        if compiled is not None:
            masks += (compiled.mask, False) not in added.spaces
            masks += compiled.bound and not added.bindings
        if masks > self._masks_max:
            raise TableFull(
                f"The rules would use {masks} combinations of fields and prefix lengths; at most"
                f" {self._masks_max} are possible, so give more of them the same ones."
            )


def perform(entry: Entry, request: Request, requester: Requester) -> bool:
    """Pass the entry's actions to the requester, in order; False means that the request is denied."""
    sessions = entry.sessions_of(request)
    for action in entry.actions:
        if action.kind is ActionKind.DENY:
            return False
        if action.kind is not ActionKind.COUNT:
            requester.begin(action, sessions, request)
    return True


def _who(rule: Rule) -> tuple[str | None, str | None]:
    return rule.pattern.tenant, rule.pattern.user


def _first(found: Entry | tuple[Entry, ...], request: Request) -> Entry | None:
    """The best entry behind a key whose conditions hold."""
    for entry in found if isinstance(found, tuple) else (found,):
        if entry.plan.admits(request):
            return entry
    return None


def _outcome(entry: Entry, matching: Sequence[Entry], request: Request) -> Outcome:
    if not entry.plan.admits(request):
        if entry.is_guard:
            return Outcome.PASSED
        return Outcome.NOT_BOUND_HERE if entry.plan.bound else Outcome.OUTSIDE
    winner = matching[0]
    if entry is winner:
        return Outcome.WON
    if entry.priority < winner.priority:
        return Outcome.LOWER_PRIORITY
    return Outcome.LESS_SPECIFIC if entry.plan.level < winner.plan.level else Outcome.YOUNGER
