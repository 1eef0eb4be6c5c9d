"""Whether a flag may travel with its bytes follows from what a provider promises, never from its name."""

from __future__ import annotations

import pytest
from nic_offload._core import lib

WAW, SAS, RMA_WAW = 1 << 4, 1 << 8, 1 << 35  # as in rdma/fabric.h
ANY = (1 << 64) - 1


@pytest.mark.parametrize(
    ("orders", "size_max", "ranges", "parts", "kept"),
    [
        pytest.param(WAW | SAS, ANY, 4, 4, ANY, id="net, tcp: a stream"),
        pytest.param(RMA_WAW, ANY, 4, 4, ANY, id="writes alone"),
        pytest.param(WAW, 4096, 4, 4, 4096, id="short ones alone"),
        pytest.param(WAW, 0, 4, 4, 0, id="shm: for no size"),
        pytest.param(SAS, ANY, 4, 4, 0, id="efa: messages, not writes"),
        pytest.param(0, ANY, 4, 4, 0, id="none"),
        pytest.param(WAW, ANY, 1, 4, 0, id="verbs, cxi: one range a message"),
        pytest.param(WAW, ANY, 4, 2, 0, id="too few parts"),
    ],
)
def test_the_longest_message_that_is_written_in_order(
    orders: int, size_max: int, ranges: int, parts: int, kept: int
) -> None:
    assert lib.tk_order_max(orders, size_max, ranges, parts) == kept


@pytest.mark.parametrize(
    ("orders", "size_max", "kept"),
    [
        pytest.param(WAW, ANY, 1, id="net, tcp: any size"),
        pytest.param(RMA_WAW, 8, 1, id="a word"),
        pytest.param(WAW, 4, 0, id="less than a word"),
        pytest.param(WAW, 0, 0, id="shm: for no size"),
        pytest.param(SAS, ANY, 0, id="messages, not writes"),
    ],
)
def test_words_keep_their_order_only_if_it_holds_for_their_size(
    orders: int, size_max: int, kept: int
) -> None:
    assert lib.tk_keeps_order(orders, size_max) == kept
