"""A cache cut into blocks, turn by turn, and put together again is unchanged: ragged batches, windows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from kvstore.engines.transformers.copies import Gathered, scatter  # noqa: E402
from kvstore.engines.transformers.shapes import LayerShape, Shapes  # noqa: E402
from kvstore.engines.transformers.token_blocks import pieces, usable  # noqa: E402

_RNG_ROUNDS = 60


def _shapes(rng: object, dtype: object) -> Shapes:
    layers = [
        LayerShape(
            int(torch.randint(1, 4, (), generator=rng)),
            int(torch.randint(0, 5, (), generator=rng)),
            int(torch.randint(1, 5, (), generator=rng)),
            (None, 2, 7, 40)[int(torch.randint(0, 4, (), generator=rng))],
        )
        for _ in range(4)
    ]
    text = SimpleNamespace(model_type="made up")
    config = SimpleNamespace(get_text_config=lambda **_: text)
    return Shapes.of(config, dtype, weights="w", block_tokens=8, layers=layers)


@pytest.mark.parametrize("seed", range(_RNG_ROUNDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_data_is_joined_exactly(seed: int, dtype: object) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = _shapes(rng, dtype)
    turns = torch.randint(1, 40, (4,), generator=rng).cumsum(0).tolist()
    tokens = torch.randint(0, 1000, (turns[-1],), generator=rng).tolist()
    truth = [
        tuple(
            torch.randn(1, layer.heads, turns[-1], numbers, generator=rng).to(dtype)
            for numbers in (layer.k_numbers, layer.v_numbers)
        )
        for layer in shapes.layers
    ]
    stored = {}
    # A turn is saved when it ends, out of what the layers still have then.
    for number, end in enumerate(turns):
        before = turns[number - 1] if number else 0
        new = [piece for piece in pieces(shapes, tokens, turns[: number + 1]) if piece.begin >= before]
        cache = [
            tuple(tensor[:, :, max(0, end - (layer.window or 10**9) + 1) : end] for tensor in pair)
            for layer, pair in zip(shapes.layers, truth, strict=True)
        ]
        memory = torch.zeros(sum(piece.length for piece in new), dtype=torch.uint8)
        scatter(shapes, cache, end, memory, new)
        at = 0
        for piece in new:
            stored[piece.key] = memory[at : at + piece.length].clone()
            at += piece.length
    everything = list(pieces(shapes, tokens, turns))
    assert [piece.key for piece in everything] == list(stored)
    assert usable(shapes, everything) == len(everything)
    for count in range(1, len(everything) + 1):
        whole = everything[:count]
        good = usable(shapes, whole)
        if any(piece.end in turns for piece in whole):
            assert good, "where a turn ended, nothing is lacking"
        if good < count:
            continue
        gathered = Gathered(shapes, torch.device("cpu"))
        for some in (whole[: count // 2], whole[count // 2 :]):
            if some:
                gathered.add(torch.cat([stored[piece.key] for piece in some]), some)
        end = whole[-1].end
        for layer, expected, got in zip(shapes.layers, truth, gathered.layers(), strict=True):
            begin = max(0, end - (layer.window or 10**9) + 1)
            assert all(torch.equal(a[:, :, begin:end], b) for a, b in zip(expected, got, strict=True))


def test_different_tokens_give_different_keys_from_there_on() -> None:
    shapes = _shapes(torch.Generator().manual_seed(3), torch.float32)
    tokens = list(range(100))
    other = [*tokens[:20], 7, *tokens[21:]]
    one, two = (list(pieces(shapes, some, [40, 100])) for some in (tokens, other))
    assert [piece.key for piece in one[:2]] == [piece.key for piece in two[:2]]
    assert not {piece.key for piece in one[2:]} & {piece.key for piece in two[2:]}
