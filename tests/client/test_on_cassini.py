"""The whole path under Cassini's rules: a NIC that holds the puts, memory bound to endpoints, offsets for addresses."""

from __future__ import annotations

import pytest

from tests.cassini.suite import passes_on_cassini


@pytest.mark.timeout(300)
def test_puts_gets_and_their_guarantees_hold_on_the_software_cassini() -> None:
    passes_on_cassini("tests/client/test_put_get.py", "tests/client/test_promises.py", timeout_s=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("errors_count", "late_ms"), [("0", "0"), ("1", "0"), ("1", "40")])
def test_a_block_whose_write_failed_is_neither_stored_nor_acknowledged(
    errors_count: str, late_ms: str
) -> None:
    """Also if the NIC fires late while it is probed for what a failure fires."""
    passes_on_cassini(
        "tests/client/test_failing_writes.py", timeout_s=240, ERRORS_COUNT=errors_count, LATE_MS=late_ms
    )
