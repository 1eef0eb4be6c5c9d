"""A model's shape out of the `config.json` that Hugging Face keeps beside its weights.

What always holds: a config that does not say enough is refused with the name of what is missing; nothing is
guessed from a model's name. Understood are the usual names of the counts, falcon's and bigcode's flags
for one KV head, MLA's latent, widths that differ by layer, layers that share KV or have no attention,
and sliding windows.

What it doesn't do: count parameters. A config names none, so KV/model is left open.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sim.layout import DTYPE_BITS, Layer, Layout
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["layout_of", "read_config"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_PER_LAYER = ("num_key_value_heads_per_layer", *_KV_HEADS)
_NESTED = ("text_config", "llm_config", "language_config")
_WITHOUT_KV = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "rwkv", "moe_only", "mlp"}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FILE_BYTES_MAX = 10 << 20

_Config = dict[str, Any]


def _first(config: _Config, names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _count(config: _Config, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        accepted = f"a whole number from 1 under one of {', '.join(names)}"
        raise OutOfRange("config.json", "without it" if value is None else repr(value), "a count", accepted)
    return value


def _kv_heads(config: _Config, layers: int, heads: int) -> list[int]:
    """KV heads of each layer."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list):  # blocks found by architecture search, each with its own group size
        found = []
        for block in blocks:
            attention = block.get("attention", {}) if isinstance(block, dict) else {}
            group = attention.get("n_heads_in_group")
            found.append(heads // group if group and not attention.get("no_op") else 0)
        return found
    value = _first(config, _PER_LAYER)
    if isinstance(value, list):
        return [int(item) for item in value]
    if value is None or (config.get("model_type") == "falcon" and not config.get("new_decoder_architecture")):
        one = bool(config.get("multi_query"))
        return [1 if one else heads] * layers
    return [int(value)] * layers


def _windows(config: _Config, layers: int) -> list[int | None]:
    """How far each layer looks back; None is without a bound."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return [None] * layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return [window if kind == "sliding_attention" else None for kind in kinds]
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # every n-th layer sees all
        return [None if (i + 1) % pattern == 0 else window for i in range(layers)]
    return [window] * layers


def _keeps(config: _Config, layers: int) -> list[bool]:
    """Whether each layer has KV of its own."""
    kinds = config.get("layer_types")
    keeps = [True] * layers
    if isinstance(kinds, list):
        keeps = [kind not in _WITHOUT_KV for kind in kinds]
    shared = config.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:
        keeps = [kept and i < layers - shared for i, kept in enumerate(keeps)]
    if config.get("use_cla") and isinstance(config.get("cla_share_factor"), int):
        keeps = [kept and i % config["cla_share_factor"] == 0 for i, kept in enumerate(keeps)]
    return keeps


def _kind(config: _Config, kv_heads: list[int], heads: int) -> str:
    if config.get("kv_lora_rank") is not None:
        return "MLA"
    if len(set(kv_heads)) > 1:
        return "ragged"
    return "MHA" if kv_heads[0] == heads else "MQA" if kv_heads[0] == 1 else "GQA"


def layout_of(config: _Config) -> Layout:
    """How a model with this config keeps its KV."""
    for name in _NESTED:
        if isinstance(config.get(name), dict):
            config = {**config[name]}
    if isinstance(config.get("attn_config"), dict):
        config = {**config["attn_config"], **config}
    layers = _count(config, _LAYERS)
    queries = _first(config, _HEADS)
    heads = max(queries) if isinstance(queries, list) and queries else _count(config, _HEADS)
    kv_heads = _kv_heads(config, layers, heads)
    keeps, windows = _keeps(config, layers), _windows(config, layers)
    for name, what in (("KV heads", kv_heads), ("layer_types", keeps)):
        if len(what) != layers:
            raise OutOfRange(
                f"config.json's {name}", f"a list of {len(what)}", "a list", f"of {layers} layers"
            )
    if config.get("kv_lora_rank") is not None:
        latent = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
        widths = [(latent, 0)] * layers
    else:
        head_dim = _first(config, _HEAD_DIM)
        if head_dim is None:
            head_dim = _count(config, _HIDDEN) // heads
        value_dim = config.get("v_head_dim") or head_dim
        widths = [(n * int(head_dim), n * int(value_dim)) for n in kv_heads]
    return Layout(
        _kind(config, kv_heads, heads),
        tuple(
            Layer(*(width if kept else (0, 0)), window)
            for width, kept, window in zip(widths, keeps, windows, strict=True)
        ),
    )


def read_config(path: Path) -> tuple[str, Layout, str]:
    """The model's name, its layout, and the type of its numbers."""
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise OutOfRange("--config", f"{path}, which can't be read", "a config.json", str(error)) from error
    if not isinstance(config, dict):
        raise OutOfRange("--config", str(path), "a config.json", "an object with the model's counts")
    named = config.get("_name_or_path") or path.resolve().parent.name
    text: _Config = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    dtype = str(_first({**config, **text}, ("dtype", "torch_dtype")) or "bfloat16")
    dtype = _DTYPES.get(dtype, dtype)
    return str(named), layout_of(config), dtype if dtype in DTYPE_BITS else "fp16"
