"""`python -m benchmarks NAME` runs `benchmarks/bench_NAME.py`; `all` runs all of them, in order of name.

If a benchmark fails, its traceback is printed, the others still run, and the exit status is 1. A missed goal is not a
failure.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.form import Form, table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["discover", "main"]


def discover(folder: Path = Path(__file__).parent) -> list[str]:
    """The names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))


def main(arguments: Sequence[str], names: Sequence[str] | None = None, package: str = "benchmarks") -> int:
    """Run the named benchmarks; return the exit status."""
    known = list(discover() if names is None else names)
    if len(arguments) != 1 or (arguments[0] != "all" and arguments[0] not in known):
        print(
            f"usage: python -m benchmarks NAME; NAME is one of: {', '.join(['all', *known])}",
            file=sys.stderr,
        )
        return 2
    if not known:
        print("There is no benchmark yet: benchmarks/ holds no bench_NAME.py.")
    status = 0
    for name in known if arguments[0] == "all" else arguments:
        form = Form(name)
        print(f"# {name}", flush=True)
        try:
            importlib.import_module(f"{package}.bench_{name}").run(form)
        except Exception:  # noqa: BLE001 - whatever one benchmark dies of, the others still run
            traceback.print_exc()
            status = 1
        else:
            path = form.write()
            print(f"{table(form.points)}\n-> {path}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
