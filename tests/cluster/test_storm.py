"""Nodes of a cluster die, hang and come back, one at a time, while clients put and get: two replicas lose nothing.

`TRIGGERKV_CLUSTER_ROUNDS` is how many times; `make test` has a few, `make test-cluster` 300.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import ClusterBlock, ClusterClient, Hit
from kvstore.errors import KvError
from kvstore.miss import Miss
from kvstore.names import block_key
from tests.cluster.real_etcd import RealEtcd
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

ROUNDS = int(os.environ.get("TRIGGERKV_CLUSTER_ROUNDS", "4"))
SEED = int(os.environ.get("TRIGGERKV_CLUSTER_SEED", "1"))
BYTES, BATCH, WAIT_S = 4096, 8, 8.0
PUT_EVERY_S = ROUNDS * 0.01  # the drives must not fill up: what is evicted is lost as well


class Worker:
    """Puts blocks of its own, and gets those that were acknowledged by two nodes."""

    def __init__(self, number: int, client: ClusterClient) -> None:
        self.number, self.client = number, client
        self.dice = random.Random(SEED * 1000 + number)
        self.acknowledged: list[int] = []
        self.lost: list[str] = []
        self.puts = self.gets = self.refused = 0
        self.memory = mmap.mmap(-1, 2 * BATCH * BYTES)
        self.kv = client.register(self.memory)
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _bytes(self, name: int) -> bytes:
        return random.Random(SEED << 40 | self.number << 32 | name).randbytes(BYTES)

    def _key(self, name: int) -> bytes:
        return block_key(b"storm", b"%d %d" % (self.number, name))

    def _run(self) -> None:
        name = 0
        try:
            put_s = 0.0
            while not self.is_over.wait(0.05):
                if time.monotonic() >= put_s:
                    put_s = time.monotonic() + PUT_EVERY_S
                    self._put(range(name, name + BATCH))
                    name += BATCH
                self._get()
        except BaseException as error:
            self.lost.append(repr(error))
            raise

    def _put(self, names: range) -> None:
        blocks = []
        for place, name in enumerate(names):
            self.memory[place * BYTES : (place + 1) * BYTES] = self._bytes(name)
            blocks.append(ClusterBlock(self._key(name), self.kv, place * BYTES, BYTES))
        try:
            results = self.client.put(blocks, timeout_s=WAIT_S)
        except KvError:
            results = []
        for name, result in zip(names, results, strict=False):
            if result.error is None:
                self.acknowledged.append(name)
        self.puts += len(names)
        self.refused += sum(one.error is not None for one in results)

    def _get(self) -> None:
        if not self.acknowledged:
            return
        newest = self.acknowledged[-BATCH:]
        names = [*newest[:2], *self.dice.sample(self.acknowledged, min(BATCH - 2, len(self.acknowledged)))]
        wanted = []
        for place, name in enumerate(names):
            at = (BATCH + place) * BYTES
            self.memory[at : at + BYTES] = bytes(BYTES)
            wanted.append(ClusterBlock(self._key(name), self.kv, at, BYTES))
        for block, name, outcome in zip(
            wanted, names, self.client.get(wanted, timeout_s=WAIT_S), strict=True
        ):
            self.gets += 1
            if not isinstance(outcome, Hit):
                self.lost.append(f"{name}: {outcome}")
            elif self.memory[block.offset : block.offset + BYTES] != self._bytes(name):
                self.lost.append(f"{name}: other bytes")


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_with_two_copies_nothing_is_lost_with_one_node(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    with ExitStack() as stack:
        etcd = stack.enter_context(RealEtcd(tmp_path / "etcd"))
        told = ("--cluster", f"{etcd.endpoints[0]}/storm")
        nodes = [
            stack.enter_context(
                small_node(
                    tmp_path / f"node{at}",
                    arguments=(*told, "--cluster-zone", f"rack-{at}"),
                    capacity="512MiB",
                )
            )
            for at in range(3)
        ]
        more: dict[str, Any] = {"slots": 16, "block_bytes_max": 1 << 20, "call_timeout_ms": 2_000}
        clients = [  # the second reads the copies of the last node first
            stack.enter_context(ClusterClient([nodes[at].target], replicas=2, zone=zone, **more))
            for at, zone in enumerate(("", "rack-2"))
        ]
        for client in clients:
            wait_until(lambda: len(client.nodes.map.members) == 3, "all are members", 30)  # noqa: B023
        workers = [Worker(number, client) for number, client in enumerate(clients)]
        for worker in workers:
            worker.thread.start()
        try:
            for _ in range(ROUNDS):
                harm(dice.choice(nodes), dice)
                for client in clients:
                    wait_until(lambda: len(client.nodes.map.members) == 3, "it is a member again", 30)  # noqa: B023
                    for node in nodes:  # else two are away, as the client sees it
                        wait_until(lambda: is_reached(client, node), "it is reached again", 30)  # noqa: B023
                time.sleep(dice.uniform(0, 0.5))
                assert not [line for worker in workers for line in worker.lost]
        finally:
            for worker in workers:
                worker.is_over.set()
            for worker in workers:
                worker.thread.join()
        assert not [line for worker in workers for line in worker.lost]
        for worker in workers:
            assert len(worker.acknowledged) > 50
            assert worker.gets > 50
        everything = [(worker, name) for worker in workers for name in worker.acknowledged]
        nodes[dice.randrange(3)].kill()
        missed = [
            (worker.number, name, found)
            for worker, name in everything
            if isinstance(found := worker.client.get_inline(worker._key(name), BYTES), Miss)
        ]
        assert missed == [], f"{len(missed)} of {len(everything)}"


def is_reached(client: ClusterClient, node: NodeProcess) -> bool:
    """Whether a client calls a node, and gets an answer: for a moment it may not call one that answers again."""
    try:
        client._calls.silent.check(node.target)
        client.nodes.at(node.target).exists([block_key(b"none")])
    except KvError:
        return False
    return True


def harm(node: NodeProcess, dice: random.Random) -> None:
    """Kill a node and restart it, at once or after a while, or let it hang that long."""
    while_s = dice.choice([0.0, 0.3, 2.0, 7.0])
    if dice.random() < 0.5:
        node.kill()
        time.sleep(while_s)
        node.start()
    else:
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(while_s)
        os.kill(node.pid, signal.SIGCONT)
