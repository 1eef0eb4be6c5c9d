"""The attacks that once affected a neighbour, with one tenant's token or with none."""

from __future__ import annotations

import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block
from kvstore.errors import KvError
from kvstore.limits import (
    LANDING_BYTES_MAX,
    MESSAGE_AHEAD_BYTES,
    MESSAGE_BYTES_MAX,
    MESSAGES_COMING_MAX,
)
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress
from tests.conftest import small_client
from tests.hostile.beside import FIRST_S, MEMORY_MAX, Beside, check_speed, p99

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hostile.beside import Times

pytestmark = pytest.mark.slow

PROBE_S = 1.0  # a supervisor that waits for longer ends the node


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
@pytest.mark.parametrize("name", ["resets", "resets_of_one"])
def test_rapid_reset(beside: Beside, name: str, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure(name, **token)
    assert did["resets"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
def test_silent_streams(beside: Beside, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure("silent_streams", streams=3000, **token)
    assert did["streams"] > 0
    check_speed(alone, under)


def test_idle_connections_to_the_port_for_calls(beside: Beside) -> None:
    alone, under, did = beside.endure("idle", connections=1000)
    assert did["held"] <= 64
    check_speed(alone, under)


def test_calls_without_credentials(beside: Beside) -> None:
    alone, under, did = beside.endure("unknown", token="nobody's")
    assert did["UNAUTHENTICATED"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("call", ["Exists", "Prefix", "Explain"])
def test_calls_that_name_a_thousand_blocks(beside: Beside, call: str) -> None:
    alone, under, did = beside.endure("heavy", token="evil", call=call, blocks=1024)
    assert did["OK"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("call", ["Status", "Exists", "Get"])
def test_endless_small_calls(beside: Beside, call: str) -> None:
    alone, under, did = beside.endure("burn", token="evil", call=call, connections=20)
    assert did["done"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("path", ["KvStore/Status", "KvStore/Put", "Batches/PutBatch", "KvStore/Attach"])
def test_half_sent_messages(beside: Beside, path: str) -> None:
    """The node holds a tenant's share of them, and little of each other call."""
    before, most, stop = beside.memory_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            most.append(beside.memory_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        alone, under, did = beside.endure(
            "half_sent", token="evil", path=f"/kvstore.v1.{path}", connections=8
        )
    finally:
        stop.set()
        watching.join()
    print(f"{path}: memory grew by {(max(most) - before) >> 20} MiB")  # noqa: T201 - as in beside
    assert did["begun"] > 0
    whole = MESSAGES_COMING_MAX // 2 * MESSAGE_BYTES_MAX
    assert max(most) - before < MEMORY_MAX + whole + did["begun"] * MESSAGE_AHEAD_BYTES
    check_speed(alone, under)


def test_a_flood_of_drive_and_hot_memory_leaves_others_their_shares(beside: Beside) -> None:
    """More connections write and read than the hot memory has room for."""
    alone, under, did = beside.endure("flood", token="evil", connections=12)
    assert sum(did.values()) > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["attaches", "landing"])
def test_taking_all_places_or_all_memory_leaves_others_theirs(beside: Beside, name: str) -> None:
    """A new client attaches and puts in the middle of it."""
    came: list[str] = []

    def come() -> None:
        time.sleep(FIRST_S + beside.seconds / 2)
        try:
            with small_client(beside.node.target, token="good") as client, FlagWords.create(1) as flags:
                kv = client.register(allocate(1 << 20))
                puts = client.reserve([Block(block_key(b"late"), kv, 0, 1 << 20)]).arm(flags[0])
                flags[0].store(1)
                came.extend(str(one.error) for one in puts.wait(20))
        except KvError as error:
            came.append(str(error))

    coming = threading.Thread(target=come)
    coming.start()
    alone, under, did = beside.endure(name, token="evil")
    coming.join()
    assert did["held"] > 0
    assert did.get("leased_bytes", 0) <= LANDING_BYTES_MAX // 2
    assert came == ["None"]
    check_speed(alone, under)


def asked_for_health(
    beside: Beside, attack: Callable[[], tuple[Times, Times, Any]]
) -> tuple[Times, Times, Any]:
    """Health checks with a timeout of a second, without a pause; 99 % must be answered in time."""
    stop, took = threading.Event(), list[float]()

    def probe() -> None:
        while not stop.wait(0.1):
            began = time.monotonic()
            with urllib.request.urlopen(f"http://127.0.0.1:{beside.http_port}/healthz", timeout=5) as answer:
                assert answer.status == 200
            took.append(time.monotonic() - began)

    probing = threading.Thread(target=probe)
    probing.start()
    try:
        told = attack()
    finally:
        stop.set()
        probing.join()
    assert len(took) > 20
    assert p99(took) < PROBE_S, f"99 of 100 answers came within {p99(took):.2f} s, all within {max(took):.1f}"
    return told


def test_slow_connections_to_the_health_port(beside: Beside) -> None:
    alone, under, did = asked_for_health(
        beside, lambda: beside.endure("slow_http", connections=400, port=beside.http_port)
    )
    assert did["begun"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("page", ["/metrics", "/ui/state.json"])
def test_endless_pages(beside: Beside, page: str) -> None:
    alone, under, did = asked_for_health(
        beside, lambda: beside.endure("pages", token="evil", port=beside.http_port, page=page)
    )
    assert did["200"] > 0
    check_speed(alone, under)


def test_failing_attaches(beside: Beside) -> None:
    before = len(beside.audited())
    alone, under, did = beside.endure("failing_attaches", token="evil")
    assert set(did) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    lines = [
        one for one in beside.audited()[before:] if (one["what"], one["outcome"]) == ("attach", "refused")
    ]
    assert {one["tenant"] for one in lines} == {"evil"}
    assert sum(one.get("refusals_left_out", 0) + 1 for one in lines) > 0
    check_speed(alone, under)


def test_idle_connections_to_the_port_of_anothers_endpoint(beside: Beside) -> None:
    beside.client.attach()
    link = beside.client._core.link
    assert link is not None
    alone, under, did = beside.endure("idle", connections=1000, port=SocketAddress.of(link.node_address).port)
    assert did["held"] <= 64
    check_speed(alone, under)
    with small_client(beside.node.target, token="good") as another:
        another.attach()
    beside.client.attach()
    assert beside.client._core.link is link, "the neighbour has the connection that it had"
