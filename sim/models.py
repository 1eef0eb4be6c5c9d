"""KV bytes of the models of the paper's Fig. 1, from their architecture.

What always holds: nothing here is a stored result; bytes are computed from the layout (`sim.kv_layout`). Weights count
with 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.kv_layout import Layout, dtype_bits, parse_ragged, uniform
from sim.units import OutOfRange, require

__all__ = ["MODELS", "WEIGHT_BYTES", "Footprint", "Model", "footprint", "model", "relaid"]

_BATCH_MAX = 10**6
WEIGHT_BYTES = 2  # a parameter


@dataclass(frozen=True, slots=True)
class Model:
    """The dimensions of a model that determine the size of its KV cache and the work per token."""

    name: str
    layers: int
    heads: int
    kv_heads: int  # 1 for MLA, whose latent all heads share
    head_dim: int  # for MLA: latent rank + rotary part
    parameters: float
    latent: bool = False
    active_parameters: float | None = None  # of a mixture of experts; None: all of them
    plain_widths: tuple[int, int] | None = None  # K and V of a head, if they aren't head_dim
    kept: Layout | None = None  # the layout of each layer, if it doesn't follow from the counts
    kv_bits: int = 16  # of a number, as served

    @property
    def token_bytes(self) -> int:
        """KV bytes that one token leaves behind."""
        return self.layout.token_bytes(self.kv_bits)

    @property
    def layout(self) -> Layout:
        """How this model keeps its KV."""
        if self.kept is not None:
            return self.kept
        width = self.kv_heads * self.head_dim
        if self.latent:
            return uniform("MLA", self.layers, width, 0)
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        return uniform(kind, self.layers, width, width)

    @property
    def token_flops(self) -> float:
        """Floating-point operations to prefill a token, without attention to earlier tokens."""
        return 2 * (self.active_parameters or self.parameters)

    def prefill_flops(self, new_tokens: float, context_tokens: float = 0.0) -> float:
        """Floating-point operations to prefill tokens after a context; each attends to all tokens before it."""
        return new_tokens * self.token_flops + self.attention_flops(new_tokens, context_tokens)

    def attention_flops(self, new_tokens: float, context_tokens: float = 0.0) -> float:
        """The attention's part of these operations."""
        key, value = self.plain_widths or (self.head_dim, self.head_dim)
        pairs = new_tokens * (context_tokens + new_tokens / 2)
        return pairs * 2 * self.layers * self.heads * (key + value)


@dataclass(frozen=True, slots=True)
class Footprint:
    """One row of Fig. 1."""

    model: str
    layout: str
    token_bytes: int
    batch: int
    tokens: int
    kv_bytes: int
    kv_per_model: float | None  # None: the number of parameters isn't known


_ALL = (
    Model("gpt2-xl", 48, 25, 25, 64, 1.558e9),
    Model("opt-6.7b", 32, 32, 32, 128, 6.66e9),
    Model("opt-13b", 40, 40, 40, 128, 12.85e9),
    Model("opt-30b", 48, 56, 56, 128, 29.97e9),
    Model("opt-175b", 96, 96, 96, 128, 174.6e9),
    Model("llama-2-7b", 32, 32, 32, 128, 6.738e9),
    Model("llama-2-13b", 40, 40, 40, 128, 13.016e9),
    Model("llama-2-70b", 80, 64, 8, 128, 68.98e9),
    Model("llama-3-8b", 32, 32, 8, 128, 8.03e9),
    Model("llama-3-70b", 80, 64, 8, 128, 70.55e9),
    Model("llama-3.1-405b", 126, 128, 8, 128, 405.85e9),
    Model("mistral-7b", 32, 32, 8, 128, 7.242e9),
    Model("mixtral-8x7b", 32, 32, 8, 128, 46.7e9, active_parameters=12.9e9),
    Model("mixtral-8x22b", 56, 48, 8, 128, 140.6e9, active_parameters=39.1e9),
    Model("falcon-7b", 32, 71, 1, 64, 7.22e9),
    Model("falcon-40b", 60, 128, 8, 64, 41.3e9),
    Model("falcon-180b", 80, 232, 8, 64, 179.5e9),
    Model("qwen2.5-7b", 28, 28, 4, 128, 7.616e9),
    Model("qwen2.5-72b", 80, 64, 8, 128, 72.7e9),
    Model(
        "deepseek-v3",
        61,
        128,
        1,
        512 + 64,
        671e9,
        latent=True,
        active_parameters=37e9,
        plain_widths=(128 + 64, 128),
    ),
)

MODELS: dict[str, Model] = {entry.name: entry for entry in _ALL}
MODELS["gpt-3"] = MODELS["opt-175b"]  # the same shape


def model(name: str) -> Model:
    """Look a model up; case does not matter."""
    if name.lower() not in MODELS:
        raise OutOfRange("--model", repr(name), "a name", "one of " + ", ".join(sorted(MODELS)))
    return MODELS[name.lower()]


def relaid(entry: Model, text: str) -> Layout:
    """The model's KV in another layout: mha, mqa, gqa:N, mla:N or ragged:..."""
    kind, _, rest = text.lower().partition(":")
    if kind == "ragged":
        return parse_ragged(rest)
    heads = {"mha": str(entry.heads), "mqa": "1", "gqa": rest, "mla": "1"}.get(kind, "")
    named = rest if kind in {"gqa", "mla"} else ""
    if not heads.isdecimal() or (kind in {"gqa", "mla"} and not named.isdecimal()) or rest != named:
        raise OutOfRange(
            "--layout",
            repr(text),
            "a layout",
            "one of mha, mqa, gqa:KV-HEADS, mla:NUMBERS-A-TOKEN, ragged:K/V,K/V,... (one pair a layer)",
        )
    if kind == "mla":
        return uniform("MLA", entry.layers, int(rest), 0)
    require("--layout", int(heads), "a number of KV heads", 1, entry.heads)
    key, value = entry.plain_widths or (entry.head_dim, entry.head_dim)
    return uniform(kind.upper(), entry.layers, int(heads) * key, int(heads) * value)


def footprint(
    entry: Model, tokens: int, batch: int = 1, dtype: str = "fp16", layout: Layout | None = None
) -> Footprint:
    """The KV of `batch` sequences, and how it compares with the model's weights."""
    layout = layout or entry.layout
    require("--batch", batch, "a number of sequences", 1, _BATCH_MAX)
    bits = dtype_bits(dtype)
    kv_bytes = batch * layout.sequence_bytes(tokens, bits)
    ratio = kv_bytes / (entry.parameters * WEIGHT_BYTES) if entry.parameters else None
    return Footprint(entry.name, layout.kind, layout.token_bytes(bits), batch, tokens, kv_bytes, ratio)
