"""The outcomes of look-ups, in sentences: for `kvstore explain` and the node's web page.

What always holds: every kind and outcome has a sentence, and every outcome that is not a hit has advice.
What it doesn't do: call a node, or print.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.config import show_size, show_time
from kvstore.limits import LOOKUP_SLOW_MS
from kvstore.lookups import HITS, Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.lookups import Lookup, Run
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = ["ASKED", "Placed", "advice", "lookup_document", "numbered", "outcome_text", "placed"]

ASKED = {
    Kind.UNSPECIFIED: "look-up of {}",
    Kind.EXISTS: "checked whether {} can be got",
    Kind.PREFIX: "counted how many of {} are stored, up to the first gap",
    Kind.FETCH: "fetched {}",
    Kind.GET: "got {} over gRPC",
    Kind.SESSION: "listed the session, {}",
}
TEXTS = {
    Outcome.UNSPECIFIED: "mixed outcomes",
    Outcome.MEMORY: "in the node's memory",
    Outcome.DRIVE: "read from a drive",
    Outcome.STORED: "stored",
    Outcome.NAMED: "named by the session",
    Outcome.NEVER: "never stored by this tenant under this key, or removed too long ago to be remembered",
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
    Outcome.ERASED: "erased on request, with its encryption key",
}
DO = {
    Outcome.UNSPECIFIED: "Request fewer blocks at a time to see each of them.",
    Outcome.NEVER: "Nothing was put under these keys: check that the writer has finished, has the same tenant,"
    " and makes keys from the same model, tokens and salt.",
    Outcome.EVICTED: "The drives were full ({room}): add drives, or set quotas for the tenants that fill them.",
    Outcome.STRANDED: "The drives were full ({room}) and a block before these had been evicted: add drives, or"
    " protect sessions that return.",
    Outcome.CLEARED: "The drives were full ({room}) and fragmented: add drives, or use one block size.",
    Outcome.EXPIRED: "Put the blocks with a longer time to live, or without one.",
    Outcome.QUOTA: "The tenant's quota was used up ({quota}): raise it, or store less.",
    Outcome.DELETED: "The blocks were deleted; put them again if that was a mistake.",
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
    Outcome.ERASED: "The blocks were erased (`kvstore erase`); the audit log says when and for whom.",
}
assert set(TEXTS) == set(Outcome)
assert set(ASKED) == set(Kind)
assert set(DO) | HITS == set(Outcome)

_HALF = 2


class Placed(NamedTuple):
    """A look-up, and the number of its first block within its request."""

    lookup: Lookup
    first: int  # the number of its first block


def lookup_document(lookup: Lookup, first: int) -> dict[str, object]:
    """One look-up for programs; `docs/seeing.md` says what the fields mean."""
    return {
        "request": lookup.request_id,
        "kind": lookup.kind.name.lower(),
        "reported_by": "client" if lookup.by_caller else "node",
        "at_unix_ms": lookup.at_unix_ms,
        "took_ms": lookup.took_us / 1000,
        "queued_ms": lookup.queued_us / 1000,
        "drive_ms": lookup.drive_us / 1000,
        "blocks": lookup.blocks,
        "examined": lookup.examined,
        "bytes": lookup.size_bytes,
        "detail": lookup.detail,
        "runs": [
            {
                "first": at,
                "blocks": run.blocks,
                "hit": run.outcome in HITS,
                "outcome": run.outcome.name.lower(),
                "removed_unix_ms": run.gone_unix_ms,
                "idle_ms": run.idle_ms,
            }
            for at, run in numbered(lookup, first)
        ],
    }


def outcome_text(run: Run, lookup: Lookup, now_ms: int) -> str:
    """The outcome of a run of blocks, and when it happened."""
    text = TEXTS[run.outcome]
    if run.gone_unix_ms:
        before = "" if run.blocks == 1 else "the first of them "
        text += f" {before}{show_time(now_ms - run.gone_unix_ms)} ago"
        since_ms = lookup.at_unix_ms - run.gone_unix_ms
        text += f", {show_time(since_ms)} before this look-up" if since_ms > 0 else ""
    if run.idle_ms:
        text += f"; idle for {show_time(run.idle_ms)}"
    return text


def advice(lookups: Sequence[Lookup], statistics: StatisticsResponse) -> list[str]:
    """Advice on the most frequent miss, or on the slowest part."""
    missed: Counter[Outcome] = Counter()
    for lookup in lookups:
        for run in lookup.runs:
            if run.outcome not in HITS:
                missed[run.outcome] += run.blocks
    if missed:
        most = [outcome for outcome, _ in missed.most_common(2)]
        room = f"{show_size(statistics.free_bytes)} of {show_size(statistics.capacity_bytes)} are free now"
        used, quota = show_size(statistics.quota_used_bytes), show_size(statistics.quota_bytes)
        sentences = [DO[outcome].format(room=room, quota=f"{used} of {quota} now") for outcome in most]
    else:
        sentences = ["Nothing was missed."]
    slow = max(lookups, key=lambda one: one.took_us)
    if slow.took_us >= LOOKUP_SLOW_MS * 1000:
        if slow.queued_us * _HALF > slow.took_us:
            sentences.append(
                "Most of the time was spent queueing behind other fetches: spread the load over more nodes."
            )
        elif slow.drive_us * _HALF > slow.took_us and not missed:
            sentences.append(
                "Most of the time was spent on the drive: prefetch the session, or give the node more --hot memory."
            )
        elif slow.size_bytes and not missed:
            sentences.append(
                "Most of the time was spent sending: check the network and the caller's bandwidth."
            )
    return sentences


def placed(lookups: Sequence[Lookup]) -> Iterator[Placed]:
    """Look-ups with the numbers of their first blocks: the fetches of a resume follow on one another."""
    asked: dict[str, int] = {}
    for lookup in lookups:
        first = 0
        if lookup.kind is Kind.SESSION:
            asked[lookup.request_id] = 0
        elif lookup.kind is Kind.FETCH and not lookup.by_caller and lookup.request_id in asked:
            first = asked[lookup.request_id]
            asked[lookup.request_id] += lookup.blocks
        yield Placed(lookup, first)


def numbered(lookup: Lookup, first: int) -> Iterator[tuple[int, Run]]:
    """The runs of a look-up with the number of the first block of each."""
    for run in lookup.runs:
        yield first, run
        first += run.blocks
