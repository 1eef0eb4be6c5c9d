"""vLLM with LMCache's connector, LMCache's own server, and our node behind it: the same answers despite failures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.miss import MissReason
from tests.engines.engine import Engine
from tests.engines.lmcache_server import LmcacheServer
from tests.engines.node import Node, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.chats import Chats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # it starts the server three times
    pytest.mark.skipif(
        find_spec("lmcache") is None, reason="lmcache is in .venv-engines only: make test-engines"
    ),
]

CHUNK = 64
TURN = range(3, 4)
BEHIND = {
    "type": "plugin",
    "module_path": "kvstore.engines.lmcache.l2",
    "class_name": "TriggerKvL2Adapter",
}


def test_lmcaches_own_server_keeps_its_objects_on_a_node(
    place: Path, model: Path, chats: Chats, tmp_path: Path
) -> None:
    def statistics() -> Any:
        with Client(node.target) as client:
            return client.statistics()

    full = sum(len(prompt) // CHUNK * CHUNK for prompt in chats.last)
    with (
        Node(tmp_path / "node") as node,
        LmcacheServer(
            tmp_path, BEHIND | {"adapter_params": {"node": node.target, "weights": "of this test"}}
        ) as server,
        # Without a cache of the engine's own all that it did not compute comes from LMCache.
        Engine(
            place, "lmcache", model, kv_transfer_config=server.transfer, enable_prefix_caching=False
        ) as engine,
    ):
        chats.check(engine, TURN)
        until(lambda: statistics().puts >= full // CHUNK, "LMCache hands its objects on")

        def restart(times: int) -> None:
            server.kill()
            node.restart()
            server.start()
            # Until both of its sides have found their server again, the engine computes, and stores.
            until(
                lambda: engine.log().count("resuming normal operation") == 2 * times,
                "the server is found again",
            )

        restart(1)
        # The server's memory is new: all comes from our node.
        assert chats.check(engine, TURN) >= full - len(chats.last) * CHUNK
        assert statistics().hits_memory + statistics().hits_drive > 0  # a started node warms up

        node.kill()
        assert chats.check(engine, TURN) == 0

        node.start()
        node.stop()  # a node that was killed looks at all blocks when it starts
        assert node.damage(0.3) > 5
        restart(2)
        assert 0 < chats.check(engine, TURN) < full - len(chats.last) * CHUNK
        assert MissReason.CORRUPT in {one.reason for one in statistics().misses}
        assert "A task failed" not in server.log()
