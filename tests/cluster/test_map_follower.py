"""Following a map: nodes that send it, send invalid ones, are silent, or are in no cluster."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import map_follower
from kvstore.client.map_follower import Following, is_in_cluster
from kvstore.cluster.map import Map, Member
from kvstore.placement import LOTS
from kvstore.reach import Reach
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 10.0
WAIT_MS = 10_000


class Teller(cluster_pb2_grpc.ClusterServicer):
    """A node that answers as the test sets it."""

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        self.answers: list[pb.MapResponse] = []
        self.goes_on = threading.Condition()
        self.is_over = False
        self.requests: list[pb.MapRequest] = []
        server = grpc.server(stack.enter_context(ThreadPoolExecutor(4)))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.node = f"{host}:{server.add_insecure_port(f'{host}:0')}"
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        stack.callback(self.end)

    def tell(self, answer: pb.MapResponse) -> None:
        with self.goes_on:
            self.answers.append(answer)
            self.goes_on.notify_all()

    def end(self) -> None:
        with self.goes_on:
            self.is_over = True
            self.goes_on.notify_all()

    def Map(self, request: pb.MapRequest, context: Any) -> Iterator[pb.MapResponse]:  # noqa: N802 - named by the proto
        self.requests.append(request)
        told = 0
        while not self.is_over and context.is_active():
            with self.goes_on:
                self.goes_on.wait(0.05)
                new = self.answers[told:]
            told += len(new)
            yield from new


class Recorded(Following):
    """Records the revision of each map that it adopts."""

    revisions: list[int]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_map":
            self.__dict__.setdefault("revisions", []).append(value.revision)
        super().__setattr__(name, value)


class MapNodes:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        # In the order in which they are asked.
        self.one, self.other = sorted((Teller(stack), Teller(stack)), key=lambda teller: teller.node)

    def follow(self, call_timeout_ms: int = 10_000, nodes: tuple[str, ...] = ()) -> Recorded:
        nodes = nodes or (self.one.node, self.other.node)
        given = Map.of(0, (Member(node, node) for node in nodes))
        found = Recorded(Reach(nodes, call_timeout_ms=call_timeout_ms), given)
        self._stack.callback(found.close)
        return found


@pytest.fixture
def world() -> Iterator[MapNodes]:
    with ExitStack() as stack:
        yield MapNodes(stack)


def told(revision: int, *nodes: str) -> pb.MapResponse:
    members = [pb.ClusterMember(name=f"of {node}", node=node, weight=1) for node in nodes]
    return pb.MapResponse(clustered=True, revision=revision, members=members)


def homes(following: Following) -> list[str]:
    return [one.node for one in following.map.members]


def test_the_map_is_that_of_the_node_that_reports_it(world: MapNodes) -> None:
    world.one.tell(told(7, "a:1", "b:1"))
    found = world.follow()
    assert homes(found) == ["a:1", "b:1"]
    world.one.tell(told(8, "b:1", "c:1"))
    wait_until(lambda: homes(found) == ["b:1", "c:1"], "it follows", WAIT_S)


def test_an_older_empty_or_invalid_map_is_ignored(world: MapNodes) -> None:
    world.one.tell(told(7, "a:1", "b:1"))
    found = world.follow()
    assert found.map.revision == 7
    for answer in (told(6, "c:1"), told(9), told(10, "no address"), told(11, "d:1")):
        world.one.tell(answer)
    wait_until(lambda: found.map.revision == 11, "the one that can be is taken", WAIT_S)
    for answer in (told(10, "e:1"), pb.MapResponse(clustered=True)):
        world.one.tell(answer)
    world.one.tell(told(12, "f:1"))
    wait_until(lambda: found.map.revision == 12, "it follows on", WAIT_S)
    assert found.revisions == [0, 7, 11, 12]


def test_nodes_in_no_cluster_are_the_configured_ones(world: MapNodes) -> None:
    world.one.tell(pb.MapResponse())
    found = world.follow()
    assert homes(found) == sorted((world.one.node, world.other.node))
    assert found.map.revision == 0
    found._thread.join(WAIT_S)
    assert not found._thread.is_alive(), "there is nothing to follow"


def test_without_an_answer_the_configured_nodes_count_after_a_calls_timeout(world: MapNodes) -> None:
    found = world.follow(500)  # neither says anything
    assert homes(found) == sorted((world.one.node, world.other.node))
    world.other.tell(told(7, "a:1"))
    wait_until(lambda: homes(found) == ["a:1"], "the answer counts when it comes", WAIT_S)


def test_a_node_that_falls_silent_is_replaced_by_the_next(
    world: MapNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_follower, "WATCH_HEARTBEAT_MS", 200)
    world.one.tell(told(7, "a:1"))
    world.other.tell(told(9, "b:1"))
    found = world.follow()
    wait_until(lambda: homes(found) == ["b:1"], "the other was asked", WAIT_S)
    world.other.end()
    world.one.tell(told(11, "c:1"))
    wait_until(lambda: homes(found) == ["c:1"], "and the first again", WAIT_S)


def test_the_number_of_lots_is_the_maps_and_8192_for_maps_of_earlier_nodes(world: MapNodes) -> None:
    world.one.tell(told(7, "a:1"))
    found = world.follow()
    assert found.map.lots == LOTS
    later = told(8, "a:1")
    later.lots = 4 * LOTS
    world.one.tell(later)
    wait_until(lambda: found.map.lots == 4 * LOTS, "it is of the map", WAIT_S)
    assert world.one.requests[0].places_by_lots


def hanging(stack: ExitStack) -> str:
    """An address that accepts connections and never answers."""
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_hanging_addresses_do_not_turn_the_list_of_nodes_into_the_map() -> None:
    with ExitStack() as stack:
        last = Teller(stack, "127.0.0.9")  # asked last
        last.tell(told(7, "a:1", "b:1"))
        nodes = (*(hanging(stack) for _ in range(3)), last.node)
        found = MapNodes(stack).follow(WAIT_MS, nodes)
        assert homes(found) == ["a:1", "b:1"]
        began_s = time.monotonic()
        assert is_in_cluster(Reach(nodes, call_timeout_ms=WAIT_MS))
        assert time.monotonic() - began_s < WAIT_MS / 1000, "it waited for none of them to its end"


def test_an_address_without_the_service_is_logged_once_and_others_are_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:
        server = grpc.server(stack.enter_context(ThreadPoolExecutor(1)))
        proxy = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        last, later = Teller(stack, "127.0.0.8"), Teller(stack, "127.0.0.9")
        found = MapNodes(stack).follow(WAIT_MS, (proxy, last.node, later.node))
        wait_until(lambda: proxy in caplog.text, "asked", WAIT_S)
        last.tell(told(7, last.node, proxy))
        wait_until(lambda: found.map.revision == 7, "the other is followed", WAIT_S)
        last.tell(told(8, "a:1"))
        wait_until(lambda: homes(found) == ["a:1"], "and still is", WAIT_S)
        later.tell(told(9, "b:1"))
        last.end()
        wait_until(lambda: homes(found) == ["b:1"], "and another after it", WAIT_S)
        alone = MapNodes(stack).follow(WAIT_MS, (proxy,))
        alone._thread.join(WAIT_S)
        assert not alone._thread.is_alive(), "it is a node of an earlier version"
    assert caplog.text.count(f"{proxy} does not support clusters") == 2, "once for each client"
