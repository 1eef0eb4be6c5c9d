"""Puts of a user's blocks to their home and its standby: real nodes, some killed, stopped or drained."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Arrivals, Block, ClusterBlock
from kvstore.client.user_owners import UserOwners
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, KvError
from kvstore.names import block_key
from kvstore.steps import Step
from nic_offload.flags import FlagWord, FlagWords
from nic_offload.match_action import Table
from tests.cluster.test_sessions import keys as keys_of
from tests.cluster.test_upkeep import RealCluster, command
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import ClusterPuts, Nodes, PutResult, RegisteredMemory, Session
    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S, USER = 24, 4096, 60.0, "ada"
BOUND_S = 15.0  # far more than a deadline, on a busy machine, and far less than a caller's


class Chat:
    """A user of a cluster, and blocks in memory that have not been put."""

    def __init__(self, world: RealCluster, stack: ExitStack) -> None:
        self.world = world
        self.source = bytearray(secrets.token_bytes(COUNT * BYTES))
        self.memory: RegisteredMemory = stack.enter_context(self.nodes.register(self.source))
        self.flag: FlagWord = stack.enter_context(FlagWords.create(1))[0]
        self.keys = [block_key(bytes(self.source[:16]), bytes([number])) for number in range(COUNT)]
        self.blocks = [ClusterBlock(key, self.memory, at * BYTES, BYTES) for at, key in enumerate(self.keys)]
        wait_until(lambda: len(self.names()) == 2, "the home has a standby", WAIT_S)

    @property
    def nodes(self) -> Nodes:
        return self.world.client.nodes

    def names(self) -> dict[str, str]:
        """The nodes that must have the user's blocks now, the home first; {} if the home doesn't answer."""
        return self.asker().ask(WAIT_S) or {}

    def asker(self) -> UserOwners:
        """One of the test's own: the puts have to ask by themselves."""
        return UserOwners(self.nodes, self.nodes._puts()._calls, USER)

    def both(self) -> tuple[NodeProcess, NodeProcess]:
        home, standby = self.names()
        return self.node(home), self.node(standby)

    def node(self, target: str) -> NodeProcess:
        return next(node for node in self.world.nodes if node.target == target)

    def has(self, node: NodeProcess) -> bool:
        """Whether a node has all of the blocks, byte for byte."""
        got = self.nodes.at(node.target).get_many_inline([(key, BYTES) for key in self.keys])
        return b"".join(one for one in got if isinstance(one, bytes)) == self.source

    def append(self, keys: list[bytes]) -> bool:
        try:
            return self.nodes.session(USER, "chat").append(keys, tokens=16) > 0
        except KvError:
            return False


def are_good(results: list[PutResult]) -> bool:
    assert [one.error for one in results] == [None] * COUNT
    return {one.durability for one in results} == {Durability.WRITTEN}


def armed_at(puts: ClusterPuts) -> set[str]:
    return {part.node for part in puts._places._parts}


@pytest.fixture
def chat(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chat]:
    with ExitStack() as stack:
        yield Chat(RealCluster(tmp_path, stack, getattr(request, "param", 3)), stack)


def test_acknowledged_puts_of_a_session_are_hits_at_its_new_home(chat: Chat) -> None:
    home, standby = chat.both()
    assert are_good(chat.nodes.put(USER, chat.blocks, timeout_s=WAIT_S))
    assert chat.append(chat.keys[: COUNT // 2])
    home.kill()
    chat.world.nodes.remove(home)
    assert chat.has(standby), "also those that no session names, of which nothing is copied in the background"
    wait_until(lambda: keys_of(chat.nodes, USER) is not None, "another home", WAIT_S)
    assert chat.nodes.home(USER) == standby.target
    assert keys_of(chat.nodes, USER) == chat.keys[: COUNT // 2]
    assert chat.append(chat.keys[COUNT // 2 :])
    client, got = chat.nodes.of(USER), bytearray(len(chat.source))
    with chat.nodes.register(got) as memory:
        resumed = chat.nodes.session(USER, "chat").resume(
            lambda number, key: Block(key, memory.at(client), number * BYTES, BYTES)
        )
        assert resumed.is_whole
        assert got == chat.source


@pytest.mark.parametrize("by", ["Nodes.session", "Nodes.of.session", "Arrivals.session"])
def test_no_block_that_a_session_has_put_is_lost_with_its_home(chat: Chat, by: str) -> None:
    home, standby = chat.both()
    with Arrivals(chat.nodes, Table(), tenant="default") as arrivals:
        session = {
            "Nodes.session": chat.nodes.session,
            "Nodes.of.session": chat.nodes.of(USER).session,
            "Arrivals.session": arrivals.session,
        }[by](USER, "chat")
        puts = session.arm(chat.blocks, chat.flag)
        chat.flag.store(1)
        assert are_good(puts.wait(WAIT_S))
        os.kill(home.pid, signal.SIGKILL)
        assert chat.has(standby)
        if by != "Nodes.of.session":  # that is one of the lost node
            wait_until(lambda: is_appended(session, chat.keys), "the session follows its user's home", WAIT_S)


def is_appended(session: Session, keys: list[bytes]) -> bool:
    try:
        return session.append(keys, tokens=16) >= len(keys)
    except KvError:
        return False


def test_a_session_in_a_cluster_makes_no_put_that_is_on_its_home_alone(chat: Chat) -> None:
    client = chat.nodes.of(USER)
    own = [Block(one.key, chat.memory.at(client), one.offset, one.length) for one in chat.blocks]
    for session in (chat.nodes.session(USER, "chat"), client.session(USER, "chat")):
        for put in (session.arm, session.reserve):
            with pytest.raises(InvalidArgument, match="two copies"):
                put(own)
    assert not any(chat.world.there(chat.both()[0], chat.keys))


def test_the_home_alone_traces_the_puts_of_a_session(chat: Chat) -> None:
    home, standby = chat.both()
    session = chat.nodes.session(USER, "chat")
    assert are_good(session.arm(chat.blocks).wait(WAIT_S))
    assert session.append(chat.keys, tokens=16) == COUNT
    session.report()
    steps = [one.step for one in session.trace().seen]
    assert steps.count(Step.ARMED) == 1
    assert steps.count(Step.FIRED) == 1
    there = chat.nodes.at(standby.target).session(USER, "chat")
    assert Step.ARMED not in [one.step for one in there.trace().seen]
    assert home.target == chat.nodes.home(USER)


@pytest.mark.parametrize(("chat", "how"), [(2, "killed"), (3, "stopped")], indirect=["chat"])
def test_a_standby_lost_in_the_middle_of_puts_costs_a_short_time_once(chat: Chat, how: str) -> None:
    home, standby = chat.both()
    puts = chat.nodes.arm(USER, chat.blocks, chat.flag)
    if how == "stopped":
        stop(standby.pid)
    else:
        standby.kill()
    try:
        chat.flag.store(1)
        began_s = time.monotonic()
        assert are_good(puts.wait(WAIT_S))
        assert time.monotonic() - began_s < BOUND_S
        assert chat.has(home)
        now = list(chat.names())
        assert standby.target not in now, "the record names another, or none"
        assert all(chat.has(chat.node(target)) for target in now)
        assert are_good(chat.nodes.put(USER, chat.blocks, timeout_s=BOUND_S))
    finally:
        if how == "stopped":
            os.kill(standby.pid, signal.SIGCONT)


def test_a_home_checks_a_standby_that_a_client_can_not_put_to(chat: Chat) -> None:
    home, standby = chat.both()
    assert chat.asker().ask(WAIT_S, away=standby.target) == chat.names(), "it answers the home"
    stop(standby.pid)
    try:
        now = chat.asker().ask(WAIT_S, away=standby.target)
    finally:
        os.kill(standby.pid, signal.SIGCONT)
    assert now is not None
    assert home.target in now
    assert standby.target not in now


def test_puts_that_wait_for_their_flag_go_to_a_new_standby(chat: Chat) -> None:
    home, standby = chat.both()
    other = next(node for node in chat.world.nodes if node not in (home, standby))
    puts = chat.nodes.arm(USER, chat.blocks, chat.flag, lease_ms=int(WAIT_S * 1000))
    assert command("drain", standby.target).returncode == 0
    wait_until(lambda: list(chat.names()) == [home.target, other.target], "another standby", WAIT_S)
    assert not puts.has_ended
    chat.flag.store(1)
    assert are_good(puts.wait(WAIT_S))
    assert chat.has(home)
    assert chat.has(other)


def test_a_put_that_a_former_standby_has_acknowledged_is_put_to_its_successor(chat: Chat) -> None:
    home, standby = chat.both()
    other = next(node for node in chat.world.nodes if node not in (home, standby))
    puts = chat.nodes.arm(USER, chat.blocks, chat.flag, lease_ms=int(WAIT_S * 1000))
    chat.flag.store(1)
    wait_until(lambda: puts.has_ended, "home and standby have them", WAIT_S)
    assert command("drain", standby.target).returncode == 0
    wait_until(lambda: list(chat.names()) == [home.target, other.target], "another standby", WAIT_S)
    assert armed_at(puts) == {home.target, standby.target}
    assert are_good(puts.wait(WAIT_S))
    assert chat.has(other)
    assert other.target in armed_at(puts), "the client has put them there"


def test_a_deletion_of_a_users_block_is_made_at_the_standby_too(chat: Chat) -> None:
    home, standby = chat.both()
    assert are_good(chat.nodes.put(USER, chat.blocks, timeout_s=WAIT_S))
    assert chat.nodes.delete(chat.keys) == [True] * COUNT
    assert not any(chat.world.there(home, chat.keys))
    assert not any(chat.world.there(standby, chat.keys))


def test_a_put_is_not_acknowledged_while_the_home_can_not_confirm_where_it_belongs(chat: Chat) -> None:
    chat.names()
    (member,) = chat.world.etcd.members
    member.kill()
    wait_until(lambda: not chat.names(), "the home orders no sessions", WAIT_S)
    results = chat.nodes.put(USER, chat.blocks, timeout_s=2)
    assert {type(one.error).__name__ for one in results} == {"DeadlineExceeded"}
    assert chat.nodes.of(USER).get_inline(chat.keys[0], BYTES) == bytes(chat.source[:BYTES]), (
        "blocks don't wait"
    )
    member.start(chat.world.etcd.members)
    wait_until(lambda: len(chat.names()) > 0, "it orders them again", WAIT_S)
    assert are_good(chat.nodes.put(USER, chat.blocks, timeout_s=WAIT_S))
