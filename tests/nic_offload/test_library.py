"""Finding libfabric, and the error messages if it is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nic_offload.errors import FabricError, FabricUnavailable, KvError
from nic_offload.library import load
from tests.nic_offload.rig import PROVIDERS, open_fabric

WITHOUT = """
import importlib, pkgutil
import nic_offload
for module in pkgutil.iter_modules(nic_offload.__path__):
    if module.name != "_build":
        importlib.import_module(f"nic_offload.{module.name}")
from nic_offload.checksum import crc32c
from nic_offload.errors import FabricUnavailable
from nic_offload.fabric import Fabric
from nic_offload.flags import FlagWords
assert crc32c(b"123456789") == 0xE3069283
with FlagWords.create(1) as words:
    words[0].store(1)
for _ in range(2):
    try:
        Fabric("net")
    except FabricUnavailable as error:
        print(error)
"""


def without_libfabric(path: str) -> list[str]:
    environment = os.environ | {"TRIGGERKV_LIBFABRIC": path}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.splitlines()


def test_without_libfabric_everything_imports_and_the_fabric_says_what_to_install() -> None:
    lines = without_libfabric("/nonexistent")
    assert len(lines) == 2  # one sentence each time
    for line in lines:
        assert line.startswith("libfabric could not be loaded (/nonexistent")
        assert "apt install libfabric1" in line
        assert line.endswith(".")


def test_a_library_other_than_libfabric_is_refused() -> None:
    lines = without_libfabric("libc.so.6")
    assert len(lines) == 2
    assert "libc.so.6 is not a libfabric" in lines[0]


def test_providers_are_listed_with_their_features() -> None:
    library = load()
    assert load() == library
    known = {provider.name: provider for provider in library.providers()}
    assert len(known) == len(library.providers())
    usable = [name for name in PROVIDERS if name in known]
    assert usable
    assert all(known[name].rma for name in usable)
    assert library.best_provider() in known
    if "sockets" in known:
        assert known["sockets"].deferred_work
        assert known["sockets"].ordered  # by what it promises
    if "net" in known:
        assert known["net"].ordered
        assert not known["net"].deferred_work


def test_an_unknown_provider_is_refused_by_name() -> None:
    with pytest.raises(FabricError, match="nosuchprovider") as caught:
        open_fabric("nosuchprovider")
    assert isinstance(caught.value, KvError)
    assert not isinstance(caught.value, FabricUnavailable)


def test_a_fabric_closes_once_and_frees_its_descriptors(provider: str) -> None:
    for _ in range(3):  # the provider keeps some for as long as the process lives
        open_fabric(provider).close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all
    for _ in range(10):
        fabric = open_fabric(provider)
        fabric.open_endpoint()
        fabric.register(bytearray(4096))
        assert not fabric.closed
        fabric.close()
        fabric.close()
        assert fabric.closed
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208
