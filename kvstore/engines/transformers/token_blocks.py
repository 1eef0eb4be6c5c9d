"""How a conversation's tokens are divided into blocks, and the blocks' names.

Each turn is cut from the end of the previous one into blocks of equal numbers of tokens; the last may have fewer. So a
stored block never changes, and a turn sends only new tokens.

What always holds: a block's key is made from all tokens up to its end, and from how many of them windowed layers had.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvstore.names import UNSAID, block_key, in_domain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.engines.transformers.shapes import Shapes

__all__ = ["Piece", "pieces", "usable"]


class Piece(NamedTuple):
    """A block: tokens from `begin` to `end`."""

    key: bytes
    begin: int
    end: int
    kept: tuple[int, ...]  # by layers with a window, for each window there is
    length: int  # in bytes
    domain: bytes = UNSAID  # the erase domain that it is put into


def pieces(
    shapes: Shapes, tokens: Sequence[int], turn_ends: Sequence[int], domain: bytes = UNSAID
) -> Iterator[Piece]:
    """Cut the tokens up to the last of the turns' ends, into blocks of an erase domain."""
    layout = shapes.layout
    digest, begin = block_key(b"transformers"), 0
    for turn_end in turn_ends:
        while begin < turn_end:
            end = min(begin + layout.block_tokens, turn_end)
            digest = block_key(digest, array("q", tokens[begin:end]).tobytes())
            kept = shapes.kept(begin, end, turn_end)
            key = layout.key(block_key(digest, array("q", kept).tobytes()))
            length = shapes.block_bytes(end - begin, kept)
            if length:  # if all layers have windows, tokens that none of them still has get no block
                yield Piece(in_domain(key, domain), begin, end, kept, length, domain)
            begin = end


def usable(shapes: Shapes, run: Sequence[Piece]) -> int:
    """How many of these blocks, from the first, form a usable KV."""
    for count in range(len(run), 0, -1):
        end = run[count - 1].end
        if all(_has(run[:count], at, end - window + 1) for at, window in enumerate(shapes.windows)):
            return count
    return 0


def _has(run: Sequence[Piece], at: int, first: int) -> bool:
    """Whether the layers of one window have every token, from the first."""
    end = run[-1].end
    for piece in reversed(run):
        if end <= first:
            return True
        if piece.end != end or piece.end - piece.kept[at] > max(piece.begin, first):
            return False
        end = piece.begin
    return end <= max(0, first)
