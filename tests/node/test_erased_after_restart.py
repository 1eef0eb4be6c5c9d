"""A miss reports that its erase domain was erased, after a restart too."""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING

from kvstore.client import Block, Client, as_request
from kvstore.lookups import Outcome
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, block_key, domain_of, in_domain
from nic_offload.memory import allocate
from tests.node.test_erasing_service import node_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

COUNT, SIZE = 40, 5000
ADA, GRACE = "ada", "grace"
ERASED, UNKNOWN = MissReason.ERASED, MissReason.UNKNOWN


def keys_of(user: str) -> list[bytes]:
    domain = domain_of(user) if user else SHARED
    return [in_domain(block_key(b"model", number.to_bytes(4)), domain) for number in range(COUNT)]


def payload(key: bytes) -> bytes:
    return (key * (SIZE // len(key) + 1))[:SIZE]


def put(client: Client, user: str, count: int = COUNT) -> None:
    blocks = [(key, payload(key)) for key in keys_of(user)[:count]]
    results = client.put_many_inline(blocks, domain=domain_of(user) if user else SHARED)
    assert {one.error for one in results} == {None}


def told(client: Client, keys: list[bytes]) -> set[str | MissReason]:
    """The outcomes of every kind of call for these blocks: reasons of misses, or `hit`."""
    request = secrets.token_hex(8)
    with allocate(SIZE * len(keys)) as memory, client.register(memory) as region, as_request(request):
        wanted = [Block(key, region, SIZE * at, SIZE) for at, key in enumerate(keys)]
        outcomes: list[object] = list(client.get(wanted))
        for key, block, outcome in zip(keys, wanted, outcomes, strict=True):
            assert isinstance(outcome, Miss) or memory[block.offset : block.offset + SIZE] == payload(key)
    for key, data in zip(keys, client.get_many_inline([(key, SIZE) for key in keys]), strict=True):
        assert isinstance(data, Miss) or data == payload(key)
        outcomes.append(data)
    outcomes += client.exists(keys)
    if isinstance(outcomes[0], Miss):
        outcomes += [client.prefix(keys).miss, client.get_inline(keys[0], SIZE)]
    explained = {"hit" if one.stored else one.reason or "UNKNOWN" for one in client.explain(keys)}
    looked = {run.outcome for one in client.looked_up(request).lookups for run in one.runs}
    assert (Outcome.ERASED in looked) is (ERASED.name in explained)
    assert (Outcome.NEVER in looked) is (UNKNOWN.name in explained)
    reasons = {one.reason if isinstance(one, Miss) else "hit" for one in outcomes}
    assert {str(getattr(one, "name", one)) for one in reasons} == explained, "calls differ"
    return reasons


def restart(node: NodeProcess) -> None:
    node.kill()
    node.start()


def test_blocks_of_an_erased_domain_are_reported_as_erased_after_a_restart(tmp_path: Path) -> None:
    with node_of(tmp_path, encrypted=True) as node:
        with Client(node.target) as client:
            for user in (ADA, GRACE, ""):
                put(client, user)
        node.stop()
        shutil.copytree(tmp_path / "data" / "index-0", tmp_path / "old")
        node.start()
        with Client(node.target) as client:
            client.erase_user(ADA)
            assert told(client, keys_of(ADA)) == {ERASED}
        restart(node)
        with Client(node.target) as client:
            assert told(client, keys_of(ADA)) == {ERASED}
            assert "erase domain was erased" in client.explain(keys_of(ADA)[:1])[0].sentence
            assert told(client, keys_of(GRACE)) == told(client, keys_of("")) == {"hit"}
            assert told(client, keys_of("never seen")) == {UNKNOWN}
            assert told(client, [block_key(b"shared, and never put")]) == {UNKNOWN}

        # Without its index, and with an old one.
        node.kill()
        shutil.rmtree(tmp_path / "data" / "index-0")
        node.start()
        with Client(node.target) as client:
            assert told(client, keys_of(ADA)) == {ERASED}
        node.kill()
        shutil.rmtree(tmp_path / "data" / "index-0")
        shutil.copytree(tmp_path / "old", tmp_path / "data" / "index-0")
        node.start()
        with Client(node.target) as client:
            assert told(client, keys_of(ADA)) == {ERASED}

            # In use again, a domain has unknown blocks, and others.
            put(client, ADA, 2)
            assert told(client, keys_of(ADA)[:2]) == {"hit"}
            assert told(client, keys_of(ADA)[2:]) == {UNKNOWN}
        restart(node)
        with Client(node.target) as client:
            assert told(client, keys_of(ADA)[:2]) == {"hit"}
            assert told(client, keys_of(ADA)[2:]) == {UNKNOWN}

            # Of an erased tenant, all that it had a key for is: what its users shared, too.
            client.erase_tenant()
        restart(node)
        with Client(node.target) as client:
            assert told(client, keys_of(ADA)) == told(client, keys_of(GRACE)) == {ERASED}
            assert told(client, keys_of("")) == {ERASED}
            assert told(client, keys_of("never seen")) == {UNKNOWN}
            put(client, "", 2)
            assert told(client, keys_of("")[2:]) == {UNKNOWN}
        with Client(node.target, tenant="another") as client:
            assert told(client, keys_of(ADA)) == told(client, keys_of("")) == {UNKNOWN}
