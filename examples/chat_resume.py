"""Chat resume: a session begins in one process and continues in the next, which computes nothing twice.

Blocks are put like any others; the session lists the chat's blocks in order.

    $ kvstore serve --data ./node &
    $ python examples/chat_resume.py
    0 tokens from the node, 64 computed
    $ python examples/chat_resume.py
    64 tokens from the node, 64 computed
    $ python examples/chat_resume.py
    128 tokens from the node, 64 computed

When a chat fills its memory, 64 blocks at the 17th run, it starts again.
"""

from kvstore.client import Block, Client
from kvstore.errors import NoSession
from kvstore.names import block_key

BLOCK_BYTES, BLOCK_TOKENS, BLOCKS_OF_A_TURN, BLOCKS_MAX = 100_000, 16, 4, 64


def kv_of(number: int) -> bytes:
    """What a GPU would compute."""
    return bytes([number]) * BLOCK_BYTES


with Client("127.0.0.1:7070", layout=b"my model, bf16") as client:
    client.status(wait_s=60)  # the node may still be starting
    memory = bytearray(BLOCKS_MAX * BLOCK_BYTES)
    region = client.register(memory)

    def place(number: int, key: bytes) -> Block:
        """Where block `number` of the session belongs."""
        return Block(key, region, number * BLOCK_BYTES, BLOCK_BYTES)

    chat = client.session("ada", "chat 7")
    try:
        back = chat.resume(place)  # if a block is missing, it has the number of usable blocks before it
        old, tokens = back.usable_blocks, back.usable_tokens
        if not back.is_whole:
            chat.truncate(old)
    except NoSession:
        old = tokens = 0
    if old + BLOCKS_OF_A_TURN > BLOCKS_MAX:
        print("the chat has", tokens, "tokens and no room for a turn: it begins anew")
        chat.truncate(0)
        old = tokens = 0
    assert memory[: old * BLOCK_BYTES] == b"".join(kv_of(number) for number in range(old))

    new = [
        place(n, block_key(b"examples/chat_resume.py", bytes([n])))
        for n in range(old, old + BLOCKS_OF_A_TURN)
    ]
    for block in new:
        memory[block.offset : block.offset + BLOCK_BYTES] = kv_of(block.offset // BLOCK_BYTES)
    failed = [result.error for result in client.put(new) if result.error]
    if failed:
        raise failed[0]
    chat.append([block.key for block in new], tokens=len(new) * BLOCK_TOKENS)
    print(tokens, "tokens from the node,", len(new) * BLOCK_TOKENS, "computed")
