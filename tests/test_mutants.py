"""The list of planted bugs fits the tree, and its runner distinguishes killed mutants, survivors and errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Mutant, Tree

ROOT = Path(__file__).resolve().parent.parent
LISTED = mutants.load()


@lru_cache(maxsize=512)
def _names(path: Path) -> set[str]:
    """The names of a test file's functions, with those of its classes before them."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in tree.body if isinstance(node, functions)}
    for group in tree.body:
        if isinstance(group, ast.ClassDef):
            found |= {f"{group.name}::{node.name}" for node in group.body if isinstance(node, functions)}
    return found


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.name)
def test_a_planted_bug_fits_the_tree(mutant: Mutant) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
    assert mutant.guard.endswith(".")
    assert mutant.old != mutant.new
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed: its planted bug must change with it"
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))
    for test in mutant.test:
        file, _, name = test.partition("::")
        assert name.split("[")[0] in _names(ROOT / file), f"{file} has no {name}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A tree of one guard and one test, whose environment is this one."""
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    (source / "limits.py").write_text("def allowed(n):\n    return n < 3\n")
    (source / "tests" / "test_limits.py").write_text(
        "from limits import allowed\n\ndef test_three_is_too_many():\n    assert not allowed(3)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    (source / ".venv").symlink_to(sys.prefix)
    (source / ".gitignore").write_text("/.venv\n")
    made = Tree(tmp_path / "tree", source)
    made.fill()
    return made


def _mutant(old: str, new: str, test: str = "test_three_is_too_many") -> Mutant:
    return Mutant("planted", "Two at most.", "limits.py", old, new, (f"tests/test_limits.py::{test}",))


def test_a_detected_bug_is_killed_and_removed(tree: Tree) -> None:
    assert tree.outcome(_mutant("n < 3", "n <= 3")).what == "killed"
    assert (tree.path / "limits.py").read_text() == (tree.source / "limits.py").read_text()


def test_a_bug_that_no_test_detects_survives(tree: Tree) -> None:
    outcome = tree.outcome(_mutant("n < 3", "n < 2"))
    assert outcome.what == "survived"
    assert not outcome.is_right


def test_a_bug_that_ends_the_process_is_killed(tree: Tree) -> None:
    assert tree.outcome(_mutant("return n < 3", "import os; os.abort()")).what == "killed"


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("n < 3", "n <", "test_three_is_too_many"),  # no Python
        ("n < 4", "n < 5", "test_three_is_too_many"),  # not the tree's text
        ("n < 3", "n <= 3", "test_of_another_name"),
    ],
)
def test_an_error_of_the_runner_is_not_a_killed_bug(tree: Tree, old: str, new: str, test: str) -> None:
    assert tree.outcome(_mutant(old, new, test)).what == "error"


def test_a_bug_whose_tests_are_skipped_is_an_error_and_no_survivor(tree: Tree) -> None:
    test = tree.path / "tests" / "test_limits.py"
    test.write_text("import pytest\n\ndef test_three_is_too_many():\n    pytest.skip('it lacks something')\n")
    assert tree.outcome(_mutant("n < 3", "n <= 3")).what == "error"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "a"', "lacks"),
        ('name = "a"\nguard = ""\nfile = ""\nold = ""\nnew = ""\ntest = []', "no test"),
        ('name = "a"\nguard = ""\nfile = ""\nold = ""\nnew = ""\ntest = ["t"]\nwhy = ""', "unknown why"),
    ],
)
def test_an_incomplete_entry_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.toml").write_text(f"[[mutant]]\n{text}\n")
    with pytest.raises(ValueError, match=words):
        mutants.load(tmp_path)
