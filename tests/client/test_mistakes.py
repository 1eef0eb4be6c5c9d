"""A caller's mistakes: each raises InvalidArgument in one sentence, and nothing is sent."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.client import AsyncClient, Block, Client, ClusterClient, Hit, Nodes
from kvstore.client.checks import check_keys
from kvstore.client.step_calls import ReadAhead
from kvstore.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KeyTaken,
    LayoutError,
    NoSession,
    Refused,
    SessionRefused,
    StorageError,
)
from kvstore.layout import Layer, Layout
from kvstore.limits import BATCH_BLOCKS_MAX, BLOCK_BYTES_MAX, SLOTS_PER_CLIENT_MAX
from kvstore.miss import Miss
from kvstore.names import block_key
from kvstore.testing import MemoryNode
from nic_offload.flags import FlagWords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY = bytes(range(32))
NO_LISTS: list[Any] = ["text", "k" * 32, KEY, bytearray(KEY), None, 5, {KEY}, iter([KEY])]
NO_KEYS: list[Any] = [["k" * 32], [KEY, None], [b"short"], [[KEY]], [KEY, bytearray(KEY)], [memoryview(KEY)]]
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
    """The error message of a call that is refused."""
    with pytest.raises(InvalidArgument) as caught:
        call(*arguments, **named)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 200
    return sentence


def test_a_list_of_keys_is_not_a_key_or_text(client: Client) -> None:
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


def test_a_list_of_blocks_is_not_a_block_or_keys(client: Client) -> None:
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


def test_grpc_puts_and_gets_take_pairs(client: Client) -> None:
    for wrong in NO_PUTS:
        assert says(client.put_many_inline, wrong)
    for key, data in (("k" * 32, b"x"), (b"short", b"x"), (KEY, "text"), (KEY, ["text"]), (KEY, 5)):
        assert "block" in says(client.put_inline, key, data)
    for wrong in NO_GETS:
        assert says(client.get_many_inline, wrong)
    assert "2 keys, 1 length" in says(client.exists, [KEY, KEY], lengths=[1])
    assert "list of lengths" in says(client.exists, [KEY], lengths=5)
    assert "user is a str" in says(client.session, b"ada", "chat")


def test_a_layout_memory_or_key_part_of_another_type_is_named_in_the_error(client: Client) -> None:
    wrong: Any = 5
    assert "not int" in says(Client, "127.0.0.1:1", layout=wrong)
    assert "writable buffer" in says(client.register, "text")
    assert "this bytes is read-only" in says(client.register, b"read only")
    assert "not str" in says(block_key, "text")
    for data in (b"", bytes(BLOCK_BYTES_MAX + 1)):
        assert f"not {len(data)}" in says(client.put_inline, KEY, data)
        assert f"not {len(data)}" in says(client.put_many_inline, [(KEY, data)])


@pytest.mark.parametrize("kind", ["O", [("number", "i4"), ("Object", "O")]])
def test_references_to_python_objects_are_no_bytes(client: Client, kind: Any) -> None:
    """A get would overwrite them, and the interpreter would crash later."""
    objects = np.zeros(4, dtype=kind)
    before = client.calls
    for take in (client.register, partial(client.put_inline, KEY)):
        assert "an array of python objects" in says(take, objects).lower()
    assert client.calls == before
    assert "an array of python objects" in says(client.put_many_inline, [(KEY, [b"x", objects])]).lower()


def test_arrays_of_numbers_are_bytes_whatever_their_fields_are_called(client: Client) -> None:
    kinds: list[Any] = [">i4", "f2", "U3", [("Object", "i4"), ("O", "f8")]]
    for number, kind in enumerate(kinds):
        array: Any = np.ones(4, dtype=kind)
        key = block_key(b"array", bytes([number]))
        client.put_inline(key, array)
        assert client.get_inline(key, array.nbytes) == array.tobytes()
        client.register(array).close()
    assert "contiguous" in says(client.put_inline, KEY, np.zeros(4, dtype="M8[s]"))  # NumPy hides its bytes


def test_an_exception_of_the_callers_iterator_is_raised_by_the_put(client: Client) -> None:
    def blocks() -> Iterator[tuple[bytes, bytes]]:
        yield KEY, b"the KV of a page"
        raise OSError("the caller's file is gone")

    with pytest.raises(OSError, match="the caller's file"):
        client.put_many_inline(blocks())


def test_a_cluster_client_refuses_the_same_arguments() -> None:
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


def test_an_asyncio_client_refuses_the_same_arguments() -> None:
    async def exists(client: AsyncClient) -> None:
        async with client:
            await client.exists(KEY)  # type: ignore[arg-type]

    assert "a list of keys" in says(lambda: asyncio.run(exists(AsyncClient("127.0.0.1:1"))))


def test_the_check_takes_less_than_a_microsecond() -> None:
    """On a slow machine: than three times as much as it takes to ask all keys for their length."""
    keys = [KEY] * 16

    def least_ns(call: Callable[[list[bytes]], object]) -> float:
        least = 1 << 60
        for _ in range(20):
            began_ns = time.thread_time_ns()
            for _ in range(1000):
                call(keys)
            least = min(least, time.thread_time_ns() - began_ns)
        return least / 1000

    assert least_ns(check_keys) < max(1000, 3 * least_ns(lambda keys: [len(key) for key in keys]))


def test_a_name_that_is_not_valid_text_is_a_typed_error(client: Client) -> None:
    """Such as Python makes of a command's arguments that are not UTF-8."""
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


def test_an_empty_list_of_blocks_is_valid_and_makes_no_call(client: Client) -> None:
    before = client.calls
    assert client.put([]) == []
    assert client.get([]) == []
    assert client.prefetch([]) == ReadAhead([], {})
    assert client.calls == before


@pytest.mark.parametrize("call", OF_KEYS)
def test_calls_accept_more_keys_than_fit_in_a_message(client: Client, call: str) -> None:
    keys = [block_key(b"many", number.to_bytes(2, "little")) for number in range(2 * BATCH_BLOCKS_MAX + 3)]
    client.put_inline(keys[-1], b"KV")
    answer = getattr(client, call)(keys)
    if call == "prefetch":
        assert (answer.unread, list(answer.missing)) == ([], keys[:-1])


def test_a_refusal_is_not_a_storage_error(client: Client) -> None:
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


def test_a_durability_is_one_of_three_values(client: Client) -> None:
    assert "77" in says(client.put_inline, KEY, b"x", durability=77)
    assert "77" in says(client.delete, [KEY], durability=77)


@pytest.mark.parametrize("number", [8.0, None, "8"])
def test_offset_and_length_of_a_block_are_integers(client: Client, number: Any) -> None:
    with client.register(bytearray(64)) as region:
        assert "whole numbers" in says(Block, KEY, region, number, 8)
        assert "whole numbers" in says(Block, KEY, region, 8, number)


def test_ranges_are_checked_before_anything_is_sent(client: Client) -> None:
    before = client.calls
    assert "1 to 67108864, not 0" in says(client.get_inline, KEY, 0)
    assert "1 to 67108864, not 0" in says(client.get_many_inline, [(KEY, 0)])
    assert "both user and session" in says(client.looked_up, user="ada")
    assert client.calls == before
    for wrong in (-5, 0, 1.5, "4", 1 << 40):
        assert f"slots must be 1 to {SLOTS_PER_CLIENT_MAX}, not" in says(Client, client.target, slots=wrong)
        assert "longest block" in says(Client, client.target, block_bytes_max=wrong)


def test_a_mistake_in_a_call_is_named_even_if_no_node_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TRIGGERKV_CONFIG", str(tmp_path / "client.toml"))
    monkeypatch.delenv("TRIGGERKV_NODE", raising=False)
    assert "slots must be 1 to" in says(Client, slots=0)
    assert "layout" in says(Client, layout="x")
    with pytest.raises(ConfigError, match="No node is set"):
        Client()


def test_a_timeout_is_not_negative(client: Client) -> None:
    assert "wait_s is 0 or more seconds, not -1." in says(client.status, wait_s=-1)
    with client.register(bytearray(8)) as kv:
        for call, given in (
            (client.watch, ()),
            (client.put, ([Block(KEY, kv, 0, 8)],)),
            (client.get, ([Block(KEY, kv, 0, 8)],)),
            (client.arm, ([Block(KEY, kv, 0, 8)],)),
            (client.put_inline, (KEY, b"x")),
            (client.get_inline, (KEY, 1)),
            (client.exists, ([KEY],)),
            (client.session("ada", "chat").resume, (lambda *_: Block(KEY, kv, 0, 8),)),
        ):
            for timeout_s in (-0.5, float("-inf")):
                words = f"timeout_s is 0 or more seconds, not {timeout_s}."
                assert words in says(call, *given, timeout_s=timeout_s)
    assert client.status(wait_s=0).node


def test_a_watch_that_does_not_begin_in_its_time_is_an_error() -> None:
    """Else it would look like one in which nothing happened."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(DeadlineExceeded, match="Watching"):
            list(client.watch(timeout_s=0.3))


def test_the_words_are_not_one_of_them(client: Client) -> None:
    with client.register(bytearray(64)) as region, FlagWords.create(1) as flags:
        assert "flags[0]" in says(client.arm, [Block(KEY, region, 0, 8)], flags)


def test_a_wrong_argument_raises_the_asyncio_clients_own_error() -> None:
    wrong: Any = {"slot": 4}
    with pytest.raises(TypeError, match=r"^AsyncClient\.__init__\(\) .*'slot'"):
        AsyncClient("127.0.0.1:1", **wrong)
    assert inspect.signature(AsyncClient) == inspect.signature(Client)


@pytest.mark.parametrize("timeout_s", ["x", float("nan"), [1], b"1"])
def test_a_timeout_is_a_number(client: Client, timeout_s: Any) -> None:
    with client.register(bytearray(8)) as kv:
        block = Block(KEY, kv, 0, 8)
        for call in (
            lambda: client.put([block], timeout_s=timeout_s),
            lambda: client.get([block], timeout_s=timeout_s),
            lambda: client.exists([KEY], timeout_s=timeout_s),
            lambda: client.erase_user("ada", timeout_s=timeout_s),
            lambda: client.watch(timeout_s=timeout_s),
            lambda: client.status(wait_s=timeout_s),
        ):
            assert "is a number of seconds, not" in says(call)


def test_an_expired_timeout_makes_a_get_a_miss(client: Client) -> None:
    with client.register(bytearray(8)) as kv:
        (miss,) = client.get([Block(KEY, kv, 0, 8)], timeout_s=0)
    assert isinstance(miss, Miss)
    with suppress(DeadlineExceeded):  # or the node was fast
        client.exists([KEY], timeout_s=0)


def test_an_infinite_timeout_is_the_longest_one(client: Client) -> None:
    assert client.exists([KEY], timeout_s=float("inf"))
    assert client.exists([KEY], timeout_s=1 << 70)


def test_memory_to_register_is_contiguous_and_writable(client: Client) -> None:
    strided = memoryview(bytearray(64))[::2]
    assert "has gaps" in says(client.register, strided)
    assert "read-only" in says(client.register, memoryview(b"bytes"))
    assert "has no bytes" in says(client.register, bytearray())


def test_arguments_and_results_of_callbacks_are_checked(client: Client) -> None:
    key = block_key(b"of a session")
    client.put_inline(key, b"12345678")
    chat = client.session("ada", "resumed")
    chat.append([key], tokens=1)
    with client.register(bytearray(8)) as kv:
        few: Any = lambda: 5  # noqa: E731
        other: Any = lambda _, __: 5  # noqa: E731
        odd: Any = lambda _: "first"  # noqa: E731
        assert "called with 2 arguments" in says(chat.resume, few)
        assert "returns a Block" in says(chat.resume, other)
        assert "another key" in says(chat.resume, lambda _, __: Block(KEY, kv, 0, 8))
        assert "A layer" in says(chat.resuming, lambda _, key: Block(key, kv, 0, 8), layer_of=odd)
        assert chat.resume(lambda _, key: Block(key, kv, 0, 8)).is_whole, "nothing is left of these"


def test_a_failing_callback_does_not_harm_the_client(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    key = block_key(b"for a failing function")
    client.put_inline(key, b"12345678")
    called = threading.Event()

    def fails(_: object) -> None:
        called.set()
        raise ValueError("the caller's own")

    with client.register(bytearray(8)) as kv:
        client.getting([Block(key, kv, 0, 8)], ended=fails)
        assert called.wait(10)
        for _ in range(3):  # by the same thread
            assert client.get([Block(key, kv, 0, 8)], timeout_s=10) == [Hit(key)]
            assert client.put([Block(key, kv, 0, 8)], timeout_s=10)[0].error is None
    assert "`ended` of a get failed" in caplog.text


def test_flag_words_and_their_values_are_range_checked() -> None:
    for count in (0, -1, 10**12, 1.5, "2"):
        assert "1 to 1048576 words" in says(FlagWords.create, count)
    assert "`FlagWords.path`" in says(FlagWords.open, None)
    with FlagWords.create(1) as flags:
        for value in (-1, 1 << 64, "1", None):
            assert "0 to 18446744073709551615" in says(flags[0].store, value)
        assert flags[0].load() == 0
    with pytest.raises(Closed):
        flags[0]


def test_settings_of_several_nodes_are_checked() -> None:
    wrong: Any
    for wrong in (5, {"127.0.0.1:1"}, [5], ["127.0.0.1:1", None]):
        for kind in (ClusterClient, Nodes):
            with pytest.raises(ConfigError, match="HOST:PORT, not"):
                kind(wrong)
    assert '"all" or "any"' in says(ClusterClient, ["127.0.0.1:1"], acks="both")
    assert "replicas" in says(ClusterClient, ["127.0.0.1:1"], replicas="2")


def test_a_layout_has_a_bounded_number_of_shards() -> None:
    layout = Layout("model", "weights", "int8", 1, (Layer(1, 8, 8),))
    for shards in (0, -1, 1 << 40, 1.5):
        with pytest.raises(LayoutError, match="1 to 4096 shards"):
            layout.reshard(shards)  # type: ignore[arg-type]
