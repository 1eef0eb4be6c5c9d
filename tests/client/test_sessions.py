"""Sessions on a node: appended turn by turn, resumed by another client, truncated, forked, removed."""

from __future__ import annotations

import mmap
import secrets
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Block, Client, Resumed, Stored, TurnInfo
from kvstore.durability import Durability
from kvstore.errors import (
    InvalidArgument,
    NodeUnavailable,
    NoSession,
    Overloaded,
    ProtocolError,
    SessionRefused,
)
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    HOT_BYTES_MIN,
    PREFETCHES_MAX,
    PROTECTED_SESSIONS_OF_TENANT_MAX,
    RESUME_BATCH_BLOCKS,
    SESSION_LABEL_BYTES_MAX,
    SESSIONS_LISTED_MAX,
    SHARES,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.storage.eviction.types import Guard
from kvstore.wire import sessions_pb2 as pb
from kvstore.wire import sessions_pb2_grpc
from nic_offload.flags import FlagWords
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node

pytestmark = pytest.mark.node("shared")

MIB = 1 << 20
SIZE = 20_000  # of a block
WAIT_S = 20.0


def key(number: int) -> bytes:
    return block_key(b"block", number.to_bytes(4))


def bytes_of(number: int) -> bytes:
    return number.to_bytes(4) * (SIZE // 4)


class Memory:
    """Registered memory of a client with a place for each block."""

    def __init__(self, client: Client, blocks: int) -> None:
        self.memory = mmap.mmap(-1, max(1, blocks) * SIZE)
        self.memory[:] = b"\xdd" * len(self.memory)
        self.region = client.register(self.memory)

    def place(self, number: int, name: bytes) -> Block:
        return Block(name, self.region, number * SIZE, SIZE)

    def has(self, numbers: Sequence[int]) -> bool:
        return self.memory[: len(numbers) * SIZE] == b"".join(map(bytes_of, numbers))


def put(client: Client, numbers: Sequence[int]) -> None:
    results = client.put_many_inline([(key(number), bytes_of(number)) for number in numbers])
    assert [result.error for result in results] == [None] * len(numbers)


def append(client: Client, numbers: Sequence[int], *, name: str = "chat", user: str = "user") -> None:
    put(client, numbers)
    client.session(user, name).append([key(number) for number in numbers], 16 * len(numbers))


def resume(client: Client, *, name: str = "chat", blocks: int = 300) -> tuple[Resumed, Memory]:
    memory = Memory(client, blocks)
    return client.session("user", name).resume(memory.place, timeout_s=WAIT_S), memory


@pytest.fixture
def node_here(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "data") as node:
        yield node


def guarded(node: Node, guard: Guard) -> int:
    return node.store.statistics().eviction.guarded.get(guard, 0)


def test_a_session_is_resumed_by_another_client_after_the_node_was_killed(
    node: NodeProcess, tenant: str
) -> None:
    blocks = RESUME_BATCH_BLOCKS + 22
    with small_client(node.target, tenant=tenant) as client:
        append(client, range(100))
        append(client, range(100, blocks))
    node.kill()
    node.start()
    with small_client(node.target, tenant=tenant) as client:
        client.status(wait_s=WAIT_S)
        resumed, memory = resume(client)
        assert resumed == Resumed(blocks, 16 * blocks, blocks, 16 * blocks, None)
        assert resumed.is_whole
        assert memory.has(range(blocks))
        first, second = client.session("user", "chat").info().turns
        assert (first.blocks, first.tokens) == (range(100), range(1600))
        assert (second.blocks, second.tokens) == (range(100, blocks), range(1600, 16 * blocks))
        assert 0 < first.began_unix_ms <= second.began_unix_ms
        assert client.session("user", "chat").keys() == [key(number) for number in range(blocks)]


def test_a_node_killed_during_a_resume_is_a_miss_and_the_next_resume_is_complete(
    node: NodeProcess, tenant: str
) -> None:
    blocks = 3 * RESUME_BATCH_BLOCKS
    with small_client(node.target, tenant=tenant) as client:
        append(client, range(blocks))
        memory = Memory(client, blocks)

        def place(number: int, name: bytes) -> Block:
            if number == 2 * RESUME_BATCH_BLOCKS:  # it is asked for when the first batch has come
                node.kill()
            return memory.place(number, name)

        session = client.session("user", "chat")
        resumed = session.resume(place, timeout_s=WAIT_S)
        assert RESUME_BATCH_BLOCKS <= resumed.usable_blocks <= 2 * RESUME_BATCH_BLOCKS
        assert resumed.usable_tokens == 16 * resumed.usable_blocks
        assert resumed.miss is not None
        assert resumed.miss.reason is MissReason.NODE_AWAY
        assert memory.has(range(resumed.usable_blocks))
        away = session.resume(memory.place, timeout_s=WAIT_S)
        assert away.miss is not None
        assert (away.usable_blocks, away.miss.reason) == (0, MissReason.NODE_AWAY)
        node.start()
        client.status(wait_s=WAIT_S)
        assert session.resume(memory.place, timeout_s=WAIT_S).is_whole
        assert memory.has(range(blocks))


@pytest.mark.parametrize("gone", [0, 1, 5, 16, 29])
def test_a_deleted_block_makes_a_resume_a_miss_with_the_prefix_before_it(
    node_here: NodeInProcess, gone: int
) -> None:
    with small_client(node_here.target) as client:
        append(client, range(10))
        append(client, range(10, 30))
        client.delete([key(gone)])
        resumed, memory = resume(client)
        assert resumed == Resumed(30, 480, gone, 16 * gone, Miss(MissReason.UNKNOWN, resumed.miss.detail))  # type: ignore[union-attr]
        assert not resumed.is_whole
        assert memory.has(range(gone))
        client.put_inline(key(gone), bytes_of(gone))
        assert resume(client)[0].is_whole


def test_an_evicted_block_makes_a_resume_a_miss_with_the_prefix_before_it(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        append(client, range(300))
        client.session("user", "chat").protect(120)
        put(client, range(1000, 2000))
        resumed, memory = resume(client)
        assert resumed.miss is not None
        assert resumed.miss.reason is MissReason.EVICTED
        assert 120 <= resumed.usable_blocks < 300
        assert resumed.usable_tokens == 16 * resumed.usable_blocks
        assert memory.has(range(resumed.usable_blocks))


def test_blocks_of_a_session_being_resumed_are_not_evicted(tmp_path: Path) -> None:
    blocks = RESUME_BATCH_BLOCKS + 10
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        append(client, range(blocks))
        memory = Memory(client, blocks)

        def place(number: int, name: bytes) -> Block:
            if number == RESUME_BATCH_BLOCKS:
                put(client, range(1000, 2000))
                assert node.call(lambda one: guarded(one, Guard.LEASE)) == blocks
            return memory.place(number, name)

        assert client.session("user", "chat").resume(place, timeout_s=WAIT_S).is_whole
        assert memory.has(range(blocks))
        assert node.call(lambda one: (guarded(one, Guard.LEASE), one.pins.count)) == (0, 0)


def test_a_session_too_large_to_be_pinned_can_be_resumed(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        append(client, range(250))
        with pytest.raises(Overloaded):
            client.pin([key(number) for number in range(250)])
        resumed, memory = resume(client)
        assert resumed.is_whole
        assert memory.has(range(250))


def test_missing_and_empty_blocks(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        nothing = resume(client)[0]
        assert nothing == Resumed(
            0, 0, 0, 0, Miss(MissReason.UNKNOWN, "The user 'user' has no session 'chat'.")
        )
        append(client, [1])
        client.session("user", "chat").truncate(0)
        assert resume(client)[0] == Resumed(0, 0, 0, 0, None)
        assert client.session("user", "chat").info().turns == ()


def test_a_resume_under_another_layout_is_a_miss_without_bytes(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client, small_client(node_here.target, layout=b"another") as other:
        append(client, range(3))
        resumed, memory = resume(other)
        assert resumed.miss == Miss(MissReason.LAYOUT)
        assert resumed.usable_blocks == resumed.usable_tokens == 0
        assert memory.memory[: 3 * SIZE] == b"\xdd" * (3 * SIZE)


def test_a_turn_cut_by_a_gap_has_tokens_in_proportion_and_no_more(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        put(client, range(5))
        client.session("user", "chat").append([key(number) for number in range(5)], 70)
        client.delete([key(3)])
        assert resume(client)[0].usable_tokens == 42


def test_a_place_under_another_key_is_refused(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        append(client, range(3))
        memory = Memory(client, 3)
        with pytest.raises(InvalidArgument, match="Block 0 of the session"):
            client.session("user", "chat").resume(lambda number, _: memory.place(number, key(9)))
        assert node_here.call(lambda one: one.pins.count) == 0


def test_a_stored_block_is_neither_sent_nor_named_again(node: NodeProcess, tenant: str) -> None:
    """A prompt that was put before costs one call, and an append whose answer was lost is executed once."""
    with (
        small_client(node.target, tenant=tenant, block_bytes_max=SIZE) as client,
        FlagWords.create(1) as flags,
    ):
        memory = Memory(client, 8)
        keys = [key(number) for number in range(8)]
        blocks = [memory.place(number, name) for number, name in enumerate(keys)]
        for turn in (1, 2):
            puts = client.reserve(blocks).arm(flags[0])
            flags[0].store(1)
            results = puts.wait(WAIT_S)
            assert [one.error for one in results] == [None] * 8
            assert [one.already_stored for one in results] == [turn == 2] * 8, "the second time sends nothing"
            memory.memory[:] = secrets.token_bytes(len(memory.memory))
        session = client.session("user", "chat")
        assert session.append(keys, 128) == 8
        session._blocks = 0  # as if the answer had been lost
        assert session.append(keys, 128) == 8
        assert client.session("user", "chat").info().tokens == 128
        assert len(client.session("user", "chat").info().turns) == 1


def test_a_writer_that_missed_the_last_turn_is_refused_until_it_refreshes(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        put(client, range(4))
        one, other = client.session("user", "chat"), client.session("user", "chat")
        one.append([key(0)], 16)
        other.append([key(1)], 16)
        with pytest.raises(SessionRefused, match="has 2 blocks"):
            one.append([key(2)], 16)
        assert one.info().blocks == 2
        assert one.append([key(2)], 16) == 3


def test_a_turn_of_more_blocks_than_fit_in_a_call_is_one_turn(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        session = client.session("user", "long")
        count = 2 * BATCH_BLOCKS_MAX + 5
        assert session.append([key(0)] * count, 16 * count) == count
        (turn,) = session.info().turns
        assert turn == TurnInfo(range(count), range(16 * count), turn.began_unix_ms)
        session._blocks = 0
        assert session.append([key(0)] * count, 16 * count) == count, "the same again"


@pytest.mark.parametrize("durability", [Durability.LANDED, Durability.WRITTEN, Durability.SYNCED])
def test_forks_truncations_and_removals(node: NodeProcess, tenant: str, durability: Durability) -> None:
    with small_client(node.target, tenant=tenant) as client:
        append(client, range(20))
        chat = client.session("user", "chat")
        fork = chat.fork("other try", blocks=15, durability=durability)
        whole = chat.fork("whole", user="somebody else")
        assert (fork.info().blocks, fork.info().tokens, whole.info().blocks) == (15, 240, 20)
        append(client, [50], name="other try")
        chat.truncate(4, durability=durability)
        assert (chat.info().blocks, chat.info().tokens) == (4, 64)
        assert sorted(
            (one.session, one.blocks, one.turns, one.tokens) for one in client.sessions("user")
        ) == [
            ("chat", 4, 1, 64),
            ("other try", 16, 2, 256),
        ]
        with pytest.raises(SessionRefused, match="of this name already"):
            chat.fork("whole", user="somebody else")
        for blocks in (5, 2**31):
            with pytest.raises(SessionRefused, match="fewer than"):
                chat.truncate(blocks)
        assert whole.remove(delete_blocks=True, durability=durability) == 5
        assert not any(
            isinstance(one, Stored) for one in client.exists([key(number) for number in range(15, 20)])
        )
        assert resume(client, name="other try")[0].is_whole
        assert fork.remove() == 12
        assert fork.remove() == 0, "what is gone is gone"
        assert isinstance(client.exists([key(50)])[0], Stored), "it was not asked to delete them"
        assert [one.session for one in client.sessions("user")] == ["chat"]
        for call in (fork.info, fork.keys, fork.prefetch, fork.protect, lambda: fork.truncate(0)):
            with pytest.raises(NoSession):
                call()
        with pytest.raises(NoSession):
            fork.fork("x")
        with pytest.raises(InvalidArgument, match="1 to 128 bytes"):
            client.sessions("")  # at once, though it is an iterator
        node.kill()
        node.start()
        client.status(wait_s=WAIT_S)
        assert [one.session for one in client.sessions("user")] == ["chat"]
        assert resume(client)[0].is_whole


def test_a_session_names_only_stored_blocks(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        put(client, [0])
        with pytest.raises(SessionRefused, match="only stored blocks"):
            client.session("user", "chat").append([key(0), key(1)], 32)
        assert list(client.sessions("user")) == []
        with pytest.raises(InvalidArgument, match="at least one block"):
            client.session("user", "chat").append([], 5)


def test_two_tenants_with_the_same_names_share_nothing(node_here: NodeInProcess) -> None:
    with (
        small_client(node_here.target, tenant="a") as one,
        small_client(node_here.target, tenant="b") as other,
    ):
        append(one, range(3))
        assert resume(other)[0].miss == Miss(MissReason.UNKNOWN, "The user 'user' has no session 'chat'.")
        assert list(other.sessions("user")) == []
        with pytest.raises(SessionRefused, match="only stored blocks"):
            other.session("user", "chat").append([key(0)], 16)
        other.put_inline(key(0), b"\x7f" * SIZE)
        other.session("user", "chat").append([key(0)], 16)
        assert other.session("user", "chat").remove(delete_blocks=True) == 1
        resumed, memory = resume(one)
        assert resumed.is_whole
        assert memory.has(range(3))


def test_a_users_sessions_are_listed_in_pages(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        names = [f"chat {number} \N{SNOWMAN}" for number in range(SESSIONS_LISTED_MAX + 10)]
        for name in names:
            client.session("user", name).append([key(0)], 16)
        client.session("another", "chat").append([key(0)], 16)
        before = client.calls
        assert sorted(one.session for one in client.sessions("user")) == sorted(names)
        assert client.calls == before + 2
        with grpc.insecure_channel(node_here.target) as channel:
            stub: Any = sessions_pb2_grpc.SessionsStub(channel)  # type: ignore[no-untyped-call]
            page = stub.ListSessions(pb.ListSessionsRequest(user="user", page_size=1), timeout=20)
            assert len(page.sessions) == 1
            full = pb.ListSessionsRequest(user="user", page_size=9999, page_token=page.next_page_token)
            assert len(stub.ListSessions(full, timeout=20).sessions) == SESSIONS_LISTED_MAX


def test_protection_is_counted_and_ends(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        append(client, range(10))
        session = client.session("user", "chat")
        session.protect(4)
        assert node_here.call(lambda one: guarded(one, Guard.PROTECTED)) == 4
        session.protect()
        assert node_here.call(lambda one: guarded(one, Guard.PROTECTED)) == 10
        assert session.unprotect()
        assert not session.unprotect()
        assert node_here.call(lambda one: guarded(one, Guard.PROTECTED)) == 0
        session.protect()
        session.remove()
        assert node_here.call(lambda one: guarded(one, Guard.PROTECTED)) == 0
        append(client, [0])
        with pytest.raises(ProtocolError, match="blocks to protect"):
            session.protect(2**31)


def test_a_tenant_protects_a_bounded_number_of_sessions(node_here: NodeInProcess) -> None:
    with (
        small_client(node_here.target, tenant="a") as one,
        small_client(node_here.target, tenant="b") as other,
    ):
        for client in (one, other):
            client.put_inline(key(0), b"x")
        for number in range(PROTECTED_SESSIONS_OF_TENANT_MAX + 1):
            one.session("user", str(number)).append([key(0)], 16)
        for number in range(PROTECTED_SESSIONS_OF_TENANT_MAX):
            one.session("user", str(number)).protect()
        with pytest.raises(Overloaded, match="at most 512"):
            one.session("user", str(PROTECTED_SESSIONS_OF_TENANT_MAX)).protect()
        one.session("user", "0").protect(1)
        append(other, [5])
        other.session("user", "chat").protect()
        one.session("user", "0").remove()
        one.session("user", str(PROTECTED_SESSIONS_OF_TENANT_MAX)).protect()


def hot(node: NodeInProcess) -> tuple[int, int]:
    """The blocks in hot memory, and the number of hits there."""

    def told(inside: Node) -> tuple[int, int]:
        inside.catch_up()  # what the C core has answered
        statistics = inside.hot.pages.statistics()
        return statistics.kept, statistics.found

    return node.call(told)  # type: ignore[no-any-return]


def test_a_prefetched_session_is_resumed_from_memory(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        append(client, range(200))
        assert client.session("user", "chat").prefetch() == 200
        wait_until(lambda: hot(node_here)[0] == 200, "all of it is in the hot memory")
        assert node_here.call(lambda one: len(one.prefetches)) == 0
        resumed, memory = resume(client)
        assert resumed.is_whole
        assert memory.has(range(200))
        assert hot(node_here) == (200, 200)
        assert client.session("user", "chat").prefetch() == 200, "what is there is not read again"
        assert node_here.call(lambda one: one.hot.pages.statistics().evicted) == 0


def test_a_prefetch_ends_at_a_gap_and_at_its_share(tmp_path: Path) -> None:
    with (
        NodeInProcess(tmp_path / "data", hot_bytes=HOT_BYTES_MIN) as node,
        small_client(node.target) as client,
    ):
        share = HOT_BYTES_MIN // SHARES
        for number in range(20):
            client.put_inline(key(number), b"x" * MIB)
        session = client.session("user", "chat")
        session.append([key(number) for number in range(20)], 20)
        fits = share // (MIB + 4096)
        assert 0 < fits < 20
        assert session.prefetch() == fits
        wait_until(lambda: hot(node)[0] == fits, "its share is in the hot memory")
        client.delete([key(3)])
        assert session.prefetch() == 3


def test_waiting_prefetches_are_bounded_by_the_tenants_share(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        for number in range(20):
            client.session("user", str(number)).append([key(0)], 16)

        def none_is_read(node: Node) -> None:
            node.prefetches._is_wanted_elsewhere = lambda: True

        node_here.call(none_is_read)
        for number in range(PREFETCHES_MAX // SHARES):
            client.session("user", str(number)).prefetch()
            client.session("user", str(number)).prefetch()
        with pytest.raises(Overloaded, match="prefetch queue is full"):
            client.session("user", "19").prefetch()
        assert hot(node_here)[0] == 0, "nothing is read while somebody else waits for the drive"


@pytest.mark.parametrize(
    ("user", "name"),
    [("", "x"), ("x", ""), ("x" * (SESSION_LABEL_BYTES_MAX + 1), "x"), ("x", "\N{SNOWMAN}" * 43)],
)
def test_invalid_names_are_refused(node_here: NodeInProcess, user: str, name: str) -> None:
    """By the node as well, whatever the client lets through."""
    with small_client(node_here.target) as client:
        session = client.session("x", "x")
        session.user, session.name = user, name
        calls: list[Callable[[], Any]] = [session.info, session.remove, session.prefetch, session.unprotect]
        for call in calls:
            with pytest.raises(ProtocolError, match="name has 1 to 128 bytes"):
                call()


def test_the_longest_names_are_stored_and_returned(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        name = "x" * SESSION_LABEL_BYTES_MAX
        client.session(name, name).append([key(0)], 1)
        assert [one.session for one in client.sessions(name)] == [name]


def test_without_a_node_each_step_is_one_typed_error(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data") as node:
        client = small_client(node.target)
        append(client, [0])
    with client:
        session = client.session("user", "chat")
        for call in (session.info, session.remove, session.prefetch, lambda: session.append([key(0)], 1)):
            with pytest.raises(NodeUnavailable):
                call()
