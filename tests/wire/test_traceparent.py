"""`traceparent`: valid by W3C's Trace Context, or absent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import TRACEPARENT_BYTES_MAX
from kvstore.wire.traceparent import TRACEPARENT_HEADER, TraceParent, parent_in

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def said(value: str | bytes, times: int = 1) -> TraceParent | None:
    return parent_in([("x-request-id", "a"), *((TRACEPARENT_HEADER, value),) * times])


def test_valid_input_is_parsed() -> None:
    assert said(GOOD) == TraceParent(int(TRACE, 16), int(SPAN, 16), sampled=True)
    assert said(f"00-{TRACE}-{SPAN}-00") == TraceParent(int(TRACE, 16), int(SPAN, 16), sampled=False)
    assert said(f"00-{TRACE}-{SPAN}-03") == said(GOOD)  # other flags are others' affair
    assert said(f"cc-{TRACE}-{SPAN}-01-what.the-future-brings") == said(GOOD)
    assert parent_in([]) is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        GOOD.encode(),
        GOOD.upper(),
        GOOD + " ",
        GOOD + "\n",
        GOOD + "-x",
        GOOD[:-1],
        GOOD[:-3],
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",  # a digit, as Unicode sees it
        f"00_{TRACE}_{SPAN}_01",
        f"cc-{TRACE}-{SPAN}-01" + "-" + "x" * TRACEPARENT_BYTES_MAX,
        f"cc-{TRACE}-{SPAN}-01x",
        "'; drop table spans; --",
    ],
)
def test_an_invalid_header_is_no_parent(value: str | bytes) -> None:
    assert said(value) is None


def test_two_headers_are_none() -> None:
    assert said(GOOD, times=2) is None


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_written_data_is_read_back(trace_id: int, span_id: int, sampled: bool) -> None:  # noqa: FBT001 - drawn
    parent = TraceParent(trace_id, span_id, sampled)
    assert said(str(parent)) == parent


@given(st.text(max_size=80))
def test_any_other_input_is_survived(text: str) -> None:
    assert said(text) is None or text[:2] != "ff"
