"""A tenant's quota of bytes as its client sees it, over gRPC and the fabric, after SIGHUP and a restart."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client
from kvstore.errors import QuotaExceeded
from kvstore.limits import PAGE_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.conftest import small_client, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
BLOCKS = 4
KEYS = [block_key(bytes([number])) for number in range(9)]


def write_tenants(path: Path, quota_bytes: int) -> None:
    path.write_text(
        f'[small]\ntokens_sha256 = ["{token_digest("small")}"]\nbytes = {quota_bytes}\n'
        f'[other]\ntokens_sha256 = ["{token_digest("other")}"]\n'
    )


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    write_tenants(path, BLOCKS * 2 * PAGE_BYTES)
    return path


@pytest.fixture
def quota_node(tmp_path: Path, tenants: Path) -> Iterator[NodeProcess]:
    with small_node(tmp_path / "node", arguments=("--tenants", str(tenants))) as process:
        yield process


def stored(client: Client) -> list[int]:
    return [at for at, one in enumerate(client.exists(KEYS)) if not isinstance(one, Miss)]


def put(client: Client, numbers: range) -> None:
    for number in numbers:
        client.put_inline(KEYS[number], b"x" * PAGE_BYTES)


def test_a_quota_evicts_the_tenants_own_blocks_and_reports_it(quota_node: NodeProcess) -> None:
    with (
        small_client(quota_node.target, token="small") as small,
        small_client(quota_node.target, token="other") as other,
    ):
        put(other, range(9))
        put(small, range(6))
        assert stored(small) == [2, 3, 4, 5]
        assert stored(other) == list(range(9))
        (told,) = small.explain([KEYS[0]])
        assert told.reason == "QUOTA"
        assert "quota" in told.sentence
        missed = small.get_inline(KEYS[0], PAGE_BYTES)
        assert isinstance(missed, Miss)
        assert missed.reason is MissReason.QUOTA
        kv = small.register(allocate(PAGE_BYTES))
        (missed_too,) = small.get([Block(KEYS[0], kv, 0, PAGE_BYTES)], timeout_s=WAIT_S)
        assert isinstance(missed_too, Miss)
        assert missed_too.reason is MissReason.QUOTA
        with pytest.raises(QuotaExceeded, match="the quota of 32 KiB"):
            small.put_inline(block_key(b"large"), bytes(64 * PAGE_BYTES))


def test_a_fabric_put_beyond_the_quota_reports_the_reason(quota_node: NodeProcess) -> None:
    with small_client(quota_node.target, token="small") as small, FlagWords.create(1) as flags:
        kv = small.register(allocate(64 * PAGE_BYTES))
        puts = small.arm([Block(block_key(b"large"), kv, 0, 64 * PAGE_BYTES)], flags[0])
        flags[0].store(1)
        (result,) = puts.wait(timeout_s=WAIT_S)
        assert isinstance(result.error, QuotaExceeded)


def test_a_quota_survives_a_restart_and_follows_the_file(quota_node: NodeProcess, tenants: Path) -> None:
    with small_client(quota_node.target, token="small") as small:
        put(small, range(4))
    quota_node.kill()
    quota_node.start()
    with small_client(quota_node.target, token="small") as small:
        put(small, range(4, 6))
        assert stored(small) == [2, 3, 4, 5]
        write_tenants(tenants, 2 * 2 * PAGE_BYTES)
        os.kill(quota_node.pid, signal.SIGHUP)
        wait_until(lambda: stored(small) == [4, 5], "what is too much goes when the file has been read")
