"""Watches of transfers: a session learns the outcomes of its blocks, and adds its name to each call.

What always holds: a watch is notified of each put's end once, with the client's lock held, so it must not wait.
What it doesn't do: change transfers or their timing.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvstore.client.blocks import Block, PutResult
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.spans import GetSpan, InlineSpan, PutSpan, ResumeSpan

__all__ = ["Metadata", "Watch", "current_watch", "metadata_of", "watched_by", "within"]

Metadata: TypeAlias = "tuple[tuple[str, bytes], ...]"


class Watch(Protocol):
    """Notifications of a client about watched transfers."""

    def metadata(self) -> Metadata:
        """The metadata of calls made for watched transfers."""
        ...

    def armed(self, blocks: Sequence[Block], puts: ArmedPuts) -> None:
        """Puts were armed."""
        ...

    def put_ended(self, block: Block, result: PutResult) -> None:
        """A put has ended, with success or failure."""
        ...


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched_by(watch: Watch | None) -> Iterator[None]:
    """Have a watch notified of the transfers that this thread starts inside."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def current_watch() -> Watch | None:
    """The watch of what this thread starts now."""
    return _watch.get()


def metadata_of(watch: Watch | None) -> Metadata:
    """The metadata of a call; none without a watch."""
    return () if watch is None else watch.metadata()


def within(span: PutSpan | GetSpan | InlineSpan | ResumeSpan | None) -> AbstractContextManager[object]:
    """Add this span's context to calls; unchanged without tracing."""
    return nullcontext() if span is None else span.current()
