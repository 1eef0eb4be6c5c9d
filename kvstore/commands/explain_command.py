"""`kvstore explain`: why a request's blocks hit or missed, run by run, how long it took, and what to do about it.

It asks one node, and changes nothing. It shows what that node recorded, and what clients reported of look-ups that
did not reach the node. Blocks are numbered within their look-up; after a session's own look-up, with which a resume
begins, they are numbered within the resume.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvcli.running import Status
from kvstore.config import printable, show_size
from kvstore.explanations import ASKED, advice, lookup_document, numbered, placed, said
from kvstore.limits import LOOKUPS_LISTED_MAX
from kvstore.lookups import HITS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client import Client
    from kvstore.client.observing import LookedUp
    from kvstore.lookups import Lookup
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = ["document", "explain", "page"]


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
        "lookups": [lookup_document(lookup, first) for lookup, first in placed(told.lookups)],
        "advice": advice(told.lookups, statistics),
    }


def page(told: LookedUp, statistics: StatisticsResponse) -> str:
    """For people."""
    lines = []
    request_id: str | None = None
    for lookup, first in placed(told.lookups):
        if lookup.request_id != request_id:
            request_id = lookup.request_id
            lines += ["", f"request {printable(request_id) or '(the caller gave no id)'}"]
        lines += _lookup_lines(lookup, first, told.now_unix_ms)
    lines += ["", *(f"What to do: {one}" for one in advice(told.lookups, statistics))]
    if len(told.lookups) >= LOOKUPS_LISTED_MAX:
        lines.append(f"(There may be more: the last {LOOKUPS_LISTED_MAX} are shown.)")
    if told.unwritten:
        lines.append(f"({told.unwritten} look-ups of the node are not in its log; a restart loses them.)")
    return "\n".join(lines[1:])


def _lookup_lines(lookup: Lookup, first: int, now_ms: int) -> Iterator[str]:
    asked = ASKED[lookup.kind].format(_blocks(lookup.blocks))
    who = ", reported by the client" if lookup.by_caller else ""
    yield f"  {_date(lookup.at_unix_ms)}  {asked}{who}"
    rows = [
        (_span(at, run.blocks), "hit " if run.outcome in HITS else "MISS", said(run, lookup, now_ms))
        for at, run in numbered(lookup, first)
    ]
    unseen = lookup.blocks - lookup.looked_at
    if unseen > 0:
        rows.append((_span(first + lookup.looked_at, unseen), "-   ", "not looked at"))
    width = max((len(row[0]) for row in rows), default=0)
    for span, verdict, text in rows:
        yield f"    {span.ljust(width)}  {verdict}  {text}"
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


def _span(first: int, blocks: int) -> str:
    return f"block {first}" if blocks == 1 else f"blocks {first}-{first + blocks - 1}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _ms(us: int) -> str:
    return f"{us / 1000:.2f} ms"


def _date(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"
