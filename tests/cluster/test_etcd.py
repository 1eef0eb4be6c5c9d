"""Our calls to a real etcd, also while its members die or stop answering."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.etcd import Etcd, EtcdAway
from kvstore.cluster.etcd_options import EtcdReach
from tests.cluster.real_etcd import RealEtcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from pathlib import Path

    from kvstore.cluster.etcd import Listed

FOLDER = b"/triggerkv/test/nodes/"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    with RealEtcd(tmp_path_factory.mktemp("one") / "etcd") as etcd:
        yield etcd


def run(doing: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(doing, 120))


async def until(following: AsyncIterator[Listed], values: set[bytes]) -> Listed:
    async for listed in following:
        if {value for value, _ in listed.values.values()} == values:
            return listed
    raise AssertionError


def test_a_record_is_listed_and_watched_and_ends_with_its_lease(etcd: RealEtcd) -> None:
    async def doing() -> None:
        ours, theirs = Etcd(EtcdReach(etcd.endpoints, "test")), Etcd(EtcdReach(etcd.endpoints, "test"))
        following = theirs.follow(FOLDER)
        before = await anext(following)
        lease = await ours.grant(2)
        revision = await ours.put(FOLDER + b"a", b"one", lease)
        there = await until(following, {b"one"})
        assert there.values[FOLDER + b"a"] == (b"one", lease)
        assert before.revision < revision == there.revision
        assert await ours.keep(lease)
        assert await ours.put(FOLDER + b"a", b"not this", lease, only_new=True) == 0
        assert await ours.put(FOLDER + b"a", b"two", lease) > revision
        await ours.put(b"/triggerkv/test/nodes0", b"no part of it", lease)
        await until(following, {b"two"})
        await ours.revoke(lease)
        gone = await until(following, set())
        assert gone.revision > there.revision
        assert not await ours.keep(lease)
        over = await ours.grant(2)
        assert await ours.put(FOLDER + b"b", b"three", over, only_new=True) > gone.revision
        await until(following, {b"three"})
        await until(following, set())  # nobody kept it
        await ours.close()
        await theirs.close()

    run(doing())


def test_a_record_is_replaced_or_written_unless_another_exists(etcd: RealEtcd) -> None:
    async def doing() -> None:
        ours = Etcd(EtcdReach(etcd.endpoints, "test"))
        lease = await ours.grant(30)
        at, known, gone = FOLDER + b"c", b"/triggerkv/test/known/c", b"/triggerkv/test.gone/c"
        written = await ours.put(at, b"zero", lease, lasting=known)
        assert await ours.put(at, b"two", lease, lasting=known, was=written - 1) == 0
        assert await ours.put(at, b"two", lease, lasting=known, lasting_was=written - 1) == 0
        assert await ours.put(at, b"one", lease, lasting=known, was=written, lasting_was=written) > written
        assert (await ours.listed(b"/triggerkv/test/known/")).values == {known: (b"one", 0)}
        assert not await ours.replace(known, gone, b"one", unless=at)
        assert (await ours.value(gone)).value == b""
        await ours.revoke(lease)
        assert (await ours.listed(b"/triggerkv/test/")).values == {known: (b"one", 0)}
        assert await ours.replace(known, gone, b"one", unless=at)
        assert (await ours.listed(b"/triggerkv/test/")).values == {}
        assert (await ours.value(gone)).value == b"one"
        assert await ours.put(at, b"two", await ours.grant(30), unless=gone) == 0
        assert (await ours.listed(b"/triggerkv/test/")).values == {}
        await ours.close()

    run(doing())


def test_a_list_is_complete_even_if_its_watch_died_unnoticed(
    etcd: RealEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.etcd.ETCD_RELIST_MS", 300)

    async def doing() -> None:
        ours, theirs = Etcd(EtcdReach(etcd.endpoints, "test")), Etcd(EtcdReach(etcd.endpoints, "test"))
        following = theirs.follow(FOLDER)
        await anext(following)
        listed = await asyncio.wait_for(anext(following), 5)  # with nothing changed
        lease = await ours.grant(5)
        await ours.put(FOLDER + b"a", b"one", lease)
        assert (await until(following, {b"one"})).revision > listed.revision
        await ours.revoke(lease)
        await ours.close()
        await theirs.close()

    run(doing())


def test_a_list_is_read_again_at_a_time_that_its_reader_gives(etcd: RealEtcd) -> None:
    async def doing() -> None:
        client = Etcd(EtcdReach(etcd.endpoints, "test"))
        loop = asyncio.get_running_loop()
        times = [0.0]
        following = client.follow(FOLDER, lambda: times[-1])
        await anext(following)
        times.append(loop.time() + 0.3)
        await asyncio.wait_for(anext(following), 5)  # with nothing changed
        assert loop.time() >= times[-1]
        await following.aclose()
        await client.close()

    run(doing())


def test_without_etcd_a_call_ends_at_its_timeout() -> None:
    async def doing() -> None:
        etcd = Etcd(EtcdReach(("127.0.0.1:1", "127.0.0.1:2"), "test"))
        began = time.monotonic()
        with pytest.raises(EtcdAway, match=r"127\.0\.0\.1:1"):
            await etcd.grant(5)
        with pytest.raises(EtcdAway, match=r"127\.0\.0\.1:2"):
            await etcd.listed(FOLDER)
        with pytest.raises(EtcdAway):
            await etcd.keep(7)
        with pytest.raises(EtcdAway):
            await anext(etcd.follow(FOLDER))
        assert time.monotonic() - began < 9
        await etcd.close()

    run(doing())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_of_three_members_may_die_or_hang(tmp_path: Path, number: signal.Signals) -> None:
    """The one that serves all requests: the next call starts with another."""

    async def doing(three: RealEtcd) -> None:
        etcd = Etcd(EtcdReach(three.endpoints, "test"))
        following = etcd.follow(FOLDER)

        async def trying(call: Any) -> Any:
            async with asyncio.timeout(30):  # the others elect a leader first
                while True:
                    try:
                        return await call()
                    except EtcdAway:
                        await asyncio.sleep(0.2)

        lease = await trying(lambda: etcd.grant(90))  # the members may not have a leader yet
        await trying(lambda: anext(following))
        watching = asyncio.create_task(until(following, {b"never"}))
        await asyncio.sleep(0.3)
        three.members[etcd._at].signal(number)
        assert await trying(lambda: etcd.keep(lease))
        await trying(lambda: etcd.put(FOLDER + b"a", b"one", lease))
        with pytest.raises(EtcdAway):  # what was followed there is over, and begun anew elsewhere
            await asyncio.wait_for(watching, 30)
        await trying(lambda: until(etcd.follow(FOLDER), {b"one"}))
        await etcd.close()

    with RealEtcd(tmp_path / "etcd", members=3) as three:
        run(doing(three))


def test_a_record_is_claimed_by_the_latest_list_or_not_at_all(etcd: RealEtcd) -> None:
    async def doing() -> None:
        ours, folder = Etcd(EtcdReach(etcd.endpoints, "claims")), b"/triggerkv/claims/"
        lot, own = b"/triggerkv/claims.sessions/1", folder + b"nodes/a"
        lease = await ours.grant(30)

        async def claim(value: bytes, was: int, top: int) -> bool:
            return await ours.claim(lot, value, was, within=folder, top=top, there=(own,))

        assert await ours.latest(folder, own) is None, "the key that it goes by isn't there"
        assert not await claim(b"one", 0, 0), "its own record is not there"
        top = await ours.put(own, b"a node", lease)
        following = ours.follow(folder)
        listed = await anext(following)
        assert await ours.latest(folder, own) == (listed.top, len(listed.values)) == (top, 1)
        assert not await claim(b"one", 0, top - 1), "the list is an older one"
        assert await claim(b"one", 0, top)
        found = await ours.value(lot)
        assert found.value == b"one"
        assert await ours.latest(folder, own) == (top, 1), "it is no part of the list"
        assert not await claim(b"two", 0, top), "somebody has it"
        assert await claim(b"two", found.revision, top)
        later = await ours.put(folder + b"nodes/b", b"another", lease, lasting=folder + b"known/b")
        told = await anext(following)
        assert (told.top, told.is_told, len(told.values)) == (later, True, 3)
        assert await ours.latest(folder, own) == (later, 3)
        found = await ours.value(lot)
        assert not await claim(b"three", found.revision, top)
        await ours.revoke(lease)
        gone = await anext(following)
        assert await ours.latest(folder, own) is None
        assert await ours.latest(folder, folder + b"known/b") == (later, 1)
        assert not await claim(b"three", found.revision, gone.top)
        assert await ours.value(b"/triggerkv/claims.sessions/none") == (b"", 0)
        await following.aclose()
        await ours.close()

    run(doing())
