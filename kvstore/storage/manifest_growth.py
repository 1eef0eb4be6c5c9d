"""How a session's manifest grows by a turn: its bounds, and when a chunk is full. Pure, and in slices.

What always holds: an impossible step is SessionRefused, and changes nothing; in the result every block belongs to a
turn, and each chunk that has become full is listed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.config import counted
from kvstore.errors import SessionRefused, StorageError
from kvstore.limits import (
    SESSION_BLOCKS_MAX,
    SESSION_CHUNK_BLOCKS,
    SESSION_SLICE_BLOCKS,
    SESSION_TURN_TOKENS_MAX,
    SESSION_TURNS_MAX,
)
from kvstore.storage.labels import is_sealed_label
from kvstore.wire.manifest import Manifest, Turn, chunk_key, follow_each_other

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kvstore.storage.items import SessionItem
    from kvstore.storage.manifests import Manifests

    Growth = Generator[None, None, tuple[Manifest, dict[bytes, bytes]]]
    """Comes to a manifest, and the chunks that it may be the first to name, by their keys."""

__all__ = ["appended", "empty", "first_blocks", "labelled", "longer", "refuse_longer", "taken"]


def appended(manifest: Manifest, item: SessionItem, owner: bytes) -> Growth:
    """Append a turn, or the rest of one; keys that fill a chunk become one."""
    if item.first_block is not None and item.first_block != manifest.blocks:
        raise SessionRefused(
            f"The session has {counted(manifest.blocks, 'block')}, and these were to follow block {item.first_block}."
        )
    new, written = yield from longer(manifest, item.keys, owner)
    turns = list(manifest.turns)
    if item.continues and turns:
        turns[-1] = turns[-1]._replace(tokens=turns[-1].tokens + item.tokens)
    elif item.keys:
        turns.append(Turn(manifest.blocks, item.tokens, item.at_ms))
    if len(turns) > SESSION_TURNS_MAX:
        raise SessionRefused(f"A session has at most {SESSION_TURNS_MAX} turns.")
    if turns and not 0 <= turns[-1].tokens <= SESSION_TURN_TOKENS_MAX:
        raise SessionRefused(f"A turn has 0 to {SESSION_TURN_TOKENS_MAX} tokens, not {turns[-1].tokens}.")
    expires_ms = manifest.expires_ms if item.expires_ms is None else item.expires_ms
    return new._replace(turns=tuple(turns), expires_ms=expires_ms), written


def taken(first: Manifest, item: SessionItem, owner: bytes) -> Growth:
    """Make a session what it is on another node, out of its first blocks."""
    new, written = yield from longer(first, item.keys, owner)
    turns = tuple(item.turns)
    if len(turns) > SESSION_TURNS_MAX or not follow_each_other(turns, new.blocks):
        raise SessionRefused("The turns of the session don't fit its blocks.")
    return new._replace(turns=turns, expires_ms=item.expires_ms or 0), written


def longer(manifest: Manifest, keys: Sequence[bytes], owner: bytes) -> Growth:
    """Append keys, and leave the turns as they are. `owner` is the user to whom new chunks belong."""
    if manifest.blocks + len(keys) > SESSION_BLOCKS_MAX:
        raise SessionRefused(f"A session has at most {SESSION_BLOCKS_MAX} blocks.")
    tail = [*manifest.tail, *keys]
    whole = len(tail) - len(tail) % SESSION_CHUNK_BLOCKS
    chunks, written = list(manifest.chunks), dict[bytes, bytes]()
    for at in range(0, whole, SESSION_CHUNK_BLOCKS):
        if at and not at % SESSION_SLICE_BLOCKS:
            yield
        payload = b"".join(tail[at : at + SESSION_CHUNK_BLOCKS])
        chunks.append(chunk_key(payload, owner))
        written[chunks[-1]] = payload
    return manifest._replace(chunks=tuple(chunks), tail=tuple(tail[whole:])), written


def refuse_longer(wanted: int, blocks: int) -> None:
    """Refuse to keep more of a session than it has."""
    if not 0 <= wanted <= blocks:
        raise SessionRefused(f"The session has {counted(blocks, 'block')}, fewer than {wanted}.")


def first_blocks(
    manifests: Manifests, tenant: bytes, manifest: Manifest, blocks: int
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Chunks and tail of the first blocks of a session that was found."""
    whole, rest = divmod(blocks, SESSION_CHUNK_BLOCKS)
    chunks = manifest.chunks
    tail = manifests.chunk_keys(tenant, chunks[whole]) if whole < len(chunks) else manifest.tail
    return chunks[:whole], tail[:rest]


def labelled(manifest: Manifest, item: SessionItem) -> Manifest:
    """Replace a label that can't be opened by the step's; StorageError if it has none."""
    if not is_sealed_label(manifest.label):
        return manifest
    if not item.label:
        raise StorageError("The session's label can't be read: its key's slot in the keyring is damaged.")
    return manifest._replace(label=item.label)


def empty(item: SessionItem) -> Manifest:
    """A session without blocks."""
    return Manifest(item.name.user, item.name.session, (), (), (), item.label, epoch=item.epoch or 0)
