"""The stand-in as nic_offload finds it, and how it is built."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cassini import build as builder
from tests.cassini.build import build

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 110
OFF = {"FI_CXI_PROV_KEY_CACHE": "0"}

LIST_PROVIDERS = """
from nic_offload.library import load
library = load()
for provider in library.providers():
    print(provider.name, provider.rma, provider.deferred_work)
print(library.best_provider())
"""


def test_nic_offload_finds_cxi_and_nothing_else() -> None:
    environment = {**os.environ, "TRIGGERKV_LIBFABRIC": str(build())}
    done = subprocess.run(
        [sys.executable, "-c", LIST_PROVIDERS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["cxi True True", "cxi"]


REGISTER = """
from nic_offload.fabric import Fabric
with Fabric("cxi", address="127.0.0.1") as fabric, fabric.open_endpoint() as endpoint:
    print(fabric.register(bytearray(4096), endpoint=endpoint).length)
"""


@pytest.mark.parametrize(
    ("stays", "environment", "opens"), [("0", {}, True), ("1", {}, False), ("1", OFF, True)]
)
def test_a_fabric_opens_only_if_its_keys_are_confined(
    stays: str, environment: dict[str, str], *, opens: bool
) -> None:
    """With the cache of keys, which is on at first, a key reaches all memory of the process."""
    done = subprocess.run(
        [sys.executable, "-c", REGISTER],
        env=os.environ
        | {"TRIGGERKV_LIBFABRIC": str(build()), "SOFT_CASSINI_KEY_CACHE_STAYS": stays}
        | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.stdout == "4096\n") is opens, done.stderr
    assert ("FI_CXI_PROV_KEY_CACHE=0" in done.stderr) is not opens


def test_concurrent_builds_all_get_the_same_complete_file(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from tests.cassini.build import build; print(build(Path({str(tmp_path)!r})))"
    command = [sys.executable, "-c", code]

    def run(_: int) -> str:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        ctypes.CDLL(done.stdout.strip())
        return done.stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(run, range(3))) == {str(tmp_path / "libcassini.so")}


def test_it_is_compiled_again_only_when_an_input_is_newer(tmp_path: Path) -> None:
    library = build(tmp_path)
    first = library.stat().st_mtime_ns
    assert build(tmp_path).stat().st_mtime_ns == first
    os.utime(library, ns=(0, 0))
    assert build(tmp_path).stat().st_mtime_ns >= first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["libcassini.so", "libcassini.so.lock"]


def test_the_build_is_in_a_folder_ignored_by_git() -> None:
    assert builder.FOLDER == ROOT / "build" / "cassini"
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/build/" in ignored
