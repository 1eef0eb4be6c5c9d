"""The effects on other callers of a flush that takes a full second, as on cxi."""

from __future__ import annotations

import pytest

from tests.cassini.suite import passes_on_cassini


@pytest.mark.timeout(150)
@pytest.mark.parametrize("errors_count", ["0", "1"])
def test_a_flush_of_a_second_delays_nobody_else(errors_count: str) -> None:
    passes_on_cassini(
        "tests/conformance/test_slots.py", timeout_s=120, FLUSH_MS="1000", ERRORS_COUNT=errors_count
    )
