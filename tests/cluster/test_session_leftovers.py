"""What sessions leave on nodes that were the home or the standby of their users: it is removed with them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.primacy import Record
from kvstore.errors import KvError
from kvstore.limits import SESSIONS_MOVE_RETRY_MS
from kvstore.node.session_hand_overs import HandOvers
from tests.cluster.ahead import made_ahead
from tests.cluster.test_session_moves import USERS
from tests.cluster.test_session_standbys import begun
from tests.cluster.test_upkeep import command
from tests.nic_offload.rig import wait_until
from tests.node.test_http import http_url, values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.ahead import Ahead
    from tests.cluster.test_session_moves import Conversations

WAIT_S = 60.0

triples = made_ahead("chats", begun)


@pytest.fixture
def chats(triples: Ahead[Conversations]) -> Iterator[Conversations]:
    """Conversations on three nodes."""
    with triples.one() as chats:
        yield chats


def is_removed(chats: Conversations, user: str) -> bool:
    try:
        chats.nodes.session(user, "chat").remove(delete_blocks=True)
    except KvError:
        return False
    return True


def stored(chats: Conversations) -> list[int]:
    """How many sessions each node has on its drive."""
    return [int(values(http_url(node))["kvstore_sessions",]) for node in chats.world.nodes]


def test_sessions_that_moved_and_were_removed_leave_nothing_on_any_node(chats: Conversations) -> None:
    """Else each change of home would leave pages that count against the tenant's quota."""
    world = chats.world
    first, second, _ = world.nodes
    assert command("drain", second.target).returncode == 0
    assert command("join", second.target).returncode == 0
    world.settled()
    assert command("drain", first.target).returncode == 0
    for user in USERS:
        wait_until(lambda user=user: is_removed(chats, user), "it is removed with its blocks", WAIT_S)  # type: ignore[misc]
    assert command("join", first.target).returncode == 0
    wait_until(lambda: stored(chats) == [0, 0, 0], "nothing is left", 20)


def test_a_session_that_moved_stays_while_its_former_home_has_blocks_of_it(chats: Conversations) -> None:
    """They would be copied to other nodes if no session named them."""
    first = chats.world.nodes[0]
    moved = [user for user, home in chats.homes().items() if home == first.target]
    for user in moved:
        chats.nodes.session(user, "chat").fork("empty").truncate(0)
    before = stored(chats)[0]
    assert command("drain", first.target).returncode == 0
    wait_until(lambda: stored(chats)[0] <= before - len(moved), "those without blocks are removed", 20)
    time.sleep(2 * SESSIONS_MOVE_RETRY_MS / 1000)
    assert stored(chats)[0] == before - len(moved)


def test_a_standby_that_was_off_the_map_asks_the_home_again() -> None:
    """The home has found another one meanwhile, and its copies are left here."""
    home: Any = SimpleNamespace(name="home")
    now: Any = SimpleNamespace(map=SimpleNamespace(home=lambda *_: home), lease_of={"home": 1}, lease=7)
    other: Any = SimpleNamespace(placed_as=lambda name: name, is_draining=False)
    hand_overs = HandOvers(other, other, now, other, other, other, other)
    hand_overs.note_copy("", "ada", "home")
    assert hand_overs._unknowing_home(("", "ada")) is None
    now.lease = 8
    assert hand_overs._unknowing_home(("", "ada")) is home


def test_a_standby_that_was_replaced_while_it_was_on_the_map_asks_the_home_again() -> None:
    """The home does not say that it has found another one: this node did not answer then."""
    home: Any = SimpleNamespace(name="home")
    records = {7: Record("home", 1, 0, "me", 1, 1)}

    async def record(lot: int) -> Record:
        return records[lot]

    now: Any = SimpleNamespace(
        name="me",
        map=SimpleNamespace(home=lambda *_: home, lot_of=lambda *_: 7),
        lease_of={"home": 1},
        lease=7,
        primacy=SimpleNamespace(record=record),
    )
    other: Any = SimpleNamespace(placed_as=lambda name: name, is_draining=False)
    hand_overs = HandOvers(other, other, now, other, other, other, other)
    for user in ("ada", "grace"):
        hand_overs.note_copy("", user, "home")
    assert not asyncio.run(hand_overs._has_been_replaced())
    assert hand_overs._unknowing_home(("", "ada")) is None
    records[7] = Record("home", 1, 0, "another", 2, 2)
    assert asyncio.run(hand_overs._has_been_replaced())
    assert hand_overs._unknowing_home(("", "ada")) is hand_overs._unknowing_home(("", "grace")) is home
