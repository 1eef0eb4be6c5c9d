"""A batch of puts is armed in one call, all or none; batches that wait for the same flag word share a counter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from nic_offload._core import ffi, lib

from nic_offload.errors import FabricError
from nic_offload.sender import put, put_row
from tests.nic_offload.rig import PAGE, wait_until
from tests.nic_offload.test_granted import DATA, FINGERPRINT, LANDED, SLOTS, GrantRig, key_of, open_rig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nic_offload.flags import FlagWord
    from nic_offload.group import Group

LENGTH = 5000


@pytest.fixture
def net() -> Iterator[GrantRig]:
    yield from open_rig("net")


def row(net: GrantRig, number: int, threshold: int, address: int | None = None) -> bytes:
    region = net.pair.near.region
    here = region.address + DATA + number * 64
    return put_row(region, here if address is None else address, LENGTH, threshold, key_of(number))


def armed(
    net: GrantRig,
    tag: int,
    rows: Sequence[bytes],
    flag: FlagWord | None,
    metadata: tuple[bytes, bytes] = (b"", b""),
) -> Group:
    fabric = net.pair.near.fabric
    return put(fabric, net.sender, tag, rows, flag, FINGERPRINT, LANDED, metadata=metadata)


def is_watched(net: GrantRig, word: FlagWord) -> bool:
    addresses = ffi.new("uint64_t[]", [word.address])
    assert lib.tk_words_watched(net.pair.near.fabric.handle, addresses, 1) == 0
    return bool(addresses[0])


def test_batches_on_one_word_fire_in_the_order_of_their_thresholds(net: GrantRig) -> None:
    net.feed(6, pages=3)
    word = net.pair.near.word(100)
    late = armed(net, 1 << 20, [row(net, 1, 9), row(net, 2, 3)], word)
    early = armed(net, 1 << 21, [row(net, 3, 2), row(net, 4, 5)], word)
    word.store(3)
    wait_until(lambda: late.row(1).over == early.row(0).over == 1, "two of them have landed")
    assert (late.row(0).fired_ns, early.row(1).fired_ns) == (0, 0)
    word.store(9)
    assert net.codes(late, 2) == net.codes(early, 2) == [LANDED] * 2


def test_words_of_different_batches_are_not_confused(net: GrantRig) -> None:
    net.feed(2, pages=3)
    one, other = net.pair.near.word(100), net.pair.near.word(101)
    first = armed(net, 1 << 20, [row(net, 1, 1)], one)
    second = armed(net, 1 << 21, [row(net, 2, 1)], other)
    one.store(1)
    assert net.codes(first, 1) == [LANDED]
    assert second.row(0).fired_ns == 0
    other.store(1)
    assert net.codes(second, 1) == [LANDED]


def test_a_word_is_watched_exactly_until_the_last_batch_ends(net: GrantRig) -> None:
    net.feed(3, pages=3)
    word = net.pair.near.word(100)
    first = armed(net, 1 << 20, [row(net, 1, 1)], word)
    second = armed(net, 1 << 21, [row(net, 2, 2)], word)
    word.store(1)
    assert net.codes(first, 1) == [LANDED]
    assert is_watched(net, word)
    word.store(2)
    assert net.codes(second, 1) == [LANDED]
    wait_until(lambda: not is_watched(net, word), "its counter is freed")
    assert net.codes(armed(net, 1 << 22, [row(net, 3, 2)], word), 1) == [LANDED], "and made anew"


def test_a_batch_with_an_invalid_row_arms_none_and_leaves_nothing_behind(net: GrantRig) -> None:
    near = net.pair.near
    word, statistics = near.word(100), near.fabric.statistics
    beyond = near.region.address + near.region.length - LENGTH + 1
    with pytest.raises(FabricError):
        armed(net, 1 << 20, [row(net, 1, 1), row(net, 2, 1, beyond)], word)
    wait_until(lambda: not is_watched(net, word), "its counter is freed")
    assert (near.region._is_idle(), statistics().waiting) == (True, 0)
    net.feed(SLOTS, pages=3)
    assert net.codes(net.put(list(range(SLOTS)))[1], SLOTS) == [LANDED] * SLOTS, "no slot is lost"


def test_each_block_has_its_own_metadata(net: GrantRig) -> None:
    net.feed(3, pages=3)
    rows = [row(net, number, 0) for number in range(3)]
    assert net.codes(armed(net, 1 << 20, rows, None, (b"of the first", b"others'")), 3) == [LANDED] * 3
    net.wait_came(3)
    far = net.pair.far
    told = {}
    for came in net.came:
        end = came.address - far.region.address + PAGE - 128
        told[came.key] = far.bytes_at(end - came.metadata_bytes, came.metadata_bytes).rstrip(b"\0")
    assert told == {key_of(0): b"of the first", key_of(1): b"others'", key_of(2): b"others'"}
