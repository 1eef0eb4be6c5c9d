"""A resume in progress: blocks arrive in the order of the request, and the first can be used before the last.

    with chat.resuming(place, layer_of=lambda number: number % layers) as back:
        for layer in range(layers):
            if not back.wait_layer(layer):
                break  # a MISS: compute
            ...        # attention over this layer, while the next ones arrive
        resumed = back.whole()

What always holds: a wait returns True only if all of its blocks are in memory and checked. After a miss nothing more is
requested. When `whole` or `close` returns, nothing is in flight. Until then the blocks are pinned, unless they exceed
what a tenant may pin. All of it ends within its deadline.
What it doesn't do: run a thread. The next blocks are requested while a caller waits; two batches are pending at
a time. One thread waits at a time.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.arguments import checks_arguments
from kvstore.client.blocks import Hit
from kvstore.client.checks import check_number, check_placed
from kvstore.client.request_ids import as_request, current_request
from kvstore.client.transfer_watch import watched_by, within
from kvstore.errors import Closed, KvError
from kvstore.limits import RESUME_AHEAD_BATCHES, RESUME_BATCH_BLOCKS
from kvstore.miss import Miss
from kvstore.steps import Step
from kvstore.wire.manifest import Turn, cut_turns
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.client import Client
    from kvstore.client.gets import EndedGet, Get
    from kvstore.client.grpc_gets import GrpcGet
    from kvstore.client.spans import ResumeSpan
    from kvstore.client.trace import Notes
    from kvstore.clock import Clock
    from kvstore.layout import Layout

__all__ = ["Manifest", "Resumed", "Resuming"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a resume. Only the first `usable_blocks` of the memory hold correct bytes."""

    blocks: int  # of the session
    tokens: int
    usable_blocks: int
    usable_tokens: int
    miss: Miss | None  # of the first missing block; None: all arrived

    @property
    def is_whole(self) -> bool:
        """Whether the whole session arrived."""
        return self.miss is None


class Manifest(NamedTuple):
    """A session's list of blocks, or why it could not be read."""

    keys: Sequence[bytes]
    turns: Sequence[Turn]
    miss: Miss | None = None

    def resumed(self, usable: int, miss: Miss | None) -> Resumed:
        """The number of tokens that its first blocks cover."""
        return Resumed(
            len(self.keys),
            sum(turn.tokens for turn in self.turns),
            usable,
            sum(turn.tokens for turn in cut_turns(self.turns, len(self.keys), usable)),
            miss,
        )


class _Batch(NamedTuple):
    get: Get | GrpcGet | EndedGet
    first: int  # in the order asked
    numbers: Sequence[int]


@made_by("`Session.resuming`")
@checks_arguments
class Resuming(Handle):
    """One resume: blocks arrive in the order of the request, and the first can be used before the last.

    `Session.resuming` makes it. `wait_layer` and `wait_blocks` say whether blocks can be used, `whole` waits for all.

    >>> resuming = chat.resuming(lambda number, key: Block(key, kv, offset=0, length=4096))
    >>> resuming.wait_blocks(1)
    True
    >>> resuming.whole().usable_tokens
    16
    """

    def __init__(
        self,
        client: Client,
        manifest: Manifest,
        place: Callable[[int, bytes], Block],
        notes: Notes,
        clock: Clock,
        until_ns: int,
        layout: Layout | None,
        layer_of: Callable[[int], int] | None,
        span: ResumeSpan | None = None,
    ) -> None:
        self._client = client
        self._span = span
        self._request_id = current_request()
        self._manifest = manifest
        self._place = place
        self._notes = notes
        self._clock = clock
        self._until_ns = until_ns
        self._layout = layout
        numbers = range(len(manifest.keys))
        layers = [0 if layer_of is None else check_number("A layer", layer_of(number)) for number in numbers]
        self._order = sorted(
            range(len(layers)), key=layers.__getitem__
        )  # a stable sort: else as in the session
        self._layers = [layers[number] for number in self._order]
        self._outcomes: list[Hit | Miss | None] = [None] * len(layers)
        self._batches: deque[_Batch] = deque()
        self._asked = 0
        self._came = 0  # outcomes known of those requested, without a gap
        self._miss = manifest.miss
        self._closed = False
        self._held = ExitStack()
        if manifest.keys:
            self._pin()
            self._ask()

    def _left_s(self) -> float:
        return max(0.0, (self._until_ns - self._clock.monotonic_ns()) / 1e9)

    def _pin(self) -> None:
        try:
            time_to_live_ms = max(1, int(self._left_s() * 1000))
            self._held.enter_context(self._client.pin(self._manifest.keys, time_to_live_ms=time_to_live_ms))
        except KvError:  # unpinned blocks may miss, which is reported
            pass

    def _ask(self) -> None:
        """Request batches up to the maximum number in flight."""
        try:
            while (
                self._miss is None
                and not self._closed
                and len(self._batches) < RESUME_AHEAD_BATCHES
                and self._asked < len(self._order)
            ):
                numbers = self._order[self._asked : self._asked + RESUME_BATCH_BLOCKS]
                blocks = [self._placed(number) for number in numbers]
                with as_request(self._request_id), within(self._span), watched_by(self._notes):
                    get = self._client.getting(blocks, layout=self._layout, timeout_s=self._left_s())
                self._batches.append(_Batch(get, self._asked, numbers))
                self._asked += len(numbers)
        except BaseException:
            self.close()
            raise

    def _placed(self, number: int) -> Block:
        key = self._manifest.keys[number]
        block = self._place(number, key)
        check_placed(block, number, key)
        if not self._asked:
            self._notes.registered(block.region)
        return block

    def wait_blocks(self, count: int) -> bool:
        """Wait for the first `count` blocks in the order requested; returns whether they all arrived.

        >>> resuming.wait_blocks(1)
        True
        """
        count = min(count, len(self._order))
        if self._closed and self._came < count and self._miss is None:
            raise Closed("The resume was closed before all blocks had arrived.")
        first = not self._came
        while self._came < count and self._miss is None:
            self._ask()
            batch = self._batches[0]
            self._take(batch, min(count - batch.first, len(batch.numbers)))
        if first and self._miss is None and 0 < self._came < len(self._order):
            self._notes.note(Step.FIRST_USABLE, blocks=self._came)
        return self._miss is None

    def wait_layer(self, layer: int) -> bool:
        """Wait for the blocks of all layers up to this one; returns whether they all arrived.

        >>> resuming.wait_layer(0)
        True
        """
        return self.wait_blocks(sum(one <= layer for one in self._layers))

    def _take(self, batch: _Batch, count: int) -> None:
        """Wait for the first `count` outcomes of the batch that was requested first."""
        outcomes = batch.get.wait(count)
        for number, outcome in zip(batch.numbers, outcomes, strict=False):
            self._outcomes[number] = outcome
            if isinstance(outcome, Miss):
                self._miss = self._miss or outcome
                self._notes.missed(self._manifest.keys[number], outcome)
        self._came = batch.first + count
        if count == len(batch.numbers):
            self._batches.popleft()

    def whole(self) -> Resumed:
        """Wait for all blocks. The result is all of them, or a MISS with the blocks usable before it.

        >>> resuming.whole().is_whole
        True
        """
        self.wait_blocks(len(self._order))
        self._settle()
        usable = next(
            (number for number, outcome in enumerate(self._outcomes) if not isinstance(outcome, Hit)),
            len(self._outcomes),
        )
        miss = self._miss
        if usable < len(self._outcomes) and isinstance(first := self._outcomes[usable], Miss):
            miss = first
        resumed = self._manifest.resumed(usable, miss)
        self._notes.resumed(resumed)
        if self._span is not None:
            self._span.resumed(resumed)
        return resumed

    def close(self) -> None:
        """Request nothing more, wait until nothing is pending, and release the blocks.

        >>> resuming.close()
        """
        self._settle()
        if self._span is not None:
            self._span.closed(self._came)

    def _settle(self) -> None:
        self._closed = True
        while self._batches:
            self._take(self._batches[0], len(self._batches[0].numbers))
        self._held.close()
