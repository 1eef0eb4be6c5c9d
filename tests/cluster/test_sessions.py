"""Sessions on real nodes: one node orders those of a user, while it is stopped, replaced and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvcli.running import Status
from kvstore.client import Client, Nodes
from kvstore.client.client import session_calls_of
from kvstore.client.session_calls import AnyHome
from kvstore.client.sessions import manifest_of
from kvstore.clock import SystemClock
from kvstore.errors import KvError, NodeUnavailable, NoSession, SessionRefused
from kvstore.miss import MissReason
from kvstore.names import block_key
from tests.cluster.ahead import made_ahead
from tests.cluster.test_cluster import USERS, Cluster, cluster
from tests.commands.here import run_here
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

__all__ = ["cluster"]
WAIT_S, LIVES_MS = 60.0, 600_000
KEYS = [block_key(b"a session", bytes([number])) for number in range(4)]


def put(nodes: Nodes, user: str) -> None:
    for key in KEYS:
        nodes.of(user).put_inline(key, key)


def keys(nodes: Nodes, user: str) -> list[bytes] | None:
    try:
        return nodes.session(user, "chat").keys()
    except NoSession:
        return []
    except KvError:
        return None


def ordering(folder: Path, stack: ExitStack) -> Cluster:
    """A cluster whose nodes order the sessions of their users: a new one does after five seconds."""
    made = Cluster(folder, stack)
    homes = {made.client.home(user): user for user in USERS}
    for node in made.nodes:
        user = homes[node.target]
        wait_until(lambda user=user: keys(made.client, user) == [], "it orders sessions", WAIT_S)  # type: ignore[misc]
    return made


clusters = made_ahead("cluster", ordering)


def wait_for_order(ask: Callable[[], object]) -> None:
    """Ask until a node orders the user's sessions."""
    for _ in range(20):
        with suppress(NodeUnavailable):
            ask()
            return


class OfAnOldMap(AnyHome):
    """A client whose map says that its node is the home."""

    def revision(self) -> int:
        return 1

    def is_here(self, user: str) -> bool:
        del user
        return False


def copy_sessions(node: NodeProcess, user: str, *session: str) -> tuple[int, dict[str, Any]]:
    """`kvstore sessions copy`: its status and what it prints."""
    words = ["sessions", "copy", "--node", node.target, "--user", user, "--json"]
    words += [word for name in session for word in ("--session", name)]
    done = run_here(*words)
    return done.returncode, json.loads(done.stdout or "{}")


def home(cluster: Cluster, user: str) -> NodeProcess:
    return next(node for node in cluster.nodes if node.target == cluster.client.home(user))


def test_a_home_that_hangs_and_returns_serves_none_of_its_old_state(cluster: Cluster) -> None:
    nodes, user = cluster.client, "ada"
    put(nodes, user)
    chat = nodes.session(user, "chat")
    chat.append(KEYS[:2], tokens=32)
    chat.fork("another answer")
    assert {one.session for one in nodes.of(user).sessions(user)} == {"another answer", "chat"}
    first = home(cluster, user)
    old = nodes.of(user).session(user, "chat")
    stop(first.pid)
    try:
        wait_until(lambda: keys(nodes, user) == [], "another node orders the user's sessions", WAIT_S)
        assert home(cluster, user) is not first
        with pytest.raises(SessionRefused):
            chat.append(KEYS[2:], tokens=32)  # to two blocks that are no more
        put(nodes, user)
        anew = nodes.session(user, "chat")
        anew.append(KEYS[3:], tokens=16)
        assert keys(nodes, user) == KEYS[3:]
    finally:
        os.kill(first.pid, signal.SIGCONT)
    with Client(first.target) as direct:
        session_calls_of(direct).home = OfAnOldMap()
        with pytest.raises(NodeUnavailable, match="was not done, and nothing has changed"):
            direct.session(user, "chat").append(KEYS[2:], tokens=32)
    cluster.settled(cluster.nodes, WAIT_S)
    wait_until(lambda: keys(nodes, user) == [], "the first has taken over, and has no session", WAIT_S)
    assert home(cluster, user) is first
    assert list(nodes.of(user).sessions(user)) == []
    assert manifest_of(old).miss is not None
    with Client(first.target) as direct:
        assert direct.session(user, "chat").keys() == KEYS[:2], "who asks this very node gets what it has"
    anew = nodes.session(user, "chat")
    assert anew.append(KEYS[:1], tokens=16) == 1
    assert keys(nodes, user) == KEYS[:1]


def test_a_client_of_the_wrong_node_is_told_of_the_users_home(cluster: Cluster) -> None:
    nodes, user = cluster.client, "ada"
    other = next(node for node in cluster.nodes if node.target != nodes.home(user))
    with Client(other.target) as client, Client(nodes.home(user)) as at_home:
        for call in (client.session(user, "chat").keys, client.session(user, "none").trace):
            with pytest.raises(NoSession, match=f"here: their home in the cluster is {nodes.home(user)}"):
                call()
        for one in (at_home.session(user, "chat"), nodes.session(user, "chat")):
            with pytest.raises(NoSession, match=r"has no session 'chat'\.$"):
                wait_for_order(one.keys)
        client.put_inline(KEYS[0], KEYS[0])
        for name in ("chat", "another"):
            client.session(user, name).append(KEYS[:1], tokens=16)
    assert other.log().count(f"users whose home is another node, such as {nodes.home(user)}") == 1
    assert "another node, such as" not in home(cluster, user).log()


def test_without_etcd_sessions_wait_and_a_restarted_node_has_them(cluster: Cluster) -> None:
    nodes, user = cluster.client, "ada"
    put(nodes, user)
    nodes.session(user, "chat").append(KEYS, tokens=64)
    first = home(cluster, user)
    first.kill()
    first.start()
    wait_until(lambda: keys(nodes, user) == KEYS, "it goes on", WAIT_S)
    (member,) = cluster.etcd.members
    member.kill()
    wait_until(
        lambda: manifest_of(nodes.of(user).session(user, "chat")).miss is not None, "they wait", WAIT_S
    )
    missed = manifest_of(nodes.of(user).session(user, "chat")).miss
    assert missed is not None
    assert missed.reason is MissReason.NODE_AWAY
    with pytest.raises(NodeUnavailable, match="no recent answer from etcd"):
        nodes.session(user, "chat").remove()
    assert nodes.of(user).get_inline(KEYS[0], len(KEYS[0])) == KEYS[0], "blocks don't wait"
    member.start(cluster.etcd.members)
    wait_until(lambda: keys(nodes, user) == KEYS, "and go on", WAIT_S)


def test_a_node_that_was_alone_joins_with_the_sessions_of_its_users(cluster: Cluster) -> None:
    users = [f"user {number}" for number in range(30)]
    data = cluster.folder / "alone"
    with small_node(data) as node, Client(node.target) as client:
        for key in KEYS:
            client.put_inline(key, key)
        lost = block_key(b"a session's block that is lost")
        client.put_inline(lost, lost)
        for user in users:
            client.session(user, "chat").append(KEYS, tokens=64)
            client.session(user, "broken").append([KEYS[0], lost], tokens=32)
            client.session(user, "ends").append(KEYS[:1], tokens=16, time_to_live_ms=LIVES_MS)
        client.delete([lost])
    joined = cluster.add(data)
    cluster.settled(cluster.nodes)
    theirs = {user for user in users if cluster.client.home(user) == joined.target}
    assert theirs
    wait_until(lambda: keys(cluster.client, min(theirs)) == KEYS, "it orders them", WAIT_S)
    assert {user for user in users if keys(cluster.client, user) == KEYS} == theirs
    moved, file = min({*users} - theirs), cluster.folder / "session"
    for doing in ("export", "import"):
        words = ["sessions", doing, "--node", joined.target, "--user", moved, "--session", "chat"]
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *words, "--file", str(file)], timeout=60, check=False
        )
        assert done.returncode == 0
    assert keys(cluster.client, moved) == KEYS, "on its home"
    copied = max({*users} - theirs)
    status, said = copy_sessions(joined, copied)
    assert said == {"home": cluster.client.home(copied), "copied": ["chat", "ends"], "failed": said["failed"]}
    assert (status, list(said["failed"])) == (Status.NO, ["broken"]), "the others are copied all the same"
    assert keys(cluster.client, copied) == KEYS
    ends_ms = cluster.client.session(copied, "ends").info().expires_unix_ms
    assert 0 < ends_ms - SystemClock().wall_ms() <= LIVES_MS, "it ends when it would have"
    cluster.client.session(copied, "chat").truncate(1)
    status, said = copy_sessions(joined, copied)
    assert (status, said["copied"], list(said["failed"])) == (Status.NO, [], ["broken"])
    assert keys(cluster.client, copied) == KEYS[:1], "what the home has stays"
    assert copy_sessions(joined, copied, "none")[0] == Status.NO
    assert copy_sessions(joined, min(theirs), "chat") == (
        Status.DONE,
        {"home": joined.target, "copied": [], "failed": {}},
    )
