"""Loads into the device's own memory, where the node can write to it, and why they go through the host's elsewhere.

`test_the_software_cassini_writes_into_a_devices_memory` runs the tests below it in a process whose libfabric has
FI_HMEM. A CPU that touches the device's memory crashes there, and the device sees nothing of it without a flush.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.engines.vllm.groups import Wanted
from kvstore.errors import DeviceError, FabricError, InvalidArgument
from kvstore.names import block_key
from kvstore.testing import MemoryNode
from nic_offload.device import Copy
from nic_offload.host_device import HostDevice
from nic_offload.memory import address_of
from nic_offload.pieces import Pieces
from tests.cassini.suite import passes_on_cassini
from tests.device.engine import Engine, random_values
from tests.device.tensors import LAYERS, running
from tests.nic_offload.rig import offered

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

SHAPE = "[2, blocks] HND"
on_cassini = pytest.mark.skipif("cxi" not in offered(), reason="it runs on the software Cassini")


@pytest.mark.timeout(200)
def test_the_software_cassini_writes_into_a_devices_memory() -> None:
    passes_on_cassini(__file__, timeout_s=150, HMEM="1")


def test_a_provider_without_devices_memory_is_named_as_the_reason() -> None:
    with MemoryNode() as node:
        engine = Engine(node, SHAPE, transport="memory")
        assert engine.transport.name.endswith("through page-locked memory: memory has no FI_HMEM")
        engine.close()


def test_memory_that_a_device_sees_late_is_not_seen_before_a_flush() -> None:
    device, target = HostDevice(), mmap.mmap(-1, 4096)
    with device.allocate(4096) as own:
        own.there[:4] = b"kept"
        for seen in (bytes(4), b"kept"):
            device.copy(device.compute, [Copy(address_of(target), own.address, 4)])
            device.run()
            assert target[:4] == seen
            device.see_arrivals()


def loaded_by(engine: Engine, device: HostDevice) -> None:
    """Save two blocks and load them into two others, three times over all windows."""
    with running(device):
        for turn in range(3):
            wanted = [Wanted(0, block, secrets.token_bytes(32)) for block in (3, 8)]
            values = random_values(SHAPE, (3, 8))
            engine.step(wanted, values)
            assert len(engine.saved(2)) == 2
            targets = [Wanted(0, 11 + turn, wanted[0].digest), Wanted(0, 20, wanted[1].digest)]
            assert engine.load(targets).missing == []
            seen = engine.seen((11 + turn, 20))
            for before, after in ((3, 11 + turn), (8, 20)):
                exact = [values[before][at].tobytes() for at in range(LAYERS)]
                assert [seen[after, at] for at in range(LAYERS)] == exact
    engine.close()


@on_cassini
@pytest.mark.node("shared")
@pytest.mark.parametrize("seed", range(3))
def test_blocks_arrive_in_the_devices_memory_and_are_exact(node: NodeProcess, seed: int) -> None:
    device = HostDevice(seed)
    engine = Engine(node, SHAPE, device)
    assert engine.transport.name == "the fabric (cxi), which writes loads into the device's memory"
    loaded_by(engine, device)


@on_cassini
@pytest.mark.node("shared")
@pytest.mark.parametrize("what", ["allocate", "register", "see"])
def test_a_device_into_which_the_node_can_not_write_loads_through_the_host(
    node: NodeProcess, what: str
) -> None:
    class Unable(HostDevice):
        def see_arrivals(self) -> None:
            if what == "see":
                raise DeviceError("cuFlushGPUDirectRDMAWrites failed: operation not supported (801).")
            super().see_arrivals()

        def allocate(self, length: int) -> Any:
            if what == "allocate":
                raise DeviceError("cuMemAlloc_v2 failed: out of memory (2).")
            memory = super().allocate(length)
            if what == "register":
                memory.address = address_of(memory.here)  # no device's memory, as far as the NIC knows
            return memory

    device = Unable()
    engine = Engine(node, SHAPE, device)
    assert ", through page-locked memory: " in engine.transport.name
    assert not device._own
    loaded_by(engine, device)


@on_cassini
@pytest.mark.node("shared")
def test_what_the_cpu_would_touch_is_refused(node: NodeProcess) -> None:
    with HostDevice().allocate(8192) as own, Client(node.target, device_memory=True) as client:
        memory = (ctypes.c_char * 8192).from_address(own.address)
        region = client.fabric.register(memory, gpu=0)
        block = Block(block_key(secrets.token_bytes(8)), region, 0, 4096)
        for put in (client.arm, client.reserve):
            with pytest.raises(InvalidArgument, match="copy it from the GPU's first"):
                put([block])
        with pytest.raises(InvalidArgument, match="not in a GPU's memory"):
            Pieces.of(region, [(0, 4096)])


@on_cassini
@pytest.mark.node("shared")
def test_a_node_on_the_same_machine_writes_there_itself(node: NodeProcess) -> None:
    key, data = block_key(secrets.token_bytes(8)), secrets.token_bytes(4096)
    with HostDevice().allocate(4096) as own, Client(node.target, device_memory=True) as client:
        kept, held = client.register(bytearray(data)), bytearray(4096)
        assert client.put([Block(key, kept, 0, 4096)])[0].error is None
        here = Block(key, client.register(held), 0, 4096)
        region = client.fabric.register((ctypes.c_char * 4096).from_address(own.address), gpu=0)
        for one in (here, here, Block(key, region, 0, 4096)):  # the second without a call to the node
            assert isinstance(client.get([one])[0], Hit)
        assert held == data
        assert own.there[:] == data


@on_cassini
@pytest.mark.node("shared")
def test_a_fabric_that_was_not_opened_for_it_takes_no_devices_memory(node: NodeProcess) -> None:
    with Client(node.target) as client, pytest.raises(FabricError):
        client.fabric.register(bytearray(4096), gpu=0)
