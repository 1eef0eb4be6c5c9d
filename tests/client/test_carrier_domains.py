"""The owner of an engine's blocks: the settings give the default for requests without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.client import Client, Reach
from kvstore.engines import stores
from kvstore.engines.carrier import PART_BYTES, Carrier, Place
from kvstore.engines.common_settings import EngineSettings
from kvstore.errors import ConfigError
from kvstore.names import block_key, domain_of, in_domain

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node("shared", encrypted=True, capacity="256MiB")

BYTES, COUNT = PART_BYTES + 5000, 2  # of two parts
KEYS = [block_key(b"of an engine", bytes([at])) for at in range(COUNT)]


class Engine:
    """Memory, and a carrier with these settings."""

    def __init__(self, node: NodeProcess, transport: str, replicas: int = 1, **settings: object) -> None:
        reach = Reach.of({"node": node.target, "transport": transport, **settings})
        self.carrier = Carrier(EngineSettings(reach, replicas), b"an engine's")
        self.memory = np.arange(COUNT * BYTES, dtype=np.uint8)
        self.came = np.zeros(COUNT * BYTES, dtype=np.uint8)
        for one in (self.memory, self.came):
            self.carrier.register(int(one.ctypes.data), len(one))

    def places(self, memory: np.ndarray) -> list[Place]:
        return [Place(key, int(memory.ctypes.data) + at * BYTES, BYTES) for at, key in enumerate(KEYS)]

    def put(self) -> list[bool]:
        return self.carrier.put(self.places(self.memory), timeout_s=20)

    def is_whole(self) -> bool:
        self.came[:] = 0
        return all(self.carrier.get(self.places(self.came))) and self.came.tobytes() == self.memory.tobytes()


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_an_engines_blocks_belong_to_the_user_in_its_settings(node: NodeProcess, transport: str) -> None:
    engine, other = (Engine(node, transport, user=user) for user in ("ada", "grace"))
    with engine.carrier as carrier, other.carrier, Client(node.target) as client:
        assert all(engine.put())
        assert engine.is_whole()
        assert not other.is_whole(), "the same blocks of another user are others"
        sizes = [(key, BYTES) for key in KEYS]
        assert carrier.present(sizes) == [True] * COUNT
        assert carrier.prefix(KEYS) == COUNT
        assert carrier.lengths(KEYS) == [PART_BYTES] * COUNT
        pin = carrier.pin(KEYS, 10_000)
        assert pin is not None
        assert pin.pinned == [True] * COUNT
        pin.close()
        assert carrier.delete(KEYS[:1]) == 1
        assert carrier.lengths(KEYS) == [0, PART_BYTES]
        assert client.erase_user("ada").blocks == 2 * COUNT - 1
        assert not any(carrier.lengths(KEYS))


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_a_small_block_of_an_engine_belongs_to_its_user(node: NodeProcess, transport: str) -> None:
    engine, other = (Engine(node, transport, user=user) for user in ("ada", "grace"))
    key, size = block_key(b"small"), 4096
    with engine.carrier as carrier, other.carrier, Client(node.target) as client:
        small = Place(key, int(engine.memory.ctypes.data), size)
        assert carrier.put([small]) == carrier.get([small]) == [True]
        assert other.carrier.lengths([key]) == [0]
        assert client.erase_user("ada").blocks == 1


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_shared_blocks_are_found_by_every_engine_set_to_shared(node: NodeProcess, transport: str) -> None:
    one, two = (Engine(node, transport, shared=True) for _ in range(2))
    with one.carrier, two.carrier as carrier, Client(node.target) as client:
        assert all(one.put())
        assert two.is_whole()
        assert client.erase_user("ada").blocks == 0
        assert two.is_whole()
        assert carrier.delete([*KEYS, *(block_key(key, b"part 1") for key in KEYS)]) == 2 * COUNT


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_settings_without_an_owner_store_nothing_and_log_that_once(
    node: NodeProcess, transport: str, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    stores._warn_once.cache_clear()
    engine = Engine(node, transport, replicas)
    with engine.carrier:
        for _ in range(3):
            assert engine.put() == [False] * COUNT
    warnings = [one.getMessage() for one in caplog.records if "erase domain" in one.getMessage()]
    assert len(warnings) == 1
    assert "until the engine's settings have `user` or `shared`" in warnings[0]


def test_engines_use_the_same_names_for_settings() -> None:
    settings = EngineSettings.of({"node": "127.0.0.1:7070", "user": "ada"}, where="extra")
    assert settings.named(KEYS[0]) == in_domain(KEYS[0], domain_of("ada"))
    assert EngineSettings.of({"node": "127.0.0.1:7070", "shared": True}, where="extra").reach.shared
    with pytest.raises(ConfigError, match="user or shared"):
        EngineSettings.of({"node": "127.0.0.1:7070", "shared": True, "user": "ada"}, where="extra")
    with pytest.raises(ConfigError, match="true or false"):
        EngineSettings.of({"node": "127.0.0.1:7070", "shared": "yes"}, where="extra")
