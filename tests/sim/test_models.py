"""The KV footprint against Fig. 1 of the paper (64 x 512 tokens, 16 bit)."""

from __future__ import annotations

import pytest

from sim.models import MODELS, footprint, model
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
    row = footprint(model(name), 64 * 512)
    assert row.token_bytes == int(token_bytes)
    for value, printed in ((row.kv_bytes / 1e9, kv_gb), (row.kv_per_model, kv_per_model)):
        decimals = len(printed.split(".")[1])
        assert abs(value - float(printed)) <= 0.5 * 10**-decimals + 1e-9


def test_every_model_is_in_the_figure() -> None:
    assert set(MODELS) == {row[0] for row in ROWS}


def test_the_claim_that_kv_outgrows_the_model_holds_for_mha_up_to_13b_only() -> None:
    larger = {name for name, entry in MODELS.items() if footprint(entry, 64 * 512).kv_per_model > 1}
    assert larger == {"gpt2-xl", "opt-6.7b", "opt-13b", "llama-2-7b", "llama-2-13b"}


def test_one_byte_elements_halve_it() -> None:
    assert model("Llama-3-8B").token_bytes(1) * 2 == model("llama-3-8b").token_bytes()


def test_unknown_models_and_silly_counts_are_refused_with_what_is_accepted() -> None:
    with pytest.raises(OutOfRange, match="--model is 'gpt-9'; it takes a name, one of deepseek-v3, "):
        model("gpt-9")
    with pytest.raises(OutOfRange, match=r"--tokens is 0; it takes tokens, from 1 to 1e\+12\."):
        footprint(model("gpt-3"), 0)
    with pytest.raises(OutOfRange, match=r"--element-bytes is 0; it takes bytes a number, from 1 to 4\."):
        model("gpt-3").token_bytes(0)
