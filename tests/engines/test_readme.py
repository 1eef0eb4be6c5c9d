"""`make demo`, as in the README, in a clean copy of this tree: both environments (2.4 GB) and both demos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import clean_copy, commands, environment

pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO_S = 600


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 60)
def test_make_demo_runs_in_a_clean_copy(tmp_path: Path) -> None:
    (demo,) = {"make demo"} & set(commands((ROOT / "README.md").read_text()))
    copy = clean_copy(ROOT, tmp_path / "copy")
    clean = environment(copy) | {"PYTHON": sys.executable}  # which need not be the PATH's first
    done = subprocess.run(
        ["bash", "-ec", demo],
        cwd=copy,
        env=clean,
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "every byte came back exact" in done.stdout
    assert "are equal, bit for bit," in done.stdout
