"""`kvstore.testing`: the node that users' own tests are given."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.demo.node_process import NodeProcess
from kvstore.errors import NodeUnavailable
from kvstore.names import block_key
from kvstore.testing import LocalNode

if TYPE_CHECKING:
    from kvstore.client import Client

pytest_plugins = ["kvstore.testing.fixtures"]

KEY = block_key(b"testing")


def test_a_client_of_the_fixture_has_its_own_tenant(
    kv_process_node: LocalNode, kv_process_client: Client
) -> None:
    kv_process_client.put_inline(KEY, b"KV")
    assert kv_process_client.get_inline(KEY, 2) == b"KV"
    with kv_process_node.client(tenant="another") as other:
        assert not isinstance(other.get_inline(KEY, 2), bytes)


def test_a_closed_node_leaves_nothing_behind() -> None:
    with LocalNode() as node:
        folder, pid = Path(node._folder.name), node._process.pid
        assert (folder / "node").is_dir()
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    node.close()  # once more is nothing


def test_a_node_that_does_not_start_says_why_and_leaves_nothing() -> None:
    before = set(Path(tempfile.gettempdir()).glob("triggerkv-*"))
    with pytest.raises(NodeUnavailable, match=r"did not start: (?!kvstore: ).*eviction"):
        LocalNode(arguments=("--eviction", "none"))
    assert set(Path(tempfile.gettempdir()).glob("triggerkv-*")) <= before


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def interrupted(process: subprocess.Popen[str]) -> str:
        started.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(NodeProcess, "_first_line", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        NodeProcess(tmp_path / "node", capacity="64MiB")
    assert not Path(f"/proc/{started[0]}").exists()


def test_users_tests_can_use_the_fixtures(tmp_path: Path) -> None:
    test = tmp_path / "test_mine.py"
    test.write_text(
        'pytest_plugins = ["kvstore.testing.fixtures"]\n'
        "def test_a_block_comes_back(kv_client):\n"
        "    kv_client.put_inline(bytes(32), b'KV')\n"
        "    assert kv_client.get_inline(bytes(32), 2) == b'KV'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
