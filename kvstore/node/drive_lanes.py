"""The lanes of a node's drives: they write landed blocks without Python (`nic_offload.lane`).

A lane writes blocks whose name has this drive as its home. While in use it gets ground before it runs out, and again
after the drive has written a record of its own, which withdraws the ground. An idle lane's ground is withdrawn too.

What always holds: every record is counted when its lane begins it, so `ahead` says whether there is a record that
Python doesn't know yet.

It doesn't know the blocks themselves: `granted_puts` does, and reports them to the drives.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvstore.limits import LANE_BYTES_MAX, LANE_DEPTH, ROOMS_IDLE_TICKS
from nic_offload.errors import FabricError
from nic_offload.lane import Lane, Lanes, written_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.storage.drive import Drive
    from kvstore.storage.items import PutItem, PutsDone
    from kvstore.storage.store import Store
    from nic_offload.fabric import Fabric
    from nic_offload.lane import Written

__all__ = ["LANE_TAG", "DriveLanes"]

log = logging.getLogger(__name__)

LANE_TAG: Final = 1 << 63  # of the lanes' events; connections have smaller ones


class DriveLanes:
    """The lanes of a node. Receivers use `handed`; it is None if no drive has a lane."""

    def __init__(self, store: Store, fabric: Fabric) -> None:
        """Open them."""
        lanes = [_open(drive, fabric) for drive in store.drives]
        self._drives = store.drives
        self._pairs = [
            (drive, lane) for drive, lane in zip(store.drives, lanes, strict=True) if lane is not None
        ]
        self.handed = Lanes(lanes, store.homes) if self._pairs else None
        self.record_pages = 1  # of the blocks that arrive
        self._known = 0  # records that were reported, or have ended
        self._idle_ticks = ROOMS_IDLE_TICKS

    @property
    def ahead(self) -> int:
        """Return how many records lanes have begun that are not known yet."""
        return sum(lane.begun for _, lane in self._pairs) - self._known

    def report_begun(self, by_lane: Mapping[int, Sequence[PutItem]], done: PutsDone) -> None:
        """Report to the drives what their lanes write, by the lanes' numbers; each block ends like any other put."""
        self._idle_ticks = 0
        for number, items in by_lane.items():
            self._known += len(items)
            self._drives[number - 1].puts.under_way(items, done)

    def ended(self, records: int) -> None:
        """Note that so many records have ended that were not known before."""
        self._idle_ticks = 0
        self._known += records

    def begun(self) -> Iterator[Written]:
        """Return the records under way that are not known."""
        for _, lane in self._pairs:
            while rows := lane.under_way():
                yield from written_in(rows)

    def take(self) -> Iterator[tuple[Drive, bytes]]:
        """Process the records that have ended, each drive's in the order of generations."""
        for drive, lane in self._pairs:
            while rows := lane.take():
                yield drive, rows

    def lend(self) -> None:
        """Give the lanes ground for a client that puts, as far as they need it."""
        self._idle_ticks = 0
        self.renew()

    def renew(self) -> None:
        """Give ground to lanes that were used recently, as far as they need it."""
        if self._idle_ticks < ROOMS_IDLE_TICKS:
            for drive, _ in self._pairs:
                drive.lend(self.record_pages)

    @property
    def want_ground(self) -> bool:
        """Whether a lane has nothing to go on with when its ground is used up."""
        return any(not lane.state().next.pages for _, lane in self._pairs)

    def tick(self) -> None:
        """Withdraw ground that has not been used for a while."""
        self._idle_ticks += 1
        if self._idle_ticks == ROOMS_IDLE_TICKS:
            self.seal()

    def seal(self) -> None:
        """Withdraw all ground."""
        for drive, _ in self._pairs:
            drive.seal()


def _open(drive: Drive, fabric: Fabric) -> Lane | None:
    """Open a lane, if another ring can be had; otherwise Python writes all blocks of the drive."""
    if drive.direct_fd is None:
        return None
    try:
        lane = Lane(
            fabric, LANE_TAG, drive.direct_fd, LANE_DEPTH, LANE_BYTES_MAX, drive.record_format, drive.cipher
        )
    except FabricError as error:
        log.warning("Puts to drive %d are written by Python: %s", drive.number, error)
        return None
    drive.use_lane(lane)
    return lane
