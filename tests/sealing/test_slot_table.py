"""Slots are read whole while others are written, in both orders; reading never waits for a drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.sealing.new_keyring import new_image
from kvstore.sealing.slot_table import SlotTable
from kvstore.sealing.slots import SLOTS_PER_PAGE, Kind, Slot, State
from tests.sealing.rig import ACME, STORE, FakeClock, Memory, master, user

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = 5
SPLIT = 4096 * 2 + 128 * NUMBER + 64  # in the middle of its slot


class Torn(Memory):
    """A file in which a slot is moved in two halves, with something else in between."""

    during_write: Callable[[], object] | None = None
    during_read: Callable[[], object] | None = None

    def write(self, page: int, data: bytes) -> None:
        """Write one half, then everything."""
        begins = page * 4096
        self.now[begins:SPLIT] = data[: SPLIT - begins]
        happens, self.during_write = self.during_write, None
        if happens is not None:
            happens()
        super().write(page, data)

    def read(self, page: int, count: int) -> bytes:
        """Read one half, then the other."""
        half = super().read(page, count)[: SPLIT - page * 4096]
        happens, self.during_read = self.during_read, None
        if happens is not None:
            happens()
        return half + super().read(page, count)[len(half) :]


def slot(byte: int) -> Slot:
    """A slot whose bytes identify it."""
    name = bytes([byte]) * 8
    return Slot(State.LIVE, Kind.DOMAIN, name, ACME, user(1), byte, name, bytes([byte]) * 60)


def table_of_one() -> tuple[SlotTable, Torn]:
    """A table with one slot."""
    file = Torn(new_image(master(), STORE, FakeClock()))
    table = SlotTable(file, SLOTS_PER_PAGE)
    table.write({NUMBER: slot(1)})
    return table, file


def test_a_slot_read_while_it_is_written_is_the_old_one() -> None:
    table, file = table_of_one()
    seen = []
    file.during_write = lambda: seen.append(table.read(NUMBER))
    table.write({NUMBER: slot(2)})
    assert seen == [slot(1)]
    assert table.read(NUMBER) == slot(2)


def test_a_slot_written_while_it_is_read_is_read_again() -> None:
    table, file = table_of_one()
    file.during_read = lambda: table.write({NUMBER: slot(2)})
    assert table.read(NUMBER) == slot(2)
