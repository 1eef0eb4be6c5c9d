"""README's commands, run as printed in this tree, whose set-up is complete.

`tests/engines/test_readme.py` runs `make demo` in a clean copy, with both set-ups; here it is the demo alone.
`make test` would run this test again, and that one the next: it is given PYTEST_ARGS with one short file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.readme import clean_copy, commands, environment

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = commands((ROOT / "README.md").read_text())
WITHOUT_ENGINES = {"make demo": "make setup && .venv/bin/kvstore demo"}


def test_commands_are_parsed_as_printed() -> None:
    text = "x\n```console\n$ make a\noutput\n$ b -c 'd'\n```\n```python\n$ no\n```\n"
    text += "```sh\n# why\ne && f\n\n```\n```\n$ no\n```\n"
    assert commands(text) == ["make a", "b -c 'd'", "e && f"]


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


def test_a_clean_copy_contains_what_git_would_and_nothing_built(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True, timeout=60)
    for name in ("kept", "new", "gone", "built.so"):
        (tree / name).write_text(name)
    (tree / ".gitignore").write_text("*.so\n")
    subprocess.run(["git", "add", "kept", "gone", ".gitignore"], cwd=tree, check=True, timeout=60)
    (tree / "gone").unlink()
    copy = clean_copy(tree, tmp_path / "copy")
    assert sorted(path.name for path in copy.iterdir()) == [".gitignore", "kept", "new"]


def test_an_unpacked_archive_is_copied_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("kept", "built.so", ".venv/bin/python", "build/x", "a/kept"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    copy = clean_copy(tree, tmp_path / "copy")
    files = [path.relative_to(copy).as_posix() for path in sorted(copy.rglob("*")) if path.is_file()]
    assert files == ["a/kept", "kept"]


def _python_of_the_readme(node: NodeProcess) -> str:
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return str(example).replace("127.0.0.1:7070", node.target)


def test_the_client_example_of_the_readme_runs_as_printed(node: NodeProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _python_of_the_readme(node)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WRITTEN") == 3
    assert done.stdout.count("'Hit'") == 3


def test_a_node_accepts_the_readmes_blocks_and_a_chat_that_starts_over_when_it_is_full(
    node: NodeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(_python_of_the_readme(node), {})
    chat = (ROOT / "examples/chat_resume.py").read_text().replace("127.0.0.1:7070", node.target)
    capsys.readouterr()
    for turn in [*range(16), 0, 1]:
        exec(chat, {})
        assert f"{turn * 64} tokens from the node, 64 computed\n" in capsys.readouterr().out
    # Its blocks aren't the README's.
    exec(_python_of_the_readme(node), {})


def test_the_copy_does_not_see_the_venv_around_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"/x/.venv/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("VIRTUAL_ENV", "/x/.venv")
    monkeypatch.setenv("MAKEFLAGS", "n")
    clean = environment(tmp_path)
    assert clean["PATH"] == "/usr/bin"
    assert not {"VIRTUAL_ENV", "MAKEFLAGS", "PYTHONPATH"} & clean.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("printed", COMMANDS)
def test_a_command_of_the_readme_runs(printed: str) -> None:
    done = subprocess.run(
        ["bash", "-ec", WITHOUT_ENGINES.get(printed, printed)],
        cwd=ROOT,
        env=environment(ROOT) | {"PYTEST_ARGS": "-q tests/test_names.py"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
