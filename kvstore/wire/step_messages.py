"""Events of a session's steps as messages: in a header of any call, or in a message.

What always holds: a header is bounded; a reader skips unknown steps without an error.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvstore.limits import STEP_CLOCK_BYTES, STEP_DETAIL_BYTES_MAX
from kvstore.steps import Seen, Step
from kvstore.wire import steps_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["STEPS_HEADER", "machine_clock", "seen_message", "seen_of"]

STEPS_HEADER = "kvstore-steps-bin"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KNOWN = {int(step) for step in Step}


def machine_clock() -> bytes:
    """Return a digest that identifies this boot of this machine, and so its CLOCK_MONOTONIC; empty if unknown."""
    try:
        return blake2b(_BOOT.read_bytes(), digest_size=STEP_CLOCK_BYTES).digest()
    except OSError:
        return b""


def seen_message(seen: Seen) -> pb.Seen:
    """Encode for the wire."""
    return pb.Seen(
        step=cast("pb.Step", int(seen.step)),
        at_ns=seen.at_ns,
        blocks=seen.blocks,
        size_bytes=seen.size_bytes,
        tokens=seen.tokens,
        detail=seen.detail.encode()[:STEP_DETAIL_BYTES_MAX].decode(errors="ignore"),
        by_node=seen.by_node,
    )


def seen_of(messages: Iterable[pb.Seen]) -> Iterator[Seen]:
    """Decode from the wire; steps that a later version has added are left out."""
    for message in messages:
        if int(message.step) in _KNOWN:
            yield Seen(
                Step(message.step),
                message.at_ns,
                message.blocks,
                message.size_bytes,
                message.tokens,
                message.detail,
                message.by_node,
            )
