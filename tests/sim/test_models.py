"""The KV footprint against Fig. 1 of the paper (64 x 512 tokens, 16 bit), and other layouts."""

from __future__ import annotations

import pytest

from sim.kv_layout import Layer, Layout, dtype_bits, parse_ragged
from sim.models import MODELS, footprint, model, relaid
from sim.units import OutOfRange

# name, B/token, KV GB, KV/model; as printed
FIGURE_1 = """
gpt2-xl 307200 10.1 3.23
opt-6.7b 524288 17.2 1.29
opt-13b 819200 26.8 1.04
opt-30b 1376256 45.1 .75
gpt-3 4718592 154.6 .44
opt-175b 4718592 154.6 .44
llama-2-7b 524288 17.2 1.27
llama-2-13b 819200 26.8 1.03
llama-2-70b 327680 10.7 .08
llama-3-70b 327680 10.7 .08
llama-3-8b 131072 4.3 .27
mistral-7b 131072 4.3 .30
llama-3.1-405b 516096 16.9 .02
falcon-7b 8192 .27 .02
falcon-40b 122880 4.0 .05
falcon-180b 163840 5.4 .015
mixtral-8x7b 131072 4.3 .05
mixtral-8x22b 229376 7.5 .03
qwen2.5-7b 57344 1.9 .12
qwen2.5-72b 327680 10.7 .07
deepseek-v3 70272 2.3 .002
"""
ROWS = [line.split() for line in FIGURE_1.split("\n") if line]


@pytest.mark.parametrize(("name", "token_bytes", "kv_gb", "kv_per_model"), ROWS, ids=[row[0] for row in ROWS])
def test_figure_1_follows_from_the_architectures(
    name: str, token_bytes: str, kv_gb: str, kv_per_model: str
) -> None:
    row = footprint(model(name), 512, 64)
    assert row.kv_per_model is not None
    assert row.token_bytes == int(token_bytes)
    for value, printed in ((row.kv_bytes / 1e9, kv_gb), (row.kv_per_model, kv_per_model)):
        decimals = len(printed.split(".")[1])
        assert abs(value - float(printed)) <= 0.5 * 10**-decimals + 1e-9


def test_every_model_is_in_the_figure() -> None:
    assert set(MODELS) == {row[0] for row in ROWS}


def test_layouts_have_their_usual_names() -> None:
    kinds = {name: MODELS[name].layout.kind for name in ("gpt-3", "llama-3-8b", "falcon-7b", "deepseek-v3")}
    assert kinds == {"gpt-3": "MHA", "llama-3-8b": "GQA", "falcon-7b": "MQA", "deepseek-v3": "MLA"}


@pytest.mark.parametrize(
    ("name", "layout", "token_bytes"),
    [
        ("llama-3-8b", "mha", 4 * 131_072),
        ("llama-3-8b", "mqa", 131_072 // 8),
        ("gpt-3", "gqa:8", 2 * 96 * 8 * 128 * 2),
        ("gpt-3", "mla:576", 96 * 576 * 2),
        ("deepseek-v3", "mha", 61 * 128 * (192 + 128) * 2),
        ("gpt-3", "ragged:2x10/20,0/0,1/0", (30 + 30 + 1) * 2),
    ],
)
def test_a_model_can_have_another_layout(name: str, layout: str, token_bytes: int) -> None:
    entry = model(name)
    assert footprint(entry, 1, layout=relaid(entry, layout)).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("dtype", "bits"), [("fp32", 32), ("FP16", 16), ("bf16", 16), ("fp8", 8), ("int8", 8), ("int4", 4)]
)
def test_the_number_format_scales_the_bytes(dtype: str, bits: int) -> None:
    assert dtype_bits(dtype) == bits
    assert footprint(model("llama-3-8b"), 10, 3, dtype).kv_bytes == 131_072 * 30 * bits // 16


def test_batch_and_tokens_multiply() -> None:
    assert footprint(model("gpt-3"), 7, 5).kv_bytes == 35 * 4_718_592


def test_a_layer_with_a_window_keeps_only_its_tokens_and_half_bytes_are_rounded_up() -> None:
    layout = Layout("ragged", (Layer(3, 0), Layer(1, 1, window_tokens=4)))
    assert layout.sequence_bytes(10, 8) == 30 + 8
    assert layout.sequence_bytes(2, 8) == 6 + 4
    assert Layout("ragged", (Layer(3, 0),)).token_bytes(4) == 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: model("gpt-9"), "--model is 'gpt-9'; it takes a name, one of deepseek-v3, "),
        (
            lambda: footprint(model("gpt-3"), 0),
            "--tokens is 0; it takes tokens a sequence, from 1 to 1,000,000,000.",
        ),
        (
            lambda: footprint(model("gpt-3"), 1, 10**400),
            "--batch is a number of 401 digits; it takes a number of sequences, from 1 to 1,000,000.",
        ),
        (
            lambda: footprint(model("gpt-3"), 1, 0),
            "--batch is 0; it takes a number of sequences, from 1 to 1,000,000.",
        ),
        (
            lambda: footprint(model("gpt-3"), 1, 1, "fp3"),
            "--dtype is 'fp3'; it takes a type of number, one of",
        ),
        (lambda: relaid(model("gpt-3"), "gqa"), "--layout is 'gqa'; it takes a layout, one of mha, mqa,"),
        (lambda: relaid(model("gpt-3"), "mha:2"), "--layout is 'mha:2'; it takes a layout"),
        (
            lambda: relaid(model("gpt-3"), "gqa:97"),
            "--layout is 97; it takes a number of KV heads, from 1 to 96.",
        ),
        (lambda: parse_ragged("1/2,x"), "--layout ragged is 'x'; it takes K/V widths of a layer in numbers"),
    ],
)
def test_an_error_names_parameter_unit_and_range(act: object, message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        act()  # type: ignore[operator]
    assert message in str(caught.value)
