"""Runs other tests again, in a process whose libfabric is the software Cassini."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cassini.build import build

__all__ = ["INSIDE", "passes_on_cassini"]

INSIDE = "TRIGGERKV_TESTS_ON_CASSINI"


def passes_on_cassini(*paths: str, timeout_s: float, **settings: str) -> None:
    """Run these tests on the software Cassini with these settings; a failure shows the end of their output."""
    if INSIDE in os.environ:
        pytest.skip("these are those tests already")
    environment = os.environ | {
        INSIDE: "1",
        "TRIGGERKV_LIBFABRIC": str(build()),
        "SOFT_CASSINI_FLUSH_MS": "20",
        **{f"SOFT_CASSINI_{name}": value for name, value in settings.items()},
    }
    environment.pop("FI_PROVIDER", None)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
