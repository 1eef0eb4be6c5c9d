"""A client that is stopped, or whose host is lost, closes nothing: the node detects it and frees its slots."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from kvstore.cluster import etcd
from kvstore.limits import KEEPALIVE_MS
from kvstore.node import server
from kvstore.wire.keepalive import server_keepalive_options
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INTERVAL_MS = 1500  # a client may have no core for a while, and is no lost one
WAIT_S = 20.0
ATTACHED = """
import sys
from kvstore.client import Client
client = Client(sys.argv[1], slots=1, block_bytes_max=4096, fabric_address=sys.argv[2])
client.attach()
print("attached", flush=True)
sys.stdin.read()
"""


@contextmanager
def attached(
    target: str, *, within: tuple[str, ...] = (), address: str = "127.0.0.1"
) -> Iterator[subprocess.Popen[str]]:
    """A process that is attached and sends nothing more."""
    command = [*within, sys.executable, "-c", ATTACHED, target, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            yield process
        finally:
            process.kill()


def test_a_stopped_client_loses_its_slots_within_two_intervals(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path, options=server_keepalive_options(INTERVAL_MS)) as node:
        with attached(node.target) as process:
            quiet_until = time.monotonic() + 3 * INTERVAL_MS / 1000
            wait_until(lambda: time.monotonic() > quiet_until, "it has been quiet for a while")
            assert node.call(len) == 1
            stop(process.pid)
            stopped_s = time.monotonic()
            wait_until(lambda: node.call(len) == 0, "the node has let it go")
            assert time.monotonic() - stopped_s < 2 * INTERVAL_MS / 1000 + 5.0  # the machine may be busy
        wait_until(lambda: node.call(lambda inside: inside.landing.total) == 0, "its slots are free")


def test_a_server_and_its_clients_ping_at_the_configured_intervals() -> None:
    options = dict(server._GRPC_OPTIONS)
    assert dict(server_keepalive_options()).items() <= options.items()
    assert options["grpc.keepalive_time_ms"] == options["grpc.keepalive_timeout_ms"] == KEEPALIVE_MS


def test_our_clients_never_ping_too_often() -> None:
    """A node accepts any number of pings; etcd accepts one in 5 s, and ours may arrive closer than they were sent."""
    assert (
        dict(server._GRPC_OPTIONS)["grpc.http2.max_ping_strikes"] == 0
    )  # also, refusals make floods cost more
    assert dict(etcd._OPTIONS)["grpc.keepalive_time_ms"] >= 2 * 5_000


@pytest.mark.slow
def test_a_real_node_drops_a_stopped_client_in_ten_seconds(tmp_path: Path) -> None:
    """It once took 62 s: gRPC waited a minute for the answer to its ping."""
    with small_node(tmp_path / "node") as node, attached(node.target) as process, Client(node.target) as asks:
        quiet_until = time.monotonic() + KEEPALIVE_MS / 1000
        wait_until(lambda: time.monotonic() > quiet_until, "it has been quiet for a while")
        assert asks.status().connections == 1
        stop(process.pid)
        stopped_s = time.monotonic()
        wait_until(lambda: asks.status().connections == 0, "the node has let it go", 30.0)
        assert time.monotonic() - stopped_s < 2 * KEEPALIVE_MS / 1000 + 5.0


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=WAIT_S)


@contextmanager
def another_host() -> Iterator[tuple[str, str, str]]:
    """A network namespace connected to this one: its name, our address, and its own."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("makes a network namespace: run as root, with iproute2 (apt-get install iproute2)")
    name, number = f"kv{os.getpid()}", os.getpid() % 250
    ours, theirs = f"10.211.{number}.1", f"10.211.{number}.2"
    try:
        run(f"ip netns add {name}")
        run(f"ip link add {name}a type veth peer name {name}b netns {name}")
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"this machine gives root no network namespace: {error.stderr.decode().strip()}")
    try:
        run(f"ip addr add {ours}/30 dev {name}a")
        run(f"ip link set {name}a up")
        run(f"ip -n {name} addr add {theirs}/30 dev {name}b")
        run(f"ip -n {name} link set {name}b up")
        run(f"ip -n {name} link set lo up")
        yield name, ours, theirs
    finally:
        run(f"ip netns del {name}")


def test_a_client_whose_host_vanished_loses_its_slots_too(tmp_path: Path) -> None:
    """Its packets are dropped both ways, so the TCP connection never ends."""
    with (
        another_host() as (name, ours, theirs),
        NodeInProcess(tmp_path, options=server_keepalive_options(INTERVAL_MS), host=ours) as node,
        attached(node.target, within=("ip", "netns", "exec", name), address=theirs),
    ):
        quiet_until = time.monotonic() + 3 * INTERVAL_MS / 1000
        wait_until(lambda: time.monotonic() > quiet_until, "it has been quiet for a while")
        assert node.call(len) == 1
        run(f"ip -n {name} link set {name}b down")
        wait_until(
            lambda: node.call(len) == 0, "the node has let it go"
        )  # TCP by itself takes a quarter of an hour
