"""The `repr` of clients and sessions: it says what they are connected to, without a token, and opens nothing."""

from __future__ import annotations

import asyncio

from kvstore.client import AsyncClient, AsyncClusterClient, Client, ClusterClient

TOKEN = "a secret of forty characters, never shown"


def test_a_client_shows_its_node_transport_and_tenant() -> None:
    with Client("127.0.0.1:1", transport="grpc") as client:
        assert repr(client) == "Client('127.0.0.1:1', transport='grpc')"
    with Client("[::1]:1", tenant="acme", token=TOKEN) as client:
        assert repr(client) == "Client('[::1]:1', transport='auto', tenant='acme')"
        assert client._core._fabric is None, "repr opens no fabric"


def test_a_client_shows_the_transport_that_auto_chose() -> None:
    with Client("127.0.0.1:1", transport="auto") as client:
        assert client.transport in repr(client)


def test_a_cluster_client_shows_its_nodes_and_replicas() -> None:
    with ClusterClient(["127.0.0.1:1", "127.0.0.1:2"], replicas=2, tenant="acme", token=TOKEN) as cluster:
        assert repr(cluster) == (
            "ClusterClient(['127.0.0.1:1', '127.0.0.1:2'], replicas=2, transport='auto', tenant='acme')"
        )


def test_a_session_shows_its_user_and_name() -> None:
    with Client("127.0.0.1:1") as client:
        assert repr(client.session("ada", "chat 7")) == "Session(user='ada', name='chat 7')"


def test_asyncio_clients_and_sessions_show_the_same() -> None:
    async def shown() -> list[str]:
        async with (
            AsyncClient("127.0.0.1:1", token=TOKEN) as one,
            AsyncClusterClient(["127.0.0.1:2"]) as all_of_them,
        ):
            return [repr(one), repr(one.session("ada", "chat 7")), repr(all_of_them)]

    assert asyncio.run(shown()) == [
        "AsyncClient('127.0.0.1:1', transport='auto')",
        "AsyncSession(user='ada', name='chat 7')",
        "AsyncClusterClient(['127.0.0.1:2'], transport='auto')",
    ]
