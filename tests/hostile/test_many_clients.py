"""A thousand clients of one node: each costs a descriptor or two, and hardly any memory until it puts."""

from __future__ import annotations

import resource
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Hit
from kvstore.limits import DESCRIPTORS_KEPT, DESCRIPTORS_OF_CLIENT
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from tests.hostile.attacks import address, attach_request
from tests.hostile.beside import Beside
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

CLIENTS = 1000
OF_ONE_CONNECTION = 100
MIB = 1 << 20


def test_a_thousand_clients_attach_with_less_than_a_mebibyte_each(tmp_path: Path) -> None:
    wanted = DESCRIPTORS_KEPT + 2 * DESCRIPTORS_OF_CLIENT * CLIENTS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        pytest.skip(f"needs {wanted} descriptors, and the hard limit is {hard}: raise ulimit -Hn")
    with ExitStack() as undo:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        beside = undo.enter_context(Beside(tmp_path))
        descriptors, memory = beside.descriptors(), beside.memory_bytes()
        over, bearer = threading.Event(), (("authorization", "Bearer evil"),)
        held: list[Any] = []

        def requests(number: int) -> Iterator[Any]:
            told = {"slots": 64, "block_bytes_max": MIB}
            yield attach_request(told, address(number))
            over.wait()

        calls = undo.enter_context(ExitStack())
        for at in range(0, CLIENTS, OF_ONE_CONNECTION):
            channel = calls.enter_context(
                grpc.insecure_channel(beside.node.target, options=(("of_its_own", at),))
            )
            stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
            for number in range(at, at + OF_ONE_CONNECTION):
                held.append(stub.Attach(requests(number), metadata=bearer))
                assert next(held[-1]).slots == 64
        assert beside.memory_bytes() - memory < CLIENTS * MIB // 4
        assert beside.descriptors() - descriptors <= 2 * CLIENTS
        assert isinstance(beside.client.get_inline(beside.keys[0], 4096), bytes | Hit)
        over.set()
        for one in held:
            one.cancel()
        calls.close()
        wait_until(lambda: beside.descriptors() <= descriptors + 2, "all have gone", 60)
