"""The KV of one token in one layer: the widths of its keys and values, and the layer's window.

What always holds: bytes depend on the widths alone. Multi-head (MHA), grouped (GQA), multi-query (MQA) and
ragged layouts differ in the widths; multi-head latent attention (MLA) stores one vector for both, so its value
width is 0; a layer that shares another's KV, or has no attention, stores nothing.

What it doesn't do: block padding, quantisation scales, tensor-parallel copies of KV heads, draft models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from sim.units import OutOfRange, require

__all__ = ["DTYPE_BITS", "TOKENS_MAX", "Layer", "Layout", "dtype_bits", "parse_ragged", "uniform"]

TOKENS_MAX = 10**9
_LAYERS_MAX = 10_000
_WIDTH_MAX = 10**7
DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


class Layer(NamedTuple):
    """Numbers that one layer keeps of each token."""

    key_width: int
    value_width: int
    window_tokens: int | None = None  # older tokens are dropped; None: unlimited


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers of a model, and the name of this layout."""

    kind: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        require("layers", len(self.layers), "a number of layers", 1, _LAYERS_MAX)
        for layer in self.layers:
            for width in layer[:2]:
                require("a layer's width", width, "numbers a token", 0, _WIDTH_MAX)

    def token_bytes(self, bits: int = 16) -> int:
        """KV bytes that one token leaves behind."""
        return -(-sum(layer.key_width + layer.value_width for layer in self.layers) * bits // 8)

    def sequence_bytes(self, tokens: int, bits: int = 16) -> int:
        """KV bytes of one sequence; layers with a window keep its tokens only."""
        require("--tokens", tokens, "tokens a sequence", 1, TOKENS_MAX)
        numbers = 0
        for layer in self.layers:
            kept = tokens if layer.window_tokens is None else min(tokens, layer.window_tokens)
            numbers += kept * (layer.key_width + layer.value_width)
        return -(-numbers * bits // 8)


def dtype_bits(name: str) -> int:
    """Bits of one number of this type."""
    if name.lower() not in DTYPE_BITS:
        raise OutOfRange("--dtype", repr(name), "a type of number", "one of " + ", ".join(DTYPE_BITS))
    return DTYPE_BITS[name.lower()]


def uniform(kind: str, layers: int, key_width: int, value_width: int) -> Layout:
    """All layers alike."""
    return Layout(kind, (Layer(key_width, value_width),) * layers)


def parse_ragged(text: str) -> Layout:
    """Read '2x1024/1024,0/0,4096/2048': K and V widths by layer, a layer repeated with Nx; 0 is allowed."""
    layers: list[Layer] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,4})x)?(\d{1,7})/(\d{1,7})\s*", part)
        if match is None:
            raise OutOfRange(
                "--layout ragged",
                repr(part),
                "K/V widths of a layer in numbers a token",
                "such as 2x1024/1024",
            )
        layers += [Layer(int(match[2]), int(match[3]))] * int(match[1] or 1)
    return Layout("ragged", tuple(layers))
