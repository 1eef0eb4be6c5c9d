"""Conversations of a small model on a cluster: with nothing but a node's address, and while their home changes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from transformers import DynamicCache  # noqa: E402

from kvstore.engines.transformers import CacheStore  # noqa: E402
from tests.cluster.test_upkeep import RealCluster, command  # noqa: E402
from tests.engines.test_transformers import _model, _run, _same, _tokens  # noqa: E402
from tests.nic_offload.rig import wait_until  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S, USER = 60.0, "user 0"


def users_of(world: RealCluster, each: int) -> list[str]:
    """So many users of each node."""
    theirs: dict[str, list[str]] = {node.target: [] for node in world.nodes}
    for user in (f"user {number}" for number in range(1000)):
        theirs[world.client.nodes.home(user)].append(user)
    return [user for some in theirs.values() for user in some[:each]]


@pytest.mark.parametrize("addresses", [1, 2])
def test_conversations_go_on_at_their_users_homes_while_a_node_is_drained(
    tmp_path: Path, addresses: int
) -> None:
    model, tokens = _model("full"), _tokens(100)
    live = DynamicCache(config=model.config)
    _run(model, tokens[:, :70], live)
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        named = [node.target for node in world.nodes[1:]][:addresses]
        where = named[0] if addresses == 1 else named
        store = stack.enter_context(CacheStore(where, model, block_tokens=16))
        users = users_of(world, 2)
        for user in users:
            wait_until(
                lambda user=user: store.session(user, "chat").save(live, tokens).error is None,  # type: ignore[misc]
                "it is saved once its home orders sessions",
                WAIT_S,
            )
        drained = world.nodes[0]
        assert {world.client.nodes.home(user) for user in users} == {node.target for node in world.nodes}
        assert command("drain", drained.target).returncode == 0
        drained.stop()
        world.nodes.remove(drained)
        world.settled()
        for user in users:
            wait_until(
                lambda user=user: store.session(user, "chat").resume(tokens).tokens == 70,  # type: ignore[misc]
                "it continues, on its new home",
                WAIT_S,
            )
            back = store.session(user, "chat").resume(tokens)
            assert back.miss is None
            assert _same(back.cache, live)


def test_a_conversation_goes_on_if_its_home_is_lost_as_soon_as_it_is_saved(tmp_path: Path) -> None:
    model, tokens = _model("full"), _tokens(100)
    live = DynamicCache(config=model.config)
    _run(model, tokens[:, :70], live)
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        reach = [node.target for node in world.nodes]
        store = stack.enter_context(CacheStore(reach, model, block_tokens=16))
        chat = store.session(USER, "chat")
        wait_until(
            lambda: chat.save(live, tokens).error is None, "it is saved once its home orders sessions", WAIT_S
        )
        target = world.client.nodes.home(USER)
        home = next(node for node in world.nodes if node.target == target)
        home.kill()
        wait_until(lambda: store.session(USER, "chat").resume(tokens).tokens == 70, "it continues", WAIT_S)
        assert _same(store.session(USER, "chat").resume(tokens).cache, live)
