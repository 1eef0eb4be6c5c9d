"""The example in `docs/sealing.md`, run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.demo.node_process import NodeProcess
from kvstore.sealing.masters import new_master_file

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "sealing.md"


def test_the_example_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    new_master_file(tmp_path / "master.key")
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with_key = ("--master-key", f"file:{tmp_path / 'master.key'}")
    with NodeProcess(tmp_path / "data", capacity="32MiB", arguments=with_key) as node:
        command = [sys.executable, "-c", example.replace("127.0.0.1:7070", node.target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['WRITTEN', 'WRITTEN']",
        "1 session, 2 keys",
        "['MISS(erased): it was erased']",
    ]
