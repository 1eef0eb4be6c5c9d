"""One turn of a chat in its own process, like a serving engine with one GPU slot.

    python -m tests.client.turn TARGET USER CONTEXT SLOT TURN FIRST_TOKEN

The slot is a file that stands for GPU memory: a canary page, room for the KV of one user, a canary page. The process
recognises the user by its rules, has their KV fetched while they "thinks", resumes, checks every byte, "computes" ten
tokens whose KV is put every four, gives the slot away, says on standard output what it saw, and waits to be killed.
"""

from __future__ import annotations

import json
import mmap
import sys
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Arrivals, Block, Nodes
from kvstore.names import block_key
from kvstore.steps import Step
from nic_offload.flags import FlagWords
from nic_offload.match_action import Request, Table
from nic_offload.match_file import parse_rules
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from nic_offload.fabric import Region

PAGE = 4096
TOKEN_BYTES = 3000
TOKENS = 10  # of a turn
EVERY = 4  # tokens leave together
TURNS_MAX = 4
SLOT_BYTES = (TURNS_MAX * TOKENS * TOKEN_BYTES + PAGE - 1) // PAGE * PAGE
CANARY = b"\xc5" * PAGE
WAIT_S = 30.0
RULES = """
[[rule]]
name = "ada's own"
tenant = "acme"
user = "ada"
bind = [{ source = "10.1.0.0/16" }]
actions = ["prefetch"]

[[rule]]
name = "acme"
tenant = "acme"
actions = ["fetch"]
"""


def kv_of(user: str, token: int) -> bytes:
    """The KV of a token: half a digest, repeated, different for each token."""
    return (blake2b(f"{user} {token}".encode(), digest_size=50).digest() * (TOKEN_BYTES // 50))[:TOKEN_BYTES]


def pieces(first: int) -> list[range]:
    """The tokens of a turn in the order in which they are sent: four, four, and two."""
    return [range(at, min(at + EVERY, first + TOKENS)) for at in range(first, first + TOKENS, EVERY)]


class Slot:
    """The GPU memory, as mapped by this process."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), PAGE + SLOT_BYTES + PAGE)
        self.memory[:PAGE] = self.memory[PAGE + SLOT_BYTES :] = CANARY
        self.memory[PAGE : PAGE + SLOT_BYTES] = bytes(SLOT_BYTES)  # whoever had it before is gone

    def write(self, user: str, token: int) -> None:
        at = PAGE + token * TOKEN_BYTES
        self.memory[at : at + TOKEN_BYTES] = kv_of(user, token)

    def has(self, user: str, tokens: int) -> bool:
        """Whether it holds the KV of the first tokens and nothing else, between intact canaries."""
        kv = b"".join(kv_of(user, token) for token in range(tokens))
        return self.memory[:] == CANARY + kv + bytes(SLOT_BYTES - len(kv)) + CANARY


def block(user: str, tokens: range, region: Region) -> Block:
    key = block_key(user.encode(), tokens.start.to_bytes(4), len(tokens).to_bytes(4))
    return Block(key, region, PAGE + tokens.start * TOKEN_BYTES, len(tokens) * TOKEN_BYTES, tokens.stop)


def main(target: str, user: str, context: str, slot_path: str, turn: str, first_token: str) -> None:
    first = int(first_token)
    slot = Slot(Path(slot_path))
    table = Table()
    table.replace(parse_rules(RULES))
    fields = {"tenant": "acme", "user": user, "context": context, "model": "m", "protocol": "tcp"}
    five = {"source": "10.1.2.3", "destination": "10.9.9.9", "source_port": 40000, "destination_port": 443}
    request = Request.parse({**fields, **five})
    said: dict[str, object] = {}
    with (
        Nodes([target], tenant="acme") as nodes,
        Arrivals(nodes, table, tenant="acme") as arrivals,
        FlagWords.create(1) as flags,
    ):
        region = nodes.of(user).register(slot.memory)
        chat = arrivals.session(user, context)
        blocks = [
            block(user, tokens, region)
            for start in range(0, first + TOKENS, TOKENS)
            for tokens in pieces(start)
        ]
        back = None
        if int(turn) > 1:
            typing = arrivals.arrived(request)
            said["prefetched"] = typing.wait(WAIT_S)
            back = arrivals.arrived(request, lambda number, _: blocks[number], timeout_s=WAIT_S).whole()
            said["whole"], said["tokens"] = back.is_whole, back.usable_tokens
        said["exact"] = slot.has(user, first)
        new = blocks[len(blocks) - len(pieces(first)) :]
        puts = chat.arm(new, flags[0])
        for token in range(first, first + TOKENS):  # only the new tokens are computed
            slot.write(user, token)
            flags[0].store(token + 1)
            left = sum(one.threshold <= token + 1 for one in new)
            wait_until(lambda left=left: puts.progress()[1] == left, f"{left} pieces have landed")  # type: ignore[misc]
        wait_until(lambda: puts.progress()[2] > 0, "a piece is on the drive")
        if back is not None:
            chat.mark(Step.COMPUTED, tokens=TOKENS)
        chat.mark(Step.ANSWERED, tokens=TOKENS)
        said["errors"] = [str(one.error) for one in puts.wait(WAIT_S) if one.error is not None]
        chat.append([one.key for one in new], TOKENS)
        chat.mark(Step.SLOT_GIVEN)
        chat.report()
        said["mine"] = slot.has(user, first + TOKENS)
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # SIGKILL ends this


if __name__ == "__main__":
    main(*sys.argv[1:])
