"""The order of a drive's work: tenants take turns by bytes, each in its own order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvstore.limits import DRIVE_INFLIGHT_BYTES_MAX, TURN_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

EVIL, GOOD, OURS = b"evil", b"good", b""


class Disk:
    """A drive that ends only the operations that the test ends."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []

    def reap(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def submit(self, ops: Sequence[DiskOp]) -> int:
        return len(ops)


class Work:
    reads = False

    def __init__(self, log: list[Work], tenant: bytes, number: int, size_bytes: int = TURN_BYTES) -> None:
        self.log, self.tenant, self.number, self.size_bytes = log, tenant, number, size_bytes

    def begin(self, tag: int) -> DiskOp:
        self.log.append(self)
        self.tag = tag
        return DiskOp(DiskOpKind.WRITE, 0, self.size_bytes, 0, tag)

    def end(self, result: int) -> None:
        assert result == self.size_bytes


class Drive:
    """A queue, and the drive that serves it one operation at a time once it is full."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.traffic = Traffic(cast("Any", self.disk))
        self.begun: list[Work] = []
        self.ended = 0

    def add(self, tenant: bytes, count: int, size_bytes: int = TURN_BYTES) -> None:
        for number in range(count):
            self.traffic.add(Work(self.begun, tenant, number, size_bytes))

    def serve(self, count: int) -> list[Work]:
        """End this many operations; returns those that began in their place."""
        before = len(self.begun)
        for work in self.begun[self.ended : self.ended + count]:
            self.disk.ended.append((work.tag, work.size_bytes))
            self.traffic.poll()
        self.ended += count
        return self.begun[before:]


def test_a_late_tenant_is_served_after_one_turn_of_each_other() -> None:
    drive = Drive()
    drive.add(EVIL, 500)
    drive.traffic.pump()
    assert len(drive.begun) == DRIVE_INFLIGHT_BYTES_MAX // TURN_BYTES
    drive.add(GOOD, 10)
    begun = drive.serve(24)
    assert [one.number for one in begun if one.tenant == GOOD] == list(range(10))
    assert max(at for at, one in enumerate(begun) if one.tenant == GOOD) <= 2 * 10 + 1


def test_turns_are_of_bytes_and_a_tenant_of_small_blocks_gets_as_many_as_one_of_large() -> None:
    drive = Drive()
    drive.add(EVIL, 100, 8 * TURN_BYTES)
    drive.traffic.pump()
    drive.add(GOOD, 4000, TURN_BYTES // 8)
    began = drive.serve(60)
    sizes = {whose: sum(one.size_bytes for one in began if one.tenant == whose) for whose in (EVIL, GOOD)}
    assert abs(sizes[EVIL] - sizes[GOOD]) <= 10 * TURN_BYTES


def test_work_of_one_tenant_is_done_in_order() -> None:
    drive = Drive()
    for tenant in (EVIL, GOOD, OURS):
        drive.add(tenant, 100)
    first = Work(drive.begun, OURS, -1)
    drive.traffic.add_first(first)
    assert drive.traffic.queued == 301
    drive.traffic.pump()
    while drive.ended < len(drive.begun):
        drive.serve(1)
    assert drive.begun[0] is first
    for tenant in (EVIL, GOOD, OURS):
        assert [one.number for one in drive.begun[1:] if one.tenant == tenant] == list(range(100))
    assert drive.traffic.queued == drive.traffic.in_flight == drive.traffic.in_flight_bytes == 0
