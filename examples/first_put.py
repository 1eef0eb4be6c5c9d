"""First put: a block goes to a node, and comes back.

Copy the commands after `$`; the lines below them are their output.

    $ kvstore serve --data ./node &
    $ python examples/first_put.py
    put: written
    got the same bytes: True
    a block that nobody put: MISS(not stored)
"""

from kvstore import Block, Client, block_key

kv_of_a_page = b"the KV of sixteen tokens " * 4096
memory = bytearray(kv_of_a_page)

with Client("127.0.0.1:7070", layout=b"my model, bf16") as client:
    client.status(wait_s=60)  # the node may still be starting
    region = client.register(memory)  # the fabric reads and writes it: no copy, and no call per block
    page = Block(block_key(b"my model", b"the sixteen tokens"), region, offset=0, length=len(memory))

    (put,) = client.put([page])
    print("put:", put.error or "written")

    memory[:] = bytes(len(memory))
    client.get([page])
    print("got the same bytes:", memory == kv_of_a_page)

    other = Block(block_key(b"my model", b"other tokens"), region, offset=0, length=len(memory))
    (miss,) = client.get([other])
    print("a block that nobody put:", miss)
