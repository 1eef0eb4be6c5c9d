"""Free slots have a mark. A slot without it, zeros too, was lost by the drive, and is not an erased key."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import Corrupt
from kvstore.sealing import slots
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import read_status
from nic_offload.checksum import crc32c
from tests.sealing.rig import STORE, ZETA, Memory, PowerLost, at, keys_of, master, new_keyring, opened, users

if TYPE_CHECKING:
    from pathlib import Path


def test_an_overwritten_slot_is_reused_and_its_key_stays_erased() -> None:
    keyring, file = new_keyring()
    one, _ = keyring.ensure(users(1, 2))
    for lost, give_up in (
        (b"?" * 128, lambda ring: ring.erase(users(9))),
        (bytes(128), Keyring.give_up_damaged),
    ):
        image = bytearray(file.durable)
        image[at(one.number)] = lost
        again = Memory(bytes(image))
        ring = opened(again)
        assert ring.ensure(users(3))[0].number != one.number
        give_up(ring)
        for after in (ring, opened(bytes(again.durable))):
            assert after.by_number(one.number, one.id) is None
            (other,) = after.ensure(users(4))
            assert other.number == one.number
            assert after.by_number(one.number, one.id) is None


def test_an_erasure_spares_lost_slots_and_names_them() -> None:
    keyring, file = new_keyring()
    one, two = keyring.ensure(users(1, 2))
    image = bytearray(file.durable)
    image[at(one.number)] = bytes(128)
    lost = Memory(bytes(image))
    for tenant in (None, ZETA):
        ring = opened(lost)
        *_, last = ring.erase(users(2)) if tenant is None else ring.erase_tenant(tenant)
        assert (last.number, last.is_lost, last.is_unread) == (one.number, True, False)
        assert lost.durable[at(one.number)] == bytes(128)
        with pytest.raises(Corrupt):
            ring.by_number(one.number, one.id)
    assert opened(bytes(lost.durable)).by_number(two.number, two.id) is None


def test_a_free_slot_that_records_name_is_given_to_nobody() -> None:
    keyring, file = new_keyring()
    keyring.ensure(users(1))
    old = Memory(bytes(file.durable))
    (later,) = keyring.ensure(users(2))
    ring = opened(old)  # an older copy
    assert ring.expect(np.array([1, 2, later.number, 5000])) == 1
    assert ring.status().damaged == 1
    (fresh,) = ring.ensure(users(3))
    assert fresh.number != later.number
    with pytest.raises(Corrupt):
        ring.by_number(later.number, later.id)
    ring.give_up_damaged()
    assert ring.by_number(later.number, later.id) is None


def test_a_truncated_file_is_damage_and_no_erasure(tmp_path: Path) -> None:
    path = keyring_path(tmp_path)
    Keyring.create(path, master(), STORE)
    with Keyring.open(path, master(), STORE) as keyring:
        names = users(*range(100))
        made = {key.number: key.id for key in keyring.ensure(names)}
    with path.open("r+b") as file:
        file.truncate(4096 * 3 + 100)
    assert read_status(path).damaged == 512
    with Keyring.open(path, master(), STORE) as keyring:
        assert keyring.status().damaged == 512
        for number, key_id in made.items():
            if number >= 32:
                with pytest.raises(Corrupt, match="damaged"):
                    keyring.by_number(number, key_id)
        assert len(keyring.give_up_damaged()) == 512
        assert keyring.status().damaged == 0
        keyring.ensure(names)
    with Keyring.open(path, master(), STORE) as keyring:
        assert None not in keys_of(keyring, names).values()


def without_marks(image: bytes) -> bytes:
    """The same in the previous format, with zeros as free slots and without a count in the header."""
    rows = [image[at : at + 128] for at in range(8192, len(image), 128)]
    rows = [bytes(128) if row == slots.pack_slot(None) else row for row in rows]
    header = bytearray(image[:512])
    header[8], header[304:308] = 1, bytes(4)
    header[508:] = crc32c(header[:508]).to_bytes(4, "little")
    return bytes(header.ljust(4096, b"\0") * 2 + b"".join(rows))


def test_a_keyring_without_marks_gets_them_despite_any_interruption(tmp_path: Path) -> None:
    keyring, file = new_keyring()
    names = users(*range(40))
    keyring.ensure(names)
    keyring.erase(users(3))
    image, keys = without_marks(bytes(file.durable)), keys_of(keyring, names)
    path = keyring_path(tmp_path)
    path.write_bytes(image)
    before = read_status(path)
    assert (before.damaged, before.erased) == (0, 1)
    assert path.read_bytes() == image
    whole = Memory(image)
    opened(whole)
    chance = random.Random(1)
    for steps in range(len(whole.done) + 1):
        for _ in range(20):
            stopped = Memory(image, steps)
            with suppress(PowerLost):
                opened(stopped)
            left = Memory(stopped.after_power_loss(chance))
            ring = opened(left)
            assert keys_of(ring, names) == keys
            assert ring.status()[4:8] == before[4:8]
            assert all(
                left.durable[at(number)] != bytes(128) for number in range(len(left.durable) // 128 - 64)
            )
