"""The keys of a connection, as described in `docs/wire.md`."""

from __future__ import annotations

from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from kvstore.wire.seal import SECRET_BYTES, Seal


def keys(secret: bytes) -> dict[str, Any]:
    """The three keys of each end: for sending, for receiving, and the place of its words."""
    given: dict[str, Any] = {}

    def end(name: str) -> Any:
        return SimpleNamespace(seal=lambda *told: given.update({name: told}))

    seal = Seal(secret)
    seal.put_on_node(end("node"))
    seal.put_on_client(end("client"), "words")  # type: ignore[arg-type]
    return given


def test_each_direction_has_its_own_key() -> None:
    secret = bytes(range(16))
    to_node, to_client = (
        blake2b(b"", key=secret, person=person, digest_size=16).digest()
        for person in (b"kv to node", b"kv to client")
    )
    assert to_node != to_client
    assert keys(secret) == {"node": (to_client, to_node), "client": (to_node, to_client, "words")}


def test_no_two_connections_share_a_secret() -> None:
    secrets = {Seal.fresh().secret for _ in range(100)}
    assert len(secrets) == 100
    assert {len(one) for one in secrets} == {SECRET_BYTES}
