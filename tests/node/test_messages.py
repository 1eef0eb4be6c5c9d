"""Messages that are still arriving: how many a node accepts at a time, and from which tenants."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.node import messages
from kvstore.node.messages import Messages

if TYPE_CHECKING:
    import pytest


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_messages_beyond_a_tenants_share_wait_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MESSAGES_COMING_MAX", 8)
    came: list[str] = []

    async def come() -> None:
        door, ends = Messages(lambda: 2), asyncio.Event()

        async def read(who: str, name: str) -> None:
            async with door.coming(who):
                came.append(name)
                await ends.wait()

        reading = [asyncio.create_task(read("many", f"many {at}")) for at in range(7)]
        await settle()
        assert came == [f"many {at}" for at in range(4)]
        reading += [asyncio.create_task(read("few", "few"))]
        await settle()
        assert came[4:] == ["few"]
        reading[4].cancel()  # it left while it waited
        reading[0].cancel()
        await settle()
        assert came[5:] == ["many 5"]
        reading[1].cancel()
        reading[6].cancel()  # it had come to be its turn, and did not know yet
        await settle()
        ends.set()
        for one in reading:
            with suppress(asyncio.CancelledError):
                await one
        assert not door._places.total
        assert not door._waiting

    asyncio.run(come())


def test_the_turn_of_a_caller_that_left_passes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGES_COMING_MAX", 1)

    async def come() -> None:
        door, over = Messages(lambda: 1), asyncio.Event()
        reading: list[asyncio.Task[None]] = []

        async def read(at: int) -> None:
            async with door.coming(None):
                await over.wait()
            if at == 0:
                reading[1].cancel()  # at the moment at which it has come to be its turn

        reading += [asyncio.create_task(read(at)) for at in range(3)]
        await settle()
        over.set()
        await asyncio.wait_for(reading[2], 5)
        assert reading[1].cancelled()
        assert not door._places.total

    asyncio.run(come())
