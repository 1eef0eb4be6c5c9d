"""`kvstore explain`: why a request's blocks hit or missed, run by run, how long it took, and what to do about it.

It asks the node that it is given, and changes nothing. What it shows is what that node recorded, and what clients told
it of look-ups that did not reach it. Numbers of blocks are those of the look-up; behind a session's own look-up, which
a resume begins with, they are those of the resume.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from kvcli.running import Status
from kvstore.config import printable, show_size, show_time
from kvstore.limits import LOOKUPS_LISTED_MAX
from kvstore.lookups import HITS, Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client import Client
    from kvstore.client.observing import LookedUp
    from kvstore.lookups import Lookup, Run
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = ["document", "explain", "page"]

_ASKED = {
    Kind.UNSPECIFIED: "look-up of {}",
    Kind.EXISTS: "asked whether {} are there",
    Kind.PREFIX: "asked how many of {} are there without a gap",
    Kind.FETCH: "fetched {}",
    Kind.GET: "got {} inside gRPC",
    Kind.SESSION: "asked which blocks the session has: {}",
}
_SAID = {
    Outcome.UNSPECIFIED: "mixed outcomes",
    Outcome.MEMORY: "in the node's memory",
    Outcome.DRIVE: "read from a drive",
    Outcome.STORED: "stored",
    Outcome.NAMED: "named by the session",
    Outcome.NEVER: "never stored by this tenant under this key, or gone too long ago to be remembered",
    Outcome.EVICTED: "evicted for room, as the least recently used",
    Outcome.STRANDED: "evicted for room, since its session had a gap before it",
    Outcome.CLEARED: "evicted for contiguous room",
    Outcome.EXPIRED: "its time to live had ended",
    Outcome.QUOTA: "evicted because the tenant was at its quota",
    Outcome.DELETED: "deleted",
    Outcome.CORRUPT: "the bytes failed a check, and were not served",
    Outcome.LAYOUT: "stored in another layout: another model, type, or block size",
    Outcome.LENGTH: "stored with another length",
    Outcome.LEASE_EXPIRED: "it was reserved, but did not land before its lease ended",
    Outcome.UNREADABLE: "the drive answered with an error",
    Outcome.BUSY: "the node was at a limit and refused",
    Outcome.NODE_AWAY: "the node was not reached, or did not answer in time",
    Outcome.GIVEN_UP: "not sent before the caller gave up or went away",
    Outcome.NO_SESSION: "there was no such session",
}
_DO = {
    Outcome.UNSPECIFIED: "Request fewer blocks at a time to see each of them.",
    Outcome.NEVER: "Nothing was put under these keys: check that the writer has finished, has the same tenant,"
    " and makes keys from the same model, tokens and salt.",
    Outcome.EVICTED: "The drives were full ({room}): add drives, or give the tenants that fill them a quota.",
    Outcome.STRANDED: "The drives were full ({room}) and a block before these had been evicted: add drives, or"
    " protect sessions that return.",
    Outcome.CLEARED: "The drives were full ({room}) and fragmented: add drives, or use one block size.",
    Outcome.EXPIRED: "Put them with a longer time to live, or with none.",
    Outcome.QUOTA: "The tenant's quota was used up ({quota}): raise it, or put less.",
    Outcome.DELETED: "They were deleted; put them again if that was a mistake.",
    Outcome.CORRUPT: "The drive returned wrong bytes: run `kvstore fsck --payloads`, and check the drive.",
    Outcome.LAYOUT: "Reader and writer differ in model, type, block size or parallelism: give both the same layout.",
    Outcome.LENGTH: "Reader and writer differ in the size of a block: give both the same layout.",
    Outcome.LEASE_EXPIRED: "The flag was stored too late, or never: raise lease_ms, and check that the writer"
    " reaches its flag.",
    Outcome.UNREADABLE: "A drive is failing: check `kvstore drives` and the node's log, and replace it.",
    Outcome.BUSY: "The node was overloaded, or the tenant called too often: check `kvstore stats`, and raise"
    " requests_per_s or add a node.",
    Outcome.NODE_AWAY: "The node could not be reached: check that it runs, its log and the network.",
    Outcome.GIVEN_UP: "The caller gave up or died: check where the time went, or raise its timeout.",
    Outcome.NO_SESSION: "No turn was appended to that session, it expired, or it was removed: check `kvstore"
    " sessions`.",
}
_SLOW_MS = 1.0
_HALF = 2

assert set(_SAID) == set(Outcome)
assert set(_ASKED) == set(Kind)
assert set(_DO) | HITS == set(Outcome)


class _Placed(NamedTuple):
    lookup: Lookup
    first: int  # the number of its first block


def explain(client: Client, request_id: str, session: tuple[str, str], last: int, *, as_json: bool) -> int:
    """Print it; the exit status."""
    told = client.looked_up(request_id, *session, last=last)
    if not told.lookups:
        asked = " ".join(filter(None, (request_id, "/".join(filter(None, session)))))
        since = f", the earliest of {_date(told.since_unix_ms)}" if told.remembered else ""
        print(  # noqa: T201 - its output
            f"kvstore: The node has no look-up{f' of {asked}' if asked else ''}; it has {told.remembered} of this"
            f" tenant's{since}. Did the engine ask this node, and say this request's id?",
            file=sys.stderr,
        )
        return Status.NO
    statistics = client.statistics()
    print(json.dumps(document(told, statistics), indent=2) if as_json else page(told, statistics))  # noqa: T201 - its output
    return 0


def document(told: LookedUp, statistics: StatisticsResponse) -> dict[str, object]:
    """For programs; `docs/seeing.md` says what the fields mean."""
    return {
        "now_unix_ms": told.now_unix_ms,
        "remembered": told.remembered,
        "since_unix_ms": told.since_unix_ms,
        "unwritten": told.unwritten,
        "lookups": [
            {
                "request": lookup.request_id,
                "kind": lookup.kind.name.lower(),
                "told_by": "client" if lookup.by_caller else "node",
                "at_unix_ms": lookup.at_unix_ms,
                "took_ms": lookup.took_us / 1000,
                "queued_ms": lookup.queued_us / 1000,
                "drive_ms": lookup.drive_us / 1000,
                "blocks": lookup.blocks,
                "looked_at": lookup.looked_at,
                "bytes": lookup.size_bytes,
                "detail": lookup.detail,
                "runs": [
                    {
                        "first": at,
                        "blocks": run.blocks,
                        "hit": run.outcome in HITS,
                        "outcome": run.outcome.name.lower(),
                        "gone_unix_ms": run.gone_unix_ms,
                        "idle_ms": run.idle_ms,
                    }
                    for at, run in _numbered(lookup, first)
                ],
            }
            for lookup, first in _placed(told.lookups)
        ],
        "advice": _advice(told.lookups, statistics),
    }


def page(told: LookedUp, statistics: StatisticsResponse) -> str:
    """For people."""
    lines = []
    request_id: str | None = None
    for lookup, first in _placed(told.lookups):
        if lookup.request_id != request_id:
            request_id = lookup.request_id
            lines += ["", f"request {printable(request_id) or '(its caller gave none)'}"]
        lines += _lookup_lines(lookup, first, told.now_unix_ms)
    lines += ["", *(f"What to do: {one}" for one in _advice(told.lookups, statistics))]
    if len(told.lookups) >= LOOKUPS_LISTED_MAX:
        lines.append(f"(There may be more: the last {LOOKUPS_LISTED_MAX} are shown.)")
    if told.unwritten:
        lines.append(f"({told.unwritten} look-ups of the node are not in its log; a restart loses them.)")
    return "\n".join(lines[1:])


def _lookup_lines(lookup: Lookup, first: int, now_ms: int) -> Iterator[str]:
    asked = _ASKED[lookup.kind].format(_blocks(lookup.blocks))
    who = ", reported by the client" if lookup.by_caller else ""
    yield f"  {_date(lookup.at_unix_ms)}  {asked}{who}"
    rows = [
        (_span(at, run.blocks), "hit " if run.outcome in HITS else "MISS", _said(run, lookup, now_ms))
        for at, run in _numbered(lookup, first)
    ]
    unseen = lookup.blocks - lookup.looked_at
    if unseen > 0:
        rows.append((_span(first + lookup.looked_at, unseen), "-   ", "not looked at"))
    width = max((len(row[0]) for row in rows), default=0)
    for span, verdict, said in rows:
        yield f"    {span.ljust(width)}  {verdict}  {said}"
    if lookup.detail:
        yield f"    {printable(lookup.detail)}"
    yield f"    took {_times(lookup)}"


def _times(lookup: Lookup) -> str:
    parts = []
    if lookup.kind is Kind.FETCH and not lookup.by_caller:
        parts.append(f"queued {_ms(lookup.queued_us)}")
    if lookup.drive_us:
        parts.append(f"drive {_ms(lookup.drive_us)}")
    if lookup.size_bytes:
        rest_us = max(0, lookup.took_us - lookup.queued_us - lookup.drive_us)
        parts.append(f"sending and the rest {_ms(rest_us)}, {show_size(lookup.size_bytes)} sent")
    return _ms(lookup.took_us) + (f": {', '.join(parts)}" if parts else "")


def _said(run: Run, lookup: Lookup, now_ms: int) -> str:
    said = _SAID[run.outcome]
    if run.gone_unix_ms:
        before = "" if run.blocks == 1 else "the first of them "
        said += f" {before}{show_time(now_ms - run.gone_unix_ms)} ago"
        since_ms = lookup.at_unix_ms - run.gone_unix_ms
        said += f", {show_time(since_ms)} before this look-up" if since_ms > 0 else ""
    if run.idle_ms:
        said += f"; idle for {show_time(run.idle_ms)}"
    return said


def _advice(lookups: Sequence[Lookup], statistics: StatisticsResponse) -> list[str]:
    """What to do about what was missed most, or about what took longest."""
    missed: Counter[Outcome] = Counter()
    for lookup in lookups:
        for run in lookup.runs:
            if run.outcome not in HITS:
                missed[run.outcome] += run.blocks
    if missed:
        told = [outcome for outcome, _ in missed.most_common(2)]
        room = f"{show_size(statistics.free_bytes)} of {show_size(statistics.capacity_bytes)} are free now"
        used, quota = show_size(statistics.quota_used_bytes), show_size(statistics.quota_bytes)
        said = [_DO[outcome].format(room=room, quota=f"{used} of {quota} now") for outcome in told]
    else:
        said = ["Nothing was missed."]
    slow = max(lookups, key=lambda one: one.took_us)
    if slow.took_us >= _SLOW_MS * 1000:
        if slow.queued_us * _HALF > slow.took_us:
            said.append(
                "Most of the time went to waiting for its turn: others fetch a lot; spread them over more nodes."
            )
        elif slow.drive_us * _HALF > slow.took_us:
            said.append(
                "Most of the time went to the drive: prefetch the session, or give the node more --hot memory."
            )
        elif slow.size_bytes and not missed:
            said.append("Most of the time went to sending: check the network and the caller's bandwidth.")
    return said


def _placed(lookups: Sequence[Lookup]) -> Iterator[_Placed]:
    """Look-ups with the numbers of their first blocks: the fetches of a resume follow on one another."""
    asked: dict[str, int] = {}
    for lookup in lookups:
        first = 0
        if lookup.kind is Kind.SESSION:
            asked[lookup.request_id] = 0
        elif lookup.kind is Kind.FETCH and not lookup.by_caller and lookup.request_id in asked:
            first = asked[lookup.request_id]
            asked[lookup.request_id] += lookup.blocks
        yield _Placed(lookup, first)


def _numbered(lookup: Lookup, first: int) -> Iterator[tuple[int, Run]]:
    for run in lookup.runs:
        yield first, run
        first += run.blocks


def _span(first: int, blocks: int) -> str:
    return f"block {first}" if blocks == 1 else f"blocks {first}-{first + blocks - 1}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _ms(us: int) -> str:
    return f"{us / 1000:.2f} ms"


def _date(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
