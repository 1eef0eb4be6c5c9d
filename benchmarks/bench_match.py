"""The match-action table at 1,000,000 exact and 1,000 wildcard entries, compared with a plain dict of the same keys.

The dict is looked up by (tenant, user, context) and has no wildcards, priorities or counters. Requests are parsed in
advance, and made anew for each run, so that their strings are hashed in the run, as in production. Rates are of one
thread. Requests come from any address. A mask is probed only if one of its wildcards begins with the network of the
request's source, or, if all requests come from one network, of its tenant. That saves nothing if each mask has
wildcards for both, which is measured as well. The number of masks is 24 (the goal's) and more.

Memory is the growth of a process that fills the table and hits every entry, minus the growth of another one that makes
and keeps the same keys.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nic_offload.match_action import Action, ActionKind, Pattern, Request, Rule, Table
from nic_offload.match_fields import FiveTuple, Prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.form import Form

_EXACT, _WILDCARDS = 1_000_000, 1_000
_MASKS, _MASKS_MORE = 24, (64, 120)
_BATCH = 50_000
_GOAL_PER_S = 200_000.0
_GOAL_BYTES = 200.0
_REPLACEMENTS = 20

_TENANTS, _MODEL = 50, "llama-3-70b"
_V4 = 1 << 32
_NETWORK = _V4 | 10 << 24 | 1 << 16 | 2 << 8  # 10.1.2.0/24
_FETCH = (Action(ActionKind.FETCH),)
_EXACT_PRIORITY = 1000
_MISSING = "bench-"  # the prefix of users without an exact entry

Names = tuple[str, str, str]


def _names(number: int) -> Names:
    """Tenant, user and context of an exact entry; two contexts per user."""
    return f"tenant-{number % _TENANTS}", f"user-{number // 2}@example.org", f"context-{number:012x}"


def _fill() -> Table:
    table = Table()
    for number in range(_EXACT):
        table.add(Rule(Pattern(*_names(number)), _FETCH, _EXACT_PRIORITY))
    return table


def _wildcards(masks: int, lowest: int) -> list[Rule]:
    """Wildcards, evenly over this many masks: prefixes of the source, some of the destination, some of a tenant."""
    dice = random.Random(masks)
    rules: dict[tuple[Pattern, int], Rule] = {}
    while len(rules) < _WILDCARDS:
        mask = len(rules) % masks
        length = 9 + mask // 2 % 16
        source = Prefix(1 << length | dice.getrandbits(length), 32 - length)
        destination = Prefix((_V4 | 192 << 24) >> 8 * (mask // 32), 8 * (mask // 32)) if mask // 32 else None
        tenant = f"tenant-{dice.randrange(_TENANTS)}" if mask % 2 else None
        rule = Rule(Pattern(tenant, five=FiveTuple(source, destination)), _FETCH, lowest + mask)
        rules[rule.pattern, rule.priority] = rule
    return list(rules.values())


def _crowded(masks: int, lowest: int, tenants: str) -> list[Rule]:
    """As many, all for the network that requests come from, and for users that make none, of some tenants."""
    rules = []
    for number in range(_WILDCARDS):
        mask = number % masks
        shift = 32 - (9 + mask // 2 % 16)
        destination = Prefix((_V4 | 192 << 24) >> 24, 24) if mask % 2 else None
        five = FiveTuple(Prefix(_NETWORK >> shift, shift), destination)
        pattern = Pattern(f"{tenants}-{number // masks % _TENANTS}", f"nobody-{number}", five=five)
        rules.append(Rule(pattern, _FETCH, lowest + mask))
    return rules


def _requests(dice: random.Random, *, known: bool, crowded: bool = False) -> list[Request]:
    """Requests from any address or one network, of users with or without exact entries; all strings are new."""
    requests = []
    for _ in range(_BATCH):
        tenant, user, context = _names(dice.randrange(_EXACT))
        user = user if known else _MISSING + user
        source, destination = _V4 | dice.getrandbits(32), _V4 | 192 << 24
        source = _NETWORK | source & 0xFF if crowded else source
        port = 1024 + dice.getrandbits(14)
        requests.append(Request(tenant, user, context, _MODEL, source, destination, port, 443, 6))
    return requests


def _rate(
    work: Callable[[list[Request]], None], dice: random.Random, *, known: bool, crowded: bool = False
) -> float:
    requests = _requests(dice, known=known, crowded=crowded)
    start_ns = time.perf_counter_ns()
    work(requests)
    return len(requests) / (time.perf_counter_ns() - start_ns) * 1e9


class _Rates:
    """The table and the bare dict, asked for fresh requests."""

    def __init__(self, form: Form, table: Table) -> None:
        self._form, self._table = form, table
        self._bare = {_names(number): number for number in range(_EXACT)}
        self._dice = random.Random(1)

    def compare(self, metric: str, *, known: bool, crowded: bool = False, goal: float | None = None) -> None:
        point = self._form.compare(
            metric,
            "matches/s",
            lambda: _rate(self._match, self._dice, known=known, crowded=crowded),
            lambda: _rate(self._look_up, self._dice, known=known, crowded=crowded),
        )
        if goal is not None:
            self._form.note(f"{metric}, alone", point.value, "matches/s", goal=goal)

    def _match(self, requests: list[Request]) -> None:
        match = self._table.match
        for request in requests:
            match(request, 1)

    def _look_up(self, requests: list[Request]) -> None:
        get = self._bare.get
        for request in requests:
            get((request.tenant, request.user, request.context))


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table_bytes() -> int:
    """The growth of this process while it fills a table; each entry's counts exceed Python's cached small integers."""
    before = _resident_bytes()
    table = _fill()
    for entry in table:
        pattern = entry.pattern
        names = (pattern.tenant or "", pattern.user or "", pattern.context or "")
        table.match(Request(*names, _MODEL, _V4, _V4, 1, 443, 6), 1 << 62)
        table.add_bytes(entry, 1 << 40)
    return _resident_bytes() - before


def keys_bytes() -> int:
    """The growth of this process while it makes the keys alone, minus the list that holds them."""
    before = _resident_bytes()
    keys = []
    for number in range(_EXACT):
        tenant, user, context = _names(number)
        keys.append((sys.intern(tenant), user, context))
    return _resident_bytes() - before - sys.getsizeof(keys)


def _in_a_process_of_its_own(name: str) -> int:
    code = f"from benchmarks import bench_match; print(bench_match.{name}())"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    return int(run.stdout)


def _longest_gap_ms(table: Table, requests: list[Request], *, replacing: bool) -> float:
    """The longest time from one match to the next, with or without rules being replaced continuously."""
    rules = [_wildcards(_MASKS, lowest) for lowest in (0, 1)]

    def replace() -> None:
        for turn in range(_REPLACEMENTS):
            table.replace(rules[turn % 2])

    thread = threading.Thread(target=replace if replacing else lambda: time.sleep(1))
    gap_ns, last_ns = 0, time.perf_counter_ns()
    thread.start()
    while thread.is_alive():
        for request in requests[:1000]:
            table.match(request, 1)
            now_ns = time.perf_counter_ns()
            gap_ns, last_ns = max(gap_ns, now_ns - last_ns), now_ns
    thread.join()
    return gap_ns / 1e6


def run(form: Form) -> None:
    """Measure all points."""
    keys = _in_a_process_of_its_own("keys_bytes") / _EXACT
    whole = _in_a_process_of_its_own("table_bytes") / _EXACT
    form.note("memory of a key", keys, "B an entry")
    form.note("memory beyond the key", whole - keys, "B an entry", goal=_GOAL_BYTES, lower_is_better=True)

    start_ns = time.perf_counter_ns()
    table = _fill()
    form.note("adding exact entries", _EXACT / (time.perf_counter_ns() - start_ns) * 1e9, "entries/s")
    rates = _Rates(form, table)

    took_ms = [1e3 * form.seconds(lambda: table.replace(_wildcards(_MASKS, 0))) for _ in range(5)]
    form.note(f"replacing {_WILDCARDS} rules", statistics.median(took_ms), "ms")
    rates.compare("exact hit above the wildcards", known=True, goal=_GOAL_PER_S)
    rates.compare(f"unknown user, {_MASKS} masks", known=False, goal=_GOAL_PER_S)
    table.replace(_wildcards(_MASKS, 2 * _EXACT_PRIORITY))
    rates.compare(f"exact hit below {_MASKS} masks", known=True, goal=_GOAL_PER_S)
    for tenants, whose in (("elsewhere", ""), ("tenant", " and tenant")):
        table.replace(_crowded(_MASKS, 2 * _EXACT_PRIORITY, tenants))
        metric = f"exact hit below {_MASKS} masks of the requests' own network{whose}"
        rates.compare(metric, known=True, crowded=True)
    for masks in _MASKS_MORE:
        table.replace(_wildcards(masks, 0))
        rates.compare(f"unknown user, {masks} masks", known=False)

    requests = _requests(random.Random(2), known=True)
    for replacing, when in ((False, "while nothing changes"), (True, "while rules are replaced")):
        form.note(
            f"longest gap between matches, {when}",
            _longest_gap_ms(table, requests, replacing=replacing),
            "ms",
        )
    form.note("a full collection of Python's garbage", 1e3 * form.seconds(gc.collect), "ms")
