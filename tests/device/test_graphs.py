"""A captured step: a graph copies pages and increments flags, and the puts armed beforehand fire."""

from __future__ import annotations

import mmap
import secrets
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.client import Block
from kvstore.names import block_key
from kvstore.testing import MemoryNode
from nic_offload.device import Copy
from nic_offload.flags import FlagWords
from nic_offload.host_device import HostDevice
from nic_offload.memory import address_of
from tests.device.fake_driver import FakeCuda, FakeDriver
from tests.device.tensors import running

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE, PAGES, TURNS = 8192, 32, 3


@pytest.mark.parametrize("kind", [HostDevice, lambda: FakeCuda(FakeDriver())])
def test_launching_a_graph_sends_all_its_blocks_without_a_call_for_any(
    kind: Callable[[], HostDevice],
) -> None:
    device = kind()
    kv, staged = np.zeros((PAGES, PAGE), np.uint8), mmap.mmap(-1, PAGES * PAGE)
    with MemoryNode() as node, node.client() as client, FlagWords.create(1) as words:
        region = client.register(staged)
        side, total = device.open_stream(), device.open_total()
        flag, pinned = device.map(words[0].address, 8), device.map(address_of(staged), PAGES * PAGE)
        begin = address_of(staged)
        with device.capture(side) as graph:
            for page in range(PAGES):
                device.copy(side, [Copy(begin + page * PAGE, kv[page].ctypes.data, PAGE)])
                device.count(side, flag.device_address, total, 1)
        with running(device):
            for turn in range(TURNS):
                kv[:] = np.frombuffer(secrets.token_bytes(kv.nbytes), np.uint8).reshape(kv.shape)
                keys = [block_key(b"graph", turn.to_bytes(1), page.to_bytes(1)) for page in range(PAGES)]
                puts = client.arm(
                    [
                        Block(key, region, page * PAGE, PAGE, threshold=turn * PAGES + page + 1)
                        for page, key in enumerate(keys)
                    ],
                    words[0],
                )
                graph.launch(side)  # the one call from capture
                results = puts.wait(20)  # to the acknowledgement of all
                assert [result.error for result in results] == [None] * PAGES
                for page, key in enumerate(keys):
                    assert client.get_inline(key, PAGE) == kv[page].tobytes(), (turn, page)
        pinned.close()
        flag.close()
    device.close()
