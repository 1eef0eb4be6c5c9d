"""An erasure that ends after it has destroyed the keys: blocks that it leaves settle no later put of their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client
from kvstore.errors import StorageError
from kvstore.names import block_key, domain_of, in_domain
from kvstore.node import erasing_service
from nic_offload.memory import allocate
from tests.conftest import MIB, small_client
from tests.node.in_process import NodeInProcess
from tests.node.test_erasing_under_load import made_opener

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ADA = "ada"
DOMAIN = domain_of(ADA)
KEY = in_domain(block_key(b"a page"), DOMAIN)
BYTES = b"kv" * 2048


def registered(client: Client, *, is_reserved: bool) -> None:
    with allocate(MIB) as memory, client.register(memory) as region:
        memory[: len(BYTES)] = BYTES
        blocks = [Block(KEY, region, 0, len(BYTES), domain=DOMAIN)]
        puts = client.reserve(blocks).arm(None) if is_reserved else client.arm(blocks)
        (result,) = puts.wait(20)
        assert result.error is None
        assert not result.already_stored


def armed(client: Client) -> None:
    registered(client, is_reserved=False)


def reserved(client: Client) -> None:
    registered(client, is_reserved=True)


def inline(client: Client) -> None:
    client.put_inline(KEY, BYTES, domain=DOMAIN)


def stream(client: Client) -> None:
    (result,) = client.put_many_inline([(KEY, BYTES)], domain=DOMAIN)
    assert result.error is None


@pytest.mark.parametrize("put", [armed, reserved, inline, stream])
@pytest.mark.parametrize("restarts", [True, False])
def test_a_put_after_an_interrupted_erasure_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Client], None], *, restarts: bool
) -> None:
    data, open_keys = tmp_path / "data", made_opener(tmp_path)
    with NodeInProcess(data, open_keys=open_keys) as node, small_client(node.target) as client:
        put(client)
        interrupt(monkeypatch, client)
        if not restarts:
            put(client)
    with NodeInProcess(data, open_keys=open_keys) as node, small_client(node.target) as client:
        if restarts:
            put(client)
        assert client.get_inline(KEY, len(BYTES)) == BYTES
    with NodeInProcess(data, open_keys=open_keys) as node, small_client(node.target) as client:
        assert client.get_inline(KEY, len(BYTES)) == BYTES


def interrupt(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    """Erase the user, as far as the keys."""

    def ends(*_: object) -> None:
        raise StorageError("The node stops here.")

    with monkeypatch.context() as patch:
        patch.setattr(erasing_service._Erasure, "sessions", ends)
        with pytest.raises(StorageError):
            client.erase_user(ADA)
