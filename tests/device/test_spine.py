"""From tensors on a device to the drive and back: the connector's own code, with a host device in the place of CUDA.

The device's streams run later and in any order that their events allow, and the engine's blocks are written anew as
soon as the compute stream may, so that a wait, an event or a flag that is forgotten shows as wrong bytes.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.engines.vllm import groups
from kvstore.engines.vllm.groups import Wanted
from nic_offload.host_device import HostDevice
from tests.conftest import small_node
from tests.device.engine import Engine, random_values
from tests.device.tensors import BLOCKS, LAYERS, PAGE_BYTES, SHAPES, pages, running

if TYPE_CHECKING:
    from pathlib import Path

FROM, TO = (3, 4, 9, 17), (0, 23, 11, 5)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_blocks_go_from_tensors_to_the_drive_and_back_after_sigkill(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block is three objects of two layers each, with a flag each.
    monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", 2 * PAGE_BYTES)
    calls: list[str] = []
    for name in ("arm", "put", "reserve", "put_inline"):
        method = getattr(Client, name)

        def counted(*given: Any, name: str = name, method: Any = method, **named: Any) -> Any:
            calls.append(name)
            return method(*given, **named)

        monkeypatch.setattr(Client, name, counted)
    with small_node(tmp_path / "node") as node:
        stored = {}
        for seed, shape in enumerate(SHAPES):
            wanted = [Wanted(0, block, secrets.token_bytes(32)) for block in FROM]
            values = random_values(shape, FROM)
            one = Engine(node, shape, HostDevice(seed), transport=transport)
            calls.clear()
            with running(one.device):
                one.step(wanted, values)
                assert sorted(one.saved(len(wanted))) == sorted((0, some.digest) for some in wanted), shape
            # From capture to acknowledgement one call arms all twelve objects, and none is made for a block.
            assert calls == ["arm"], shape
            one.close()
            stored[shape] = wanted, values
        node.kill()
        node.start()
        for seed, (shape, (wanted, values)) in enumerate(stored.items(), 100):
            other = Engine(node, shape, HostDevice(seed), transport=transport)
            with running(other.device):
                targets = [Wanted(0, block, some.digest) for block, some in zip(TO, wanted, strict=True)]
                assert other.load(targets).missing == [], shape
                seen = other.seen(TO)
            for before, after in zip(FROM, TO, strict=True):
                exact = [values[before][at].tobytes() for at in range(LAYERS)]
                assert [seen[after, at] for at in range(LAYERS)] == exact, (shape, after)
            untouched = [block for block in range(BLOCKS) if block not in TO]
            assert not any(pages(cache)[untouched].any() for cache in other.caches.values()), shape
            other.close()
