"""`python -m tests.fuzz NAME [libFuzzer's arguments]`: one parser under atheris, which sees what code is reached."""

from __future__ import annotations

import sys

import atheris  # in .cache/atheris, where tools/fuzz.sh puts it

with atheris.instrument_imports(include=["kvstore", "sim"]):
    from tests.fuzz.targets import SEEDS, TARGETS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    for seed in SEEDS[name]:
        TARGETS[name](seed)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()
