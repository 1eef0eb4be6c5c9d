"""Puts and gets where writes overtake each other, and complete before they have arrived, as far as flags allow."""

from __future__ import annotations

import pytest

from tests.cassini.suite import passes_on_cassini


@pytest.mark.timeout(270)
def test_puts_gets_and_flags_work_without_any_order_of_writes() -> None:
    passes_on_cassini(
        "tests/client/test_put_get.py",
        "tests/client/test_failing_writes.py",
        "tests/conformance/test_chain.py",
        "tests/conformance/test_words.py",
        timeout_s=240,
        REORDER="1",
    )
