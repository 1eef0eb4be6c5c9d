"""Configs as models of each kind write them, cut down to what decides the KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sim.hf_config import layout_of, read_config
from sim.models import model
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

GPT2: dict[str, Any] = {"n_layer": 48, "n_head": 25, "n_embd": 1600}
OPT: dict[str, Any] = {"num_hidden_layers": 40, "num_attention_heads": 40, "hidden_size": 5120}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
FALCON_7B: dict[str, Any] = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
}
FALCON_40B: dict[str, Any] = {
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
}
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2-xl", GPT2),
        ("opt-13b", OPT),
        ("llama-3-70b", LLAMA),
        ("falcon-7b", FALCON_7B),
        ("falcon-40b", FALCON_40B),
        ("deepseek-v3", DEEPSEEK),
    ],
)
def test_configs_agree_with_the_models_table(name: str, config: dict[str, Any]) -> None:
    assert layout_of(config) == model(name).layout
    assert layout_of({"model_type": "of images and text", "text_config": config}) == model(name).layout


SMALL: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("more", "widths"),
    [
        ({}, [(64, 64)] * 4),
        ({"head_dim": 16}, [(128, 128)] * 4),
        ({"head_dim": 16, "v_head_dim": 4}, [(128, 32)] * 4),
        ({"multi_query": True}, [(8, 8)] * 4),
        ({"num_kv_heads": [1, 2, 4, 8]}, [(8, 8), (16, 16), (32, 32), (64, 64)]),
        ({"num_key_value_heads_per_layer": [0, 1, 0, 2]}, [(0, 0), (8, 8), (0, 0), (16, 16)]),
        (
            {
                "block_configs": [
                    {"attention": {"n_heads_in_group": 8}},
                    {"attention": {"no_op": True, "n_heads_in_group": None}},
                    {"attention": {"n_heads_in_group": 2}},
                    {"attention": {"n_heads_in_group": 1}},
                ]
            },
            [(8, 8), (0, 0), (32, 32), (64, 64)],
        ),
        (
            {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]},
            [(0, 0)] * 3 + [(64, 64)],
        ),
        ({"num_kv_shared_layers": 3}, [(64, 64)] + [(0, 0)] * 3),
        ({"use_cla": True, "cla_share_factor": 2}, [(64, 64), (0, 0)] * 2),
    ],
)
def test_widths_may_differ_by_layer(more: dict[str, Any], widths: list[tuple[int, int]]) -> None:
    assert [layer[:2] for layer in layout_of(SMALL | more).layers] == widths


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 100}, [100] * 4),
        ({"sliding_window": 100, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 9, "sliding_window_pattern": 2}, [9, None, 9, None]),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [9, None, 9, None],
        ),
    ],
)
def test_windows_bound_the_kept_kv(more: dict[str, Any], windows: list[int | None]) -> None:
    layout = layout_of(SMALL | more)
    assert [layer.window_tokens for layer in layout.layers] == windows
    kept = sum(1000 if window is None else window for window in windows)
    assert layout.sequence_bytes(1000) == kept * 128 * 2


def test_a_config_is_read_with_its_name_and_type(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    assert read_config(path) == ("my-model", model("llama-3-70b").layout, "fp32")
    path.write_text(json.dumps({"_name_or_path": "x/y", "dtype": "bfloat16", "text_config": LLAMA}))
    assert read_config(path)[::2] == ("x/y", "bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{}",
            "config.json is without it; it takes a count, a whole number from 1 under one of num_hidden_l",
        ),
        ("[1]", "it takes a config.json, an object with the model's counts."),
        ("{", "it takes a config.json, and this is not JSON ("),
        ('{"n_layer": 0}', "config.json is 0; it takes a count"),
        ('{"n_layer": true}', "config.json is True; it takes a count"),
        (
            '{"n_layer": 2, "n_head": 2, "n_embd": 4, "layer_types": ["mamba"]}',
            "a list of 1; it takes a list, of 2",
        ),
    ],
)
def test_incomplete_input_is_refused_with_the_missing_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(OutOfRange) as caught:
        read_config(path)
    assert message in str(caught.value)


_BASE = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "token_bytes", "long_bytes"),
    [
        # Jamba: one layer of eight has attention.
        (
            {
                **_BASE,
                "num_hidden_layers": 32,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
            },
            4 * 2 * 8 * 128 * 2,
            None,
        ),
        # Qwen3-Next: every fourth; the others are linear attention.
        (
            {
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "hidden_size": 2048,
                "full_attention_interval": 4,
                "linear_num_value_heads": 32,
            },
            12 * 2 * 2 * 256 * 2,
            None,
        ),
        # Gemma-2: every other layer looks back over a window.
        (
            {
                "model_type": "gemma2",
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "head_dim": 256,
                "num_key_value_heads": 4,
                "hidden_size": 2304,
                "sliding_window": 4096,
            },
            26 * 2 * 4 * 256 * 2,
            13 * 2 * 4 * 256 * 2 * (32768 + 4096),
        ),
        ({**_BASE, "num_hidden_layers": 4, "hybrid_override_pattern": "M*M-"}, 2 * 8 * 128 * 2, None),
        ({**_BASE, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}, 2 * 2 * 8 * 128 * 2, None),
        (
            {**_BASE, "num_hidden_layers": 4, "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0]},
            4 * 2 * 8 * 128 * 2,
            2 * 8 * 128 * 2 * (3 * 8192 + 32768),
        ),
    ],
)
def test_layers_of_several_kinds(config: dict[str, Any], token_bytes: int, long_bytes: int | None) -> None:
    layout = layout_of(config)
    assert layout.token_bytes() == token_bytes
    assert layout.sequence_bytes(32768) == (long_bytes or 32768 * token_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention", "sparse_thing"]},
            r"layer_types is a list with \['sparse_thing'\]",
        ),
        ({"hybrid_override_pattern": "M?"}, "hybrid_override_pattern is 'M\\?'; it takes letters"),
        ({"mamba_d_state": 16}, "with mamba_d_state and without layer_types"),
        ({"hybrid_layer_ids": [0]}, "with hybrid_layer_ids and without layer_types"),
        ({"attention_chunk_size": 8192}, "with attention_chunk_size alone"),
        ({"is_encoder_decoder": True}, "of an encoder with a decoder"),
        ({"layer_types": ["mamba", "mamba"]}, "of a model without KV"),
        ({"num_key_value_heads": "x"}, "KV heads is 'x'; it takes a whole number"),
        ({"kv_lora_rank": "x"}, "kv_lora_rank is 'x'"),
    ],
)
def test_unknown_input_is_refused_and_not_guessed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OutOfRange, match=message):
        layout_of({**_BASE, "num_hidden_layers": 2, **change})


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({"torch_dtype": "float8_e4m3fn"}, "fp8"),
        ({"torch_dtype": "bfloat16", "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "fp8"),
        ({"torch_dtype": "bfloat16", "quantization_config": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, "bf16"),
    ],
)
def test_kv_in_8_bits_is_read(change: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_BASE, "num_hidden_layers": 2, **change}))
    assert read_config(path)[2] == dtype


def test_an_unknown_number_format_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_BASE, "num_hidden_layers": 2, "torch_dtype": "posit16"}))
    with pytest.raises(OutOfRange, match="dtype is 'posit16'; it takes a type of number"):
        read_config(path)
    assert read_config(path, "fp8")[2] == "fp8"
