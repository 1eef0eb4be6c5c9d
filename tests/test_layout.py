"""Layouts: their names, the size of their blocks, and the bytes of each shard.

The bytes are checked against a block that is written number by number from the definition of the order, which shares no
code with the module.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import LayoutError
from kvstore.layout import ELEMENT_BYTES, Layer, Layout, Order
from nic_offload.memory import Runs

GQA = (Layer(8, 16, 16), Layer(8, 16, 16))
LLAMA = Layout("llama", "w1", "bfloat16", 16, GQA)
TIMEOUT_S = 30


def written(layout: Layout) -> bytes:
    """A block in the layout's order; each number encodes its layer, K or V, head, token and place."""
    numbers = []
    for at, layer in enumerate(layout.layers):
        if layer.alias_of is not None:
            continue
        heads = list(range(layer.heads))
        if layer.split and layer.heads:
            if layer.heads >= layout.shards:
                each = layer.heads // layout.shards
                heads = heads[layout.shard * each : (layout.shard + 1) * each]
            else:  # several shards have the same head
                heads = [layout.shard // (layout.shards // layer.heads)]
        for part, width in enumerate((layer.k_numbers, layer.v_numbers)):
            tokens = range(layout.block_tokens)
            if layout.order is Order.HEADS_FIRST:
                pairs = [(head, token) for head in heads for token in tokens]
            else:
                pairs = [(head, token) for token in tokens for head in heads]
            numbers += [
                at << 28 | part << 27 | head << 20 | token << 12 | number
                for head, token in pairs
                for number in range(width)
            ]
    return struct.pack(f"<{len(numbers)}I", *numbers)


def resharded(layout: Layout, stored_shards: int) -> bytes:
    sources = [
        ctypes.create_string_buffer(written(layout.of_shard(i, stored_shards))) for i in range(stored_shards)
    ]
    target = ctypes.create_string_buffer(b"\xee" * layout.block_bytes, layout.block_bytes + 1)
    Runs(layout.reshard(stored_shards)).copy(
        [ctypes.addressof(one) for one in sources], ctypes.addressof(target)
    )
    return target.raw[:-1]


layers = st.lists(
    st.builds(
        Layer,
        heads=st.sampled_from([0, 1, 2, 4, 8]),
        k_numbers=st.integers(0, 5),
        v_numbers=st.integers(0, 5),
        split=st.booleans(),
        alias_of=st.none(),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@given(
    layers=layers,
    order=st.sampled_from([Order.HEADS_FIRST, Order.TOKENS_FIRST]),
    tokens=st.integers(1, 5),
    stored=st.sampled_from([1, 2, 4, 8]),
    wanted=st.sampled_from([1, 2, 4, 8]),
)
def test_every_shard_of_every_degree_is_made_of_the_shards_of_every_other(
    layers: tuple[Layer, ...], order: Order, tokens: int, stored: int, wanted: int
) -> None:
    layout = Layout("m", "w", "float32", tokens, layers, order)
    for shard in range(wanted):
        mine = layout.of_shard(shard, wanted)
        assert len(written(mine)) == mine.block_bytes
        assert resharded(mine, stored) == written(mine)


@given(layers=layers, tokens=st.integers(1, 3))
def test_aliases_take_no_bytes_and_have_those_of_their_layer(layers: tuple[Layer, ...], tokens: int) -> None:
    plain = Layout("m", "w", "float32", tokens, layers)
    aliased = replace(plain, layers=(*layers, Layer(8, 64, 64, alias_of=0)))
    assert aliased.block_bytes == plain.block_bytes == len(written(aliased))
    assert aliased.spans[-1] == plain.spans[0]
    assert aliased.spans[:-1] == plain.spans
    assert sum(size for _, size in plain.spans) == plain.block_bytes
    assert aliased.fingerprint != plain.fingerprint


def test_a_shard_inside_another_is_one_run_per_tensor_and_needs_no_other_shard() -> None:
    quarter = LLAMA.of_shard(3, 4)
    assert quarter.sources(2) == [1]
    assert len(quarter.reshard(2)) == 2 * len(GQA)
    assert LLAMA.reshard(1) == [(0, 0, 0, LLAMA.block_bytes)]
    assert LLAMA.sources(2) == [0, 1]


def test_unsplit_pieces_come_from_the_first_shard() -> None:
    latent = replace(LLAMA, layers=(Layer(1, 512, 64, split=False),) * 3, shards=4, shard=2)
    assert latent.sources(8) == [0]
    assert latent.block_bytes == 3 * 576 * 16 * ELEMENT_BYTES["bfloat16"]


CHANGES = {
    "model": "other",
    "weights": "w2",
    "dtype": "float16",
    "block_tokens": 32,
    "layers": (Layer(8, 16, 16), Layer(8, 16, 15)),
    "order": Order.TOKENS_FIRST,
    "adapter": "lora",
    "shard": 1,
    "shards": 4,
    "stage": 1,
    "stages": 3,
    "isa": "amx",
    "engine": "vllm",
}


def changed_in(layout: Layout, name: str) -> Layout:
    change: dict[str, Any] = {name: CHANGES[name]}
    if name == "engine":
        change["order"] = Order.OPAQUE
    return replace(layout, **change)


def test_layouts_that_differ_in_anything_have_different_fingerprints() -> None:
    assert set(CHANGES) == {field.name for field in fields(Layout)}
    base = replace(LLAMA, shards=2, stages=2)
    changed = [changed_in(base, name) for name in CHANGES]
    assert len({layout.fingerprint for layout in [base, *changed]}) == 1 + len(CHANGES)


def test_layouts_that_differ_in_anything_have_their_own_keys() -> None:
    """An engine with another number format once shared a key with the first, and its puts always failed."""
    base = replace(LLAMA, shards=2, stages=2)
    layouts = [base, *(changed_in(base, name) for name in CHANGES)]
    assert len({layout.key(b"hash") for layout in layouts}) == 1 + len(CHANGES)
    assert base.key(b"hash") != base.key(b"other tokens")


def test_the_names_are_the_same_in_every_process() -> None:
    code = "from tests.test_layout import LLAMA; print(LLAMA.fingerprint.hex(), LLAMA.key(b'hash').hex())"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True
    )
    assert ran.stdout.split() == [LLAMA.fingerprint.hex(), LLAMA.key(b"hash").hex()]
    # A change here makes every block that anybody has stored a miss.
    assert LLAMA.fingerprint.hex() == "82b2d21f7e815cff5a13dd7ca78ed5df"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "int3"}, "number format"),
        ({"block_tokens": 0}, "at least one token"),
        ({"layers": ()}, "layers, not 0"),
        ({"shard": 1}, "no shard 1 of 1"),
        ({"stage": -1}, "no stage -1"),
        ({"engine": "vllm"}, "opaque order, and no other"),
        ({"order": Order.OPAQUE}, "opaque order, and no other"),
        ({"layers": (Layer(-1, 2, 2),)}, "negative"),
        ({"layers": (Layer(6, 2, 2),), "shards": 4}, "can't be split over 4"),
        ({"layers": (Layer(2, 2, 2, alias_of=0),)}, "comes later"),
        ({"layers": (Layer(2, 2, 2), Layer(2, 2, 2, alias_of=0), Layer(2, 2, 2, alias_of=1))}, "has none"),
    ],
)
def test_an_invalid_layout_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        replace(LLAMA, **change)


def test_an_order_known_only_to_an_engine_is_not_split() -> None:
    with pytest.raises(LayoutError, match="Only vllm"):
        replace(LLAMA, order=Order.OPAQUE, engine="vllm").reshard(2)
