"""`kvstore explain`: why a request's blocks hit or missed, run by run, how long it took, and what to do about it.

It asks the given nodes, or all members of a cluster, at the same time, and changes nothing. It shows the look-ups that
each node recorded, and those that did not reach it and were reported later by clients. Blocks are numbered within their
look-up at that node; after a session's own look-up, with which a resume begins, they are numbered within the resume. A
node that doesn't answer is named, and the others are shown.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvcli.running import Status
from kvstore.client import Client
from kvstore.commands.cluster_command import zones
from kvstore.config import counted, printable, show_size
from kvstore.errors import KvError
from kvstore.explanations import ASKED, advice, lookup_document, numbered, outcome_text, placed
from kvstore.limits import CLUSTER_CALLS_AT_ONCE, LOOKUPS_LISTED_MAX
from kvstore.lookups import HITS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.client.observing import LookedUp
    from kvstore.lookups import Lookup
    from kvstore.reach import Reach
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = ["document", "explain", "page"]

_ELSEWHERE = (
    "A block that one node misses is requested from its next owners: what to do about a miss applies only if none of"
    " these has a hit."
)


def explain(reach: Reach, request_id: str, session: tuple[str, str], last: int, *, as_json: bool) -> int:
    """Print it; returns the exit status. If no node answers, the first one's error is raised."""

    def ask(node: str) -> tuple[LookedUp, StatisticsResponse] | KvError:
        try:
            with Client(reach.at(node)) as client:
                return client.looked_up(request_id, *session, last=last), client.statistics()
        except KvError as error:
            return error

    zone_of = zones(reach)
    names = list(zone_of)
    with ThreadPoolExecutor(CLUSTER_CALLS_AT_ONCE) as threads:
        answers = dict(zip(names, threads.map(ask, names), strict=True))
    silent = {node: one for node, one in answers.items() if isinstance(one, KvError)}
    reported = {node: one for node, one in answers.items() if not isinstance(one, KvError)}
    if not reported:
        raise next(iter(silent.values()))
    for node, error in silent.items():
        print(f"kvstore: {node} did not answer: {error}", file=sys.stderr)  # noqa: T201 - its output
    found = {node: one for node, one in reported.items() if one[0].lookups}
    if not found:
        asked = " ".join(filter(None, (request_id, "/".join(filter(None, session)))))
        kept = sum(one.kept for one, _ in reported.values())
        since_ms = min((one.earliest_unix_ms for one, _ in reported.values() if one.kept), default=0)
        since = f" since {_date(since_ms)}" if since_ms else ""
        who, these = (
            ("The node remembers", "this node") if len(reported) == 1 else ("The nodes remember", "them")
        )
        if as_json:
            print(json.dumps(_documents(reported, names), indent=2))  # noqa: T201 - its output
        missing = f"{who} no look-up{f' of {asked}' if asked else ''}"
        if kept:
            others = f"{kept} of this tenant{since}"
            said = f"{missing}, but {others}: check the id, and whether the request went to {these}."
        else:
            other = ", nor any other of this tenant" if asked else " of this tenant"
            said = f"{missing}{other}, which has not requested blocks from {these} yet."
        print(f"kvstore: {said}", file=sys.stderr)  # noqa: T201 - its output
        return Status.NO
    if as_json:
        print(json.dumps(_documents(found, names), indent=2))  # noqa: T201 - its output
        return Status.DONE
    for node, one in sorted(found.items(), key=lambda row: row[1][0].lookups[0].at_unix_ms):
        head = f"{node}, zone {zone_of[node]}" if zone_of[node] else node
        print(f"{head}:\n{page(*one)}\n" if len(names) > 1 else page(*one))  # noqa: T201 - its output
    print(end=_elsewhere([one.lookups for one, _ in found.values()]))  # noqa: T201 - its output
    return Status.DONE


def _elsewhere(lookups: Sequence[Sequence[Lookup]]) -> str:
    """A line for look-ups of several nodes, if some missed and some hit."""
    outcomes = {run.outcome in HITS for some in lookups for one in some for run in one.runs}
    return f"{_ELSEWHERE}\n" if len(lookups) > 1 and len(outcomes) > 1 else ""


def _documents(
    reported: Mapping[str, tuple[LookedUp, StatisticsResponse]], names: Sequence[str]
) -> dict[str, object]:
    """The only node's answer, or each node's by its address."""
    said = {node: document(*one) for node, one in reported.items()}
    return dict(said) if len(names) > 1 else next(iter(said.values()))


def document(reported: LookedUp, statistics: StatisticsResponse) -> dict[str, object]:
    """For programs; `docs/seeing.md` says what the fields mean."""
    return {
        "now_unix_ms": reported.now_unix_ms,
        "kept": reported.kept,
        "earliest_unix_ms": reported.earliest_unix_ms,
        "not_logged": reported.not_logged,
        "lookups": [lookup_document(lookup, first) for lookup, first in placed(reported.lookups)],
        "advice": advice(reported.lookups, statistics) if reported.lookups else [],
    }


def page(reported: LookedUp, statistics: StatisticsResponse) -> str:
    """For people."""
    lines = []
    request_id: str | None = None
    for lookup, first in placed(reported.lookups):
        if lookup.request_id != request_id:
            request_id = lookup.request_id
            lines += ["", f"request {printable(request_id) or '(the caller gave no id)'}"]
        lines += _lookup_lines(lookup, first, reported.now_unix_ms)
    lines += ["", *(f"What to do: {one}" for one in advice(reported.lookups, statistics))]
    if len(reported.lookups) >= LOOKUPS_LISTED_MAX:
        lines.append(f"(There may be more: the last {LOOKUPS_LISTED_MAX} are shown.)")
    if reported.not_logged:
        lines.append(
            f"({reported.not_logged} look-ups of the node are not in its log; a restart loses them.)"
        )
    return "\n".join(lines[1:])


def _lookup_lines(lookup: Lookup, first: int, now_ms: int) -> Iterator[str]:
    asked = ASKED[lookup.kind].format(counted(lookup.blocks, "block"))
    who = ", reported by the client" if lookup.by_caller else ""
    yield f"  {_date(lookup.at_unix_ms)}  {asked}{who}"
    rows = [
        (_span(at, run.blocks), "hit " if run.outcome in HITS else "MISS", outcome_text(run, lookup, now_ms))
        for at, run in numbered(lookup, first)
    ]
    unseen = lookup.blocks - lookup.examined
    if unseen > 0:
        rows.append((_span(first + lookup.examined, unseen), "-   ", "not examined"))
    width = max((len(row[0]) for row in rows), default=0)
    for span, verdict, text in rows:
        yield f"    {span.ljust(width)}  {verdict}  {text}"
    if lookup.detail:
        yield f"    {printable(lookup.detail)}"
    if lookup.took_us:  # a look-up that a client reports may have none
        yield f"    took {_times(lookup)}"


def _times(lookup: Lookup) -> str:
    parts = []
    if lookup.kind is Kind.FETCH and not lookup.by_caller:
        parts.append(f"queued {_ms(lookup.queued_us)}")
    if lookup.drive_us:
        parts.append(f"drive {_ms(lookup.drive_us)}")
    if lookup.size_bytes:
        rest_us = max(0, lookup.took_us - lookup.queued_us - lookup.drive_us)
        parts.append(f"delivery and the rest {_ms(rest_us)}, {show_size(lookup.size_bytes)} delivered")
    return _ms(lookup.took_us) + (f": {', '.join(parts)}" if parts else "")


def _span(first: int, blocks: int) -> str:
    return f"block {first}" if blocks == 1 else f"blocks {first}-{first + blocks - 1}"


def _ms(us: int) -> str:
    return f"{us / 1000:.2f} ms"


def _date(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
