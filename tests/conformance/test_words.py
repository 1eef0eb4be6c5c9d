"""Two words put to one place, like a put's two acknowledgements: the last one stays, however the writes arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.trigger import WordPut, put_words
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Stage

TURNS, PLACES = 20, 60


def test_a_word_is_not_overtaken_by_an_earlier_one_to_the_same_place(stage: Stage) -> None:
    there = stage.there
    for last in range(2, 2 * TURNS, 2):
        put_words(
            stage.near.fabric,
            [
                WordPut(there.endpoint, there.peer, there.word_target(place), there.key, value)
                for place in range(PLACES)
                for value in (last - 1, last)
            ],
        )
        words = [stage.far.word(place) for place in range(PLACES)]
        wait_until(lambda: all(word.load() == last for word in words), f"{last} in every word")  # noqa: B023
