"""A session's time to live as a client sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import NoSession, ProtocolError
from kvstore.limits import PROTECTED_SESSIONS_OF_TENANT_MAX, SESSION_TIME_TO_LIVE_MS_MAX
from kvstore.names import block_key
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import Client

KEY = block_key(b"one")
HOUR_MS = 3_600_000


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with NodeInProcess(tmp_path / "node") as node, small_client(node.target) as client:
        client.put_inline(KEY, b"x")
        yield client


def names(client: Client) -> list[str]:
    return [one.session for one in client.sessions("ada")]


def test_an_expired_session_is_not_listed(client: Client) -> None:
    stays, goes = client.session("ada", "stays"), client.session("ada", "goes")
    stays.append([KEY], 16, time_to_live_ms=HOUR_MS)
    goes.append([KEY], 16)
    ends_ms = goes.limit(HOUR_MS)
    assert goes.info().expires_unix_ms == ends_ms
    assert {one.session: one.expires_unix_ms for one in client.sessions("ada")}["goes"] == ends_ms
    assert goes.limit(1) < ends_ms
    wait_until(lambda: names(client) == ["stays"], "it is in no list")
    with pytest.raises(NoSession):
        goes.info()
    with pytest.raises(NoSession):
        goes.prefetch()
    with pytest.raises(NoSession):
        client.session("ada", "never").limit(HOUR_MS)
    assert stays.limit(0) == stays.info().expires_unix_ms == 0
    assert client.session("ada", "goes").append([KEY], 16) == 1


def test_an_impossible_expiry_is_refused(client: Client) -> None:
    chat = client.session("ada", "chat")
    with pytest.raises(ProtocolError, match="at most"):
        chat.append([KEY], 16, time_to_live_ms=SESSION_TIME_TO_LIVE_MS_MAX + 1)
    assert names(client) == []


def test_expired_sessions_do_not_count_as_protected(client: Client) -> None:
    for number in range(PROTECTED_SESSIONS_OF_TENANT_MAX):
        chat = client.session("ada", f"chat {number}")
        chat.append([KEY], 1)
        chat.protect()
    for number in range(2):
        client.session("ada", f"chat {number}").limit(1)
    last = client.session("ada", "the last one")
    last.append([KEY], 1)
    wait_until(lambda: "chat 0" not in names(client) and "chat 1" not in names(client), "two have ended")
    last.protect()
