"""Health and reflection, the standard services, and which callers may use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.node.tenants import token_digest
from tests.conftest import small_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
ACME = (("authorization", "Bearer acme"),)
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def guarded(module_folder: Path) -> Iterator[NodeProcess]:
    tenants = module_folder / "tenants.toml"
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\n')
    with small_node(module_folder / "node", arguments=("--tenants", str(tenants))) as running:
        yield running


def listed(channel: grpc.Channel, metadata: Any = None) -> list[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=WAIT_S, metadata=metadata)
    return [service.name for service in answer.list_services_response.service]


def test_health_of_the_node_and_of_each_service_is_public(guarded: NodeProcess) -> None:
    with grpc.insecure_channel(guarded.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.KvStore", "kvstore.v1.Blocks", "kvstore.v1.Sessions"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=WAIT_S).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="another"), timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_methods_that_stream_or_list_need_a_token(guarded: NodeProcess) -> None:
    with grpc.insecure_channel(guarded.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for call in (
            lambda: next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)),
            lambda: listed(channel),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S, metadata=ACME)
        assert next(watch).status == SERVING
        watch.cancel()
        assert {"kvstore.v1.KvStore", "kvstore.v1.Blocks", "kvstore.v1.Sessions"} < set(listed(channel, ACME))


def test_a_client_finds_message_fields_by_reflection(node: NodeProcess) -> None:
    with grpc.insecure_channel(node.target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvstore.v1.Sessions")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=WAIT_S)
        (file, *_) = answer.file_descriptor_response.file_descriptor_proto
        assert b"AppendSessionRequest" in file
