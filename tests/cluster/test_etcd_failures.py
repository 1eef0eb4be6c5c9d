"""Failures of calls to etcd that are not etcd's own: a channel closed meanwhile, a password file, and bugs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.etcd import Etcd, EtcdAway
from kvstore.cluster.etcd_options import EtcdReach
from tests.cluster.simulated import FakeEtcd, run
from tests.cluster.test_membership import Process

if TYPE_CHECKING:
    from pathlib import Path

ENDPOINTS = ("127.0.0.1:1", "127.0.0.1:1")  # where nothing listens


def etcd_with_password(file: Path) -> Etcd:
    return Etcd(EtcdReach(ENDPOINTS, "test", user="node", password=file))


def test_a_call_whose_channel_is_closed_while_it_authenticates_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def doing() -> None:
        etcd = etcd_with_password(tmp_path / "password")

        async def authenticate(_: str) -> None:
            etcd._failed(etcd._open(), "another call had no answer")
            await asyncio.wait(etcd._closing)

        monkeypatch.setattr(etcd, "_authenticate", authenticate)
        with pytest.raises(EtcdAway):
            await etcd.grant(1)
        await etcd.close()

    asyncio.run(doing())


def test_a_password_file_that_is_being_replaced_is_tried_again(tmp_path: Path) -> None:
    async def doing() -> None:
        etcd = etcd_with_password(tmp_path / "password")
        with pytest.raises(EtcdAway, match="password could not be read"):
            await etcd.grant(1)
        await etcd.close()

    asyncio.run(doing())


def test_a_bug_that_ends_a_nodes_membership_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def doing() -> None:
        one = Process(FakeEtcd(), random.Random(1), "one", 1)

        async def keep(lease: int) -> bool:
            raise ZeroDivisionError(lease)

        one.way.keep = keep  # type: ignore[method-assign]
        await asyncio.sleep(5)
        await one.end(kindly=False)

    run(doing())
    assert "The cluster is no longer followed, or " in caplog.text
    assert "ZeroDivisionError" in caplog.text
