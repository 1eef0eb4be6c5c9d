"""The set of stored names (`names.c`) against a Python set."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2] / "nic_offload"
NAME_BYTES = 48
ROOM = 1 << 16  # more than `struct names` takes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    built = tmp_path_factory.mktemp("names") / "names.so"
    sources = [ROOT / "names.c", ROOT / "siphash.c"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", built, *sources, "-lpthread"], check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def names(library: Any) -> Iterator[Any]:
    memory = ctypes.create_string_buffer(ROOM)
    assert library.names_init(memory) == 0
    yield memory
    library.names_free(memory)


def name_of(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "little")


def test_entries_stay_until_they_are_removed(library: Any, names: Any) -> None:
    dice = random.Random(5)
    there: set[int] = set()
    for step in range(60):
        grows = step < 20 or dice.random() < 0.5
        some = [dice.randrange(40_000) for _ in range(3_000)]
        packed = b"".join(map(name_of, some))
        library.names_change(names, packed, ctypes.c_size_t(len(some)), int(grows))
        there = there | set(some) if grows else there - set(some)
        for number in dice.sample(range(40_000), 2_000):
            assert bool(library.names_have(names, name_of(number))) == (number in there), (step, number)
    for number in range(40_000):
        assert bool(library.names_have(names, name_of(number))) == (number in there)
    everything = b"".join(map(name_of, range(40_000)))
    library.names_change(names, everything, ctypes.c_size_t(40_000), 0)
    assert not any(library.names_have(names, name_of(number)) for number in range(40_000))
