"""Every call of every service at its deadline, and with more than its limits allow.

A call ends at its caller's deadline although the node is stopped. A caller that requests too much is refused at once,
and told when to retry. Which calls are allowed to which tenant is tested in `test_identity`, whose table this uses.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from kvstore.client import Block, Client
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from kvstore.wire import blocks_pb2
from kvstore.wire.fabric_call import Leased
from kvstore.wire.status import ERROR_NAME, RETRY_AFTER_MS
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.client import test_identity
from tests.client.test_identity import CALLS, KEY, PAGE, Acme, header, stubs
from tests.conftest import small_client, small_node
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 30.0
DEADLINE_S = 0.3
ENDED_S = 5.0  # by when a call has to have noticed its deadline, on a machine that does other things as well


def ended(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    try:
        call()
    except grpc.RpcError as error:
        failure = cast("grpc.Call", error)
        return failure.code(), {name: str(value) for name, value in failure.trailing_metadata() or ()}
    return grpc.StatusCode.OK, {}


@pytest.fixture(scope="module")
def still(module_folder: Path) -> Iterator[tuple[NodeInProcess, Acme]]:
    """A node that can be stopped, and a client with a stored block."""
    with (
        NodeInProcess(module_folder / "still") as node,
        small_client(node.target) as client,
        FlagWords.create(1) as flags,
    ):
        client.put_inline(KEY, b"a" * PAGE)
        client.session("user", "chat").append([KEY], 32)
        kv = client.register(allocate(PAGE))
        reservation = client.reserve([Block(block_key(b"leased"), kv, 0, PAGE)])
        link = client._core.link
        assert link is not None
        (lease,) = reservation._leases
        reservation.arm(flags[0])
        yield node, Acme(client, link.number, lease)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_deadline_when_the_node_is_stopped(
    still: tuple[NodeInProcess, Acme], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, acme = still
    go_on = threading.Event()
    monkeypatch.setattr(test_identity, "WAIT_S", DEADLINE_S)
    with grpc.insecure_channel(node.target) as channel:
        stub = stubs(channel)
        grpc.channel_ready_future(channel).result(WAIT_S)
        node._loop.call_soon_threadsafe(go_on.wait, WAIT_S)
        began_s = time.monotonic()
        try:
            code, _ = ended(lambda: CALLS[name](stub, acme, "", []))
            took_s = time.monotonic() - began_s
        finally:
            go_on.set()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert took_s < ENDED_S
    assert acme.client.status(wait_s=WAIT_S).blocks >= 0, "the node goes on"


@pytest.fixture(scope="module")
def busy(module_folder: Path) -> Iterator[NodeProcess]:
    """A node on which one tenant has used up its rate for a long time."""
    tenants = module_folder / "tenants.toml"
    tenants.write_text(f'[busy]\ntokens_sha256 = ["{token_digest("busy")}"]\nrequests_per_s = 1\n')
    arguments = ("--tenants", str(tenants))
    with small_node(module_folder / "busy", arguments=arguments) as node:
        with grpc.insecure_channel(node.target) as channel:
            request = blocks_pb2.ExplainRequest(keys=[KEY] * 1000)
            stubs(channel).Explain(request, metadata=header("busy"), timeout=WAIT_S)
        yield node


@pytest.mark.parametrize("name", CALLS)
def test_a_call_over_the_rate_is_told_when_to_retry(busy: NodeProcess, name: str) -> None:
    nothing = Acme(cast("Client", None), 1, Leased(0, already_stored=False, generation=0, payload=0, flag=0))
    with grpc.insecure_channel(busy.target) as channel:
        stub = stubs(channel)
        code, trailers = ended(lambda: CALLS[name](stub, nothing, "", header("busy")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers[ERROR_NAME] == "Overloaded"
    assert int(trailers[RETRY_AFTER_MS]) > 0
