"""The example in `docs/sessions.md`, run as printed, and the command that the page names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.names import block_key
from tests.conftest import small_client

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node("shared")

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "sessions.md"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)


def test_the_example_of_the_page_runs_as_printed(node: NodeProcess) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = run("-c", example.replace("127.0.0.1:7070", node.target))
    assert done.returncode == 0, done.stderr
    turns, whole, listed, half, why = done.stdout.splitlines()
    assert turns == "[range(0, 48), range(48, 80)]"
    assert whole == "True 5 80"
    assert "('chat 7', 5, 80)" in listed
    assert "('chat 7, another answer', 3, 48)" in listed
    assert half == "False 2 32 MISS(not stored)"
    assert why.startswith("The block was deleted ")


def test_the_command_lists_a_users_sessions_the_latest_last(node: NodeProcess) -> None:
    with small_client(node.target, tenant="acme") as client:
        key = block_key(b"x")
        client.put_inline(key, b"x")
        for name in ("old", "new\x1b[31m"):
            client.session("ada", name).append([key] * 3, 48)
        client.session("ada", "old").append([key], 16)
    ask = ("-m", "kvstore", "sessions", "--node", node.target, "--user", "ada", "--tenant", "acme")
    table = run(*ask)
    assert table.returncode == 0, table.stderr
    heads, _, first, last = table.stdout.splitlines()
    assert heads.split() == ["session", "turns", "blocks", "tokens", "last", "turn", "(UTC)"]
    assert first.split()[:4] == ["new\N{REPLACEMENT CHARACTER}[31m", "1", "3", "48"], (
        "no terminal is told anything"
    )
    assert last.split()[:4] == ["old", "2", "4", "64"]
    listed = json.loads(run(*ask, "--json").stdout)
    assert [(one["session"], one["tokens"]) for one in listed] == [("new\x1b[31m", 48), ("old", 64)]
    assert run("-m", "kvstore", "sessions", "--node", node.target, "--user", "eve", "--json").stdout == "[]\n"


def test_command_errors_of_sessions_are_one_sentence(node: NodeProcess, tmp_path: Path) -> None:
    ask = ("-m", "kvstore", "sessions", "--user", "ada", "--node")
    for status, *more in ((1, "127.0.0.1:1"), (2, node.target, "--token-file", str(tmp_path / "none"))):
        done = run(*ask, *more)
        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr.startswith("kvstore: ")
        assert len(done.stderr.splitlines()) == 1
