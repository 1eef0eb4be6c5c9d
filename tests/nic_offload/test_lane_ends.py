"""Ended records of a lane are taken in batches: all that there are when it is asked, and no others."""

from __future__ import annotations

from nic_offload import lane
from nic_offload.lane import Lane


class Ends(Lane):
    """A lane with these ended records; another one ends when some are taken, the first three times."""

    def __init__(self, records: int) -> None:
        self.ended, self.more = records, 3

    def take(self) -> bytes:
        taken = min(self.ended, lane._TAKEN_MAX)
        self.ended += (self.more > 0) - taken
        self.more -= 1
        return bytes(taken * lane._WRITTEN.size)


def sizes(ends: Ends) -> list[int]:
    return [len(rows) // lane._WRITTEN.size for rows in ends.take_ended()]


def test_more_than_a_batch_is_taken_in_several() -> None:
    full = lane._TAKEN_MAX
    assert sizes(Ends(2 * full + 5)) == [full, full, 7]
    assert sizes(Ends(0)) == []


def test_a_record_that_ends_while_others_are_processed_is_left_for_the_next_batch() -> None:
    assert sizes(Ends(3)) == [3]
