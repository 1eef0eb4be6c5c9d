"""Scattered pages: pages from many places arrive in order, one flag follows them, and a device's stream fires all.

This is the layer below nodes and clients: two fabrics in one process. The device is a GPU if there is one, and
otherwise this machine's memory, as in tests. It stores to the counter's doorbell: a NIC's register, if there is one.

    $ python examples/scattered_pages.py
    5 pages in 4 puts
    before the stream has run: flag 0
    after it: flag 7, and the pages are in order: True
"""

import mmap
import select

from nic_offload.cuda_device import CudaDevice
from nic_offload.device import Device
from nic_offload.errors import CudaUnavailable
from nic_offload.fabric import Fabric
from nic_offload.flags import FlagWord
from nic_offload.host_device import HostDevice
from nic_offload.memory import address_of
from nic_offload.scatter import Flag, Piece, scatter_put

PAGE = 4096
ORDER = (6, 2, 3, 0, 5)  # where the pages of one block are; 2 and 3 are one put

try:
    device: Device = CudaDevice()
except CudaUnavailable:
    device = HostDevice()

with Fabric(address="127.0.0.1") as here, Fabric(address="127.0.0.1") as there:
    pages, block = mmap.mmap(-1, 8 * PAGE), mmap.mmap(-1, 8 * PAGE)
    for number in range(8):
        pages[number * PAGE : (number + 1) * PAGE] = bytes([number]) * PAGE
    sender, receiver = here.open_endpoint(), there.open_endpoint()
    source = here.register(pages, endpoint=sender)
    target = there.register(block, endpoint=receiver)
    arrived = FlagWord(address_of(block) + 7 * PAGE)  # the last page of the target is for the flag

    counter = here.open_counter()
    puts = scatter_put(
        here,
        tag=1,
        endpoint=sender,
        peer=here.add_peer(receiver.address()),
        region=source,
        pieces=[
            Piece(source.address + number * PAGE, target.base + at * PAGE, PAGE)
            for at, number in enumerate(ORDER)
        ],
        target_key=target.key,
        flag=Flag(target.base + 7 * PAGE, target.key, 7),
        trigger=counter,
        threshold=1,
    )
    print(len(ORDER), "pages in", puts, "puts")

    stream, bell = device.open_stream(), counter.doorbell()
    with device.map(bell.address, 8, io_memory=bell.adds) as mapped:
        print("before the stream has run: flag", arrived.load())
        fire = device.ring_doorbell if bell.adds else device.store
        fire(stream, mapped.device_address, 1)
        if isinstance(device, HostDevice):
            device.run()  # a GPU runs by itself
        select.select([here.fileno()], [], [], 20)
    in_order = b"".join(bytes([number]) * PAGE for number in ORDER)
    print(
        f"after it: flag {arrived.load()}, and the pages are in order: {block[: len(in_order)] == in_order}"
    )
device.close()
