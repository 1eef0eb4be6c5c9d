"""The whole suite once more in processes whose libfabric is the software Cassini, which this one's is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cassini.build import build
from tests.nic_offload.rig import offered

HERE = Path(__file__).parent
SECONDS = 480
TAIL_CHARACTERS = 6000
# Whether failures fire what waits, and whether writes overtake each other. All four pairs are for the long form.
MODES = {("0", "0"): "", ("1", "1"): ""}
if "TRIGGERKV_CASSINI_MODES" in os.environ:
    MODES |= {("0", "1"): "crossed", ("1", "0"): "crossed"}
# About what fires when, and in which order it arrives; the other files run in two modes only.
CROSSED = ("cancel", "chain", "deadline", "early", "failed_chain", "get", "model", "once", "slots", "words")
PASSED_MIN = {"": 150, "crossed": 120}


def started(folder: Path, library: Path, errors_count: str, reorders: str) -> subprocess.Popen[bytes]:
    """Start the suite in one mode, with its output in the file `said`."""
    folder.mkdir()
    environment = os.environ | {
        "TRIGGERKV_LIBFABRIC": str(library),
        "SOFT_CASSINI_FLUSH_MS": "20",
        "SOFT_CASSINI_ERRORS_COUNT": errors_count,
        "SOFT_CASSINI_REORDER": reorders,
    }
    files = [HERE / f"test_{name}.py" for name in CROSSED] if MODES[errors_count, reorders] else [HERE]
    options = ["-q", "-k", "cxi", "-p", "no:cacheprovider", f"--basetemp={folder / 'inside'}"]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *map(str, files)],
            env=environment,
            cwd=HERE.parents[1],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.timeout(SECONDS + 30)
def test_the_suite_on_the_software_cassini(tmp_path: Path) -> None:
    """Under each rule of what fires on a failure, with and without ordered writes; each pair of these in the long form.

    A flush takes 20 ms here.
    """
    if "cxi" in offered():
        pytest.skip("this process's libfabric answers as cxi itself: the other tests here cover it")
    library = build()
    until_s = time.monotonic() + SECONDS
    with ExitStack() as undo:
        suites = {}
        for mode in MODES:
            folder = tmp_path / "".join(mode)
            suites[mode, folder] = undo.enter_context(started(folder, library, *mode))
            undo.callback(suites[mode, folder].kill)  # without effect on one that has ended
        for (mode, folder), suite in suites.items():
            status = suite.wait(until_s - time.monotonic())
            tail = (folder / "said").read_text(errors="replace")[-TAIL_CHARACTERS:]
            assert status == 0, (mode, tail)
            passed = re.search(r"(\d+) passed", tail)
            assert passed, (mode, tail)
            assert int(passed[1]) >= PASSED_MIN[MODES[mode]], (mode, tail)
