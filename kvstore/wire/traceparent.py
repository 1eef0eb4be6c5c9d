"""The header that names the trace of a call: `traceparent`, in the format of W3C's Trace Context.

What always holds: an invalid value, or two of them, counts as no parent, and is no reason to refuse a call.
What it doesn't do: read `tracestate`, which is for vendors, or log what a caller wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.limits import TRACEPARENT_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TRACEPARENT_HEADER", "TraceParent", "parent_in"]

TRACEPARENT_HEADER: Final = "traceparent"
_SAMPLED: Final = 1
# Later versions add fields after a further dash; version ff is invalid.
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(NamedTuple):
    """The parent span of a caller."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def parent_in(metadata: Iterable[tuple[str, str | bytes]]) -> TraceParent | None:
    """The parent that a call's metadata names; None if it names none, or an invalid one."""
    said = [value for key, value in metadata if key == TRACEPARENT_HEADER]
    if len(said) != 1 or not isinstance(said[0], str) or len(said[0]) > TRACEPARENT_BYTES_MAX:
        return None
    match = _FORM.fullmatch(said[0])
    if match is None or (match[1] == "00" and match[5]):
        return None
    parent = TraceParent(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None
