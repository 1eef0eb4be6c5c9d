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
def test_configs_give_what_the_models_table_says(name: str, config: dict[str, Any]) -> None:
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
def test_windows_bound_what_is_kept(more: dict[str, Any], windows: list[int | None]) -> None:
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
        ("{", "which can't be read; it takes a config.json, "),
        ('{"n_layer": 0}', "config.json is 0; it takes a count"),
        ('{"n_layer": true}', "config.json is True; it takes a count"),
        (
            '{"n_layer": 2, "n_head": 2, "n_embd": 4, "layer_types": ["mamba"]}',
            "a list of 1; it takes a list, of 2",
        ),
    ],
)
def test_what_says_too_little_is_refused_by_the_name_of_what_is_missing(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(OutOfRange) as caught:
        read_config(path)
    assert message in str(caught.value)
