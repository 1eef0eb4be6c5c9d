"""`TriggerKvL2Adapter` behind LMCache's real interface and plugin factory, with a real node: exact objects or none."""

from __future__ import annotations

import inspect
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from tests.engines import lmcache_interface  # noqa: E402

lmcache_interface.load()

from lmcache.v1.distributed.api import MemoryLayoutDesc  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (  # noqa: E402
    PluginL2AdapterConfig,
    _create_plugin_adapter,
)

from kvstore.client.link import Link  # noqa: E402
from kvstore.engines.lmcache.l2 import TriggerKvL2Adapter  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from tests.engines.lmcache_objects import OBJECT_BYTES, SHAPE, Arena, key  # noqa: E402
from tests.engines.node import GuardedNode, Node  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TRANSPORTS = ["auto", "grpc"]
CALLS = [
    name
    for name, one in vars(L2AdapterInterface).items()
    if inspect.isfunction(one) and name in vars(TriggerKvL2Adapter) and name != "__init__"
]


def opened(node: str, arena: Arena, **settings: Any) -> TriggerKvL2Adapter:
    """The adapter as LMCache's server creates it."""
    plugin = {
        "module_path": "kvstore.engines.lmcache.l2",
        "class_name": "TriggerKvL2Adapter",
        "adapter_params": {"node": node} | settings,
    }
    adapter = _create_plugin_adapter(PluginL2AdapterConfig.from_dict(plugin), arena.desc)
    assert isinstance(adapter, TriggerKvL2Adapter)
    return adapter


def _signalled(fd: int, within_s: float = 20.0) -> None:
    assert select.select([fd], [], [], within_s)[0], "nothing was signalled"
    os.eventfd_read(fd)


def store(adapter: TriggerKvL2Adapter, keys: Any, objects: Any) -> bool:
    task = adapter.submit_store_task(keys, objects)
    _signalled(adapter.get_store_event_fd())
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def look_up(adapter: TriggerKvL2Adapter, keys: Any, dtype: Any = torch.bfloat16) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {0: MemoryLayoutDesc([SHAPE], [dtype])})
    _signalled(adapter.get_lookup_and_lock_event_fd())
    bits = adapter.query_lookup_and_lock_result(task)
    assert bits is not None
    assert adapter.query_lookup_and_lock_result(task) is None
    return [bits.test(number) for number in range(len(keys))]


def load(adapter: TriggerKvL2Adapter, keys: Any, objects: Any) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    _signalled(adapter.get_load_event_fd())
    bits = adapter.query_load_result(task)
    assert bits is not None
    assert adapter.query_load_result(task) is None
    return [bits.test(number) for number in range(len(keys))]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_the_interface_has_the_same_parameters(name: str) -> None:
    ours, theirs = (
        inspect.signature(getattr(kind, name)) for kind in (TriggerKvL2Adapter, L2AdapterInterface)
    )
    assert list(ours.parameters) == list(theirs.parameters)
    assert not TriggerKvL2Adapter.__abstractmethods__


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_objects_are_loaded_exactly_into_another_servers_memory(node: Node, transport: str) -> None:
    one, two = Arena(), Arena()
    one.fill(1)
    two.fill(2)
    keys = [key(f"{transport} {number}") for number in range(4)]
    first = opened(node.target, one, transport=transport)
    fds = {first.get_store_event_fd(), first.get_lookup_and_lock_event_fd(), first.get_load_event_fd()}
    assert len(fds) == 3
    assert first._carrier.transport == {"auto": "fabric"}.get(transport, transport)
    assert look_up(first, keys) == [False] * 4
    assert store(first, keys, [one.object(number) for number in (3, 1, 7, 2)])
    assert first.get_usage().total_bytes_used == 4 * OBJECT_BYTES
    first.close()
    second = opened(node.target, two, transport=transport)
    wanted = [*keys[:2], key("none"), *keys[2:]]
    assert look_up(second, wanted) == [True, True, False, True, True]
    untouched = two.raw(15).clone()
    places = (0, 4, 5, 11, 6)
    assert load(second, wanted, [two.object(number) for number in places]) == [True, True, False, True, True]
    for there, here in zip((3, 1, 7, 2), (0, 4, 11, 6), strict=True):
        assert torch.equal(one.raw(there), two.raw(here))
    assert torch.equal(two.raw(15), untouched)
    second.submit_unlock(wanted)
    second.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_object_is_loaded_over_tls_with_a_token_file(guarded: GuardedNode, transport: str) -> None:
    one, two = Arena(), Arena()
    one.fill(1)
    names = [key(f"over TLS {transport}")]
    adapters = [opened(guarded.target, arena, transport=transport, **guarded.trust) for arena in (one, two)]
    assert adapters[1]._carrier.transport == {"auto": "fabric"}.get(transport, transport)
    assert store(adapters[0], names, [one.object(3)])
    assert look_up(adapters[1], names) == [True]
    assert load(adapters[1], names, [two.object(5)]) == [True]
    assert torch.equal(one.raw(3), two.raw(5))
    for adapter in adapters:
        adapter.close()


@pytest.mark.parametrize(
    "difference",
    [
        {"model": "other"},
        {"rank": 1},
        {"group": 1},
        {"salt": "ada"},
        {"weights": "other"},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_other_objects_are_not_found(node: Node, difference: dict[str, Any]) -> None:
    arena = Arena()
    arena.fill(1)
    adapter = opened(node.target, arena)
    assert store(adapter, [key("shared")], [arena.object(0)])
    dtype = difference.get("dtype", torch.bfloat16)
    theirs = Arena(dtype=dtype)
    settings = {name: value for name, value in difference.items() if name == "weights"}
    named = {name: value for name, value in difference.items() if name not in ("weights", "dtype")}
    other = opened(node.target, theirs, **settings)
    assert look_up(other, [key("shared", **named)], dtype) == [False]
    assert load(other, [key("shared", **named)], [theirs.object(0)]) == [False]
    assert not theirs.memory.any()
    adapter.close()
    other.close()


def test_a_locked_object_is_pinned_until_it_is_unlocked(node: Node) -> None:
    arena = Arena()
    adapter = opened(node.target, arena)
    keys = [key("locked 0"), key("locked 1")]
    assert store(adapter, keys, [arena.object(0), arena.object(1)])
    for _ in range(2):
        assert look_up(adapter, keys) == [True, True]
    assert adapter.report_status()["locks"] == 2
    for left in (2, 1, 1, 0):
        adapter.submit_unlock([keys[left % 2]])
        assert adapter.report_status()["locks"] == left  # a pin ends with the last of its keys
    adapter.submit_unlock(keys)  # what is not locked is let be
    adapter.close()


def test_deleted_objects_are_removed_and_accounted_for(node: Node) -> None:
    arena = Arena()
    adapter = opened(node.target, arena)
    heard: list[str] = []

    class Listener:
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            heard.append(f"stored {len(keys)} {sum(sizes)}")

        def on_l2_keys_accessed(self, keys: Any) -> None:
            heard.append(f"accessed {len(keys)}")

        def on_l2_keys_deleted(self, keys: Any) -> None:
            heard.append(f"deleted {len(keys)}")

    adapter.register_listener(Listener())
    keys = [key("deleted 0"), key("deleted 1")]
    assert store(adapter, keys, [arena.object(0), arena.object(1)])
    adapter.delete([keys[0], key("never there")])
    assert store(adapter, [keys[1]], [arena.object(1)])  # which comes after it
    assert look_up(adapter, keys) == [False, True]
    assert heard[:2] == [f"stored 2 {2 * OBJECT_BYTES}", "deleted 1"]
    adapter.close()


def test_an_invalid_configuration_is_refused_at_the_start(node: Node) -> None:
    for settings in ({"nod": 1}, {"transport": "pigeon"}, {"save_timeout_ms": 0}):
        with pytest.raises(ConfigError):
            opened(node.target, Arena(), **settings)


def test_a_closed_adapter_fails_and_raises_nothing(node: Node) -> None:
    arena = Arena()
    adapter = opened(node.target, arena)
    adapter.close()
    adapter.close()
    task = adapter.submit_load_task([key("x")], [arena.object(0)])
    bits = adapter.query_load_result(task)
    assert bits is not None
    assert not bits.test(0)
    adapter.delete([key("x")])
    adapter.submit_unlock([key("x")])
    assert not adapter.report_status()["is_healthy"]


def test_a_task_that_begins_as_the_adapter_is_closed_raises_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena()
    adapter = opened(node.target, arena)
    submit = adapter._loads.thread.submit

    def close_before(run: Any) -> Any:
        if adapter._lock.acquire(blocking=False):  # else a thread that closes it would wait
            adapter._lock.release()
            adapter.close()
        return submit(run)

    monkeypatch.setattr(adapter._loads.thread, "submit", close_before)
    task = adapter.submit_load_task([key("x")], [arena.object(0)])
    _signalled(adapter.get_load_event_fd())
    assert adapter.query_load_result(task) is not None
    adapter.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_that_hangs_or_dies_costs_no_more_than_the_deadline(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Link, "_open_direct", lambda *_: None
    )  # which reads the memory of a node that hangs, too
    arena = Arena()
    arena.fill(1)
    expected = arena.raw(0).clone()
    times = {"lookup_timeout_ms": 300, "load_timeout_ms": 400, "save_timeout_ms": 400}
    keys = [key("kept")]
    with Node(tmp_path / "node") as node:
        adapter = opened(node.target, arena, transport=transport, **times)
        assert store(adapter, keys, [arena.object(0)])
        begun_s = time.monotonic()
        with node.paused():
            assert load(adapter, keys, [arena.object(1)]) == [False]
            assert look_up(adapter, keys) == [False]
            assert not store(adapter, [key("new")], [arena.object(1)])
        assert time.monotonic() - begun_s < 5
        node.kill()
        assert load(adapter, keys, [arena.object(1)]) == [False]
        node.start()
        begun_s = time.monotonic()
        while load(adapter, keys, [arena.object(2)]) != [True]:  # the breaker lets a call through soon
            assert time.monotonic() - begun_s < 30
        assert torch.equal(arena.raw(2), expected)
        adapter.close()


def test_an_object_damaged_on_the_drive_is_a_miss(tmp_path: Path) -> None:
    arena = Arena()
    arena.fill(1)
    keys = [key("a"), key("b")]
    with Node(tmp_path / "node", capacity="128MiB") as node:
        adapter = opened(node.target, arena)
        assert store(adapter, keys, [arena.object(0), arena.object(1)])
        node.stop()
        assert node.damage(1.0) == 2
        node.start()
        begun_s = time.monotonic()
        while look_up(adapter, keys) == [False, False]:
            assert time.monotonic() - begun_s < 30
        assert load(adapter, keys, [arena.object(2), arena.object(3)]) == [False, False]
        adapter.close()


def test_two_threads_of_the_server_each_get_their_own_objects(node: Node) -> None:
    arena = Arena(32)
    arena.fill(5)
    adapter = opened(node.target, arena)
    expected = [arena.raw(number).clone() for number in range(16)]
    keys = [key(f"many {number}") for number in range(16)]
    tasks = [adapter.submit_store_task([one], [arena.object(number)]) for number, one in enumerate(keys)]
    done: dict[int, Any] = {}
    begun_s = time.monotonic()
    while len(done) < 16:
        assert time.monotonic() - begun_s < 20
        _signalled(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    assert sorted(done) == tasks
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, 16, 2):
            task = adapter.submit_load_task([keys[number]], [arena.object(16 + number)])
            bits = None
            until_s = time.monotonic() + 20
            while bits is None and time.monotonic() < until_s:
                bits = adapter.query_load_result(task)
            if bits is None or not bits.test(0) or not torch.equal(arena.raw(16 + number), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    adapter.close()
