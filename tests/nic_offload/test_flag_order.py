"""The flag arrives after all of the bytes: they are checked the instant the flag is seen."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from nic_offload.checksum import crc32c, crc32c_at
from nic_offload.fabric import EventKind
from tests.nic_offload.rig import PAGE, Pair, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 255, 257, 4095, 4096, 4097, 16383, 16385, 65535, 65537)
LARGE = (262143, 262145, 1 << 20, (1 << 20) + 3, (4 << 20) - 1, 4 << 20)
AREA = 8 << 20
TAIL = 64


def sizes(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    yield from SIZES
    yield from LARGE
    yield from (rng.randrange(1, 1 << rng.randrange(1, 22)) for _ in range(24))


def test_the_flag_arrives_after_the_bytes_one_by_one(provider: str) -> None:
    with Pair(provider, AREA) as pair:
        near, far = pair.near, pair.far
        word = far.word(0)
        for generation, length in enumerate(sizes(1), 1):
            source, target = generation % 61, generation % 67
            near.fill(source, os.urandom(length))
            wanted = crc32c_at(near.region.address + source, length)
            at = far.region.address + target
            ending = max(0, length - TAIL)
            tail_wanted = near.bytes_at(source + ending, length - ending)
            far.fill(target, bytes(length))
            pair.there.arm(
                pair.there.put(generation, length, source=source, target=target, flag=(0, generation))
            )
            while word.load() != generation:
                os.sched_yield()
            tail = far.bytes_at(target + ending, length - ending)
            assert crc32c_at(at, length) == wanted, length
            assert tail == tail_wanted, length
            near.final(generation)


def test_the_flag_arrives_after_the_bytes_with_many_in_flight(provider: str) -> None:
    """All at once, each into its own slot, checked in the order in which the flags arrive."""
    lengths = [*SIZES, 1 << 20, (1 << 20) + 3, (2 << 20) - 1] * 2
    starts = [0]
    for length in lengths:
        starts.append(-(-(starts[-1] + length) // PAGE) * PAGE)
    with Pair(provider, starts[-1]) as pair:
        pair.near.fill(0, random.Random(2).randbytes(starts[-1]))
        wanted = [
            crc32c_at(pair.near.region.address + start, n) for start, n in zip(starts, lengths, strict=False)
        ]
        tags = range(len(lengths))
        flag = pair.flags[0]
        pair.there.arm(
            *(
                pair.there.put(
                    i, lengths[i], source=starts[i], target=starts[i], flag=(i, 1), fires=(flag, 1)
                )
                for i in tags
            )
        )
        words = [pair.far.word(i) for i in tags]
        left = set(tags)
        flag.store(1)

        def look() -> bool:
            for i in tuple(left):
                if words[i].load():
                    assert crc32c_at(pair.far.region.address + starts[i], lengths[i]) == wanted[i]
                    left.discard(i)
            return not left

        wait_until(look, "all flags")
        finals = pair.near.all_final(tags)
        assert {finals[i].kind for i in tags} == {EventKind.DONE}


def test_a_put_without_a_flag_writes_only_its_target(pair: Pair) -> None:
    before = os.urandom(pair.far.length)
    pair.far.fill(0, before)
    block = os.urandom(5001)
    pair.near.fill(3, block)
    pair.there.arm(pair.there.put(1, len(block), source=3, target=77))
    assert pair.near.final(1).kind == EventKind.DONE
    # Done says that the source is free, not that the target has it all.
    wait_until(lambda: crc32c(pair.far.bytes_at(77, len(block))) == crc32c(block), "the bytes")
    pair.there.fence()
    whole = pair.far.bytes_at(0, pair.far.length)
    assert whole == before[:77] + block + before[77 + len(block) :]


def test_a_flag_without_bytes(pair: Pair) -> None:
    pair.there.arm(pair.there.put(1, 0, flag=(3, 1 << 63 | 5)))
    assert pair.near.final(1).kind == EventKind.DONE
    wait_until(lambda: pair.far.word(3).load() == 1 << 63 | 5, "the flag")
    assert (pair.far.word(2).load(), pair.far.word(4).load()) == (0, 0)
