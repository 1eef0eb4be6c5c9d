"""`kvstore doctor --node`: makes a first contact with a node step by step, and says which step fails and what to try.

What always holds: each step ends in time; nothing is stored on the node; the first failed step is the last.
"""

from __future__ import annotations

import mmap
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.client.blocks import Block
from kvstore.client.client import Client
from kvstore.client.contact import steps
from kvstore.commands.doctor import Result
from kvstore.commands.show_commands import encryption_line
from kvstore.errors import ConfigError, FabricError, KvError, NodeUnavailable, ProtocolError
from kvstore.limits import PAGE_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.reach import AUTO, FABRIC, GRPC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.reach import Reach

__all__ = ["check_node"]

_MEANS = {
    "name": "The node's address.",
    "connection": "The network works.",
    "TLS": "The connection is encrypted, and the node is authenticated.",
    "protocol": "It is a node.",
}
_NO_CALL = "No call reaches the node."


def check_node(reach: Reach) -> Iterator[Result]:
    """Walk the steps towards one node."""
    try:
        for step in steps(reach):
            if not step.is_done:
                yield Result(step.name, "fail", step.said, _NO_CALL, step.advice)
                return
            yield Result(step.name, "ok", step.said, _MEANS[step.name], step.advice)
    except ConfigError as error:
        yield Result("TLS", "fail", str(error), _NO_CALL, "Check ca, certificate and key.")
        return
    if reach.transport == AUTO:
        reach = replace(reach, transport=FABRIC)  # otherwise all would seem well without a fabric
    with Client(reach, slots=1, block_bytes_max=PAGE_BYTES) as client:
        yield from _check_calls(client)


def _check_calls(client: Client) -> Iterator[Result]:
    try:
        client.statistics()
    except KvError as error:
        do = "Check the token, and the node's tenants file." if client.reach.uses_tls else ""
        if isinstance(error, NodeUnavailable | ProtocolError):
            do = "Is this the node's gRPC port, not its HTTP port or another service's?"
        yield Result("tenant", "fail", str(error), "Calls are refused.", do)
        return
    yield Result("tenant", "ok", "the node accepts calls from here", "Blocks can be sent over gRPC.")
    yield _encryption(client)
    if client.reach.transport == GRPC:
        said = "transport is grpc"
        yield Result(
            "fabric", "warn", said, "Blocks are sent over gRPC, copied by the CPU.", "Unset transport."
        )
        return
    do = "Let both machines reach each other's fabric ports, and use one provider."
    with mmap.mmap(-1, PAGE_BYTES) as memory:
        try:
            region = client.register(memory)
            name = block_key(b"doctor", secrets.token_bytes(16))  # no other node has it
            # Longer than a connection may take: then it says itself what it waited for.
            timeout_s = client.reach.connect_timeout_s + client.reach.call_timeout_s
            (answer,) = client.get([Block(name, region, 0, PAGE_BYTES)], timeout_s=timeout_s)
            region.close()
        except (FabricError, KvError) as error:
            yield Result("fabric", "fail", str(error), "Blocks can be sent over gRPC only.", do)
            return
    if isinstance(answer, Miss) and answer.reason is MissReason.UNKNOWN:
        said = f"the node answers over {client.fabric.provider}"
        yield Result("fabric", "ok", said, "Blocks are sent by remote writes.")
    else:
        yield Result(
            "fabric", "fail", f"the node did not answer: {answer}", "Blocks can be sent over gRPC only.", do
        )


def _encryption(client: Client) -> Result:
    status = client.status()
    do = "" if status.encrypted else "Give it --master-key."
    if status.keys_damaged:
        do = "kvstore keys status, on the node."
    return Result(
        "the node's encryption",
        "warn" if do else "ok",
        encryption_line(status),
        "A node with a master key encrypts stored data, and can erase a user by destroying a key.",
        do,
    )
