"""The tree keeps the rules of `tests/tidy.py`, and each rule detects a planted breach."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import tidy

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
RULES = {rule.__name__: rule for rule in tidy.RULES}


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Modules are parsed once: millions of nodes, which each garbage collection would walk, in later tests too."""
    gc.disable()
    yield
    tidy.forget_trees()
    gc.enable()


GOOD = '"""A module."""\n'

# rule, file, text, and a word of the breach; put together so that this file breaks no rule itself
PLANTED = [
    ("imports_run_one_way", "sim/a.py", "import nic_offload", "sim must not import nic_offload"),
    ("imports_run_one_way", "sim/a.py", "def f():\n    from kvstore.limits import X", "kvstore.limits"),
    ("imports_run_one_way", "nic_offload/a.py", "import kvstore.errors", "kvstore.errors"),
    ("imports_run_one_way", "nic_offload/a.py", "from sim import cli", "must not import sim"),
    ("imports_run_one_way", "kvstore/node/a.py", "import tests.fakes", "tests.fakes"),
    ("imports_run_one_way", "kvcli/a.py", "import kvstore.errors", "kvcli must not import"),
    (
        "imports_run_one_way",
        "kvstore/client/a.py",
        "from kvstore.node.authorization import Gate",
        "kvstore.client must not",
    ),
    (
        "imports_run_one_way",
        "kvstore/node/a.py",
        "import kvstore.client.core",
        "kvstore.node must not import",
    ),
    (
        "imports_run_one_way",
        "kvstore/storage/a.py",
        "from kvstore.cluster import map",
        "kvstore.storage must not",
    ),
    ("imports_run_one_way", "kvstore/a.py", "from kvstore.client import Client", "kvstore must not import"),
    ("imports_run_one_way", "kvstore/cli.py", "import tools.mutants", "must not import tools"),
    ("imports_run_one_way", "kvstore/bench/a.py", "import benchmarks.form", "must not import benchmarks"),
    ("benchmarks_stand_apart", "tests/node/a.py", "from benchmarks.form import Form", "benchmarks.form"),
    ("benchmarks_stand_apart", "examples/a.py", "import benchmarks", "import benchmarks"),
    ("benchmarks_stand_apart", "benchmarks/a.py", "from tests.node.rig import Rig", "tests.node.rig"),
    ("no_pickle", "kvstore/a.py", "import pickle", "pickle"),
    ("no_pickle", "tests/a.py", "from marshal import loads", "marshal"),
    ("no_builtin_hash", "kvstore/a.py", "key = hash(b'x')", "hash()"),
    ("time_only_through_the_clock", "kvstore/node/a.py", "import time\ntime.time()", "time.time"),
    ("time_only_through_the_clock", "sim/a.py", "import time\nf = time.monotonic_ns", "monotonic_ns"),
    ("time_only_through_the_clock", "kvstore/a.py", "from time import monotonic", "kvstore.clock"),
    ("time_only_through_the_clock", "kvstore/a.py", "from datetime import datetime\ndatetime.now()", "now"),
    ("no_bare_except", "sim/a.py", "try:\n    pass\nexcept:\n    pass", "bare except"),
    ("environment_only_in_config", "kvstore/a.py", "import os\nos.environ['X']", "environment"),
    ("environment_only_in_config", "nic_offload/a.py", "import os\nos.getenv('X')", "environment"),
    ("environment_only_in_config", "kvstore/a.py", "from os import environ", "environment"),
    ("nothing_left_undone", "kvstore/a.py", "raise Not" + "ImplementedError", "NotImpl"),
    ("nothing_left_undone", "nic_offload/a.c", "/* TO" + "DO */", "TO"),
    ("nothing_left_undone", "tools/a.sh", "# FIX" + "ME later", "FIX"),
    ("all_says_what_is_public", "kvstore/a.py", "def f(): pass", "no __all__"),
    ("all_says_what_is_public", "kvstore/a.py", "__all__ = []\ndef f(): pass", "f is public"),
    ("all_says_what_is_public", "kvstore/a.py", "__all__ = ['g']", "names g"),
    ("files_are_short", "sim/a.py", "x = 1\n" * 600, "at most 600"),
    ("c_files_are_short", "nic_offload/a.c", "\n" * 400, "at most 400"),
    ("bounds_are_in_limits", "kvstore/node/a.py", "_TRIES = 3", "_TRIES belongs in"),
    (
        "bounds_are_in_limits",
        "kvstore/client/a.py",
        "from typing import Final\nWAIT_S: Final = 1.5",
        "WAIT_S",
    ),
    ("bounds_are_in_limits", "kvstore/node/a.py", "_ROW_NS = 100 * 1_000_000", "_ROW_NS belongs in"),
    ("bounds_are_in_limits", "kvstore/storage/a.py", "_ROWS_AT_ONCE = 1 << 16", "_ROWS_AT_ONCE belongs in"),
    ("bounds_are_in_limits", "kvstore/storage/a.py", "_AT_ONCE = 4096", "_AT_ONCE belongs in"),
    ("bounds_are_in_limits", "kvstore/engines/a.py", "_THREADS = 2", "_THREADS belongs in"),
    (
        "bounds_are_in_limits",
        "kvstore/storage/a.py",
        "_READ_BYTES: Final = 4 << 20",
        "_READ_BYTES belongs in",
    ),
    ("bounds_are_in_limits", "kvstore/node/a.py", "_READ_BYTES = 65_536", "_READ_BYTES belongs in"),
    ("bounds_are_in_limits", "kvstore/storage/a.py", "_BATCH_RECORDS = 64", "_BATCH_RECORDS belongs in"),
    ("bounds_are_in_limits", "kvstore/cli.py", "_DAYS_MAX: Final = 3650", "_DAYS_MAX belongs in"),
    ("bounds_are_in_limits", "kvstore/commands/a.py", "_S_MIN, _S_MAX = 0.1, 3600.0", "_S_MIN belongs in"),
    ("bounds_are_in_limits", "kvstore/a.py", "@lru_cache(maxsize=8)\ndef a(): ...", "the size of a cache"),
    ("no_file_is_dead", "kvstore/node/a.py", "", "not used"),
    ("no_file_is_dead", "benchmarks/a.py", "", "not used"),
    ("no_file_is_dead", "tools/a.sh", "", "not used"),
    ("no_file_is_dead", "nic_offload/a.c", "", "not used"),
    ("no_path_of_somebodys_machine", "docs/a.md", "see /ho" + "me/me/x", "docs/a.md:2"),
    ("no_path_of_somebodys_machine", ".ci/run", "cd /wo" + "rk/x", ".ci/run:2"),
    ("proto_and_deploy_hold_no_python", "proto/a.py", "", "proto/a.py"),
    ("proto_and_deploy_hold_no_python", "deploy/x/a.py", "", "deploy/x/a.py"),
    ("ci_makes_what_tests_need", "tests/a.py", 'skip("there is ' + 'no x: make tool")', "does not make tool"),
    ("readme_links_lead_somewhere", "README.md", "[x](docs/none.md#part)", "docs/none.md"),
]

HARMLESS = [
    ("imports_run_one_way", "kvstore/a.py", "import nic_offload"),
    ("imports_run_one_way", "kvstore/node/a.py", "from kvstore.storage.store import Store"),
    ("benchmarks_stand_apart", "tests/benchmarks/a.py", "from benchmarks.form import Form"),
    ("benchmarks_stand_apart", "benchmarks/bench_a.py", "from tests.engines.node import Node"),
    ("no_file_is_dead", "benchmarks/bench_a.py", ""),
    (
        "bounds_are_in_limits",
        "kvstore/a.py",
        "from kvstore.limits import X\nWAIT_S = X / 1000\n_SECOND_NS = 1\n_HEAD_BYTES = 4096",
    ),
    ("c_files_are_short", "nic_offload/a.c", "\n" * 390),
    ("no_builtin_hash", "kvstore/a.py", "class A:\n    def __hash__(self):\n        return hash(1)"),
    ("time_only_through_the_clock", "kvstore/clock.py", "import time\ntime.time()"),
    ("time_only_through_the_clock", "tests/a.py", "import time\ntime.time()"),
    ("environment_only_in_config", "kvstore/config.py", "import os\nos.environ"),
    ("no_path_of_somebodys_machine", "docs/a.md", "net/home/x and $HOME/home/x and /proc/root/x"),
    (
        "all_says_what_is_public",
        "kvstore/a.py",
        "from os import path\n__all__ = ['path']\nLIMIT = 1\ndef _f(): pass",
    ),
    ("all_says_what_is_public", "kvstore/a.py", "__all__: list[str] = []"),
    ("readme_links_lead_somewhere", "README.md", "[x](https://example.org/a.md)"),
    ("proto_and_deploy_hold_no_python", "proto/a.proto", ""),
]


def _plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(GOOD + text + "\n")


@pytest.mark.parametrize("name", RULES)
def test_this_tree_follows_the_rule(name: str) -> None:
    assert list(RULES[name](ROOT)) == []


@pytest.mark.parametrize(("rule", "name", "text", "word"), PLANTED)
def test_a_planted_breach_is_detected(rule: str, name: str, text: str, word: str, tmp_path: Path) -> None:
    _plant(tmp_path, name, text)
    breaches = list(RULES[rule](tmp_path))
    assert len(breaches) == 1
    assert word in breaches[0]


@pytest.mark.parametrize(("rule", "name", "text"), HARMLESS)
def test_permitted_calls_pass(rule: str, name: str, text: str, tmp_path: Path) -> None:
    _plant(tmp_path, name, text)
    assert list(RULES[rule](tmp_path)) == []


def test_a_module_without_a_docstring_is_detected(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "a.py").write_text("x = 1\n")
    assert list(tidy.modules_have_docstrings(tmp_path)) == ["sim/a.py: no docstring"]


def test_a_second_module_of_one_name_is_detected(tmp_path: Path) -> None:
    for name in ("kvstore/node/gets.py", "sim/gets.py", "sim/cli.py", "kvstore/cli.py", "tests/sim/gets.py"):
        _plant(tmp_path, name, "")
    breaches = list(tidy.a_name_has_one_meaning(tmp_path))
    assert breaches == ["sim/gets.py: kvstore/node/gets.py has this name already"]


def test_every_rule_has_a_planted_breach() -> None:
    planted = {rule for rule, *_ in PLANTED}
    assert set(RULES) - planted == {"modules_have_docstrings", "a_name_has_one_meaning"}


def test_every_exception_has_a_reason() -> None:
    for allowed in (
        tidy.BENCHMARKS_USED_BY,
        tidy.BOUNDS_ALLOWED,
        tidy.CLOCK_ALLOWED,
        tidy.ENVIRONMENT_ALLOWED,
        tidy.LAYERS_ALLOWED,
        tidy.NAMES_ALLOWED,
    ):
        assert all(len(reason) > 10 for reason in allowed.values())
