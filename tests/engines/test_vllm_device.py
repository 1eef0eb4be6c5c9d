"""The connector's worker with KV on a device: PyTorch's tensors, a host device for CUDA, and a node in memory."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import tests.engines.pretend  # noqa: F401  # isort: skip - it is how vLLM is imported here

import torch

from kvstore.engines.vllm import worker
from kvstore.engines.vllm.connector_metadata import Load, Plan, Wanted
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.settings import Settings
from kvstore.errors import DeviceError, LayoutError
from kvstore.testing import MemoryNode
from nic_offload.host_device import HostDevice
from tests.device.tensors import BLOCKS, HEADS, TOKENS, identity_of, names, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

WAIT_S = 20.0


def caches() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2, BLOCKS, TOKENS, HEADS, 32, dtype=torch.bfloat16) for name in names()}


class Refusing(HostDevice):
    error: DeviceError | None = None

    def record(self, stream: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().record(stream)


@contextmanager
def working(
    monkeypatch: pytest.MonkeyPatch, device: HostDevice, node: MemoryNode, load: str
) -> Iterator[tuple[worker.Working, dict[str, torch.Tensor]]]:
    monkeypatch.setattr(worker, "_memory", lambda caches, *of_group: DeviceMemory(device, caches, *of_group))
    settings = Settings.of_vllm(
        {"node": node.target, "provider": "memory", "load": load, "host_bytes": 1 << 20}
    )
    tensors = caches()
    yield worker.Working(settings, identity_of("e"), 0, BLOCKS, tensors), tensors


def step(
    one: worker.Working, device: HostDevice, tensors: dict[str, torch.Tensor], plan: Plan, **kv: torch.Tensor
) -> None:
    """A step as vLLM makes it; kernels write `kv` to the saved blocks, and later overwrite them."""
    saves = list(plan.saves)
    one.begin_step(plan)
    if plan.loads:
        one.load()

    def write(cache: torch.Tensor, block: int, values: torch.Tensor | None) -> None:
        def kernel() -> bool:
            cache[:, block] = 7 if values is None else values
            return True

        device.compute.queue(kernel)

    for at, name in enumerate(names()):
        for wanted in saves:
            write(tensors[name], wanted.block, kv["kv"][at, :, wanted.block])
        one.layer_done(name)
    one.end_step()
    for cache in tensors.values():
        for wanted in saves:
            write(cache, wanted.block, None)


def until(condition: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def until_loads_end(one: worker.Working, ended: set[str]) -> None:
    def have_ended() -> bool:
        ended.update(one.finished_loads()[0])
        return bool(ended)

    until(have_ended)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_steps_save_from_a_device_and_load_into_it(monkeypatch: pytest.MonkeyPatch, load: str) -> None:
    device = Refusing(seed=3)
    kv = torch.randn(len(names()), 2, BLOCKS, TOKENS, HEADS, 32).bfloat16()
    with MemoryNode() as node, working(monkeypatch, device, node, load) as (one, tensors), running(device):
        saved = [Wanted(0, block, bytes([block]) * 32) for block in (3, 4)]
        step(one, device, tensors, Plan(saves=saved), kv=kv)
        stored: dict[Any, int] = {}

        def are_stored() -> bool:
            one.begin_step(Plan())
            one.end_step()
            told = one.take_report()
            stored.update(told.stored if told is not None else {})
            return len(stored) == len(saved)

        until(are_stored)
        targets = [Wanted(0, 20, saved[0].digest), Wanted(0, 5, saved[1].digest), Wanted(0, 6, b"x" * 32)]
        step(one, device, tensors, Plan(loads=[Load("r", targets, load == "sync")]), kv=kv)
        if load == "async":
            ended: set[str] = set()
            until_loads_end(one, ended)
            assert ended == {"r"}
        assert one.failed_blocks() == {6}
        seen: dict[str, torch.Tensor] = {}
        for name in names():

            def kernel(name: str = name) -> bool:
                seen[name] = tensors[name][:, [20, 5]].clone()
                return True

            device.compute.queue(kernel)
        until(lambda: len(seen) == len(names()))
        for at, name in enumerate(names()):
            assert torch.equal(seen[name], kv[at][:, [3, 4]]), name
        device.error = DeviceError("cuEventRecord failed: the device was reset (700).")
        step(one, device, tensors, Plan(loads=[Load("s", targets[:2], load == "sync")]), kv=kv)
        if load == "async":
            ended.clear()
            until_loads_end(one, ended)
        assert one.failed_blocks() == {20, 5}, "after a reset all that was promised is computed"
        device.error = None


def test_kv_on_several_devices_or_an_unknown_one_is_refused() -> None:
    tensors = caches()
    groups = identity_of("e").groups
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with pytest.raises(LayoutError, match="memory of a meta device"):
        worker._memory(meta, groups, 0, BLOCKS)
