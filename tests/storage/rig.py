"""A store on fake or real drives, with slots, and calls that wait for their answers."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import crc32c as independent

from kvstore.durability import Durability
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, HEADER_BYTES, TIMER_TICK_MS
from kvstore.storage.items import (
    DeleteDone,
    DeleteItem,
    GetDone,
    GetItem,
    PutDone,
    PutItem,
    SessionDone,
    SessionItem,
    SessionStep,
)
from kvstore.storage.manifests import SessionName
from kvstore.storage.sealing import NO_DOMAIN
from kvstore.storage.store import Store
from kvstore.wire.record import record_bytes
from tests.storage.fake_lane import FakeLane
from tests.storage.fakes import FakeClock, FakeDrives

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.config import DriveSpec
    from kvstore.storage.drive import Drive
    from kvstore.wire.manifest import Turn
    from tests.storage.fake_keys import FakeKeyring
    from tests.storage.fakes import FakeDisk

__all__ = ["FINGERPRINT", "TENANT", "USER", "Slots", "StoreRig", "key", "name"]

TENANT = b"tenant-of-tests!"
USER = b"a-user-of-tests!"
FINGERPRINT = b"layout-of-tests!"
_ANSWER_MS_MAX = 10_000
_LANE_TURNS_MAX = 10_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


@cache
def _dirt(size_bytes: int) -> int:
    """A file in memory full of one byte. A private mapping of it has its own copy of each page that is written to."""
    file = os.memfd_create("dirt")
    with open(file, "wb", closefd=False) as whole:
        whole.write(b"\xdd" * size_bytes)
    return file


class Slots:
    """Page-aligned memory in equal parts, filled with dirt."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.memory = mmap.mmap(_dirt(count * slot_bytes), count * slot_bytes, mmap.MAP_PRIVATE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.free = [base + index * slot_bytes for index in range(count)]


class StoreRig:
    def __init__(
        self,
        data: Path,
        disk: FakeDisk | None = None,
        slots: Slots | None = None,
        *,
        disks: Sequence[FakeDisk] = (),
    ) -> None:
        self.data = data
        self.disks = [disk] if disk is not None else list(disks)  # none: a real one
        self.away: set[int] = set()  # drives that cannot be opened
        self.specs: list[DriveSpec] = []  # of real drives
        self.slots = slots or Slots(64, 64 << 10)
        self.clock = FakeClock()
        self.boot_id = "0" * 36
        self.capacity_bytes: int | None = DRIVE_CAPACITY_BYTES_MIN
        self.policy = "lru"
        self.keyring: FakeKeyring | None = None  # records are in the clear
        self.patience_ms = 0  # so long the clock may go on while nothing but time brings an answer
        self.put_done: dict[int, PutDone] = {}
        self.get_done: dict[int, GetDone] = {}
        self.delete_done: dict[int, DeleteDone] = {}
        self.session_done: dict[int, SessionDone] = {}
        self.reported: list[int] = []  # tags, in the order of their reports
        self._slot_of: dict[int, int] = {}
        self._next_tag = 0
        self.store: Store
        self.lanes: list[FakeLane] = []  # of this life, one for each drive or none

    def open(self, *, without: Sequence[int] = ()) -> Store:
        self.store = Store.open(
            self.data,
            capacity_bytes=self.capacity_bytes,
            clock=self.clock,
            drives=self.specs,
            without=without,
            source=self.source() if self.disks else None,
            boot_id=self.boot_id,
            policy=self.policy,
            open_keys=self.keyring.open if self.keyring is not None else None,
        )
        return self.store

    def source(self) -> FakeDrives:
        return FakeDrives(self.disks, self.away)

    @property
    def drive(self) -> Drive:
        return self.store.drives[0]

    @property
    def disk(self) -> FakeDisk | None:
        return self.disks[0] if self.disks else None

    @disk.setter
    def disk(self, disk: FakeDisk) -> None:
        self.disks[0] = disk

    def kill(self) -> None:
        """Lose everything but the drives, as SIGKILL does."""
        self.lanes = []
        for drive in self.store.drives:
            drive._index.abandon()
            if not self.disks:
                drive._volume.disk.close()
        self.store._ready.close()
        self.store._lock.release()
        self._slot_of.clear()

    def close(self) -> None:
        """Finish the lanes' writes and close the store, as a node does."""
        for lane in self.lanes:
            lane.drain()
        self.catch_up()
        self.lanes = []
        self.store.close()

    def power_loss(self, seed: int) -> None:
        assert self.disks
        self.kill()
        self.disks = [disk.after_power_loss(seed + number) for number, disk in enumerate(self.disks)]
        self.boot_id = f"{seed:036d}"

    def go_on_after(self, how: str, seed: int) -> None:
        """Continue as the next process, after a loss of power, a kill, or a kill and the loss of the index."""
        if how == "power":
            self.power_loss(seed)
        else:
            self.kill()
            assert self.disk is not None
            self.disk = self.disk.after_kill(seed)
        if how == "no-index":
            shutil.rmtree(self.data / "index-0")
        self.open()

    def home(self, number: int) -> int:
        """The position of the drive where a block belongs."""
        return self.store._placement.order(TENANT, key(number))[0]

    def start_put(
        self,
        number: int,
        payload: bytes,
        durability: Durability = Durability.WRITTEN,
        *,
        tenant: bytes = TENANT,
        fingerprint: bytes = FINGERPRINT,
        expires_ms: int = 0,
        length: int | None = None,
        domain: bytes = NO_DOMAIN,
    ) -> int:
        tag = self._take_slot()
        address = self._slot_of[tag]
        ctypes.memmove(address + HEADER_BYTES, payload, len(payload))
        item = PutItem(
            tenant,
            key(number),
            fingerprint,
            len(payload) if length is None else length,
            independent.crc32c(payload),
            address,
            expires_ms,
            durability,
            tag,
            domain,
        )
        self.take_written()
        if not any(lane.takes(item, self._puts_done) for lane in self.lanes):
            self.catch_up()
            self.store.put([item], self._puts_done)
            self._lend()
        return tag

    def put(
        self, number: int, payload: bytes, durability: Durability = Durability.WRITTEN, **more: object
    ) -> PutDone:
        tag = self.start_put(number, payload, durability, **more)  # type: ignore[arg-type]
        self.settle()
        return self.put_done[tag]

    def start_delete(
        self, number: int, durability: Durability = Durability.WRITTEN, *, tenant: bytes = TENANT
    ) -> int:
        self.catch_up()
        tag = self._take_tag()
        self.store.delete([DeleteItem(tenant, key(number), durability, tag)], self._deletes_done)
        return tag

    def delete(
        self, number: int, durability: Durability = Durability.WRITTEN, *, tenant: bytes = TENANT
    ) -> DeleteDone:
        tag = self.start_delete(number, durability, tenant=tenant)
        self.settle()
        return self.delete_done[tag]

    def start_step(
        self,
        number: int,
        step: SessionStep,
        durability: Durability = Durability.WRITTEN,
        *,
        keys: Sequence[int] = (),
        blocks: int = 0,
        source: int | None = None,
        delete_blocks: bool = False,
        first_block: int | None = None,
        tokens: int = 0,
        at_ms: int = 0,
        continues: bool = False,
        label: str = "",
        expires_ms: int | None = None,
        epoch: int | None = None,
        source_epoch: int | None = None,
        turns: Sequence[Turn] = (),
        protected: int = 0,
        replaces: bool = False,
    ) -> int:
        tag = self._take_tag()
        item = SessionItem(
            SessionName(TENANT, USER, name(number)),
            step,
            durability,
            tag,
            [key(one) for one in keys],
            blocks,
            None if source is None else SessionName(TENANT, USER, name(source)),
            delete_blocks,
            first_block,
            tokens,
            at_ms,
            continues,
            label.encode(),
            expires_ms,
            epoch,
            source_epoch,
            turns,
            protected,
            replaces,
        )
        self.catch_up()
        self.store.change_sessions([item], self._sessions_done)
        return tag

    def append(
        self, number: int, keys: Sequence[int], durability: Durability = Durability.WRITTEN, **more: Any
    ) -> SessionDone:
        return self._settled(self.start_step(number, SessionStep.APPEND, durability, keys=keys, **more))

    def truncate(self, number: int, blocks: int) -> SessionDone:
        return self._settled(self.start_step(number, SessionStep.TRUNCATE, blocks=blocks))

    def fork(self, number: int, source: int, blocks: int, *, label: str = "") -> SessionDone:
        return self._settled(
            self.start_step(number, SessionStep.FORK, source=source, blocks=blocks, label=label)
        )

    def remove(self, number: int, *, delete_blocks: bool = False) -> SessionDone:
        return self._settled(self.start_step(number, SessionStep.REMOVE, delete_blocks=delete_blocks))

    def session(self, number: int) -> list[int] | None:
        keys = self.store.manifests.keys(SessionName(TENANT, USER, name(number)))
        return None if keys is None else [int.from_bytes(one, "little") for one in keys]

    def get(
        self, number: int, *, tenant: bytes = TENANT, fingerprint: bytes = FINGERPRINT, length: int = 0
    ) -> tuple[GetDone, bytes]:
        item = self.start_get(number, tenant=tenant, fingerprint=fingerprint, length=length)
        tag, address = item.tag, item.slot_address
        self.settle()
        done = self.store.verify_payload(item, self.get_done[tag])
        return done, b"" if done.miss else ctypes.string_at(address + HEADER_BYTES, done.length)

    def get_miss(self, number: int) -> bool:
        return self.get(number)[0].miss is not None

    def change_session(self, item: SessionItem) -> SessionDone:
        tag = self._take_tag()
        self.store.change_sessions([item._replace(tag=tag)], self._sessions_done)
        return self._settled(tag)

    def start_get(
        self, number: int, *, tenant: bytes = TENANT, fingerprint: bytes = FINGERPRINT, length: int = 0
    ) -> GetItem:
        tag = self._take_slot()
        address = self._slot_of[tag]
        self.catch_up()
        item = GetItem(tenant, key(number), fingerprint, length, address, self.slots.slot_bytes, tag)
        self.store.get([item], self._gets_done)
        return item

    def settle(self) -> None:
        waited_ms = turns = 0
        while self.is_busy():
            self.step_lanes()
            if self.lanes and not self.is_ready(0):
                turns += 1
                assert turns <= _LANE_TURNS_MAX, "the lane and the store wait for each other"
                continue
            if self.patience_ms and not self.is_ready(0):
                waited_ms += TIMER_TICK_MS
                assert waited_ms <= self.patience_ms, "the store does not answer in its own time"
                self.clock.now_ms += TIMER_TICK_MS
                self.store.poll()
            else:
                self.poll()

    def settle_by_polling(self, tag: int) -> None:
        """Poll until a put is acknowledged that needs only time."""
        for _ in range(_ANSWER_MS_MAX):
            if tag in self.put_done:
                return
            self.store.poll()
        raise AssertionError("the put is not answered")

    def is_busy(self) -> bool:
        store = self.store
        drives = any(
            drive._wipes.pending or drive._scrubs.pending or any(box.promised for box in drive._completions)
            for drive in store.drives
        )
        lanes = any(lane.unheard for lane in self.lanes)
        return (
            drives or lanes or store._deletions.completions.promised + store._steps.completions.promised > 0
        )

    def is_ready(self, timeout_ms: int) -> bool:
        ready = select.poll()
        ready.register(self.store.fileno(), select.POLLIN)
        return bool(ready.poll(timeout_ms))

    def poll(self) -> None:
        assert self.is_ready(_ANSWER_MS_MAX), "the store neither answers nor asks to be polled"
        self.store.poll()

    def poll_once(self) -> None:
        """Poll, whether anything is ready or not."""
        self.step_lanes()
        self.store.poll()

    def use_lanes(self, seed: int) -> None:
        """Let lanes write the blocks that they accept."""
        self.lanes = [
            FakeLane(self.store, drive, self.disks[drive.number], seed + drive.number)
            for drive in self.store.drives
        ]
        self._lend()

    def _lend(self) -> None:
        for lane in self.lanes:
            lane.drive.lend()

    def step_lanes(self) -> None:
        for lane in self.lanes:
            lane.step()
        if any(lane.dice.random() < 0.3 for lane in self.lanes):
            self.take_written()
            self._lend()
        self._hear_lanes()

    def catch_up(self) -> None:
        """Do what a node does before each call to its store."""
        for lane in self.lanes:
            lane.report_begun()
        self.take_written()

    def take_written(self) -> None:
        """Do what a node does when lanes report records."""
        for lane in self.lanes:
            lane.catch_up()
        self._hear_lanes()

    def _hear_lanes(self) -> None:
        """Take the acknowledgements that peers got before the store was told."""
        for lane in self.lanes:
            self.put_done.update(lane.told)
            lane.told.clear()

    def record_at(self, number: int) -> tuple[int, int]:
        """Offset and bytes on the drive."""
        entry = self.store.lookup([(TENANT, key(number))])[0]
        assert entry is not None
        return entry.offset, record_bytes(entry.length)

    def _settled(self, tag: int) -> SessionDone:
        self.settle()
        return self.session_done[tag]

    def _take_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def _take_slot(self) -> int:
        tag = self._take_tag()
        self._slot_of[tag] = self.slots.free.pop(0)
        self.slots.free.append(
            self._slot_of[tag]
        )  # reused in turn; tests keep fewer in flight than there are
        return tag

    def _puts_done(self, done: Sequence[PutDone]) -> None:
        for one in done:
            said = self.put_done.get(one.tag)
            assert said is None or one.error is None, "a peer heard that it was written"
            self.put_done[one.tag] = one
        self.reported.extend(one.tag for one in done)

    def _gets_done(self, done: Sequence[GetDone]) -> None:
        self.get_done.update((one.tag, one) for one in done)

    def _deletes_done(self, done: Sequence[DeleteDone]) -> None:
        self.delete_done.update((one.tag, one) for one in done)
        self.reported.extend(one.tag for one in done)

    def _sessions_done(self, done: Sequence[SessionDone]) -> None:
        self.session_done.update((one.tag, one) for one in done)
        self.reported.extend(one.tag for one in done)
