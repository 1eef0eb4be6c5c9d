"""The short form of `make fuzz`: some hundred inputs of each parser, with no signal of what code they reach."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = 200
C_RUNS = 20_000
TIMEOUT_S = 100
ROOT = Path(__file__).resolve().parents[2]


def changed(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Replace parts of an input, at places given in thousandths of its length."""
    data = bytearray(seed)
    for at, length, part in changes:
        start = at * len(data) // 1000
        data[start : start + length] = part
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_end_properly_on_any_input(name: str) -> None:
    target: Callable[[bytes], None] = TARGETS[name]
    parts = st.one_of(st.binary(max_size=8), st.sampled_from(WORDS[name]))
    changes = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 8), parts), max_size=6)
    mutated = st.builds(changed, st.sampled_from(SEEDS[name]), changes)

    @settings(max_examples=EXAMPLES)
    @given(st.one_of(st.binary(max_size=300), mutated))
    def run(data: bytes) -> None:
        target(data)

    for seed in SEEDS[name]:
        target(seed)
    run()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "desk",
            (
                "desk",
                "desk_cold",
                "desk_log",
                "desk_where",
                "directory",
                "shelf",
                "names",
                "seal",
                "siphash",
                "crc32c",
            ),
        ),
        (
            "receiver",
            (
                "receiver",
                "receiver_puts",
                "directory",
                "shelf",
                "names",
                "seal",
                "siphash",
                "crc32c",
                "atomic_words",
            ),
        ),
    ],
)
def test_c_parsers_survive_any_bytes_from_a_peer(name: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Calls at the desk and granted puts, built like the core: inputs made by the harness itself."""
    core = [f"nic_offload/{part}.c" for part in parts]
    built = tmp_path / name
    flags = ["-g", "-O1", "-DSTANDALONE", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = ["gcc", *flags, "-o", str(built), f"tests/fuzz/{name}.c", *core, "-lpthread"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S)
    ran = subprocess.run(
        [built, str(C_RUNS)], check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True
    )
    answered = int(ran.stdout)
    assert C_RUNS // 100 < answered < C_RUNS
