"""The commands of docs/commands.md for single blocks, run as printed, on a node with and without encryption."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.running import Status
from kvstore.cli import main
from kvstore.names import block_key, domain_of, in_domain
from tests.conftest import small_node, with_master_key

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()


@pytest.mark.parametrize("encrypted", [False, True], ids=["in the clear", "encrypted"])
def test_blocks_by_hand_as_the_page_shows_them(tmp_path: Path, *, encrypted: bool) -> None:
    (printed,) = re.findall(r"## Blocks by hand\n.*?```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        line for line in printed.splitlines() if not line.startswith("kvstore watch")
    ]  # it takes 10 s
    assert [line.split()[1] for line in commands] == ["put", "get", "get", "pin", "delete"]
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    script = f'kvstore() {{ "{sys.executable}" -m kvstore "$@"; }}\nset -eo pipefail\n' + "\n".join(commands)
    arguments = with_master_key(tmp_path) if encrypted else ()
    with small_node(tmp_path / "node", arguments=arguments) as node:
        ours = {"TRIGGERKV_NODE": node.target, "PYTHONPATH": str(ROOT)} | (
            {"TRIGGERKV_USER": "ada"} if encrypted else {}
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=os.environ | ours,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "copy-of-README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    assert "# " in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[-1].endswith(" deleted")


def test_a_users_block_is_found_with_the_same_user_or_by_its_full_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page"
    file.write_text("bytes")
    with small_node(tmp_path / "node", arguments=with_master_key(tmp_path)) as node:
        ours = ("--node", node.target)
        for command in ("get", "pin", "delete", "delete"):
            assert main(["put", "name:hello", str(file), "--user", "ada", *ours]) == 0
            key = capsys.readouterr().out.split()[0]
            assert key == in_domain(block_key(b"hello"), domain_of("ada")).hex()
            assert main([command, "name:hello", *ours]) == Status.NO
            assert main([command, "name:hello", "--user", "grace", *ours]) == Status.NO
            assert main([command, "name:hello", "--user", "", *ours]) == Status.USAGE
            named = [key] if command == "get" else ["name:hello", "--user", "ada"]
            assert main([command, *named, *ours]) == 0
            assert capsys.readouterr().out.splitlines()[-1].startswith((key, "bytes"))
