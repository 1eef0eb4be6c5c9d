"""A keyring in memory that can lose power at any write, and names for its contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import StorageError
from kvstore.limits import KEYRING_SLOTS_MAX, PAGE_BYTES, SECTOR_BYTES
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.master_key import LocalMaster
from kvstore.sealing.new_keyring import new_image

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kvstore.sealing.keyring import Name

STORE = b"a store of tests"
ACME, ZETA = b"acme".ljust(16, b"."), b"zeta".ljust(16, b".")


def master(first: int = 0) -> LocalMaster:
    return LocalMaster(bytearray(range(first, first + 32)))


def user(number: int) -> bytes:
    return b"user" + number.to_bytes(12, "little")


def at(number: int) -> slice:
    """The bytes of a slot in a keyring's file."""
    return slice(8192 + number * 128, 8192 + (number + 1) * 128)


def users(*numbers: int, tenant: bytes = ACME) -> list[Name]:
    return [(tenant, user(number)) for number in numbers]


class FakeClock:
    """A clock that moves by a second each time it is read."""

    def __init__(self) -> None:
        self.now_ms = 1_763_716_000_000

    def wall_ms(self) -> int:
        """Return a time one second after the last one."""
        self.now_ms += 1_000
        return self.now_ms

    def monotonic_ns(self) -> int:
        """The same."""
        return self.wall_ms() * 1_000_000


class PowerLost(Exception):
    """The machine lost power here."""


class Memory:
    """A file: what was written, and for each sector what the drive may have of it until a sync.

    With `steps`, the machine stops in that write or sync: before it, or, for a write, when it has begun.
    """

    def __init__(self, image: bytes, steps: int = 1 << 30) -> None:
        self.now = bytearray(image)
        self.durable = bytearray(image)
        self.pending: dict[int, list[bytes]] = {}  # by sector: what it had since the last sync
        self.steps = steps
        self.done: list[str] = []
        self.fails = ""  # which steps: write or sync
        self.during_write: Callable[[], object] | None = None  # once
        pages = range(0, len(image), PAGE_BYTES)
        self.written = [
            (at // PAGE_BYTES, bytes(image[at : at + PAGE_BYTES])) for at in pages
        ]  # page by page, ever

    @property
    def pages(self) -> int:
        return len(self.now) // PAGE_BYTES

    def read(self, page: int, count: int) -> bytes:
        return bytes(self.now[page * PAGE_BYTES : (page + count) * PAGE_BYTES]).ljust(
            count * PAGE_BYTES, b"\0"
        )

    def _step(self, what: str) -> None:
        if len(self.done) >= self.steps:
            raise PowerLost
        if what == self.fails:
            raise StorageError("The drive failed.")
        self.done.append(what)

    def write(self, page: int, data: bytes) -> None:
        """Write all sectors; at power loss, those of the last write may be old or new."""
        happens, self.during_write = self.during_write, None
        if happens is not None:
            happens()
        assert len(data) % PAGE_BYTES == 0
        at = page * PAGE_BYTES
        assert at <= len(self.now)
        for sector in range(at // SECTOR_BYTES, (at + len(data)) // SECTOR_BYTES):
            new = data[sector * SECTOR_BYTES - at :][:SECTOR_BYTES]
            old = bytes(self.now[sector * SECTOR_BYTES :][:SECTOR_BYTES])
            if new != old:
                self.pending.setdefault(sector, []).append(new)
        for first in range(0, len(data), PAGE_BYTES):
            self.written.append((page + first // PAGE_BYTES, bytes(data[first : first + PAGE_BYTES])))
        stopped = len(self.done) >= self.steps
        if not stopped:
            self.now[at : at + len(data)] = data
        self._step("write")

    def sync(self) -> None:
        self._step("sync")
        self.durable[:] = self.now
        self.pending.clear()

    def close(self) -> None:
        """Do nothing."""

    def after_power_loss(self, chance: random.Random) -> bytes:
        """The drive after power loss: each sector as of the last sync, or of any write since."""
        image = self.durable.ljust(len(self.now), b"\0")
        for sector, versions in self.pending.items():
            kept = chance.choice([None, *versions])
            end = (sector + 1) * SECTOR_BYTES
            if kept is not None:
                if len(image) < end:
                    image = image.ljust(-(-end // PAGE_BYTES) * PAGE_BYTES, b"\0")
                image[end - SECTOR_BYTES : end] = kept
        return bytes(image)

    def after_kill(self, chance: random.Random) -> Memory:
        """The file as the next process finds it: with all writes, durable or not."""
        left = Memory(bytes(self.durable))
        left.now = bytearray(self.now)
        left.pending = {sector: list(versions) for sector, versions in self.pending.items()}
        if len(self.done) >= self.steps and chance.random() < 0.5:  # the last write may have come through
            for sector, versions in left.pending.items():
                end = (sector + 1) * SECTOR_BYTES
                if end <= len(left.now):
                    left.now[end - SECTOR_BYTES : end] = versions[-1]
        return left


def new_keyring(slots_max: int = KEYRING_SLOTS_MAX, *, steps: int = 1 << 30) -> tuple[Keyring, Memory]:
    file = Memory(new_image(master(), STORE, FakeClock()), steps)
    return opened(file, slots_max=slots_max), file


def opened(file: Memory | bytes, first: int = 0, *, slots_max: int = KEYRING_SLOTS_MAX) -> Keyring:
    """Open a file with one of several master keys."""
    memory = Memory(file) if isinstance(file, bytes) else file
    return Keyring.of(memory, master(first), STORE, FakeClock(), slots_max)


def keys_of(keyring: Keyring, names: list[Name]) -> dict[Name, bytes | None]:
    found = {name: keyring.domain(*name) for name in names}
    return {name: None if key is None else bytes(key.key) for name, key in found.items()}
