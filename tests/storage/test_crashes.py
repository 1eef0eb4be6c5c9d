"""Whole lives of a store on a drive that loses what it may lose, drawn from seeds.

Checked after each crash: every block acknowledged as durable enough for that crash is there, byte for byte;
every other one is there with the right bytes, or is a miss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from tests.storage.fakes import FakeDisk
from tests.storage.rig import Rig, Slots

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = 240
BATCH = 20
LIVES = 4
NAMES = 16

SLOTS = Slots(64, 64 << 10)


@dataclass
class Expected:
    """What was ever put under each name, and what has to be there."""

    invoked: dict[int, list[bytes]] = field(default_factory=dict)
    acknowledged: dict[int, tuple[bytes, Durability]] = field(default_factory=dict)


def live_once(rig: Rig, rng: random.Random, expected: Expected) -> None:
    """Put and get at random, with expiring blocks so that extents are used again, and stop anywhere."""
    assert rig.disk is not None
    pending: dict[int, tuple[int, bytes, Durability, int]] = {}
    for _ in range(rng.randrange(5, 40)):
        number = rng.randrange(NAMES)
        action = rng.random()
        if action < 0.6:
            payload = rng.randbytes(rng.choice([10, 5000, 20_000]))
            stored = expected.invoked.setdefault(number, [])
            if stored:
                payload = payload[: len(stored[0])].ljust(len(stored[0]), b"-")  # a name has one length
            stored.append(payload)
            durability = rng.choice([Durability.WRITTEN, Durability.SYNCED])
            # Blocks with even names expire, so that their extents are used again; odd ones are here to stay.
            expires_ms = 0 if number % 2 else rig.clock.now_ms + rng.randrange(1, 20)
            pending[rig.start_put(number, payload, durability, expires_ms=expires_ms)] = (
                number,
                payload,
                durability,
                expires_ms,
            )
        elif action < 0.8:
            rig.poll_once()
        elif action < 0.9:
            rig.settle()
            check_get(rig, number, expected)
        else:
            rig.clock.now_ms += rng.randrange(5)
    for tag, (number, payload, durability, expires_ms) in pending.items():
        done = rig.put_done.get(tag)
        if done is None:
            continue
        assert done.error is None
        if expires_ms == 0 and expected.acknowledged.get(number, (b"", 0))[1] < durability:
            expected.acknowledged[number] = (payload, durability)


def check_get(rig: Rig, number: int, expected: Expected) -> None:
    done, got = rig.get(number)
    assert done.miss is not None or got in expected.invoked[number], f"wrong bytes for {number}"


@pytest.mark.parametrize("first_seed", range(0, SEEDS, BATCH))
def test_crashes(tmp_path: Path, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + BATCH):
        run(tmp_path / str(seed), seed)


def run(data: Path, seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(data, FakeDisk(seed=seed), SLOTS)
    expected = Expected()
    for life in range(LIVES):
        assert rig.disk is not None
        rig.open()
        live_once(rig, rng, expected)
        power = rng.random() < 0.6
        if rng.random() < 0.2:
            rig.store.close()
            rig.disk = FakeDisk(rig.disk.pages, seed=seed + life)
            survives = Durability.WRITTEN
        elif power:
            rig.power_loss(seed * LIVES + life)
            survives = Durability.SYNCED
        else:
            rig.kill()
            rig.disk = rig.disk.after_kill(seed * LIVES + life)
            survives = Durability.WRITTEN
        rig.open()
        for number in range(NAMES):
            if number in expected.invoked:
                check_get(rig, number, expected)
        must = [number for number, (_, durability) in expected.acknowledged.items() if durability >= survives]
        for number in must:
            done, _ = rig.get(number)
            assert done.miss is None, f"seed {seed}, life {life}: block {number} is lost: {done.miss}"
        expected.acknowledged = {number: expected.acknowledged[number] for number in must}
        rig.kill()
        rig.disk = rig.disk.after_kill(0)
    assert rig.disk is not None
    rig.disk.close()
