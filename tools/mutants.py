"""Plants known bugs one at a time, in a copy of the tree, and checks that a test fails for each (`make mutants`).

`tools/mutants/*.toml` lists them: for each guard the text to replace, its replacement, and tests of which at least
one must fail. A mutant that is known to survive says why in `survives`; the run fails if it is killed after all, so
an outdated reason is noticed.

What always holds: the tests of the list pass on the copy before anything is planted, so a failure has no other cause.
The checkout is never written to. A test that can't be collected is an error of the list, not a kill, and a bug whose
tests are all skipped is one, not a survivor. A C file is compiled with the bug, and again without it.

What it doesn't do: find new bugs, or choose tests. In `make test`, `tests/test_mutants.py` checks that the list fits
the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

__all__ = ["Mutant", "Outcome", "Tree", "load", "main", "named_tests"]

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "mutants"
ENGINES = "tests/engines/"
TEST_TIMEOUT_S = 180
RUN_TIMEOUT_S = 900
FIELDS = {"name", "guard", "file", "old", "new", "test"}
PASSED, FAILED = 0, 1  # pytest's exit statuses; all others say that it ran no test to its end


@dataclass(frozen=True)
class Mutant:
    """One planted bug: the guard it removes, and the tests of which one must die."""

    name: str
    guard: str
    file: str
    old: str
    new: str
    test: tuple[str, ...]
    survives: str = ""

    @property
    def is_c(self) -> bool:
        """Whether an extension must be compiled for it; the tests compile their own C."""
        return self.file.endswith((".c", ".h")) and not self.file.startswith("tests/")


def load(folder: Path = LISTS) -> list[Mutant]:
    """All mutants of the lists, in order; the first invalid one is a ValueError."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            name = entry.get("name", "one without a name")
            if missing := FIELDS - entry.keys():
                raise ValueError(f"{path.name}: {name} lacks {', '.join(sorted(missing))}.")
            if unknown := entry.keys() - FIELDS - {"survives"}:
                raise ValueError(f"{path.name}: {name} has unknown {', '.join(sorted(unknown))}.")
            if not entry["test"]:
                raise ValueError(f"{path.name}: {name} names no test.")
            mutants.append(Mutant(**{**entry, "test": tuple(entry["test"])}))
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two mutants have the name {twice[0]}.")
    return mutants


def named_tests(mutants: list[Mutant]) -> list[str]:
    """The tests of these mutants, each once."""
    return sorted({test for mutant in mutants for test in mutant.test})


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: killed, survived, or error; and the end of the tests' output if it matters."""

    mutant: Mutant
    what: str
    took_s: float = 0.0
    words: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it ended as expected."""
        return self.what == ("survived" if self.mutant.survives else "killed")


@dataclass
class Tree:
    """A copy of the checkout in which bugs are planted, with interpreters of the checkout's environments."""

    path: Path
    source: Path = ROOT
    _libraries: dict[Path, bytes] = field(default_factory=dict)

    def fill(self) -> None:
        """Copy what git knows or would add, and the compiled extensions."""
        shutil.rmtree(self.path, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
            cwd=self.source,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        libraries = [path.relative_to(self.source) for path in self.source.glob("*/**/_*.so")]
        built = [path for path in libraries if path.parts[0] in {"nic_offload", "kvstore", "sim"}]
        for name in [*filter(None, listed), *map(str, built)]:
            if (self.source / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.source / name, self.path / name)
        self._libraries = {path: (self.path / path).read_bytes() for path in built}

    def plant(self, mutant: Mutant) -> str:
        """Plant the bug, compile if needed, and return the file's original text."""
        path = self.path / mutant.file
        before = path.read_text()
        if before.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} has the text {before.count(mutant.old)} times, and not once.")
        path.write_text(before.replace(mutant.old, mutant.new))
        if mutant.is_c:
            try:
                self._compile()
            except subprocess.CalledProcessError as error:
                self.restore(mutant, before)
                raise ValueError(f"{mutant.file} does not compile with it: {error.stderr[-600:]}") from error
        return before

    def restore(self, mutant: Mutant, before: str) -> None:
        """Remove the bug, and restore the copied extensions."""
        (self.path / mutant.file).write_text(before)
        if mutant.is_c:
            for name, library in self._libraries.items():
                (self.path / name).unlink(missing_ok=True)  # not over one that a process may have mapped
                (self.path / name).write_bytes(library)

    def run(self, tests: tuple[str, ...] | list[str], *more: str) -> tuple[int, str]:
        """Run tests in the tree, in the engines' environment if they need it; returns exit status and output."""
        status, said = PASSED, ""
        for folder, chosen in (
            (".venv", [test for test in tests if not test.startswith(ENGINES)]),
            (".venv-engines", [test for test in tests if test.startswith(ENGINES)]),
        ):
            if chosen and status == PASSED:
                status, said = self._pytest(self.source / folder / "bin" / "python", [*chosen, *more])
        return status, said

    def _pytest(self, python: Path, arguments: list[str]) -> tuple[int, str]:
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        environment = os.environ | {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            [*command, *arguments],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as running:
            try:
                said = running.communicate(timeout=RUN_TIMEOUT_S)[0]
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                return FAILED, running.communicate()[0] + "\nkilled: it did not end"
        return running.returncode, said

    def _compile(self) -> None:
        python = self.source / ".venv" / "bin" / "python"
        for name in self._libraries:
            (self.path / name).unlink(missing_ok=True)
        subprocess.run(
            [str(python), "setup.py", "-q", "build_ext", "--inplace", "--force"],
            cwd=self.path,
            check=True,
            capture_output=True,
            text=True,
        )

    def outcome(self, mutant: Mutant) -> Outcome:
        """Plant the bug, run its tests, and remove it."""
        began_s = time.monotonic()
        try:
            before = self.plant(mutant)
        except (ValueError, OSError) as error:
            return Outcome(mutant, "error", words=str(error))
        try:
            status, said = self.run(mutant.test, "-x")
        finally:
            self.restore(mutant, before)
        # A process that a signal ended has died of it as well: the core's asserts end it that way.
        what = {PASSED: "survived", FAILED: "killed"}.get(status, "killed" if status < 0 else "error")
        if status == PASSED and " passed" not in said:
            what = "error"  # its tests were all skipped
        return Outcome(mutant, what, time.monotonic() - began_s, said[-1500:])


def _sound_tests(tree: Tree, mutants: list[Mutant]) -> str:
    """The failures of these tests without a planted bug; empty if all pass."""
    status, said = tree.run(named_tests(mutants))
    return "" if status == PASSED else said[-4000:]


def _outcomes(mutants: list[Mutant], jobs: int, folder: Path) -> list[Outcome]:
    free: SimpleQueue[Tree] = SimpleQueue()
    trees = [Tree(folder / f"tree-{number}") for number in range(jobs)]
    for tree in trees:
        tree.fill()
        free.put(tree)
    if words := _sound_tests(trees[0], mutants):
        raise SystemExit(f"Tests of the list fail with nothing planted:\n{words}")

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            outcome = tree.outcome(mutant)
        finally:
            free.put(tree)
        print(f"{outcome.what:9}{outcome.took_s:7.1f} s  {mutant.name}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0 if each mutant ended as expected."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="only mutants whose name holds one of these words")
    parser.add_argument("--list", action="store_true", help="print guards and tests, and plant nothing")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, os.cpu_count() or 1)), help="at a time")
    asked = parser.parse_args(arguments)
    mutants = [
        mutant for mutant in load() if not asked.names or any(word in mutant.name for word in asked.names)
    ]
    if not mutants:
        parser.error("no mutant of the lists has such a name.")
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.guard}\n    {mutant.file}; {', '.join(mutant.test)}")
        return 0
    outcomes = _outcomes(mutants, asked.jobs, ROOT / "build" / "mutants")
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    for outcome in wrong:
        print(f"\n{outcome.mutant.name} {outcome.what}: {outcome.mutant.guard}\n{outcome.words}")
    for outcome in outcomes:
        if outcome.is_right and outcome.mutant.survives:
            print(f"survives, as the list says: {outcome.mutant.name}: {outcome.mutant.survives}")
    killed = sum(outcome.what == "killed" for outcome in outcomes)
    print(f"\n{len(outcomes)} mutants: {killed} killed, {len(wrong)} not as the list says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
