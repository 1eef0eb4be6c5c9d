"""Layouts: what determines how the bytes of a block are read, and which shard of a model's KV they are.

A layout has everything that must be equal before one engine may use bytes that another one stored: model, weights,
adapter, number format, tokens per block, each layer's own widths, the order of bytes, the shard, and the instruction
set where it matters. Its fingerprint is stored with every block; a get under another one is MISS(layout), never
bytes.

What always holds: two layouts that differ in anything have different fingerprints, and different keys for the same
tokens, so blocks of several number formats, block sizes or shards coexist. Layers that use another layer's KV
(aliases) take no bytes. The fingerprint is made from a canonical text (`canonical`), never from Python's `hash`.

Heads can be moved between the shards of one layout: `reshard` says which bytes of which stored shards make up a shard
of another degree. That requires a known order of bytes; a layout in an engine's private order (`Order.OPAQUE`) is
moved only as a whole.

What it doesn't do: convert number formats, or merge pipeline stages (a stage has its own blocks, in every degree).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import LayoutError
from kvstore.limits import LAYERS_MAX, SHARDS_MAX
from kvstore.names import block_key, block_keys, layout_fingerprint
from nic_offload.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ELEMENT_BYTES", "Layer", "Layout", "Order", "Run"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}


class Order(enum.Enum):
    """How the numbers of a layer's K, and then those of its V, follow each other."""

    HEADS_FIRST = "heads first"  # [head][token][number]: a head's bytes are one piece
    TOKENS_FIRST = "tokens first"  # [token][head][number]
    OPAQUE = "opaque"  # private to the engine


class Layer(NamedTuple):
    """One layer's KV, of the whole model and not of a shard. Widths may differ from layer to layer, and be 0."""

    heads: int  # KV heads
    k_numbers: int  # of one head and token
    v_numbers: int
    split: bool = True  # whether shards have different heads; else (MLA's latent) each has all of them
    alias_of: int | None = None  # the layer whose KV this one uses


class Run(NamedTuple):
    """Bytes that are contiguous both in a stored shard's block and in the requested one's."""

    shard: int
    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How one shard's block of `block_tokens` tokens is laid out in memory.

    >>> from kvstore.layout import Layer, Layout
    >>> layout = Layout("my model", "v1", "bfloat16", 16, (Layer(heads=2, k_numbers=64, v_numbers=64),))
    >>> layout.block_bytes
    8192
    """

    model: str
    weights: str  # a digest, because the same name may stand for other weights tomorrow
    dtype: str
    block_tokens: int
    layers: tuple[Layer, ...]
    order: Order = Order.HEADS_FIRST
    adapter: str = ""  # LoRA, by name and digest; "" if there is none
    shard: int = 0
    shards: int = 1  # tensor parallel
    stage: int = 0
    stages: int = 1  # pipeline parallel; `layers` are those of this stage
    isa: str = ""  # where the kernels' bytes depend on it: CPUs with and without AMX, for one
    engine: str = ""  # the engine that defines the order, if it is opaque

    def __post_init__(self) -> None:
        """Raise for an invalid layout."""
        self._check_types()
        if not isinstance(self.dtype, str) or self.dtype not in ELEMENT_BYTES:
            raise LayoutError(
                f"There is no number format {shown(self.dtype)}; there are {', '.join(ELEMENT_BYTES)}."
            )
        if self.block_tokens < 1:
            raise LayoutError(f"A block has at least one token, not {shown(self.block_tokens)}.")
        if not 1 <= len(self.layers) <= LAYERS_MAX:
            raise LayoutError(f"A layout has 1 to {LAYERS_MAX} layers, not {len(self.layers)}.")
        for number, part, parts in (("shard", self.shard, self.shards), ("stage", self.stage, self.stages)):
            if not 0 <= part < parts:
                raise LayoutError(f"There is no {number} {shown(part)} of {shown(parts)}.")
        if (self.order is Order.OPAQUE) != bool(self.engine):
            raise LayoutError("An opaque order, and no other, names the engine that knows it.")
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_types(self) -> None:
        for name in ("block_tokens", "shard", "shards", "stage", "stages"):
            if not isinstance(number := getattr(self, name), int):
                raise LayoutError(f"{name} is a whole number, not {type(number).__name__}.")
        if not isinstance(self.layers, tuple) or not all(isinstance(one, Layer) for one in self.layers):
            raise LayoutError("The layers of a layout are a tuple of Layer.")

    def _check_layer(self, index: int, layer: Layer) -> None:
        if min(layer.heads, layer.k_numbers, layer.v_numbers) < 0:
            raise LayoutError(f"Layer {index} has a negative width.")
        if layer.alias_of is not None:
            if not 0 <= layer.alias_of < index or self.layers[layer.alias_of].alias_of is not None:
                raise LayoutError(
                    f"Layer {index} uses the KV of layer {layer.alias_of}, which has none or comes later."
                )
        elif layer.split and layer.heads % self.shards and self.shards % layer.heads:
            raise LayoutError(
                f"The {layer.heads} heads of layer {index} can't be split over {self.shards} shards."
            )

    # --- names

    @property
    def canonical(self) -> bytes:
        """The canonical text: every field by name, in a fixed order."""
        fields = {
            "adapter": self.adapter,
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "engine": self.engine,
            "isa": self.isa,
            "layers": [list(layer) for layer in self.layers],
            "model": self.model,
            "order": self.order.value,
            "shard": self.shard,
            "shards": self.shards,
            "stage": self.stage,
            "stages": self.stages,
            "weights": self.weights,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def fingerprint(self) -> bytes:
        """The layout's fingerprint, stored with every block."""
        return layout_fingerprint(self.canonical)

    @cached_property
    def _name(self) -> bytes:
        """Everything that determines the bytes, except the tokens."""
        return block_key(self.canonical)

    def key(self, chained_hash: bytes) -> bytes:
        """The key of the block with this hash of its tokens and all tokens before them.

        >>> len(layout.key(b"hash of the tokens"))
        32
        """
        return block_key(self._name, chained_hash)

    def keys(self, chained_hashes: Iterable[bytes]) -> list[bytes]:
        """The keys of many blocks, as by `key`.

        >>> layout.keys([b"hash of the tokens"]) == [layout.key(b"hash of the tokens")]
        True
        """
        return block_keys(self._name, chained_hashes)

    # --- bytes

    def heads(self, layer: Layer) -> int:
        """How many of a layer's heads this shard has. With more shards than heads, several shards share one."""
        return max(1, layer.heads // self.shards) if layer.split and layer.heads else layer.heads

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The offset and size of each layer's bytes in a block; for an alias, those of its layer."""
        spans: list[tuple[int, int]] = []
        begin = 0
        for layer in self.layers:
            if layer.alias_of is not None:
                spans.append(spans[layer.alias_of])
                continue
            size = sum(self._widths(layer)) * self.heads(layer) * self.block_tokens
            spans.append((begin, size))
            begin += size
        return tuple(spans)

    @cached_property
    def block_bytes(self) -> int:
        """The size of a block."""
        return max(begin + size for begin, size in self.spans)

    def of_shard(self, shard: int, shards: int) -> Layout:
        """The layout of another shard of the same KV.

        >>> layout.of_shard(1, shards=2).block_bytes
        4096
        """
        return replace(self, shard=shard, shards=shards)

    def sources(self, shards: int) -> list[int]:
        """Which of `shards` stored shards have the heads of this one; of shards with the same heads, the lowest.

        >>> layout.sources(shards=2)
        [0, 1]
        """
        return sorted({run.shard for run in self.reshard(shards)})

    def reshard(self, shards: int) -> list[Run]:
        """The byte ranges of the blocks of `shards` shards that make up a block of this one, in order of the target.

        >>> [(run.shard, run.length) for run in layout.reshard(shards=2)]
        [(0, 2048), (1, 2048), (0, 2048), (1, 2048)]
        """
        if self.order is Order.OPAQUE:
            raise LayoutError(
                f"Only {self.engine} knows the order of these bytes: they can't be moved between shards."
            )
        if not isinstance(shards, int) or not 1 <= shards <= SHARDS_MAX:
            raise LayoutError(f"A layout has 1 to {SHARDS_MAX} shards, not {shown(shards)}.")
        stored = [self.of_shard(shard, shards) for shard in range(shards)]
        begins = [0] * shards
        target = 0
        runs: list[Run] = []
        for layer in self.layers:
            if layer.alias_of is not None:
                continue
            for head_bytes in self._widths(layer):
                pieces = self._pieces(layer, head_bytes, stored)
                for piece in sorted(pieces, key=lambda piece: piece.target):
                    _append(
                        runs,
                        piece._replace(
                            source=begins[piece.shard] + piece.source, target=target + piece.target
                        ),
                    )
                target += self.heads(layer) * head_bytes * self.block_tokens
                for shard, layout in enumerate(stored):
                    begins[shard] += layout.heads(layer) * head_bytes * self.block_tokens
        return runs

    def _widths(self, layer: Layer) -> tuple[int, int]:
        """Bytes of one head and token, of K and of V."""
        element = ELEMENT_BYTES[self.dtype]
        return layer.k_numbers * element, layer.v_numbers * element

    def first_head(self, layer: Layer) -> int:
        """The first of a layer's heads that this shard has."""
        if not layer.split or not layer.heads:
            return 0
        return self.shard * layer.heads // self.shards

    def _pieces(self, layer: Layer, head_bytes: int, stored: Sequence[Layout]) -> list[Run]:
        """One layer's K or V: each wanted head from the first shard that has it."""
        if not head_bytes:
            return []
        tokens = self.block_tokens
        ours, first = self.heads(layer), self.first_head(layer)
        pieces = []
        for head in range(first, first + ours):
            source = next(one for one in stored if 0 <= head - one.first_head(layer) < one.heads(layer))
            theirs, at = source.heads(layer), head - source.first_head(layer)
            if self.order is Order.HEADS_FIRST:
                size = tokens * head_bytes
                pieces.append(Run(source.shard, at * size, (head - first) * size, size))
                continue
            pieces += [
                Run(
                    source.shard,
                    (token * theirs + at) * head_bytes,
                    (token * ours + head - first) * head_bytes,
                    head_bytes,
                )
                for token in range(tokens)
            ]
        return pieces


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, as part of the one before it if the two touch on both sides."""
    if runs:
        last = runs[-1]
        if (last.shard, last.source + last.length, last.target + last.length) == run[:3]:
            runs[-1] = last._replace(length=last.length + run.length)
            return
    runs.append(run)
