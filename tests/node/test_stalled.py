"""A client that reads nothing: the fabric polls it less and less often, and then the node drops it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc

from kvstore.node import stalled
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from nic_offload.fabric import Endpoint
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

TIMEOUT_S = 10.0
LOOKED_S = 1.0
TRIES_MAX = 200  # of which a node made tens of thousands


def test_an_unreachable_client_is_retried_now_and_then_and_detached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalled, "STALLED_MS", LOOKED_S * 1000)
    monkeypatch.setattr(stalled, "STALLED_LOOK_MS", 100)
    over = threading.Event()
    with NodeInProcess(tmp_path) as node, socket.create_server(("127.0.0.1", 0)) as door:
        tries = 0

        def turn_away() -> None:
            nonlocal tries
            while True:
                link, _ = door.accept()
                link.close()
                if over.is_set():
                    return
                tries += 1

        turning_away = threading.Thread(target=turn_away, daemon=True)
        turning_away.start()

        def requests() -> Iterator[pb.AttachRequest]:
            yield pb.AttachRequest(
                block_bytes_max=4096,
                slots=1,
                provider=node.call(lambda one: one.fabric.provider),
                fabric_address=SocketAddress(ip_of("127.0.0.1"), door.getsockname()[1]).encoded,
                ack_words=8,
            )
            over.wait(TIMEOUT_S)

        with ExitStack() as undo:
            undo.callback(over.set)
            channel = undo.enter_context(grpc.insecure_channel(node.target))
            stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
            attached = stub.Attach(requests())
            undo.callback(attached.cancel)
            connection = next(attached).connection
            name = pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=4096)
            fetch = pb.FetchBlock(name=name, ack_word=0, ack_generation=1)
            began = time.monotonic()
            stub.Fetch(pb.FetchRequest(connection=connection, blocks=[fetch]), timeout=TIMEOUT_S)
            wait_until(lambda: node.call(len) == 0, "the client is detached", TIMEOUT_S)
            assert time.monotonic() - began >= LOOKED_S
        socket.create_connection(door.getsockname()).close()
        turning_away.join()
    assert 0 < tries < TRIES_MAX


def test_a_client_whose_connection_broke_is_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalled, "STALLED_LOOK_MS", 100)
    with NodeInProcess(tmp_path) as node, small_client(node.target) as client:
        client.attach()
        assert node.call(len) == 1
        of_the_node = node.call(lambda one: next(iter(one.connections.values())).endpoint)
        monkeypatch.setattr(Endpoint, "has_broken", property(lambda one: one is of_the_node))
        wait_until(lambda: node.call(len) == 0, "the client is detached", TIMEOUT_S)
        wait_until(lambda: not client.is_attached, "and knows it", TIMEOUT_S)
