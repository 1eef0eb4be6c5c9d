"""Flag policies: which value of which flag word means that a piece of KV is complete.

KV comes into being layer by layer within a step, and a step adds one token or, in a prefill, many. A policy says
when the producer stores to a flag word and what, and so which word and threshold the put of each piece is armed
with. Two questions make a policy: how often (`every_tokens`), and whether each layer has a word of its own
(`per_layer`: a block's first layers leave while the last are still computed) or one word speaks for all.

    FlagPolicy(every_tokens=16)                    one word; stores when the count passes a multiple of 16
    FlagPolicy(per_layer=True)                     a word a layer; stores as soon as a layer has filled a block
    FlagPolicy(every_tokens=64, per_layer=True)    both

A word counts tokens of the sequence. `Producer` follows one sequence: it is told what was computed and says what
is to be stored.

What always holds: a threshold is reached only by a store that comes after all bytes of its piece were computed,
the tail of a last block apart, which never will be; values of a word only go up; after `finish` the pieces of
every block that was begun are reached, and no others; each store reaches at least one piece that no store had
reached, so none is superfluous.

What it doesn't do: store (`FlagWord`, `CudaFlags` do), arm puts, or use words again: a sequence has fresh ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nic_offload.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FlagPolicy", "Piece", "Producer", "Shape", "Store"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of one sequence at its longest."""

    layers: int
    block_tokens: int
    blocks: int

    def __post_init__(self) -> None:
        """Refuse what is empty."""
        for name in ("layers", "block_tokens", "blocks"):
            if getattr(self, name) < 1:
                raise KvError(f"A shape needs at least one of its {name}, not {getattr(self, name)}.")

    @property
    def tokens(self) -> int:
        """How long the sequence can get."""
        return self.block_tokens * self.blocks


class Piece(NamedTuple):
    """What one put carries, and what fires it: some layers of the tokens of one block."""

    block: int
    first_layer: int
    layers: int
    first_token: int
    tokens: int
    word: int
    threshold: int


class Store(NamedTuple):
    """A store that is due now: the value for a flag word, or the step for a doorbell, which adds."""

    word: int
    value: int
    step: int


@dataclass(frozen=True, slots=True)
class FlagPolicy:
    """When flags are stored; see the top of this file."""

    every_tokens: int = 1
    per_layer: bool = False

    def __post_init__(self) -> None:
        """Refuse a period that never comes."""
        if self.every_tokens < 1:
            raise KvError(f"A flag is stored every so many tokens, at least 1, not {self.every_tokens}.")

    def words(self, shape: Shape) -> int:
        """How many flag words a sequence needs."""
        return shape.layers if self.per_layer else 1

    def pieces(self, shape: Shape, first_block: int = 0) -> Iterator[Piece]:
        """The pieces of every block from one on, in the order in which they come into being."""
        layers = 1 if self.per_layer else shape.layers
        for block in range(first_block, shape.blocks):
            start = block * shape.block_tokens
            for word in range(self.words(shape)):
                end = start + shape.block_tokens
                yield Piece(block, word, layers, start, shape.block_tokens, word, end)


class Producer:
    """What is to be stored for one sequence while it is computed.

    `tokens` says how much KV is there before, of a resumed sequence; blocks that are full by then are not put
    again, and their pieces are not armed.
    """

    def __init__(self, policy: FlagPolicy, shape: Shape, tokens: int = 0) -> None:
        if not 0 <= tokens <= shape.tokens:
            raise KvError(f"The sequence has room for {shape.tokens} tokens and can't begin with {tokens}.")
        self._policy = policy
        self._shape = shape
        self._computed = [tokens] * shape.layers
        self._looked = [tokens] * policy.words(
            shape
        )  # where each word was when a store was last thought about
        self._reached = [self._full(tokens)] * policy.words(shape)  # whole blocks of which the word has told
        self._stored = [0] * policy.words(shape)
        self._finished = False

    def computed(self, layer: int, tokens: int) -> Store | None:
        """A layer holds KV of this many tokens now. Gives the store that is due, if one is.

        Layers come in their order: none is ever ahead of the one before it.
        """
        self._check(layer, tokens)
        self._computed[layer] = tokens
        if self._policy.per_layer:
            return self._look(layer, tokens)
        # No layer is ahead of the one before it, so the last one speaks for all.
        return self._look(0, tokens) if layer == self._shape.layers - 1 else None

    def step(self, tokens: int) -> list[Store]:
        """All layers, one after the other, have got this many more tokens."""
        total = self._computed[0] + tokens
        stores = (self.computed(layer, total) for layer in range(self._shape.layers))
        return [store for store in stores if store is not None]

    def finish(self) -> list[Store]:
        """The sequence ends here: what is left goes, a block that is not full with what it has."""
        if self._computed[-1] != self._computed[0]:
            raise KvError(
                f"The sequence can't end within a step: its first layer has {self._computed[0]} tokens"
                f" and its last {self._computed[-1]}."
            )
        self._finished = True
        begun = -(-self._computed[0] // self._shape.block_tokens)
        words = range(len(self._stored))
        return [
            self._store(word, begun * self._shape.block_tokens)
            for word in words
            if begun > self._reached[word]
        ]

    @property
    def blocks_begun(self) -> int:
        """How many blocks hold any KV; the puts of the others are to be cancelled once it has finished."""
        return -(-self._computed[0] // self._shape.block_tokens)

    def _look(self, word: int, tokens: int) -> Store | None:
        every = self._policy.every_tokens
        due = tokens // every > self._looked[word] // every
        self._looked[word] = tokens
        return self._store(word, tokens) if due and self._full(tokens) > self._reached[word] else None

    def _store(self, word: int, value: int) -> Store:
        step = value - self._stored[word]
        self._stored[word] = value
        self._reached[word] = self._full(value)
        return Store(word, value, step)

    def _full(self, tokens: int) -> int:
        return tokens // self._shape.block_tokens

    def _check(self, layer: int, tokens: int) -> None:
        if self._finished:
            raise KvError("The sequence has ended; a new sequence needs new words.")
        if not 0 <= layer < self._shape.layers:
            raise KvError(f"There are {self._shape.layers} layers and no layer {layer}.")
        limit = self._computed[layer - 1] if layer else self._shape.tokens
        if not self._computed[layer] <= tokens <= limit:
            raise KvError(
                f"Layer {layer} has KV of {self._computed[layer]} tokens and can have up to {limit} now,"
                f" not {tokens}."
            )
