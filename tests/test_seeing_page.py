"""`docs/seeing.md`: its example and commands are run as printed, and its fields are the real ones."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.limits import (
    LOOKUP_ID_BYTES_MAX,
    LOOKUP_LOG_FILES,
    LOOKUP_MISSES_EXPLAINED_MAX,
    LOOKUP_RUNS_MAX,
    LOOKUPS_MAX,
    LOOKUPS_WAITING_MAX,
)
from kvstore.names import block_key
from tests.conftest import small_client
from tests.readme import commands

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "seeing.md").read_text()
NODE = "127.0.0.1:7070"


def test_the_example_and_the_commands_of_the_page_run_as_printed(node: NodeProcess) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example.replace(NODE, node.target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "6\n6\n"), done.stderr
    with small_client(node.target) as client:
        key = block_key(b"x")
        client.put_inline(key, b"x")
        client.session("ada", "chat 7").append([key], 16)
        client.session("ada", "chat 7").keys()
    shown = commands(TEXT)
    assert len(shown) == 6
    for command in shown:
        name, *more = shlex.split(command.replace(NODE, node.target))
        assert name == "kvstore"
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *more], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        if "cmpl-7" in more:
            assert "block 6     MISS  deleted " in done.stdout
            assert "block 7     -     not examined" in done.stdout
            assert "What to do: The blocks were deleted" in done.stdout


def test_the_page_states_the_actual_bounds() -> None:
    assert f"The last {LOOKUPS_MAX:,} look-ups" in TEXT
    assert (
        f"first {LOOKUP_MISSES_EXPLAINED_MAX} misses of a look-up, and a look-up has at most {LOOKUP_RUNS_MAX} runs"
        in TEXT
    )
    assert f"at most {LOOKUP_ID_BYTES_MAX} bytes" in TEXT
    assert f"keeps the last {LOOKUPS_WAITING_MAX} look-ups" in TEXT
    assert LOOKUP_LOG_FILES == 4
