"""Memory in which blocks arrive before they are copied into the engine's.

It is the device's own if the node can write there (libfabric's FI_HMEM), and page-locked memory of the host otherwise.

What always holds: a store whose CPU copies blocks, as over gRPC or in a cluster, gets memory of the host. The device
sees what has arrived once `see` was called.
What it doesn't do: serve puts. The CPU checksums what is put, so that comes from the host's memory.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from kvstore.client import Client
from kvstore.engines.stores import name_of
from kvstore.errors import KvError
from kvstore.reach import GRPC
from nic_offload.handle import Handle
from nic_offload.memory import address_of

if TYPE_CHECKING:
    from kvstore.client import RegisteredMemory
    from kvstore.engines.stores import Store
    from nic_offload.device import Device, DeviceBytes
    from nic_offload.fabric import Fabric, Region

__all__ = ["LoadMemory"]


class LoadMemory(Handle):
    """Registered memory, and the address at which the device reads it."""

    def __init__(self, client: Store, device: Device, length: int) -> None:
        self._device = device
        self._own: DeviceBytes | None = None
        self.region: Region | RegisteredMemory
        why = _why_not(client)
        if why is None:
            try:
                self._take_own(client.fabric, length)
            except KvError as error:
                why = str(error)
        if why is None:
            self.name = f"{name_of(client)}, which writes loads into the device's memory"
            return
        memory = mmap.mmap(-1, length)
        self.address = address_of(memory)
        self._mapped = device.map(self.address, length)
        try:
            self.region = client.register(memory)
        except BaseException:
            self._mapped.close()
            raise
        self.name = f"{name_of(client)}, through page-locked memory: {why}"

    def _take_own(self, fabric: Fabric, length: int) -> None:
        own = self._device.allocate(length)
        try:
            self._device.see_arrivals()  # so that a device that can't is found out now
            self.region = _registered(fabric, own.address, length, self._device.index)
        except KvError:
            own.close()
            raise
        self._own, self.address = own, own.address

    def close(self) -> None:
        """Give the memory back; the client is closed, or nothing has begun."""
        (self._mapped if self._own is None else self._own).close()

    def see(self) -> None:
        """Let the device see what has arrived."""
        if self._own is not None:
            self._device.see_arrivals()


def _why_not(client: Store) -> str | None:
    """Why the node can't write into a device's memory, if that is known beforehand."""
    if client.transport == GRPC or not isinstance(client, Client):
        return "the CPU copies blocks"
    return None if client.fabric.takes_devices else f"{client.fabric.provider} has no FI_HMEM"


def _registered(fabric: Fabric, address: int, length: int, gpu: int) -> Region:
    memory = (ctypes.c_char * length).from_address(address)
    # Then only a connection's endpoint really registers it, so that is tried now.
    if fabric.binds_memory:
        with fabric.open_endpoint() as endpoint:
            fabric.register(memory, endpoint=endpoint, gpu=gpu).close()
    return fabric.register(memory, gpu=gpu)
