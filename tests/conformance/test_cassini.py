"""The whole suite once more in a process whose libfabric is the software Cassini, which this one's is not."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nic_offload.errors import FabricUnavailable
from tests.nic_offload.rig import offered

HERE = Path(__file__).parent
SECONDS = 480
TAIL_CHARACTERS = 6000
PASSED_MIN = 150


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("errors_count", "reorders"), [("0", "0"), ("1", "1")])
def test_the_suite_on_the_software_cassini(tmp_path: Path, errors_count: str, reorders: str) -> None:
    """Under each rule of what a failure fires, once with and once without an order of writes.

    A flush takes 20 ms here; hardware takes a second, and so does the stand-in by default.
    """
    try:
        if "cxi" in offered():
            pytest.skip("this process's libfabric answers as cxi itself")
    except FabricUnavailable as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("tests.cassini") is None:
        pytest.skip("there is no tests/cassini, the stand-in for libfabric that answers as cxi")
    library = importlib.import_module("tests.cassini.build").build()
    environment = os.environ | {
        "TRIGGERKV_LIBFABRIC": str(library),
        "SOFT_CASSINI_FLUSH_MS": "20",
        "SOFT_CASSINI_ERRORS_COUNT": errors_count,
        "SOFT_CASSINI_REORDER": reorders,
    }
    options = ["-q", "-k", "cxi", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inside'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE)],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    tail = (done.stdout + done.stderr)[-TAIL_CHARACTERS:]
    assert done.returncode == 0, tail
    passed = re.search(r"(\d+) passed", tail)
    assert passed, tail
    assert int(passed[1]) >= PASSED_MIN, tail
