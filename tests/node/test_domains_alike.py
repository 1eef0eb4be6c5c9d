"""A request for an unknown block of one erase domain costs the same whether or not another domain has the same prefix.

What is compared is work, not time: which functions of the node run, how often, and what they ask of the index and of
the drive. Times would depend on the machine.
"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit, as_request
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key, domain_of, in_domain
from kvstore.sealing.masters import new_master_file
from kvstore.sealing.store_keys import keys_opener
from nic_offload.memory import allocate
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


SIZE, COUNT, TIMES, TIMES_MAX, TURNS = 5000, 4, 9, 90, 20
ADA, BOB, GONE = (domain_of(user) for user in ("ada", "bob", "gone"))
# Of the loop, whose turns are as many as the time has ticks, and of the connection.
OF_THE_CLOCK = ("ticks", "asyncio", "grpc", "selectors", "threading", "timings", "clock", "heap", "logs")
OF_LIBRARIES = (
    "Lib.keep_",
    "Environment.",
    "Transaction.",
    "Cursor.",
    "Struct.",
    "blake2b.",
)  # of the index, digests
LOOKED_AT = ("Index.lookup", "keep_blocks_find", "OpenKeyring.erased_ms", "blake2b.digest")
Work = frozenset[tuple[str, int]]
ANY: set[Work] = set()


def prefix(name: str) -> list[bytes]:
    return [block_key(name.encode(), number.to_bytes(4)) for number in range(COUNT)]


BOBS, NOBODYS = prefix("a prompt that bob had"), prefix("a prompt that nobody had")


def adas(keys: list[bytes]) -> list[bytes]:
    return [in_domain(key, ADA) for key in keys]


class ProfiledNode:
    """A node of the test's own process, in which another user of the same tenant has some blocks."""

    def __init__(self, node: NodeInProcess, client: Client) -> None:
        self.node, self.client = node, client
        mine = [(in_domain(block_key(b"own", bytes([number])), ADA), bytes(SIZE)) for number in range(3)]
        self.own = [key for key, _ in mine]
        for domain, blocks in (
            (ADA, mine),
            (BOB, [(in_domain(key, BOB), bytes(SIZE)) for key in BOBS]),
            (GONE, [(in_domain(BOBS[0], GONE), bytes(SIZE))]),
        ):
            assert {one.error for one in client.put_many_inline(blocks, domain=domain)} == {None}
        client.erase_user("gone")  # so that there is one

    def profile(self, note: Callable[[Any, str, Any], None] | None) -> None:
        """Profile the node's thread with this function, or stop profiling."""
        self.node.call(lambda _: sys.setprofile(note))

    def work(
        self, call: Callable[[Client, list[bytes]], Any], keys: list[bytes], like: set[Work] = ANY
    ) -> set[Work]:
        """What the node does for a call: the functions that run, and how often.

        It varies a little, more on a busy machine, so some of each; and more, as long as none of it is `like` that.
        """
        seen: set[Work] = set()
        for at in range(TIMES_MAX):
            if at >= TIMES and (like is ANY or seen & like):
                break
            ran: Counter[str] = Counter()

            def note(frame: Any, event: str, what: Any, ran: Counter[str] = ran) -> None:
                if event == "call":
                    code = frame.f_code
                    if "/kvstore/" in code.co_filename and not any(
                        one in code.co_filename for one in OF_THE_CLOCK
                    ):
                        ran[f"{code.co_filename.rpartition('/kvstore/')[2]}:{code.co_qualname}"] += 1
                elif event == "c_call" and (name := what.__qualname__).startswith(OF_LIBRARIES):
                    ran[name] += 1

            self.profile(note)
            try:
                with as_request(f"request {at}"):
                    call(self.client, keys)
                for _ in range(TURNS):  # what follows the answer
                    self.node.call(lambda _: None)
            finally:
                self.profile(None)
            seen.add(frozenset(ran.items()))
        return seen


def bob_puts_more(client: Client) -> None:
    blocks = [(in_domain(block_key(secrets.token_bytes(8)), BOB), bytes(SIZE)) for _ in range(COUNT)]
    assert {one.error for one in client.put_many_inline(blocks, domain=BOB)} == {None}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProfiledNode]:
    folder: Path = tmp_path_factory.mktemp("alike")
    new_master_file(folder / "master.key")
    open_keys = keys_opener(folder / "data", f"file:{folder}/master.key")
    with NodeInProcess(folder / "data", open_keys=open_keys) as node, Client(node.target) as client:
        yield ProfiledNode(node, client)


def exists(client: Client, keys: list[bytes]) -> list[Any]:
    return client.exists(keys)


def prefix_of(client: Client, keys: list[bytes]) -> list[Any]:
    return [client.prefix(keys)]


def get_inline(client: Client, keys: list[bytes]) -> list[Any]:
    return [client.get_inline(keys[0], SIZE)]


def get_stream(client: Client, keys: list[bytes]) -> list[Any]:
    return list(client.get_many_inline([(key, SIZE) for key in keys]))


def get(client: Client, keys: list[bytes]) -> list[Any]:
    with allocate(SIZE * len(keys)) as memory, client.register(memory) as region:
        return list(client.get([Block(key, region, SIZE * at, SIZE) for at, key in enumerate(keys)]))


def explain(client: Client, keys: list[bytes]) -> list[Any]:
    return client.explain(keys)


CALLS = [exists, prefix_of, get_inline, get_stream, get, explain]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_unknown_block_costs_the_same_whatever_other_domains_have(
    world: ProfiledNode, call: Callable[[Client, list[bytes]], list[Any]]
) -> None:
    for keys in (BOBS, NOBODYS):
        outcomes = call(world.client, adas(keys))
        assert not any(isinstance(one, Hit | bytes) for one in outcomes)
        assert {one.reason for one in outcomes if isinstance(one, Miss)} <= {MissReason.UNKNOWN}
    theirs = world.work(call, adas(BOBS))
    nobodys = world.work(call, adas(NOBODYS), like=theirs)
    assert theirs & nobodys
    bob_puts_more(world.client)
    assert world.work(call, adas(NOBODYS), like=nobodys) & nobodys, "nor how much they have"
    assert not world.work(call, world.own) & nobodys, "a difference would be seen"
    for counted in LOOKED_AT:
        assert any(counted in name for one in nobodys for name, _ in one), counted
    assert not any("submit" in name for one in nobodys for name, _ in one), "the drive is not asked"


def test_a_put_costs_the_same_whatever_other_domains_have(world: ProfiledNode) -> None:
    """No block is shared between domains, so none is found to be stored already."""
    for number in range(TIMES):
        blocks = [(in_domain(block_key(b"twice", number.to_bytes(4)), BOB), bytes(SIZE))]
        assert [one.error for one in world.client.put_many_inline(blocks, domain=BOB)] == [None]

    def put() -> Callable[[Client, list[bytes]], None]:
        """Put the next block of a prompt."""
        numbers = count()

        def put_next(client: Client, prompt: list[bytes]) -> None:
            name = block_key(prompt[0], next(numbers).to_bytes(4))
            client.put_inline(in_domain(name, ADA), bytes(SIZE), domain=ADA)

        return put_next

    theirs = world.work(put(), [b"twice"])
    nobodys = world.work(put(), [b"once"], like=theirs)
    assert theirs & nobodys
    again = world.work(put(), [b"once"])
    assert not again & nobodys, "a difference would be seen"
