"""`python -m tests.fuzz NAME CORPUS [libFuzzer's arguments]`: one parser under atheris, which sees what it reaches.

The parser's seeds lie in the corpus, for a mutation of none begins with nothing, and its words go to libFuzzer as a
dictionary: a name that a parser looks up in a dict is no comparison that atheris could see.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import atheris  # in .cache/atheris, where tools/fuzz.sh puts it

with atheris.instrument_imports(include=["kvstore", "sim", "tests.fuzz"]):
    from tests.fuzz.targets import SEEDS, TARGETS, WORDS

if __name__ == "__main__":
    program, name, corpus, *arguments = sys.argv
    for seed in SEEDS[name]:
        TARGETS[name](seed)
        (Path(corpus) / hashlib.sha256(seed).hexdigest()).write_bytes(seed)
    with tempfile.NamedTemporaryFile("w", suffix=".dict") as words:
        words.writelines('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in WORDS[name])
        words.flush()
        atheris.Setup([program, f"-dict={words.name}", *arguments, corpus], TARGETS[name])
        atheris.Fuzz()
