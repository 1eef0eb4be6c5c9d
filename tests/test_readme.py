"""README's commands, run as printed, in a clean copy of this tree with a set-up of its own.

`make demo` makes .venv-engines, of 2.4 GB: `tests/engines/test_readme.py` runs it. Here stand for it the set-up and the
demo without the chat that it ends with.
`make test` would run this test again, and that one the next: so in the copy it is given PYTEST_ARGS with the
tidy tests only, and TRIGGERKV_INSIDE_README, under which the tests here that run commands are skipped.
The slow ones come last, whatever their file is called: `tests/conftest.py` sees to it.
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
INSIDE = "TRIGGERKV_INSIDE_README"
COMMANDS = commands((ROOT / "README.md").read_text())
WITHOUT_ENGINES = {"make demo": "make setup && .venv/bin/kvstore demo"}

not_inside = pytest.mark.skipif(
    INSIDE in os.environ, reason="README's commands are being run by this very test"
)


def test_commands_are_read_as_printed() -> None:
    text = "x\n```console\n$ make a\noutput\n$ b -c 'd'\n```\n```python\n$ no\n```\n"
    text += "```sh\n# why\ne && f\n\n```\n```\n$ no\n```\n"
    assert commands(text) == ["make a", "b -c 'd'", "e && f"]


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


def test_a_clean_copy_holds_what_git_would_and_nothing_built(tmp_path: Path) -> None:
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


def test_the_client_example_of_the_readme_runs_as_printed(node: NodeProcess) -> None:
    (example,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", example.replace("127.0.0.1:7070", node.target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WRITTEN") == 3
    assert done.stdout.count("'Hit'") == 3


def test_the_copy_does_not_see_the_venv_around_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"/x/.venv/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("VIRTUAL_ENV", "/x/.venv")
    monkeypatch.setenv("MAKEFLAGS", "n")
    clean = environment(tmp_path)
    assert clean["PATH"] == "/usr/bin"
    assert not {"VIRTUAL_ENV", "MAKEFLAGS", "PYTHONPATH"} & clean.keys()


@not_inside
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_readme_runs_in_a_clean_copy(tmp_path: Path) -> None:
    copy = clean_copy(ROOT, tmp_path / "copy")
    clean = environment(copy)
    clean["PYTHON"] = sys.executable  # the interpreter under test, which need not be the PATH's first
    for printed in COMMANDS:
        command = WITHOUT_ENGINES.get(printed, printed)
        inside = (
            {**clean, INSIDE: "1", "PYTEST_ARGS": "-q tests/test_tidy.py"}
            if "make test" in command
            else clean
        )
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=copy,
            env=inside,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    subprocess.run(["make", "clean"], cwd=copy, env=clean, check=True, capture_output=True, timeout=300)
