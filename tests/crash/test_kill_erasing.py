"""SIGKILL of a node at any moment of an erasure: it is complete, or was not acknowledged and can be repeated.

The first node killed is one that has just acknowledged; the others die after delays that cover the whole call. After
each restart: of an acknowledged erasure no get returns a block, no file has a byte of its blocks in the clear, and the
keyring has no key of its domain; without an acknowledgement each block is exact or a miss, and repeating the erasure
completes it. The neighbour's and the shared blocks stay exact. In the end the drive and the index from before all of
it are put back: with the keyring as it is now they give nothing of anybody who was erased.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.errors import DeadlineExceeded, NodeUnavailable
from kvstore.miss import MissReason
from kvstore.names import SHARED, block_key, domain_of, in_domain
from nic_offload.memory import allocate
from tests.conftest import MIB, small_client, small_node, with_master_key
from tests.node.test_erasing_service import files_with
from tests.node.test_proof_of_erasure import EXACT, WRONG, keys_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

ROUNDS = int(os.environ.get("TRIGGERKV_KILL_ROUNDS", "3"))
MORE_ROUNDS_MAX = 10  # if no kill has met an erasure, as on a machine that was slow before
SIZE, OWN, LOOSE, COMMON = 20_000, 80, 20, 8
CHAT = "chat"
BOB = "bob"
LAST_DELAY = 1.1  # of an undisturbed call
WAIT_S = 30.0


def mark(user: str) -> bytes:
    return f"-- what {user} said to the model: ".encode()


class People:
    """Users with sessions; each has blocks in its user's domain, in no domain, and shared ones."""

    def __init__(self, node: NodeProcess, data: Path, *, encrypted: bool) -> None:
        self.node, self.data, self.encrypted = node, data, encrypted
        self.common = [block_key(b"all", bytes([number])) for number in range(COMMON)]

    def client(self) -> Client:
        return small_client(self.node.target)

    def domain(self, user: str) -> bytes:
        return domain_of(user) if self.encrypted else SHARED

    def keys(self, user: str) -> list[bytes]:
        own = [
            in_domain(block_key(user.encode(), bytes([number])), self.domain(user)) for number in range(OWN)
        ]
        return own + [block_key(user.encode(), b"loose", bytes([number])) for number in range(LOOSE)]

    def payload(self, user: str, number: int) -> bytes:
        said = mark(user) + number.to_bytes(4)
        return (said * (SIZE // len(said) + 1))[:SIZE]

    def put(self, client: Client, user: str) -> None:
        keys = self.keys(user) + self.common
        with allocate(SIZE * len(keys)) as memory, client.register(memory) as region:
            blocks = []
            for at, key in enumerate(keys):
                owner, number = (user, at) if at < OWN + LOOSE else ("all", at - OWN - LOOSE)
                memory[SIZE * at : SIZE * (at + 1)] = self.payload(owner, number)
                domain = self.domain(user) if at < OWN else SHARED
                blocks.append(Block(key, region, SIZE * at, SIZE, domain=domain))
            assert {one.error for one in client.put(blocks)} == {None}
        client.session(user, CHAT).append(keys, tokens=len(keys))

    def got(self, client: Client, user: str, keys: list[bytes]) -> list[str | MissReason]:
        """For each block, whether it is exact, or the reason of the miss."""
        with allocate(SIZE * len(keys)) as memory, client.register(memory) as region:
            blocks = [Block(key, region, SIZE * at, SIZE) for at, key in enumerate(keys)]
            outcomes = client.get(blocks, timeout_s=WAIT_S)
            pieces = [memory[SIZE * at : SIZE * (at + 1)] for at in range(len(keys))]
            for one, piece in zip(outcomes, pieces, strict=True):
                assert isinstance(one, Hit) or mark(user) not in piece
            return [
                (EXACT if piece == self.payload(user, at) else WRONG) if isinstance(one, Hit) else one.reason
                for at, (one, piece) in enumerate(zip(outcomes, pieces, strict=True))
            ]

    def check_others(self, client: Client) -> None:
        """The neighbour's and the shared blocks are complete, in their sessions as well."""
        assert self.got(client, BOB, self.keys(BOB)) == [EXACT] * (OWN + LOOSE)
        assert self.got(client, "all", self.common) == [EXACT] * COMMON
        assert [one.session for one in client.sessions(BOB)] == [CHAT]

    def check_erased(self, client: Client, user: str) -> None:
        reasons = {MissReason.ERASED, MissReason.UNKNOWN}
        assert set(self.got(client, user, self.keys(user))) <= reasons, user
        assert not list(client.sessions(user))
        assert files_with(self.data.parent, mark(user)) == [], user
        if self.encrypted:
            assert keys_of(self.data.parent, user) == []


def erase(client: Client, user: str) -> bool:
    """Erase a user; returns whether it was acknowledged."""
    try:
        client.erase_user(user)
    except (NodeUnavailable, DeadlineExceeded):
        return False
    return True


def timed_erase(client: Client, user: str) -> float:
    """The duration of an undisturbed erasure."""
    began = time.monotonic()
    assert erase(client, user)
    return time.monotonic() - began


@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
@pytest.mark.timeout(120 + 10 * ROUNDS)
def test_an_erasure_interrupted_by_sigkill_is_complete_or_was_not_acknowledged(
    tmp_path: Path, record_property: Callable[[str, object], None], *, encrypted: bool
) -> None:
    seed = int(os.environ.get("TRIGGERKV_SEED", str(secrets.randbits(32))))
    record_property("TRIGGERKV_SEED", seed)
    chance = random.Random(seed)
    data, before = tmp_path / "data", tmp_path.parent / f"{tmp_path.name}-before"
    arguments = with_master_key(tmp_path) if encrypted else ()
    capacity = (ROUNDS + 4) * (OWN + LOOSE) * SIZE * 2 + 16 * MIB
    node = small_node(data, capacity=f"{capacity}", arguments=arguments)
    people = People(node, data, encrypted=encrypted)
    users = [f"ada-{number:05}" for number in range(ROUNDS + 2)]
    try:
        with people.client() as client:
            for user in (BOB, *users):
                people.put(client, user)
        if encrypted:
            node.stop()
            shutil.copytree(data, before)
            node.start()
        with people.client() as client:
            took_s = min(timed_erase(client, user) for user in users[:2])
            node.kill()
        after_ack(people, users[:2])
        shares = [(number + chance.random()) / ROUNDS for number in range(ROUNDS)]
        outcomes = [
            one_round(people, user, share * LAST_DELAY * took_s)
            for user, share in zip(users[2:], chance.sample(shares, ROUNDS), strict=True)
        ]
        while all(outcomes) and len(outcomes) < ROUNDS + MORE_ROUNDS_MAX:  # each had come to its end before
            late = f"eve-{len(outcomes)}"
            with people.client() as client:
                people.put(client, late)
            outcomes.append(one_round(people, late, 0.0))
        record_property("acknowledged", sum(outcomes))
        record_property("an undisturbed call, ms", round(took_s * 1000))
        assert not all(outcomes), "no kill met an erasure"
        if encrypted:
            node.stop()
            check_put_back(people, before, users)
    finally:
        node.kill()
        shutil.rmtree(before, ignore_errors=True)


def after_ack(people: People, users: list[str]) -> None:
    people.node.start()
    with people.client() as client:
        people.check_others(client)
        for user in users:
            people.check_erased(client, user)


def one_round(people: People, user: str, delay_s: float) -> bool:
    """Kill the node during an erasure, restart it, and complete the erasure if it was not acknowledged."""
    with people.client() as client:
        list(client.sessions(user))  # it has a connection
        killer = threading.Timer(delay_s, people.node.kill)
        killer.start()
        acknowledged = erase(client, user)
        killer.join()
    people.node.start()
    with people.client() as client:
        people.check_others(client)
        if not acknowledged:
            found = people.got(client, user, people.keys(user))
            assert WRONG not in found
            client.erase_user(user)
        people.check_erased(client, user)
    return acknowledged


def check_put_back(people: People, before: Path, users: list[str]) -> None:
    """Restore the drive and the index from before the erasure, with the new keyring: only others' blocks return."""
    keyring = (people.data / "keyring").read_bytes()
    shutil.rmtree(people.data)
    shutil.copytree(before, people.data)
    (people.data / "keyring").write_bytes(keyring)
    people.node.start()
    with people.client() as client:
        people.check_others(client)
        for user in users:
            assert set(people.got(client, user, people.keys(user)[:OWN])) == {MissReason.ERASED}
