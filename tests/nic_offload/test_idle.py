"""The sleep of a fabric's thread: what wakes it, and that nothing keeps it awake."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nic_offload._core import ffi

from nic_offload.errors import KvError
from nic_offload.fabric import EventKind, Fabric
from nic_offload.flags import FlagWords
from nic_offload.trigger import AckWatch, watch_acks
from tests.nic_offload.rig import Pair, Side, Way, happens_more_often, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.flags import FlagWord


STREAMS = ("net", "tcp;ofi_rxm")
ROUNDS = 15
ENDPOINTS = 1000
MANY = 100
STORE = """
import sys
from nic_offload.flags import FlagWords
words = FlagWords.open(sys.argv[1])
for line in sys.stdin:
    words[0].store(int(line))
"""
SLOW_READS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/epoll.h>
#include <time.h>

int epoll_wait(int fd, struct epoll_event *events, int count, int timeout)
{
	static int (*real)(int, struct epoll_event *, int, int);
	if (!real)
		real = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
	struct timespec began, now;
	clock_gettime(CLOCK_MONOTONIC, &began);
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while (!timeout && (now.tv_sec - began.tv_sec) * 1000000000 + now.tv_nsec - began.tv_nsec < 30000);
	return real(fd, events, count, timeout);
}
"""


@pytest.fixture(params=STREAMS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Pair(request.param) as both:
        both.there.fence()
        both.back.fence()
        yield both


def bell_of(word: FlagWord) -> Any:
    return ffi.cast("struct tk_bell *", word.place[1])


def falls_asleep(fabric: Fabric, naps: int = 3) -> None:
    """Wait for this many sleeps."""
    sleeps = fabric.statistics().sleeps
    wait_until(lambda: fabric.statistics().sleeps >= sleeps + naps, "it sleeps")


def share_awake(seconds: float = 0.5) -> float:
    """The share of a core that this process uses while this thread waits."""
    before = time.process_time()
    select.select([], [], [], seconds)
    return (time.process_time() - before) / seconds


@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="it would be preloaded together with ours"
)
def test_an_idle_thread_sleeps_where_system_calls_are_slow(tmp_path: Path) -> None:
    """As under gVisor: a long read of the provider's queue is not taken for bytes that have arrived."""
    built = tmp_path / "slow.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(built), "-", "-ldl"]
    subprocess.run(command, input=SLOW_READS, text=True, check=True, timeout=60)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.nic_offload import test_idle; test_idle.sleeps_though_reads_are_slow()",
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"LD_PRELOAD": str(built)},
        check=True,
        timeout=60,
    )


def sleeps_though_reads_are_slow() -> None:
    """Run in a process of its own."""
    with Pair("net") as pair:
        pair.there.fence()
        falls_asleep(pair.far.fabric, 20)
        pair.there.fence()  # and wakes
        time.sleep(0.5)
        before = pair.far.fabric.statistics().loops
        time.sleep(0.5)
        assert pair.far.fabric.statistics().loops - before < 1000, "it would be some 15,000"


def test_a_peers_write_ends_a_longer_sleep(pair: Pair) -> None:
    """An idle fabric polls every 20 ms: without the wake a quarter of the words would arrive within 5 ms."""
    values = itertools.count(1)

    def is_soon() -> bool:
        value = next(values)
        falls_asleep(pair.far.fabric, 1)
        before = time.monotonic()
        pair.there.arm(pair.there.put(value, 0, flag=(0, value)))
        wait_until(lambda: pair.far.word(0).load() == value, "it came")
        return time.monotonic() - before < 0.005

    assert happens_more_often(is_soon, 1 / 4)


def test_a_fabric_without_traffic_sleeps_longer_than_a_nap(pair: Pair) -> None:
    rates = []
    for _ in range(5):  # a machine that is busy with others may spoil some
        falls_asleep(pair.far.fabric)
        before = pair.far.fabric.statistics()
        select.select([], [], [], 0.3)
        after = pair.far.fabric.statistics()
        rates.append((after.sleeps - before.sleeps) / (after.alive_ns - before.alive_ns) * 1e9)
    assert min(rates) < 100, "of naps of two milliseconds there would be 500 a second"


@pytest.mark.parametrize("provider", [*STREAMS, "shm"])
def test_a_fabric_without_endpoints_sleeps_until_one_is_opened(provider: str) -> None:
    with Side(provider) as far, Side(provider) as near:
        near.endpoint.close()
        falls_asleep(near.fabric, 1)
        rates = []
        for _ in range(5):
            before = near.fabric.statistics()
            select.select([], [], [], 0.3)
            after = near.fabric.statistics()
            rates.append((after.sleeps - before.sleeps) / (after.alive_ns - before.alive_ns) * 1e9)
        assert min(rates) < 100
        Way.between(far, Side.more(near)).fence()


def test_a_peer_that_has_left_keeps_no_fabric_awake(pair: Pair) -> None:
    """Its socket is readable forever, and at its end."""
    with Side(pair.provider) as third:
        Way.between(pair.near, third).fence()
        Way.between(third, pair.near).fence()
    assert min(share_awake() for _ in range(5)) < 0.1


def test_a_store_in_another_process_rings(pair: Pair) -> None:
    """The bell is received: with a byte in the pipe the thread wakes, and reads it."""
    flags = pair.flags
    command = [sys.executable, "-c", STORE, flags.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as storer:
        assert storer.stdin is not None
        for value in range(1, ROUNDS + 1):
            pair.there.arm(pair.there.put(value, 8, fires=(flags[0], value)))
            falls_asleep(pair.near.fabric)
            storer.stdin.write(f"{value}\n")
            storer.stdin.flush()
            assert pair.near.final(value).kind == EventKind.DONE
        storer.stdin.close()
        assert storer.wait(20) == 0
    wait_until(lambda: bell_of(flags[0]).sleepers == 0, "nobody waits for the words")


def test_a_sleeper_is_counted_only_while_words_are_awaited() -> None:
    with Pair("net") as pair:
        bell, pipe_fd = bell_of(pair.flags[0]), pair.flags[0].place[2]
        pair.there.fence()
        falls_asleep(pair.near.fabric)
        assert bell.sleepers == 0
        pair.flags[0].store(1)
        with pytest.raises(BlockingIOError):
            os.read(pipe_fd, 1)  # nobody was to be woken, and so nothing was written
        pair.there.arm(*(pair.there.put(i, 8, fires=(pair.flags[i], 5)) for i in range(3)))
        wait_until(lambda: bell.sleepers == 1, "it sleeps, and is counted once for three words")
        for i in range(3):
            pair.flags[i].store(5)
        pair.near.all_final(range(3))
        wait_until(lambda: bell.sleepers == 0, "it sleeps on, and no word can wake it")


def test_a_store_ends_a_nap(pair: Pair) -> None:
    """It lasts two milliseconds: without the wake a fifth would end within 0.4 ms."""
    values = itertools.count(1)

    def is_soon() -> bool:
        value = next(values)
        pair.there.arm(pair.there.put(value, 8, fires=(pair.flags[0], value)))
        falls_asleep(pair.near.fabric, 2)
        before_ns = time.monotonic_ns()
        pair.flags[0].store(value)
        return pair.near.final(value).value - before_ns < 400_000

    assert happens_more_often(is_soon, 1 / 5)


def test_words_without_their_bell_are_refused() -> None:
    """Their creator has closed them, but the memory is still mapped elsewhere."""
    with FlagWords.create(2) as words:
        fd = os.memfd_create("triggerkv-flags", os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, bytes(64))
            with pytest.raises(KvError, match="could be truncated"):
                FlagWords.open(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        assert len(FlagWords.open(words.path)) == 2


def test_many_bells_ring_without_a_listener() -> None:
    """A full pipe blocks no process."""
    with Pair("net") as pair:
        bell = bell_of(pair.flags[0])
        bell.sleepers += 1  # somebody who was killed in its sleep
        for value in range(100_000):
            pair.flags[0].store(value + 1)
        pair.there.arm(pair.there.put(1, 8, fires=(pair.flags[0], 100_001)))
        pair.flags[0].store(100_001)
        assert pair.near.final(1).kind == EventKind.DONE
        bell.sleepers -= 1


def test_the_search_for_sockets_takes_little_time_however_many_there_are() -> None:
    """Each of 40 attaches a second once caused a search of all sockets, for each among all endpoints."""
    with Fabric("net", address="127.0.0.1", answer_timeout_ms=60_000) as fabric:  # as it closes hundreds
        endpoints = [fabric.open_endpoint() for _ in range(ENDPOINTS)]
        before, until = fabric.statistics(), time.monotonic() + 1.0
        while time.monotonic() < until:
            endpoints.append(fabric.open_endpoint())
            select.select([], [], [], 0.002)
        after = fabric.statistics()
        share = (after.cpu_ns - before.cpu_ns) / (after.alive_ns - before.alive_ns)
        assert share < 0.2


def test_words_that_change_without_a_wakeup_cause_few_searches_for_sockets(pair: Pair) -> None:
    """Such as those that a node stores in memory that it shares. They once caused searches every second."""
    fabric, word = pair.near.fabric, pair.near.word(0)
    wait_until(lambda: fabric.statistics().searches > 0, "it has looked for its sockets")
    select.select([], [], [], 1.2)  # the searches after the connection was made end
    before = fabric.statistics().searches
    for generation in range(1, MANY):
        watch = AckWatch(
            tag=generation,
            endpoint=pair.near.endpoint,
            word=pair.near.region.address + pair.near.word_offset(0),
            generation=generation,
            final_code=1,
            deadline_ns=0,
        )
        watch_acks(fabric, [watch])
        falls_asleep(fabric, 1)
        word.store(generation << 8 | 1)  # rings no bell
        pair.near.wait(lambda tag=generation: EventKind.ACKED in pair.near.kinds(tag), "it is seen")  # type: ignore[misc]
    assert fabric.statistics().searches - before < MANY / 5
