"""When a block leaves a sliding window, after which vLLM uses its memory for others."""

from __future__ import annotations

from tests.device.tensors import TOKENS, identity_of


def test_a_block_may_leave_its_window_once_no_later_token_looks_at_it() -> None:
    (group,) = identity_of("e", window_tokens=40).groups
    # The token with the number 55 looks at those from 16 on: 40 of them, and itself the last.
    assert not group.may_leave(0, TOKENS + 40 - 2)
    assert group.may_leave(0, TOKENS + 40 - 1)
    assert not group.may_leave(1, TOKENS + 40 - 1)
    assert group.may_leave(1, 2 * TOKENS + 40 - 1)


def test_without_a_window_no_block_leaves() -> None:
    (group,) = identity_of("e").groups
    assert not group.may_leave(0, 1 << 20)
