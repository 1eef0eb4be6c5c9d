"""A captured step: one launch of a graph copies the step's pages and fires their puts, with no call for any block.

The example runs on a GPU if there is one, and otherwise on this machine's memory, as in tests.

    $ kvstore serve --data ./node &
    $ python examples/captured_step.py
    step 1: 4 pages stored
    step 2: 4 pages stored
    the first step's pages came back: True
"""

import mmap

from kvstore import Block, Client, FlagWords, block_key
from nic_offload.cuda_device import CudaDevice
from nic_offload.device import Copy, Device
from nic_offload.errors import CudaUnavailable
from nic_offload.host_device import HostDevice
from nic_offload.memory import address_of

PAGE, PAGES = 1 << 16, 4
SIZE = PAGE * PAGES

computed, staged, instead = (mmap.mmap(-1, SIZE) for _ in range(3))
try:
    device: Device = CudaDevice()
    kv = device.allocate(SIZE).address
except CudaUnavailable:
    device = HostDevice()
    kv = address_of(instead)


def key(step: int, page: int) -> bytes:
    return block_key(b"my model", b"step %d, page %d" % (step, page))


with Client("127.0.0.1:7070", layout=b"my model, bf16") as client, FlagWords.create(1) as flags:
    client.status(wait_s=60)  # the node may still be starting
    region = client.register(staged)
    flag = device.map(flags[0].address, 8)
    locked = [device.map(address_of(memory), SIZE) for memory in (computed, staged)]

    stream = device.open_stream()
    total = device.open_total()  # it loads the kernel that counts, which can't be done during a capture
    with device.capture(stream) as graph:
        device.copy(stream, [Copy(kv, address_of(computed), SIZE)])  # in place of the kernels that compute KV
        for page in range(PAGES):
            device.copy(stream, [Copy(address_of(staged) + page * PAGE, kv + page * PAGE, PAGE)])
            device.count(stream, flag.device_address, total, 1)  # the page's put fires once its copy is done

    for step in (1, 2):
        computed[:] = bytes([step]) * SIZE
        fires_at = (step - 1) * PAGES + 1  # the flag keeps counting
        puts = client.arm(
            [
                Block(key(step, page), region, page * PAGE, PAGE, threshold=fires_at + page)
                for page in range(PAGES)
            ],
            flags[0],
        )
        graph.launch(stream)  # the only call until all are stored
        if isinstance(device, HostDevice):
            device.run()  # a GPU runs by itself
        print(f"step {step}: {sum(put.has_block for put in puts.wait(timeout_s=20))} pages stored")

    client.get([Block(key(1, page), region, page * PAGE, PAGE) for page in range(PAGES)])
    print("the first step's pages came back:", staged[:] == bytes([1]) * SIZE)

    for mapped in (flag, *locked):
        mapped.close()
device.close()
