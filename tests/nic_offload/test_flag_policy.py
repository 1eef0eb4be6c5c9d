"""Flag policies against what a set of computed (layer, token) pairs says, over sequences that hypothesis makes up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nic_offload.errors import KvError
from nic_offload.flag_policy import FlagPolicy, Piece, Producer, Shape, Store

SHAPES = st.builds(Shape, st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
POLICIES = st.builds(FlagPolicy, st.integers(1, 12), st.booleans())


class Watch:
    """Every piece's put, and every pair of layer and token that is computed; fails at the first put fired early."""

    def __init__(self, policy: FlagPolicy, shape: Shape, begins_with: int) -> None:
        self.policy, self.shape = policy, shape
        armed = policy.pieces(shape, begins_with // shape.block_tokens)
        self.waiting = list(armed)
        self.fired: list[Piece] = []
        self.words = [0] * policy.words(shape)
        self.there = {(layer, token) for layer in range(shape.layers) for token in range(begins_with)}
        self.ended_at: int | None = None

    def complete(self, piece: Piece) -> bool:
        layers = range(piece.first_layer, piece.first_layer + piece.layers)
        tokens = range(piece.first_token, piece.first_token + piece.tokens)
        if self.ended_at is not None:
            tokens = range(piece.first_token, min(tokens.stop, self.ended_at))
        return bool(tokens) and all((layer, token) in self.there for layer in layers for token in tokens)

    def store(self, store: Store) -> None:
        assert store.step == store.value - self.words[store.word] > 0
        self.words[store.word] = store.value
        reached = [
            piece for piece in self.waiting if piece.word == store.word and piece.threshold <= store.value
        ]
        assert reached, f"{store} fires nothing"
        assert all(self.complete(piece) for piece in reached), f"{store} fires too early"
        self.waiting = [piece for piece in self.waiting if piece not in reached]
        self.fired += reached

    def computed(self, layer: int, before: int, after: int, store: Store | None) -> None:
        self.there |= {(layer, token) for token in range(before, after)}
        if store is not None:
            self.store(store)
        word = layer if self.policy.per_layer else 0
        speaks = self.policy.per_layer or layer == self.shape.layers - 1
        every = self.policy.every_tokens
        if speaks and any(token % every == 0 for token in range(before + 1, after + 1)):
            late = [piece for piece in self.waiting if piece.word == word and self.complete(piece)]
            assert not late, "a due store was left out"


@settings(max_examples=400, deadline=None)
@given(SHAPES, POLICIES, st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30), st.data())
def test_every_put_fires_after_its_bytes_and_by_the_end(
    shape: Shape, policy: FlagPolicy, steps: list[int], begins_with: int, data: st.DataObject
) -> None:
    begins_with = min(begins_with, shape.tokens)
    producer = Producer(policy, shape, begins_with)
    watch = Watch(policy, shape, begins_with)
    total = begins_with
    for step in steps:
        after = min(shape.tokens, total + step)
        if data.draw(st.booleans()):
            by_word = {store.word: store for store in producer.step(after - total)}
            for layer in range(shape.layers):
                speaks = policy.per_layer or layer == shape.layers - 1
                word = layer if policy.per_layer else 0
                watch.computed(layer, total, after, by_word.pop(word, None) if speaks else None)
            assert not by_word
        else:
            for layer in range(shape.layers):
                watch.computed(layer, total, after, producer.computed(layer, after))
        total = after
    watch.ended_at = total
    for store in producer.finish():
        watch.store(store)
    begun = -(-total // shape.block_tokens)
    assert producer.blocks_begun == begun
    assert {piece.block for piece in watch.fired} == set(range(begins_with // shape.block_tokens, begun))
    assert all(piece.block >= begun for piece in watch.waiting)
    assert producer.finish() == []


@given(SHAPES, POLICIES)
def test_the_pieces_are_all_kv_once(shape: Shape, policy: FlagPolicy) -> None:
    pieces = list(policy.pieces(shape))
    covered = [
        (layer, token)
        for piece in pieces
        for layer in range(piece.first_layer, piece.first_layer + piece.layers)
        for token in range(piece.first_token, piece.first_token + piece.tokens)
    ]
    assert len(set(covered)) == len(covered) == shape.layers * shape.tokens
    assert {piece.word for piece in pieces} == set(range(policy.words(shape)))
    assert all(piece.first_token == piece.block * shape.block_tokens for piece in pieces)


def test_one_word_tells_of_whole_blocks_every_so_often() -> None:
    producer = Producer(FlagPolicy(every_tokens=10), Shape(layers=2, block_tokens=16, blocks=4))
    stores = {token: producer.step(1) for token in range(1, 41)}
    assert {token: made for token, made in stores.items() if made} == {
        20: [Store(0, 20, 20)],
        40: [Store(0, 40, 20)],
    }
    assert producer.finish() == [Store(0, 48, 8)]


def test_a_prefill_fires_the_first_layers_while_the_last_are_computed() -> None:
    shape = Shape(layers=3, block_tokens=16, blocks=4)
    producer = Producer(FlagPolicy(per_layer=True), shape)
    assert producer.computed(0, 40) == Store(0, 40, 40)
    assert producer.computed(1, 40) == Store(1, 40, 40)
    assert producer.computed(2, 40) == Store(2, 40, 40)
    assert [producer.step(1) for _ in range(7)] == [[]] * 7
    assert producer.step(1) == [Store(word, 48, 8) for word in range(3)]
    assert producer.finish() == []


def test_what_could_not_have_been_computed_is_refused() -> None:
    producer = Producer(FlagPolicy(), Shape(layers=2, block_tokens=4, blocks=2), 1)
    for layer, tokens, word in [
        (1, 2, "not 2"),
        (0, 9, "not 9"),
        (0, 0, "not 0"),
        (2, 1, "no layer 2"),
        (-1, 1, "-1"),
    ]:
        with pytest.raises(KvError, match=word):
            producer.computed(layer, tokens)
    producer.computed(0, 5)
    with pytest.raises(KvError, match="within a step"):
        producer.finish()
    assert producer.computed(1, 5) == Store(0, 5, 5)
    assert producer.finish() == [Store(0, 8, 3)]
    with pytest.raises(KvError, match="has ended"):
        producer.computed(0, 6)


def test_empty_shapes_and_periods_are_refused() -> None:
    for numbers in [(0, 1, 1), (1, 0, 1), (1, 1, -1)]:
        with pytest.raises(KvError, match="at least one of its"):
            Shape(*numbers)
    with pytest.raises(KvError, match="not 0"):
        FlagPolicy(every_tokens=0)
    with pytest.raises(KvError, match="can't begin with 9"):
        Producer(FlagPolicy(), Shape(1, 4, 2), 9)
