"""The KV that a model keeps per token and layer, and its size in a block.

A block is a run of tokens: for each layer its K, then its V, each head by head. Layers may differ in heads and widths
(a width may be 0), and may have a window: such a layer keeps only the newest `window - 1` tokens, so a block has those
tokens of a turn that the layer still had when the turn ended.

What always holds: two models whose bytes would be read differently have different fingerprints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvstore.errors import LayoutError
from kvstore.layout import Layer, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["LayerShape", "Shapes"]


class LayerShape(NamedTuple):
    """One layer."""

    heads: int
    k_numbers: int  # of one head and token
    v_numbers: int
    window: int | None = None


class Shapes:
    """All layers, and their common properties."""

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, layout: Layout) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self.layout = layout
        self.windows = tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))
        # A `Layout` has no field for windows, so they are added to the fingerprint here.
        self.canonical = layout.canonical + f" windows {[layer.window for layer in self.layers]}".encode()

    @classmethod
    def of(
        cls,
        config: Any,
        dtype: torch.dtype,
        *,
        weights: str,
        block_tokens: int,
        layers: Sequence[LayerShape] | None = None,
    ) -> Self:
        """Return the shapes of a model's configuration, unless layers are given; LayoutError if its KV is not plain."""
        text = config.get_text_config(decoder=True)
        layers = _of_config(config, text) if layers is None else layers
        layout = Layout(
            model=str(text.model_type),
            weights=weights,
            dtype=str(dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            layers=tuple(Layer(layer.heads, layer.k_numbers, layer.v_numbers) for layer in layers),
        )
        return cls(layers, dtype, layout)

    def kept(self, begin: int, end: int, turn_end: int) -> tuple[int, ...]:
        """How many of a block's tokens the layers with each window have, newest last."""
        return tuple(max(0, end - max(begin, turn_end - window + 1)) for window in self.windows)

    def counts(self, tokens: int, kept: Sequence[int]) -> list[int]:
        """How many tokens each layer has in a block."""
        of_window = dict(zip(self.windows, kept, strict=True))
        return [tokens if layer.window is None else of_window[layer.window] for layer in self.layers]

    def block_bytes(self, tokens: int, kept: Sequence[int]) -> int:
        """The length of a block."""
        return sum(
            layer.heads * (layer.k_numbers + layer.v_numbers) * count * self.dtype.itemsize
            for layer, count in zip(self.layers, self.counts(tokens, kept), strict=True)
        )


def _of_config(config: Any, text: Any) -> list[LayerShape]:
    windows = [_window(number, layer) for number, layer in enumerate(DynamicCache(config=config).layers)]
    if not windows:  # an empty cache creates plain layers
        windows = [None] * text.num_hidden_layers
    if getattr(text, "kv_lora_rank", None) is not None:
        raise LayoutError(f"A {text.model_type} has latent KV: describe each layer (`layers=`).")
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return [LayerShape(heads, width, width, window) for window in windows]


def _window(number: int, layer: Any) -> int | None:
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    if type(layer) is DynamicLayer:
        return None
    raise LayoutError(
        f"Layer {number} is kept in a {type(layer).__name__}, which holds more than K and V for each token."
    )
