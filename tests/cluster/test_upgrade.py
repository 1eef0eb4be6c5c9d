"""A cluster is upgraded node by node under clients of both versions: it serves, and keeps its promises, throughout.

The earlier version is a commit of this repository, built from its own files. A tree without the repository's history
can't do that.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tarfile
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.map import TOO_OLD
from tests.cluster.real_etcd import RealEtcd
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.demo.node_process import NodeProcess

EARLIER = "f9b9b88b0f45"  # before erase domains, zones and keyrings that drives know
ROOT = Path(__file__).resolve().parents[2]
ANSWER_S, WAIT_S = 60.0, 60.0
COPIES = 2 * 24


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier version's tree, with its C core built, which is kept for the next run."""
    kept = ROOT / ".cache" / f"version-{EARLIER}"
    if kept.exists():
        return kept
    done = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(
            f"commit {EARLIER} is not here: this needs a clone with its history (git fetch --unshallow)"
        )
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, capture_output=True, timeout=300, check=True)
    with suppress(OSError):  # another run was earlier
        kept.parent.mkdir(exist_ok=True)
        shutil.move(folder, part := kept.with_suffix(f".{os.getpid()}"))
        part.rename(kept)
    return kept


@contextmanager
def code_of(tree: Path) -> Iterator[dict[str, str]]:
    """Make new Python processes use that tree."""
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    try:
        yield dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


class Engine:
    """A client in a process of its own, of one version."""

    def __init__(self, tree: Path, node: str) -> None:
        program = str(ROOT / "tests/cluster/upgrade_client.py")
        with code_of(tree) as environment:
            self._process = subprocess.Popen(
                [sys.executable, program, node],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def __call__(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_S), f"no answer to {words}"
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.timeout(600)
def test_nodes_of_two_versions_serve_together_and_lose_nothing(earlier: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(RealEtcd(tmp_path / "etcd"))
        told = ("--cluster", f"{etcd.endpoints[0]}/test", "--cluster-replicas", "2")
        with code_of(earlier):
            nodes = [
                stack.enter_context(small_node(tmp_path / f"node{number}", arguments=told))
                for number in range(3)
            ]
        engines = [Engine(tree, nodes[0].target) for tree in (earlier, ROOT)]
        for engine in engines:
            stack.callback(engine.close)
        assert [Path(engine("where")).parents[2] for engine in engines] == [earlier, ROOT]
        settled(nodes, engines)
        stored = [f"before {number}" for number, _ in enumerate(engines)]
        for engine, name in zip(engines, stored, strict=True):
            assert engine("put", name) == ["WRITTEN"]
        gone: list[str] = []
        said = 0
        for at, node in enumerate(nodes):
            assert node.stop() == 0
            node.start()  # of this version
            settled(nodes, engines)
            for number, engine in enumerate(engines):
                for name in stored:
                    assert engine("get", name) == ["exact"]
                for name in gone:
                    assert engine("get", name) == ["UNKNOWN"], "a deletion was undone"
                name = f"with {at + 1} new, of {number}"
                assert engine("put", name) == ["WRITTEN"]
                assert engines[1 - number]("get", name) == ["exact"]
                stored.append(name)
                told_a_turn(engine, said)
                said += 1
                assert engines[1 - number]("said") == said
                deleted = stored.pop(0)
                assert engine("delete", deleted)
                gone.append(deleted)
        for engine in engines:
            assert [engine("get", name) for name in stored] == [["exact"]] * len(stored)
            assert [engine("get", name) for name in gone] == [["UNKNOWN"]] * len(gone)
        wait_until(
            lambda: [engines[1]("copies", name) for name in stored] == [COPIES] * len(stored),
            "each block is on two nodes",
            WAIT_S,
        )


@pytest.mark.timeout(600)
def test_clients_and_nodes_of_the_earlier_version_compute_no_owners_in_a_new_cluster(
    earlier: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(RealEtcd(tmp_path / "etcd"))
        told = ("--cluster", f"{etcd.endpoints[0]}/test", "--cluster-replicas", "2")
        nodes = [stack.enter_context(small_node(tmp_path / name, arguments=told)) for name in "ab"]
        new, early = engines = [Engine(tree, nodes[0].target) for tree in (ROOT, earlier)]
        for engine in engines:
            stack.callback(engine.close)
        settled(nodes, [new])
        wait_until(lambda: early("members") == [one.node for one in TOO_OLD], "it is refused", WAIT_S)
        assert new("put", "new") == ["WRITTEN"]
        assert early("put", "early") == ["None"]
        assert early("get", "new") == ["NODE_AWAY"]
        assert ".invalid:" in early("delete", "new"), "the error has the address that gives the reason"
        with code_of(earlier):
            late = stack.enter_context(small_node(tmp_path / "late", arguments=told))
        at_late = Engine(earlier, late.target)
        stack.callback(at_late.close)
        both = sorted([late.target, TOO_OLD[0].node])
        wait_until(lambda: at_late("members") == both, "its own map has nobody else that is real", WAIT_S)
        assert at_late("put", "late") == ["None"], "its second copy has no place"
        assert new("members") == sorted(node.target for node in nodes)
        assert new("get", "new") == ["exact"]


def settled(nodes: list[NodeProcess], engines: list[Engine]) -> None:
    members = sorted(node.target for node in nodes)
    wait_until(
        lambda: all(engine("members") == members for engine in engines), "all nodes are members", WAIT_S
    )


def told_a_turn(engine: Engine, number: int) -> None:
    """Append a turn; a session waits for 5 s after its home has restarted."""
    wait_until(lambda: engine("say", number) == number + 1, "a session's turn is stored", WAIT_S)
