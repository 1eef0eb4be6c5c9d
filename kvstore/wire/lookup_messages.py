"""Lookups as messages, for the wire and for the log on disk.

What always holds: kinds and outcomes of a later version are read as UNSPECIFIED; texts are cut to their bounds when
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvstore.limits import LOOKUP_DETAIL_BYTES_MAX
from kvstore.lookups import Kind, Lookup, Outcome, Run
from kvstore.wire import lookups_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LOOKUPS_HEADER", "REQUEST_HEADER", "lookup_message", "lookup_of"]

LOOKUPS_HEADER = "kvstore-lookups-bin"
REQUEST_HEADER = "x-request-id"

_KINDS = {int(one): one for one in Kind}
_OUTCOMES = {int(one): one for one in Outcome}


def lookup_message(lookup: Lookup) -> pb.Lookup:
    """For the wire."""
    return pb.Lookup(
        request_id=lookup.request_id,
        kind=cast("pb.LookupKind", int(lookup.kind)),
        at_unix_ms=lookup.at_unix_ms,
        took_us=lookup.took_us,
        queued_us=lookup.queued_us,
        drive_us=lookup.drive_us,
        blocks=lookup.blocks,
        size_bytes=lookup.size_bytes,
        runs=map(_run_message, lookup.runs),
        by_caller=lookup.by_caller,
        detail=lookup.detail.encode()[:LOOKUP_DETAIL_BYTES_MAX].decode(errors="ignore"),
    )


def _run_message(run: Run) -> pb.LookupRun:
    outcome = cast("pb.LookupOutcome", int(run.outcome))
    return pb.LookupRun(
        blocks=run.blocks, outcome=outcome, gone_unix_ms=run.gone_unix_ms, idle_ms=run.idle_ms
    )


def lookup_of(message: pb.Lookup) -> Lookup:
    """From the wire."""
    return Lookup(
        request_id=message.request_id,
        kind=_KINDS.get(message.kind, Kind.UNSPECIFIED),
        at_unix_ms=message.at_unix_ms,
        took_us=message.took_us,
        queued_us=message.queued_us,
        drive_us=message.drive_us,
        blocks=message.blocks,
        size_bytes=message.size_bytes,
        runs=tuple(_runs(message.runs)),
        by_caller=message.by_caller,
        detail=message.detail,
    )


def _runs(messages: Iterable[pb.LookupRun]) -> Iterable[Run]:
    for one in messages:
        outcome = _OUTCOMES.get(one.outcome, Outcome.UNSPECIFIED)
        yield Run(one.blocks, outcome, one.gone_unix_ms, one.idle_ms)
