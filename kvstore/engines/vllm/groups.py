"""KV cache groups, and the names of their blocks' objects; `identity` makes them of an engine's configuration.

What always holds: two objects have the same name only if their layouts, layers and tokens are the same. Importing this
needs no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import OBJECT_BYTES_MAX
from kvstore.names import UNSAID, in_domain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.layout import Layout

__all__ = ["Group", "Identity", "Load", "Wanted"]


@dataclass(frozen=True)
class Group:
    """A KV cache group: layers whose blocks are allocated together."""

    number: int  # among all groups of the engine
    block_tokens: int
    window_tokens: int  # 0: its layers have no window
    layer_names: tuple[str, ...]
    shards: tuple[Layout, ...]  # each tensor-parallel rank's part of it
    page_bytes: int

    @cached_property
    def runs(self) -> list[range]:
        """The layers of each of a block's objects."""
        layers, most = len(self.layer_names), max(1, OBJECT_BYTES_MAX // self.page_bytes)
        return [range(first, min(first + most, layers)) for first in range(0, layers, most)]

    @property
    def block_bytes(self) -> int:
        """The size of a block on one rank, all layers together."""
        return len(self.layer_names) * self.page_bytes

    @property
    def object_bytes_max(self) -> int:
        """The length of its longest object."""
        return len(self.runs[0]) * self.page_bytes

    def may_leave(self, block: int, tokens: int) -> bool:
        """Whether vLLM may free a request's block once so many tokens are computed: no later one looks at it."""
        end = (block + 1) * self.block_tokens
        return self.window_tokens > 0 and end <= tokens - self.window_tokens + 1

    def objects(self, digests: Iterable[bytes], shard: int, domain: bytes = UNSAID) -> list[bytes]:
        """The keys of blocks' objects on one rank, block by block; a digest covers a block's tokens and all before."""
        layout = self.shards[shard]
        # A key includes everything in the layout, so different engines store side by side without refusals.
        parts = [b"%d/%d-%d" % (self.number, run.start, run.stop) for run in self.runs]
        keys = layout.keys([layout.fingerprint + digest + part for digest in digests for part in parts])
        return keys if domain == UNSAID else [in_domain(key, domain) for key in keys]

    def keys_of(self, blocks: Sequence[Wanted], shard: int) -> list[bytes]:
        """The keys of these blocks' objects on one rank, block by block."""
        if len({block.domain for block in blocks}) == 1:  # those of one request
            return self.objects([block.digest for block in blocks], shard, blocks[0].domain)
        return [key for block in blocks for key in self.objects([block.digest], shard, block.domain)]

    def all_objects(self, digests: Iterable[bytes], domain: bytes = UNSAID) -> list[bytes]:
        """The keys of blocks' objects on all ranks, block by block."""
        of_ranks = [self.objects(digests, shard, domain) for shard in range(len(self.shards))]
        if len(of_ranks) == 1:
            return of_ranks[0]
        size = len(self.runs)
        blocks = range(0, len(of_ranks[0]), size)
        return [key for first in blocks for keys in of_ranks for key in keys[first : first + size]]

    def sized_objects(self, digests: Iterable[bytes], domain: bytes = UNSAID) -> list[tuple[bytes, int]]:
        """The same with their lengths."""
        lengths = [len(run) * self.page_bytes for run in self.runs]
        keys = self.all_objects(digests, domain)
        return [(key, lengths[at % len(lengths)]) for at, key in enumerate(keys)]

    @property
    def objects_of_block(self) -> int:
        """How many objects a block has on all ranks."""
        return len(self.runs) * len(self.shards)


@dataclass(frozen=True, slots=True)
class Identity:
    """All groups of an engine, in the engine's order."""

    groups: tuple[Group, ...]
    layout: (
        bytes  # of every object; the same for all ranks, so that any of them may look up the objects of all
    )


class Wanted(NamedTuple):
    """A block of the engine's, and the digest of its present or future content."""

    group: int
    block: int
    digest: bytes
    domain: bytes = UNSAID  # the erase domain that its objects are in


@dataclass(frozen=True, slots=True)
class Load:
    """The blocks to load for one request."""

    request: str
    blocks: list[Wanted]
    waits: bool = False  # the step waits for it, and computes with its blocks
