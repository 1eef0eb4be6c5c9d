"""Shared fixtures: a running node, and a client with a buffer."""

from __future__ import annotations

import gc
import mmap
import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from kvstore.client import Block, Client
from kvstore.demo import node_process
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import PINS_MAX
from kvstore.names import block_key
from kvstore.sealing.masters import new_master_file
from nic_offload.flags import FlagWords
from tests.ports import next_port
from tests.readme import clean_copy, environment
from tests.warm_start import Warm, warm_subprocess

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from nic_offload.fabric import Region
    from tests.node.in_process import NodeInProcess

with suppress(ImportError):  # the engines' environment has none
    from hypothesis import settings

    # A slow example says nothing of the code. What is taken into main must not hang on the luck of a draw: the same
    # examples each time, unless somebody searches.
    is_search = "TRIGGERKV_RANDOM_EXAMPLES" in os.environ
    settings.register_profile("gate", deadline=None, derandomize=not is_search)
    settings.load_profile("gate")

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
SMALL_DRIVE = "64MiB"
SMALL_HOT = "128MiB"  # the least that a node takes


def small_node(data: Path, *, arguments: Sequence[str] = (), **more: Any) -> NodeProcess:
    """A node process with the least memory and drive, because allocating more costs test time."""
    more.setdefault("capacity", SMALL_DRIVE)
    return NodeProcess(data, arguments=("--hot", SMALL_HOT, *arguments), **more)


def with_master_key(folder: Path) -> tuple[str, str]:
    """The arguments of a node that encrypts, with the master key in this folder, created if it doesn't exist."""
    key = folder / "master.key"
    if not key.exists():
        new_master_file(key)
    return "--master-key", f"file:{key}"


def small_client(target: str, **more: Any) -> Client:
    """A client with 16 MiB of the node's memory; the default would be as much as a small node has."""
    return Client(target, **({"slots": 16, "block_bytes_max": MIB} | more))


def pin_too_much(client: Client) -> None:
    """Pin a block repeatedly until the node refuses it."""
    client.put_inline(key := block_key(b"pinned"), bytes(900_000))
    for _ in range(PINS_MAX):
        client.pin([key])


class HasTarget(Protocol):
    """A node, in its own process or in the test's."""

    @property
    def target(self) -> str:
        """Its address."""
        ...


def buffer() -> mmap.mmap:
    """16 MiB in huge pages: page faults for small ones would cost more than most of a test."""
    memory = mmap.mmap(-1, 16 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class ClientWithBuffers:
    """A client of a node, a buffer to put from and one to get into, and a flag word."""

    def __init__(self, node: HasTarget, *, slots: int = 16, block_bytes_max: int = MIB) -> None:
        self.client = Client(node.target, slots=slots, block_bytes_max=block_bytes_max)
        self.source, self.target = buffer(), buffer()
        # 16 random MiB would cost more than most of a test; no two pages are alike in these either.
        noise = np.frombuffer(np.random.default_rng().bytes(MIB), np.uint8)
        filled = np.frombuffer(self.source, np.uint8).reshape(16, MIB)
        np.bitwise_xor(noise, np.arange(16, dtype=np.uint8)[:, None], out=filled)
        self.from_region = self.client.register(self.source)
        self.to_region = self.client.register(self.target)
        self.flags = FlagWords.create(1)
        self.name = secrets.token_bytes(8)

    def key(self, number: int) -> bytes:
        return block_key(self.name, number.to_bytes(4))

    def block(
        self, number: int, length: int = MIB, *, region: Region | None = None, offset: int = -1
    ) -> Block:
        offset = number % 16 * MIB if offset < 0 else offset
        return Block(self.key(number), region or self.from_region, offset, length, threshold=number + 1)

    def wanted(self, block: Block) -> Block:
        return Block(block.key, self.to_region, block.offset, block.length)

    def is_exact(self, block: Block) -> bool:
        piece = slice(block.offset, block.offset + block.length)
        return self.source[piece] == self.target[piece]

    def close(self) -> None:
        self.client.close()
        self.flags.close()


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[Warm]:
    """The process that nodes are forked from, and the commands that tests run with it."""
    warm = Warm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_process, "subprocess", warm_subprocess(warm))
        patch.setattr(node_process, "lasting_port", next_port)
        yield warm
    warm.close()


def marked(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The arguments of `@pytest.mark.node`: which node the test uses, and its settings."""
    mark = request.node.get_closest_marker("node") or pytest.mark.node().mark
    return (*mark.args, "process")[0], dict(mark.kwargs)


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeProcess | NodeInProcess]:
    """A test's node, whose data is in `node` in its `tmp_path`, or the one that its module shares.

    It is a small process, unless the test or its module has a mark: `pytest.mark.node("shared")` for `shared_node`, or
    `pytest.mark.node("in process")` for one in a thread of the tests' process. Keyword arguments are the node's.
    """
    kind, settings = marked(request)
    if kind == "shared":
        yield request.getfixturevalue("shared_node")
    elif kind == "in process":
        from kvstore.storage.uring import UringDisk  # noqa: PLC0415 - most tests need no node in their process
        from tests.node.in_process import NodeInProcess  # noqa: PLC0415 - the same

        if not settings.pop("lane", True):  # Python writes all blocks
            request.getfixturevalue("monkeypatch").setattr(UringDisk, "direct_fd", None)
        with NodeInProcess(tmp_path / "node", **settings) as here:
            yield here
    else:
        with small_node(tmp_path / "node", **settings) as process:
            yield process


@pytest.fixture(scope="module")
def module_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what a module's tests share. Unless one fails, it is removed: a run's drives would be gigabytes."""
    folder, failed = tmp_path_factory.mktemp("module"), request.session.testsfailed
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def shared_node(request: pytest.FixtureRequest, module_folder: Path) -> Iterator[NodeProcess]:
    """One node for the tests of a module that don't end it, nor mind what others store in it.

    The mark `node` has its settings, and `encrypted=True` gives it a master key. Keys of a `rig` are its own; other
    names need a tenant of the test's own.
    """
    _, settings = marked(request)
    if settings.pop("encrypted", False):
        settings["arguments"] = with_master_key(module_folder)
    with small_node(module_folder / "shared", **settings) as process:
        yield process


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, stripped as in a release, built in a clean copy by the step of deploy/Containerfile."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = clean_copy(ROOT, folder / "src")
    (step,) = re.findall(
        r"^RUN (pip wheel --no-deps .*)$", (copy / "deploy/Containerfile").read_text(), re.MULTILINE
    )
    done = subprocess.run(
        ["bash", "-ec", f"{sys.executable} -m {step.replace('/wheels', str(folder))}"],
        cwd=copy,
        env=environment(copy) | {"LDFLAGS": "-s"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def tenant() -> str:
    """A tenant of the test's own."""
    return secrets.token_hex(8)


@pytest.fixture
def rig(node: HasTarget) -> Iterator[ClientWithBuffers]:
    rig = ClientWithBuffers(node)
    yield rig
    rig.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record each failure in the file that `tools/test.sh` names."""
    report = yield
    if report.failed and call.excinfo and (listed := os.environ.get("TRIGGERKV_FAILURES")):
        with open(listed, "a") as failures:  # noqa: PTH123 - a name from the environment
            failures.write(f"{report.nodeid}\n")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests last."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which would take a tenth of a run."""
    gc.collect()
    gc.freeze()
