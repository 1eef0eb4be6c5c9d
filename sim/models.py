"""KV bytes of the models of the paper's Fig. 1, from their architecture.

What always holds: nothing here is a stored result. Bytes a token are `2 * layers * KV heads * head dim *
element`, or `layers * latent * element` for multi-head latent attention (MLA), which keeps one compressed
vector for keys and values together. Weights are counted at 16 bits.

What it doesn't do: block padding, quantisation scales, tensor-parallel copies of KV heads, draft models.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.units import OutOfRange, require

__all__ = ["MODELS", "Footprint", "Model", "footprint", "model"]

_TOKENS_MAX = 10**12
_WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides the size of its KV cache."""

    name: str
    layers: int
    kv_heads: int  # 1 for MLA, whose latent all heads share
    head_dim: int  # for MLA: latent rank + rotary part
    parameters: float
    latent: bool = False

    def token_bytes(self, element_bytes: int = 2) -> int:
        """KV bytes that one token leaves behind."""
        require("--element-bytes", element_bytes, "bytes a number", 1, 4)
        return (1 if self.latent else 2) * self.layers * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """One row of Fig. 1."""

    model: str
    token_bytes: int
    tokens: int
    kv_bytes: int
    kv_per_model: float


_ALL = (
    Model("gpt2-xl", 48, 25, 64, 1.558e9),
    Model("opt-6.7b", 32, 32, 128, 6.66e9),
    Model("opt-13b", 40, 40, 128, 12.85e9),
    Model("opt-30b", 48, 56, 128, 29.97e9),
    Model("opt-175b", 96, 96, 128, 174.6e9),
    Model("llama-2-7b", 32, 32, 128, 6.738e9),
    Model("llama-2-13b", 40, 40, 128, 13.016e9),
    Model("llama-2-70b", 80, 8, 128, 68.98e9),
    Model("llama-3-8b", 32, 8, 128, 8.03e9),
    Model("llama-3-70b", 80, 8, 128, 70.55e9),
    Model("llama-3.1-405b", 126, 8, 128, 405.85e9),
    Model("mistral-7b", 32, 8, 128, 7.242e9),
    Model("mixtral-8x7b", 32, 8, 128, 46.7e9),
    Model("mixtral-8x22b", 56, 8, 128, 140.6e9),
    Model("falcon-7b", 32, 1, 64, 7.22e9),
    Model("falcon-40b", 60, 8, 64, 41.3e9),
    Model("falcon-180b", 80, 8, 64, 179.5e9),
    Model("qwen2.5-7b", 28, 4, 128, 7.616e9),
    Model("qwen2.5-72b", 80, 8, 128, 72.7e9),
    Model("deepseek-v3", 61, 1, 512 + 64, 671e9, latent=True),
)

MODELS: dict[str, Model] = {entry.name: entry for entry in _ALL}
MODELS["gpt-3"] = MODELS["opt-175b"]  # the same shape


def model(name: str) -> Model:
    """Look a model up; case does not matter."""
    if name.lower() not in MODELS:
        raise OutOfRange("--model", repr(name), "a name", "one of " + ", ".join(sorted(MODELS)))
    return MODELS[name.lower()]


def footprint(entry: Model, tokens: int, element_bytes: int = 2) -> Footprint:
    """KV of so many tokens, and how it compares with the model's own weights."""
    require("--tokens", tokens, "tokens", 1, _TOKENS_MAX)
    kv_bytes = entry.token_bytes(element_bytes) * tokens
    ratio = kv_bytes / (entry.parameters * _WEIGHT_BYTES)
    return Footprint(entry.name, entry.token_bytes(element_bytes), tokens, kv_bytes, ratio)
