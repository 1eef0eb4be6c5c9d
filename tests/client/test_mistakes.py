"""A caller's mistakes: each raises InvalidArgument in one sentence, and nothing is sent."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import AsyncClient, Block, Client, ClusterClient, Nodes
from kvstore.client.checks import check_keys
from kvstore.client.step_calls import ReadAhead
from kvstore.errors import InvalidArgument, KeyTaken, NoSession, Refused, SessionRefused, StorageError
from kvstore.limits import BLOCK_BYTES_MAX
from kvstore.names import block_key
from kvstore.testing import MemoryNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = bytes(range(32))
NO_LISTS: list[Any] = ["text", "k" * 32, KEY, bytearray(KEY), None, 5, {KEY}, iter([KEY])]
NO_KEYS: list[Any] = [["k" * 32], [KEY, None], [b"short"], [[KEY]]]
NO_PUTS: list[Any] = [
    "text",
    [KEY],
    ["ab"],
    [(KEY,)],
    [("k" * 32, b"x")],
    [(KEY, "text")],
    [(KEY, None)],
    None,
    5,
]
NO_GETS: list[Any] = ["text", KEY, [KEY], [("k" * 32, 4)], [(KEY, "4")], [(KEY, 1.5)], None, iter([(KEY, 4)])]
OF_KEYS = ["exists", "prefix", "explain", "pin", "prefetch", "delete"]
OF_BLOCKS = ["put", "arm", "reserve", "get", "getting"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with MemoryNode() as node, node.client() as client:
        client.status(wait_s=10)
        yield client


def says(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """How a call is refused."""
    with pytest.raises(InvalidArgument) as caught:
        call(*arguments, **named)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 200
    return sentence


def test_a_list_of_keys_is_neither_a_key_nor_a_text(client: Client) -> None:
    before = client.calls
    append = partial(client.session("ada", "chat").append, tokens=1)
    for take in [*(getattr(client, name) for name in OF_KEYS), append]:
        for wrong in NO_LISTS:
            assert "a list of keys, not" in says(take, wrong)
        for wrong in NO_KEYS:
            assert "key" in says(take, wrong)
    for single in ("k" * 32, None, 5, b"short", [KEY]):
        assert "32 bytes, not" in says(client.get_inline, single, 1)
    assert client.calls == before


def test_a_list_of_blocks_is_neither_a_block_nor_keys(client: Client) -> None:
    with client.register(bytearray(8192)) as kv:
        block = Block(KEY, kv, 0, 4096)
        chat = client.session("ada", "chat")
        for take in [*(getattr(client, name) for name in OF_BLOCKS), chat.reserve, chat.arm]:
            for wrong in (*NO_LISTS, block, {block}, iter([block])):
                assert "a list of blocks, not" in says(take, wrong)
            for wrong in ([KEY], ["text"], [block, None]):
                assert "a list of Block objects; it contains" in says(take, wrong)
        for key in ("k" * 32, None, 5, [KEY], b"short"):
            assert "32 bytes, not" in says(Block, key, kv, 0, 10)


def test_puts_and_gets_inside_grpc_are_pairs(client: Client) -> None:
    for wrong in NO_PUTS:
        assert says(client.put_many_inline, wrong)
    for key, data in (("k" * 32, b"x"), (b"short", b"x"), (KEY, "text"), (KEY, ["text"]), (KEY, 5)):
        assert "block" in says(client.put_inline, key, data)
    for wrong in NO_GETS:
        assert says(client.get_many_inline, wrong)
    assert "2 keys, 1 lengths" in says(client.exists, [KEY, KEY], lengths=[1])
    assert "list of lengths" in says(client.exists, [KEY], lengths=5)
    assert "user is a str" in says(client.session, b"ada", "chat")


def test_a_layout_memory_or_part_of_a_key_of_another_type_is_named(client: Client) -> None:
    wrong: Any = 5
    assert "not int" in says(Client, "127.0.0.1:1", layout=wrong)
    assert "writable buffer" in says(client.register, "text")
    assert "this bytes is read-only" in says(client.register, b"read only")
    assert "not str" in says(block_key, "text")
    for data in (b"", bytes(BLOCK_BYTES_MAX + 1)):
        assert f"not {len(data)}" in says(client.put_inline, KEY, data)
        assert f"not {len(data)}" in says(client.put_many_inline, [(KEY, data)])


def test_what_the_callers_own_blocks_raise_comes_out_of_the_put(client: Client) -> None:
    def blocks() -> Iterator[tuple[bytes, bytes]]:
        yield KEY, b"the KV of a page"
        raise OSError("the caller's file is gone")

    with pytest.raises(OSError, match="the caller's file"):
        client.put_many_inline(blocks())


def test_a_clusters_client_refuses_the_same() -> None:
    with ClusterClient(["127.0.0.1:1"]) as cluster:  # where no node is: nothing is sent
        of_keys: list[Any] = [cluster.exists, cluster.prefix, cluster.delete, cluster.pin]
        for take in of_keys:
            for wrong in (*NO_LISTS, *NO_KEYS):
                assert "key" in says(take, wrong)
        of_blocks: list[Any] = [cluster.put, cluster.arm, cluster.get]
        for take in of_blocks:
            for wrong in (*NO_LISTS, [KEY], ["text"], (KEY, None)):
                assert "a list of" in says(take, wrong)
        for wrong in NO_PUTS:
            assert says(cluster.put_many_inline, wrong)
        for wrong in NO_GETS:
            assert says(next, cluster.get_many_inline(wrong))
        assert "32 bytes, not" in says(cluster.owners, "k" * 32)


def test_an_asyncio_client_refuses_the_same() -> None:
    async def exists(client: AsyncClient) -> None:
        async with client:
            await client.exists(KEY)  # type: ignore[arg-type]

    assert "a list of keys" in says(lambda: asyncio.run(exists(AsyncClient("127.0.0.1:1"))))


def test_the_check_takes_less_than_a_microsecond() -> None:
    keys = [KEY] * 16
    least_ns = 1 << 60
    for _ in range(20):
        began_ns = time.thread_time_ns()
        for _ in range(1000):
            check_keys(keys)
        least_ns = min(least_ns, time.thread_time_ns() - began_ns)
    assert least_ns / 1000 < 1000


def test_a_name_that_is_no_text_is_a_typed_error(client: Client) -> None:
    """As Python makes one of a command's arguments that are no UTF-8."""
    name = "ada\udcff"
    with Nodes([client.target]) as nodes:
        for call in (
            lambda: client.erase_user(name),
            lambda: client.session(name, "chat"),
            lambda: client.session("ada", name),
            lambda: list(client.sessions(name)),
            lambda: nodes.home(name),
            lambda: nodes.session(name, "chat"),
            lambda: client.session("ada", "chat").fork("other", user=name),
        ):
            with pytest.raises(InvalidArgument, match=r"'ada\\udcff', is not valid text"):
                call()


@pytest.mark.parametrize("name", ["", "u" * 129, "\xe4" * 65])
def test_a_name_is_neither_empty_nor_too_long(client: Client, name: str) -> None:
    before = client.calls
    for call in (
        lambda: client.session(name, "chat"),
        lambda: client.session("ada", name),
        lambda: client.session("ada", "chat").fork(name),
        lambda: client.erase_user(name),
        lambda: list(client.sessions(name)),
    ):
        assert "1 to 128 bytes" in says(call)
    assert client.calls == before


def test_no_blocks_are_no_mistake_and_no_call(client: Client) -> None:
    before = client.calls
    assert client.put([]) == []
    assert client.get([]) == []
    assert client.prefetch([]) == ReadAhead([], {})
    assert client.calls == before


def test_a_refusal_is_not_a_fault_of_the_drive(client: Client) -> None:
    key = block_key(b"taken")
    client.put_inline(key, b"KV")
    with pytest.raises(Refused) as taken:
        client.put_inline(key, b"other bytes")
    assert type(taken.value) is KeyTaken
    chat = client.session("ada", "unknown chat")
    with pytest.raises(Refused) as unknown:
        chat.info()
    assert type(unknown.value) is NoSession
    with pytest.raises(Refused) as absent:
        chat.append([block_key(b"never put")], tokens=1)
    assert type(absent.value) is SessionRefused
    assert not issubclass(Refused, StorageError)


def test_a_durability_is_one_of_three(client: Client) -> None:
    assert "77" in says(client.put_inline, KEY, b"x", durability=77)
    assert "77" in says(client.delete, [KEY], durability=77)


@pytest.mark.parametrize("number", [8.0, None, "8"])
def test_a_block_s_offset_and_length_are_whole_numbers(client: Client, number: Any) -> None:
    with client.register(bytearray(64)) as region:
        assert "whole numbers" in says(Block, KEY, region, number, 8)
        assert "whole numbers" in says(Block, KEY, region, 8, number)
