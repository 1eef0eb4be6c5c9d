"""Checks that don't depend on the machine's speed: they may run beside other tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.limits import ERASURES_WAITING_MAX, GUARD_ANSWERS_BYTES_MAX, INLINE_TIMEOUT_MS
from kvstore.wire import batches_pb2 as batches
from kvstore.wire import blocks_pb2 as blocks
from kvstore.wire import erasing_pb2 as erasing
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import observing_pb2 as observing
from kvstore.wire.batches_pb2_grpc import BatchesStub
from kvstore.wire.blocks_pb2_grpc import BlocksStub
from kvstore.wire.erasing_pb2_grpc import ErasingStub
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from kvstore.wire.observing_pb2_grpc import ObservingStub
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.hostile.attacks import attach_request
from tests.hostile.beside import MEMORY_MAX, SECONDS, Beside
from tests.hostile.sessions import make_large_sessions
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    with Beside(tmp_path) as beside:
        yield beside


def test_unread_answers(beside: Beside) -> None:
    """Their memory is freed while the caller is still connected, and answers pings."""
    make_large_sessions({"port": beside.port, "token": "evil"})
    memory = beside.memory_bytes()
    with beside.attack("unread", SECONDS, token="evil", stays_s=INLINE_TIMEOUT_MS / 1000 + 5) as did:
        assert not beside.times(SECONDS).errors
        time.sleep(INLINE_TIMEOUT_MS / 1000 + 3)
        wait_until(
            lambda: beside.memory_bytes() <= memory + MEMORY_MAX + GUARD_ANSWERS_BYTES_MAX, "memory", 30
        )
    assert did["asked"] > 0
    assert any("did not read an answer" in line["why"] for line in beside.audited() if "why" in line)


@pytest.mark.parametrize("call", ["PutBatch", "GetBatch", "Watch", "Attach"])
def test_a_stream_ends_when_its_token_is_removed_from_the_file(beside: Beside, call: str) -> None:
    def requests() -> Iterator[Any]:
        if call == "PutBatch":
            name = pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=1)
            yield batches.PutBatchRequest(parts=[batches.PutPart(name=name, chunk=b"x")])
        elif call == "GetBatch":
            yield batches.GetBatchRequest(
                blocks=[pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=1)]
            )
        else:
            yield attach_request({}, SocketAddress(ip_of("127.0.0.1"), 9).encoded)
        ended.wait(20)

    ended = threading.Event()
    bearer = (("authorization", "Bearer evil"),)
    with grpc.insecure_channel(beside.node.target) as channel:
        made: Any
        if call == "Watch":
            watching = ObservingStub(channel)  # type: ignore[no-untyped-call]
            made = watching.Watch(observing.WatchRequest(), metadata=bearer)
        elif call == "Attach":
            attaching = KvStoreStub(channel)  # type: ignore[no-untyped-call]
            made = attaching.Attach(requests(), metadata=bearer)
        else:
            batching = BatchesStub(channel)  # type: ignore[no-untyped-call]
            made = getattr(batching, call)(requests(), metadata=bearer)
        next(made)
        beside.write_tenants("good")
        began = time.monotonic()
        os.kill(beside.node.pid, signal.SIGHUP)
        with suppress(grpc.RpcError):
            for _ in made:
                pass
        took = time.monotonic() - began
        ended.set()
        ended_with = {"Attach": grpc.StatusCode.OK, "Watch": grpc.StatusCode.PERMISSION_DENIED}
        assert made.code() in {grpc.StatusCode.UNAUTHENTICATED, ended_with.get(call)}
        assert took < 2


def test_each_removal_is_in_the_audit_log_with_its_caller(beside: Beside) -> None:
    beside.client.delete(beside.keys[:2])
    session = beside.client.session("user", "chat")
    session.append(beside.keys[2:4], 32)
    session.truncate(1)
    session.remove()
    lines = [
        one for one in beside.audited() if one["what"] in {"delete", "truncate session", "remove session"}
    ]
    assert [(one["what"], one["tenant"], one["named"]) for one in lines] == [
        ("delete", "good", 2),
        ("truncate session", "good", 1),
        ("remove session", "good", 1),
    ]
    assert lines[0]["names"] == ",".join(key.hex() for key in beside.keys[:2])
    assert lines[0]["found"] == 2
    assert lines[1]["names"] == lines[2]["names"] != ""


@pytest.mark.parametrize("call", ["EraseUser", "EraseTenant"])
def test_endless_erasures_are_delayed_and_each_receipt_is_in_the_audit_log(beside: Beside, call: str) -> None:
    ask = erasing.EraseUserRequest(user="u") if call == "EraseUser" else erasing.EraseTenantRequest()
    ended: dict[str, int] = {}
    with grpc.insecure_channel(beside.node.target) as channel:
        erase = getattr(ErasingStub(channel), call)  # type: ignore[no-untyped-call]
        under_way = [erase.future(ask, metadata=(("authorization", "Bearer evil"),)) for _ in range(200)]
        for one in under_way:
            ended[one.code().name] = ended.get(one.code().name, 0) + 1
    assert set(ended) == {"OK", "RESOURCE_EXHAUSTED"}
    assert ended["OK"] >= ERASURES_WAITING_MAX, "a burst waits"
    receipts = [one for one in beside.audited() if one["outcome"] == "ok" and one["tenant"] == "evil"]
    assert len(receipts) == ended["OK"]


def test_every_refusal_of_a_tenant_is_in_the_audit_log(beside: Beside) -> None:
    """Our client checks keys itself; other clients need not."""
    with grpc.insecure_channel(beside.node.target) as channel:
        exists = BlocksStub(channel).Exists  # type: ignore[no-untyped-call]
        wrong = blocks.ExistsRequest(blocks=[pb.BlockName(key=b"no key")])
        with pytest.raises(grpc.RpcError):
            exists(wrong, metadata=(("authorization", "Bearer evil"),), timeout=10)

    def refused() -> set[tuple[str, str]]:
        return {(one["what"], one["tenant"]) for one in beside.audited() if one["outcome"] == "refused"}

    wait_until(lambda: ("exists", "evil") in refused(), "it is written down", 10)
    assert "evil" not in {one.get("why") for one in beside.audited()}
