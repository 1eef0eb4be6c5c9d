"""Triggered operations compared with the provider's own: the share of the wire speed that is left if a flag fires puts.

 - blocks put by a flag store, compared with plain writes of the same provider by a C program that does nothing else;
 - the same, compared with the CPU path, which copies into registered memory before it puts;
 - a flag's latency, from the store to the landed flag, compared with an 8-byte write one way by that C program;
 - the cost of arming, the rate at which armed puts are sent, and the cost of an idle fabric.

`sockets` with its own deferred work is compared with its plain writes, but has no goal: it is there for correctness.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from benchmarks.plain import PlainFabric
from benchmarks.words import WordsBackAndForth
from kvstore.bench.bare import BareFabric
from nic_offload.fabric import Fabric
from nic_offload.flags import FlagWords
from nic_offload.library import load
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredNotify, arm

if TYPE_CHECKING:
    from benchmarks.form import Form

_KIB, _MIB = 1 << 10, 1 << 20
_AGENTS = ("net", "tcp;ofi_rxm", "shm")
_SIZES = ((32 * _KIB, 0.8), (256 * _KIB, 0.9), (_MIB, 0.9), (4 * _MIB, 0.9), (16 * _MIB, 0.9))
_PAPER = [32 * _KIB << shift for shift in range(0, 15, 2)]  # 32 KiB to 512 MiB
_TOTAL = 64 * _MIB
_SMALL = 100_000
_WORDS = 2_000
_WAIT_S = 60.0


def _label(length: int) -> str:
    return f"{length // _MIB} MiB" if length >= _MIB else f"{length // _KIB} KiB"


def run(form: Form) -> None:
    """Measure all points, for the providers of this machine."""
    offered = {provider.name for provider in load().providers() if provider.rma}
    for provider in _AGENTS:
        if provider in offered:
            _throughput(form, provider, deferred_work=False)
            _latency(form, provider, deferred_work=False)
            _small(form, provider)
            _idle(form, provider)
    if "sockets" in offered:
        _throughput(form, "sockets", deferred_work=True)
        _latency(form, "sockets", deferred_work=True)
    _against_the_cpu(form, load().best_provider())


def _throughput(form: Form, provider: str, *, deferred_work: bool) -> None:
    with PlainFabric(provider) as plain:
        for length, goal in _SIZES:
            blocks = _TOTAL // length
            with BareFabric(provider, length, blocks, deferred_work=deferred_work) as armed:
                form.compare(
                    f"{provider}: triggered put, {_label(length)}",
                    "GB/s",
                    armed.gbps,
                    lambda length=length, blocks=blocks: plain.gbps(length, blocks),  # type: ignore[misc]
                    goal=None if deferred_work else goal,
                    pairs=9,
                )


def _latency(form: Form, provider: str, *, deferred_work: bool) -> None:
    rounds = _WORDS // 20 if deferred_work else _WORDS
    with (
        PlainFabric(provider) as plain,
        WordsBackAndForth(provider, deferred_work=deferred_work) as words,
    ):
        form.compare(
            f"{provider}: flag store to landed flag",
            "us",
            lambda: words.one_way_us(rounds),
            lambda: plain.one_way_us(rounds),
            goal=None if deferred_work else 2.0,
            lower_is_better=True,
            pairs=9,
        )


def _small(form: Form, provider: str) -> None:
    """Armed 8-byte puts to a fabric of this process, all fired by one store."""
    with (
        allocate(4096) as memory,
        FlagWords.create(1) as flags,
        Fabric(provider, address="127.0.0.1") as near,
        Fabric(provider, address="127.0.0.1") as far,
    ):
        endpoint, target = near.open_endpoint(), far.open_endpoint()
        region, counter = far.register(memory), near.open_counter(flags[0])
        peer = near.add_peer(target.address())
        notify = TriggeredNotify(0, endpoint, peer, region.base, region.key, 1, counter)
        arming_us, per_second = [], []
        for turn in range(1, 6):
            puts = [notify._replace(threshold=turn)] * _SMALL
            start_ns = time.monotonic_ns()
            arm(near, puts)
            arming_us.append((time.monotonic_ns() - start_ns) / _SMALL / 1e3)
            while near.statistics().waiting < _SMALL:
                time.sleep(0.001)
            fired_ns = time.monotonic_ns()
            flags[0].store(turn)
            ended = 0
            while ended < _SMALL and select.select([near], [], [], _WAIT_S)[0]:
                while events := near.reap():
                    ended += len(events)
                    last_ns = events[-1].time_ns
            per_second.append(_SMALL / ((last_ns - fired_ns) * 1e-9))
        form.note(f"{provider}: arming a put", sorted(arming_us)[2], "us", goal=5.0, lower_is_better=True)
        goal = 500_000 if provider == "shm" else None
        form.note(f"{provider}: armed 8 B puts that go out", sorted(per_second)[2], "1/s", goal=goal)


def _idle(form: Form, provider: str) -> None:
    with Fabric(provider, address="127.0.0.1") as fabric, fabric.open_endpoint():
        time.sleep(0.5)
        before = fabric.statistics()
        time.sleep(2.0)
        after = fabric.statistics()
        share = (after.cpu_ns - before.cpu_ns) / (after.alive_ns - before.alive_ns)
        form.note(f"{provider}: idle, of one core", 100 * share, "%", goal=2.0, lower_is_better=True)


def _against_the_cpu(form: Form, provider: str) -> None:
    for length in _PAPER:
        slots = max(_TOTAL, length)
        with BareFabric(provider, length, 1, slots_bytes=slots) as armed:
            form.compare(
                f"{provider}: one triggered put against the CPU's copy and put, {_label(length)}",
                "GB/s",
                armed.gbps,
                armed.staged_gbps,
                pairs=9,
            )
