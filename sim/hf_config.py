"""A model's shape, from the `config.json` that Hugging Face keeps beside its weights.

What always holds: a config in which something is missing, or with a setting about its layers that is not supported, is
refused with the name of the setting; nothing is guessed. Supported are the usual names of the counts, falcon's
and bigcode's flags for one KV head, MLA's latent, widths that differ by layer, layers that share KV or have no
attention (by `layer_types`, `layers_block_type`, `attn_layer_indices`, `attn_layer_period`, `full_attention_interval`
or `hybrid_override_pattern`), sliding windows and chunks, and KV in 8 bits.

What it doesn't do: count parameters. A config doesn't contain their number, so KV/model is left out. State other than
KV (of mamba or linear attention) is not counted: its size doesn't depend on the number of tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sim.kv_layout import DTYPE_BITS, Layer, Layout, dtype_bits
from sim.models import Model
from sim.parameter_files import read_text
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["layout_of", "read_config", "read_model"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_PER_LAYER = ("num_key_value_heads_per_layer", *_KV_HEADS)
_NESTED = ("text_config", "llm_config", "language_config")
# Kinds of layers in `layer_types` and `layers_block_type`: with KV of all tokens, of a window, of a chunk, with none.
_WHOLE = {"full_attention", "attention", "global", "hybrid"}
_SLIDING, _CHUNKED = {"sliding_attention", "local"}, {"chunked_attention"}
_WITHOUT_KV = {
    *("linear_attention", "mamba", "mamba2", "recurrent", "conv", "rwkv", "moe_only", "moe", "mlp"),
}
_PATTERN = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
# Marks of layers that keep a state instead of KV: their kinds must be given.
_STATE = (
    *("mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size", "ssm_cfg", "linear_num_value_heads"),
    *("hybrid_layer_ids", "lru_width", "rescale_every"),
)
_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}

_Config = dict[str, Any]


def _first(config: _Config, names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _count(config: _Config, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        accepted = f"a whole number from 1 under one of {', '.join(names)}"
        raise OutOfRange("config.json", "without it" if value is None else repr(value), "a count", accepted)
    return value


def _number(name: str, value: Any, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OutOfRange(f"config.json's {name}", repr(value), "a whole number", f"from {low} on")
    return value


def _kv_heads(config: _Config, layers: int, heads: int) -> list[int]:
    """KV heads of each layer."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list):  # blocks found by architecture search, each with its own group size
        found = []
        for block in blocks:
            attention = block.get("attention", {}) if isinstance(block, dict) else {}
            group = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
            without = group is None or attention.get("no_op")
            found.append(0 if without else heads // _number("n_heads_in_group", group, 1))
        return found
    value = _first(config, _PER_LAYER)
    if isinstance(value, list):
        return [_number("KV heads", item) for item in value]
    if value is None or (config.get("model_type") == "falcon" and not config.get("new_decoder_architecture")):
        one = bool(config.get("multi_query"))
        return [1 if one else heads] * layers
    return [_number("KV heads", value, 1)] * layers


def _kinds(config: _Config, layers: int) -> list[str]:
    """The kind of each layer, as `layer_types` names it."""
    listed = _first(config, ("layer_types", "layers_block_type"))
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = set(pattern) - set(_PATTERN)
        if unknown:
            accepted = f"of {', '.join(_PATTERN)}"
            raise OutOfRange("config.json's hybrid_override_pattern", repr(pattern), "letters", accepted)
        listed = [_PATTERN[letter] for letter in pattern]
    if listed is not None:
        known = _WHOLE | _SLIDING | _CHUNKED | _WITHOUT_KV
        if not isinstance(listed, list) or not all(kind in known for kind in listed):
            odd = [kind for kind in listed if kind not in known] if isinstance(listed, list) else listed
            accepted = "each of them " + ", ".join(sorted(known))
            raise OutOfRange("config.json's layer_types", f"a list with {odd!r}", "a list", accepted)
        return listed
    indices, period, interval = (
        config.get(name) for name in ("attn_layer_indices", "attn_layer_period", "full_attention_interval")
    )
    if isinstance(indices, list):
        return ["attention" if i in indices else "mamba" for i in range(layers)]
    if period is not None:
        offset = _number("attn_layer_offset", config.get("attn_layer_offset", 0))
        every = _number("attn_layer_period", period, 1)
        return ["attention" if i % every == offset else "mamba" for i in range(layers)]
    if interval is not None:
        every = _number("full_attention_interval", interval, 1)
        return ["attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    state = next((name for name in _STATE if config.get(name) is not None), None)
    if state is not None:
        accepted = "which say which layers keep KV"
        raise OutOfRange("config.json", f"with {state} and without layer_types", "layers' kinds", accepted)
    return _by_window(config, layers)


def _by_window(config: _Config, layers: int) -> list[str]:
    """The kinds of layers that all have attention."""
    chunk, ropes = config.get("attention_chunk_size"), config.get("no_rope_layers")
    if chunk is not None:
        if not isinstance(ropes, list) or not ropes:
            accepted = "which say which layers see a chunk only"
            raise OutOfRange(
                "config.json", "with attention_chunk_size alone", "layer_types or no_rope_layers", accepted
            )
        return ["chunked_attention" if rope else "attention" for rope in ropes]
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return ["attention"] * layers
    pattern = _first(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    if pattern is None and config.get("model_type") == "gemma2":
        pattern = 2
    if isinstance(pattern, int) and pattern > 0:  # every n-th layer sees all
        return ["attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if pattern is not None:
        accepted = "a whole number of layers"
        raise OutOfRange("config.json's sliding_window_pattern", repr(pattern), "a count", accepted)
    return ["sliding_attention"] * layers


def _windows(config: _Config, kinds: list[str]) -> list[int | None]:
    """How far each layer looks back; None is without a bound."""
    found: list[int | None] = []
    for kind in kinds:
        if kind in _SLIDING:
            found.append(_number("sliding_window", config.get("sliding_window"), 1))
        elif kind in _CHUNKED:
            found.append(_number("attention_chunk_size", config.get("attention_chunk_size"), 1))
        else:
            found.append(None)
    return found


def _keeps(config: _Config, kinds: list[str]) -> list[bool]:
    """Whether each layer has its own KV."""
    keeps = [kind not in _WITHOUT_KV for kind in kinds]
    shared = config.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:
        keeps = [kept and i < len(kinds) - shared for i, kept in enumerate(keeps)]
    if config.get("use_cla") and isinstance(config.get("cla_share_factor"), int):
        keeps = [kept and i % config["cla_share_factor"] == 0 for i, kept in enumerate(keeps)]
    return keeps


def _kind(config: _Config, kv_heads: list[int], heads: int) -> str:
    if config.get("kv_lora_rank") is not None:
        return "MLA"
    if len(set(kv_heads)) > 1:
        return "ragged"
    return "MHA" if kv_heads[0] == heads else "MQA" if kv_heads[0] == 1 else "GQA"


def _decoder(config: _Config) -> _Config:
    """The part that describes the decoder."""
    for name in _NESTED:
        if isinstance(config.get(name), dict):
            config = {**config[name]}
    if isinstance(config.get("attn_config"), dict):
        config = {**config["attn_config"], **config}
    return config


def layout_of(config: _Config) -> Layout:
    """How a model with this config keeps its KV."""
    config = _decoder(config)
    if config.get("is_encoder_decoder"):
        raise OutOfRange("config.json", "of an encoder with a decoder", "a config", "of a decoder alone")
    layers = _count(config, _LAYERS)
    queries = _first(config, _HEADS)
    if isinstance(queries, list) and queries:
        heads = max(_number("heads", item) for item in queries)
    else:
        heads = _count(config, _HEADS)
    kv_heads, kinds = _kv_heads(config, layers, heads), _kinds(config, layers)
    for name, what in (("KV heads", kv_heads), ("layer_types", kinds)):
        if len(what) != layers:
            raise OutOfRange(
                f"config.json's {name}", f"a list of {len(what)}", "a list", f"of {layers} layers"
            )
    keeps, windows = _keeps(config, kinds), _windows(config, kinds)
    if not any(keeps):
        raise OutOfRange("config.json", "of a model without KV", "a config", "with attention in some layer")
    if config.get("kv_lora_rank") is not None:
        rope = config.get("qk_rope_head_dim") or 0
        latent = _number("kv_lora_rank", config["kv_lora_rank"], 1) + _number("qk_rope_head_dim", rope)
        widths = [(latent, 0)] * layers
    else:
        head_dim = _first(config, _HEAD_DIM)
        head_dim = _count(config, _HIDDEN) // heads if head_dim is None else _number("head_dim", head_dim, 1)
        value_dim = _number("v_head_dim", config.get("v_head_dim") or head_dim, 1)
        widths = [(n * head_dim, n * value_dim) for n in kv_heads]
    return Layout(
        _kind(config, kv_heads, heads),
        tuple(
            Layer(*(width if kept else (0, 0)), window)
            for width, kept, window in zip(widths, keeps, windows, strict=True)
        ),
    )


def read_config(path: Path, dtype: str | None = None) -> tuple[str, Layout, str]:
    """The model's name, its layout, and the type of its KV's numbers: the file's, unless one is given."""
    config = _read(path)
    named = config.get("_name_or_path") or path.resolve().parent.name
    return str(named), layout_of(config), dtype or _dtype({**config, **_decoder(config)})


def read_model(path: Path, parameters: float | None, active: float | None) -> Model:
    """A model to be served. A config doesn't contain the number of parameters."""
    if parameters is None:
        accepted = "with --config, such as 8e9: the file names none"
        raise OutOfRange("--parameters", "not given", "a number of parameters", accepted)
    require("--parameters", parameters, "a number of parameters", 1e6, 1e14)
    if active is not None:
        require("--active-parameters", active, "a number of parameters", 1e6, parameters)
    name, layout, dtype = read_config(path)
    keeping = tuple(layer for layer in layout.layers if layer.key_width)
    if any(layer.window_tokens is not None for layer in keeping):
        accepted = "whose layers keep all tokens: a window's blocks are not stored as others are"
        raise OutOfRange("--config", f"{path}, with sliding windows", "a model", accepted)
    config = _decoder(_read(path))
    heads = _count(config, _HEADS)
    dim = _first(config, _HEAD_DIM) or _count(config, _HIDDEN) // heads
    widths = None
    if config.get("qk_nope_head_dim") is not None:
        key = _number("qk_nope_head_dim", config["qk_nope_head_dim"], 1)
        rope = _number("qk_rope_head_dim", config.get("qk_rope_head_dim", 0))
        widths = key + rope, _number("v_head_dim", config.get("v_head_dim", key), 1)
    return Model(
        name=name,
        layers=len(keeping),  # the others have no KV and attend to nothing
        heads=heads,
        kv_heads=1,
        head_dim=dim,
        parameters=parameters,
        active_parameters=active,
        plain_widths=widths,
        kept=Layout(layout.kind, keeping),
        kv_bits=dtype_bits(dtype),
    )


def _read(path: Path) -> _Config:
    try:
        config = json.loads(read_text("--config", path))
    except OutOfRange:
        raise
    except (ValueError, RecursionError) as error:
        raise OutOfRange("--config", str(path), "a config.json", f"and this is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise OutOfRange("--config", str(path), "a config.json", "an object with the model's counts")
    return config


def _dtype(config: _Config) -> str:
    """The type of the KV's numbers: that of the quantisation, otherwise that of the model."""
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        scheme, algorithm = quantised.get("kv_cache_scheme"), quantised.get("kv_cache_quant_algo")
        bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
        if bits == 8 or str(algorithm).upper() == "FP8":  # noqa: PLR2004 - bits of a byte
            return "fp8"
        if bits is not None or algorithm is not None:
            accepted = "of 8 bits; name another with --dtype"
            raise OutOfRange("config.json's KV quantisation", repr(scheme or algorithm), "a scheme", accepted)
    written = str(_first(config, ("dtype", "torch_dtype")) or "bfloat16")
    dtype = _DTYPES.get(written, written)
    if dtype not in DTYPE_BITS:
        accepted = f"one of {', '.join((*_DTYPES, *DTYPE_BITS))}"
        raise OutOfRange("config.json's dtype", repr(written), "a type of number", accepted)
    return dtype
