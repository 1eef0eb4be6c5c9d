"""Conversations of one model, stored on a node, or in a cluster on the homes of their users.

`resume` returns a cache with the KV of the given tokens, as far as the session has it. `save` stores the rest of a
cache as one more turn. KV of other tokens is never used, so editing a prompt costs only the tokens after the edit.

With rules of the match-action table, `arrived` has the user's KV read into the node's memory while they are still
typing, if a rule says so, and the session's steps are recorded (docs/eight-steps.md). A request that a rule denies is
the caller's to refuse.

What always holds: a cache from `resume` is bit for bit the one that was saved for these tokens, and leaves at least one
token to be computed. A node's failure never raises: `resume` returns less, or nothing, with the reason; `save` reports
what was not stored. A caller's mistake is raised.

What it doesn't do: batches (a session is one sequence), caches that are quantised or of fixed size, layers with a
recurrent state, models on several devices. If the model is on a GPU, its copy engine moves the blocks through
page-locked memory, and a store behind them fires their puts (`device_copies`); if the GPU can't, the CPU copies. It has
never run on a GPU.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from transformers import DynamicCache

from kvstore.client import Arrivals, Client, Nodes
from kvstore.client.map_follower import is_in_cluster
from kvstore.client.resuming import Resumed as Outcome
from kvstore.client.transfer_watch import watched_by
from kvstore.config import counted
from kvstore.engines.stores import is_about_domains
from kvstore.engines.transformers.copies import Gathered, scatter, torch_errors
from kvstore.engines.transformers.device_copies import DeviceCopies, DeviceGathered
from kvstore.engines.transformers.moving import Mover, batches
from kvstore.engines.transformers.shapes import Shapes
from kvstore.engines.transformers.token_blocks import Piece, pieces, usable
from kvstore.engines.transformers.weights_digest import weights_digest
from kvstore.errors import (
    DeviceError,
    DomainRequired,
    InvalidArgument,
    KvError,
    LayoutError,
    NoSession,
    NotEncrypted,
    Overloaded,
)
from kvstore.limits import ENGINE_MOVING_BYTES, ENGINE_SLOTS_MAX
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, UNSAID, domain_of
from kvstore.reach import Reach
from kvstore.steps import Step
from nic_offload.cuda_device import CudaDevice
from nic_offload.errors import CudaUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch

    from kvstore.client import Arrival
    from kvstore.client.sessions import Session
    from kvstore.client.trace import Notes, Trace
    from kvstore.engines.transformers.shapes import LayerShape
    from nic_offload.device import Device
    from nic_offload.match_action import Request, Table

__all__ = ["CacheStore", "ChatSession", "Resumed", "Saved"]

log = logging.getLogger(__name__)

_BLOCK_TOKENS: Final = 64


class Resumed(NamedTuple):
    """The result of a resume."""

    cache: DynamicCache  # empty if there was nothing
    tokens: int  # whose KV it holds
    miss: Miss | None  # why it is not all that the session has


class Saved(NamedTuple):
    """The result of a save."""

    tokens: int  # of the conversation, from its first token
    sent_bytes: int
    error: KvError | None  # why not all of them are stored


class _Known(NamedTuple):
    """The content of a session."""

    pieces: list[Piece]  # its first blocks, as far as they match the given tokens
    turn_ends: list[int]
    blocks: int  # all of its blocks


class CacheStore:
    """A node or a cluster, for one model."""

    def __init__(
        self,
        node: str | Sequence[str] | Reach | None,
        model: Any,
        *,
        weights: str | None = None,
        layers: Sequence[LayerShape] | None = None,
        block_tokens: int = _BLOCK_TOKENS,
        rules: Table | None = None,
        tenant: str = "",
        device: Device | None = None,
    ) -> None:
        """Open it; `kvstore.reach` describes how the node is reached.

        One node is asked whether it is in a cluster; several addresses are those of a cluster's nodes.

        `weights` identifies the model's weights; by default all of them are digested, about a second per gigabyte.
        `layers` describes the layers if the model's configuration doesn't. `rules` decide what is fetched when a
        request arrives, with `tenant` as their name of the node's tenant. `device` is the model's, if it is not a GPU.
        """
        self.config = model.config
        self._device = model.device
        digest = weights_digest(model) if weights is None else weights
        self.shapes = Shapes.of(
            model.config, model.dtype, weights=digest, block_tokens=block_tokens, layers=layers
        )
        block_bytes = self.shapes.block_bytes(block_tokens, [block_tokens] * len(self.shapes.windows))
        slots = max(1, min(ENGINE_SLOTS_MAX, ENGINE_MOVING_BYTES // block_bytes))
        reach = _reach(node)
        kind = Nodes if len(reach.nodes) > 1 or is_in_cluster(reach) else Client
        client = kind(reach, layout=self.shapes.canonical, slots=slots, block_bytes_max=block_bytes)
        self._mover = Mover(client, block_bytes, slots)
        self.copies = _device_copies(self._device, device, self._mover)
        self.arrivals = None if rules is None else Arrivals(client, rules, tenant=tenant)
        self._encrypts: bool | None = None  # whether the node encrypts; None: unknown
        self._lock = threading.Lock()

    def session(self, user: str, name: str) -> ChatSession:
        """Return a conversation of a user. The node is not called."""
        if self.arrivals is not None:
            return ChatSession(self, self.arrivals.session(user, name))
        return ChatSession(self, self._mover.client.session(user, name))

    def domain_of(self, user: str) -> bytes:
        """The erase domain of a user's blocks: their own on a node that encrypts, unless the settings say `shared`."""
        if self._mover.client.reach.shared:
            return SHARED
        if self._encrypts is None:
            self._encrypts = self._mover.client_of(user).status().encrypted
        return domain_of(user) if self._encrypts else UNSAID

    def refused(self, error: KvError) -> None:
        """A restarted node may have begun or ceased to encrypt."""
        if isinstance(error, (DomainRequired, NotEncrypted)):
            self._encrypts = None

    def fetched(
        self, user: str, wanted: Sequence[Piece], notes: Notes | None = None
    ) -> tuple[DynamicCache, int, Miss | None]:
        """A cache made of blocks, the number of its tokens, and why there are no more."""
        miss: Miss | None = None
        with self._lock, watched_by(notes):
            gathered, here = self._gathered(), 0
            if self.copies is not None:
                self.copies.settle()
            for some in batches(wanted, self._mover.capacity_bytes):
                came, miss = self._mover.get(user, some)
                gathered.add(self._mover.memory, some[:came])
                here += came
                if miss is not None:
                    break
        count = usable(self.shapes, wanted[:here])
        if count < here:  # blocks in which a windowed layer lacks tokens: rare, so fetched again
            cache, tokens, again = self.fetched(user, wanted[:count], notes)
            return cache, tokens, again or miss
        return self._cache(gathered, wanted[:count]), wanted[count - 1].end if count else 0, miss

    def _gathered(self) -> Gathered | DeviceGathered:
        if self.copies is None:
            return Gathered(self.shapes, self._device)
        return DeviceGathered(self.shapes, self.copies, self._device)

    def _cache(self, gathered: Gathered | DeviceGathered, whole: Sequence[Piece]) -> DynamicCache:
        cache = DynamicCache(config=self.config)
        if not whole:
            return cache
        with torch_errors():
            for number, (k, v) in enumerate(gathered.layers()):
                cache.update(k, v, number)
                if self.shapes.layers[number].window is not None:
                    cache.layers[number].cumulative_length = whole[-1].end
        return cache

    def put(
        self,
        user: str,
        cache: DynamicCache,
        cached_tokens: int,
        new: Sequence[Piece],
        notes: Notes | None = None,
    ) -> int:
        """Store blocks from a cache; returns their size in bytes."""
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        if notes is not None:
            notes.registered(self._mover.region_at(self._mover.client_of(user)))
        with self._lock, watched_by(notes):
            for some in batches(new, self._mover.capacity_bytes):
                if self.copies is None:
                    scatter(self.shapes, layers, cached_tokens, self._mover.memory, some)
                    self._mover.put(user, some)
                else:
                    copy = partial(self.copies.save, self.shapes, layers, cached_tokens, some)
                    self._mover.put_copied(user, some, self.copies, copy)
        return sum(piece.length for piece in new)

    def check(self, cache: DynamicCache, cached_tokens: int) -> None:
        """Raise for a cache that is not one sequence of this model."""
        if len(cache.layers) != len(self.shapes.layers):
            raise LayoutError(
                f"The cache has {len(cache.layers)} layers, the model {len(self.shapes.layers)}."
            )
        for number, (layer, shape) in enumerate(zip(cache.layers, self.shapes.layers, strict=True)):
            kept = cached_tokens if shape.window is None else min(cached_tokens, shape.window - 1)
            for tensor, numbers in ((layer.keys, shape.k_numbers), (layer.values, shape.v_numbers)):
                expected = (1, shape.heads, kept, numbers)
                _check_tensor(number, tensor, expected, self.shapes.dtype, self._device)

    def close(self) -> None:
        """Release the node; another thread's save or resume ends with an error.

        It waits for the device's copies within a bound, and a device that was reset is no error.
        """
        if self.arrivals is not None:
            self.arrivals.close()
        self._mover.client.close()
        with self._lock:
            self._mover.close()
            if self.copies is not None:
                self.copies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChatSession:
    """A conversation."""

    def __init__(self, store: CacheStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._notes = None if store.arrivals is None else session.notes  # traced blocks take a longer way

    def arrived(self, request: Request) -> Arrival:
        """Match a request of the user, and have their KV read into the node's memory if the rule says so.

        It waits for look-ups on the node, and for no block. Only with rules.
        """
        if self._store.arrivals is None:
            raise InvalidArgument("This store was opened without rules, so there is nothing to match.")
        return self._store.arrivals.arrived(request)

    def mark(self, step: Step, *, tokens: int = 0) -> None:
        """Record a step that only the application knows, as `Session.mark`."""
        self._session.mark(step, tokens=tokens)

    def trace(self) -> Trace:
        """What the node and its clients recorded of the session, as `Session.trace`."""
        self._session.report()
        return self._session.trace()

    def resume(self, tokens: Any) -> Resumed:
        """The stored KV of the longest prefix, but not of all tokens: at least one has to be computed."""
        if self._notes is not None:
            self._notes.note(Step.RESUMING)
        numbers = _numbers(tokens)
        try:
            saved = self._saved(numbers)
        except KvError as error:
            return Resumed(DynamicCache(config=self._store.config), 0, _miss(error))
        wanted = [piece for piece in saved.pieces if piece.end < len(numbers)]
        wanted = wanted[: usable(self._store.shapes, wanted)]
        try:
            cache, here, miss = self._store.fetched(self._session.user, wanted, self._notes)
        except KvError as error:
            log.warning("A conversation is not resumed: %s", error)
            cache, here, miss = DynamicCache(config=self._store.config), 0, _miss(error)
        if self._notes is not None:
            blocks = sum(piece.end <= here for piece in wanted)
            all_tokens = wanted[-1].end if wanted else 0
            self._notes.resumed(Outcome(len(wanted), all_tokens, blocks, here, miss))
        if miss is None and len(wanted) < max(1, saved.blocks):
            miss = Miss(MissReason.UNKNOWN, _why(saved, here))
        return Resumed(cache, here, miss)

    def prefetch(self) -> None:
        """Start reading the session into the node's memory while the user is typing."""
        try:
            self._session.prefetch()
        except KvError as error:
            log.debug("A session was not prefetched: %s", error)

    def save(self, cache: DynamicCache, tokens: Any) -> Saved:
        """Store the rest of the cache as a turn. `tokens` includes those it was computed from."""
        numbers, cached = _numbers(tokens), cache.get_seq_length()
        if len(numbers) < cached:
            raise InvalidArgument(f"The cache has {counted(cached, 'token')}, and {len(numbers)} were given.")
        self._store.check(cache, cached)
        known = 0
        try:
            saved = self._saved(numbers)
            here = min(saved.pieces[-1].end, cached) if saved.pieces else 0
            ends = [end for end in saved.turn_ends if end <= here]
            known = ends[-1] if ends else 0
            kept = sum(piece.end <= known for piece in saved.pieces)
            if kept < saved.blocks:
                self._session.truncate(kept)
            if known == cached:
                return Saved(known, 0, None)
            domain = self._store.domain_of(self._session.user)
            whole = pieces(self._store.shapes, numbers, [*ends, cached], domain)
            new = [piece for piece in whole if piece.begin >= known]
            sent_bytes = self._store.put(self._session.user, cache, cached, new, self._notes)
            self._session.append([piece.key for piece in new], tokens=cached - known)
        except KvError as error:
            self._store.refused(error)
            if not is_about_domains(error, log):
                log.warning("A conversation was not saved: %s", error)
            return Saved(known, 0, error)
        return Saved(cached, sent_bytes, None)

    def _saved(self, numbers: Sequence[int]) -> _Known:
        """Find out which of these tokens the session has."""
        try:
            info = self._session.info()
        except NoSession:
            return _Known([], [], 0)
        ends = [turn.tokens.stop for turn in info.turns]
        mine = pieces(self._store.shapes, numbers, ends, self._store.domain_of(self._session.user))
        same = []
        for piece, key in zip(mine, self._session.keys(), strict=False):
            if piece.end > len(numbers) or piece.key != key:
                break
            same.append(piece)
        return _Known(same, ends, info.blocks)


def _reach(node: str | Sequence[str] | Reach | None) -> Reach:
    if isinstance(node, Reach):
        return node
    return Reach.of({"node": node} if node is None or isinstance(node, str) else {"nodes": list(node)})


def _device_copies(place: torch.device, device: Device | None, mover: Mover) -> DeviceCopies | None:
    """The copies of a device; None if the CPU reads the model's tensors, or has to."""
    try:
        if device is None and place.type == "cuda":
            device = CudaDevice(place.index or 0)
        return None if device is None else DeviceCopies(device, mover.buffer)
    except (DeviceError, CudaUnavailable) as error:
        log.warning("The CPU copies this model's KV: %s", error)
        return None


def _numbers(tokens: Any) -> list[int]:
    """Tokens as a list, from a list or a tensor of one sequence."""
    listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if listed and isinstance(listed[0], list):
        if len(listed) != 1:
            raise InvalidArgument(f"A session is one sequence of tokens, not {len(listed)}.")
        listed = listed[0]
    return [int(one) for one in listed]


def _why(saved: _Known, tokens: int) -> str:
    if not saved.blocks:
        return "Nothing is saved under this name."
    return f"The session differs after token {tokens}, or has more tokens than were given."


def _miss(error: KvError) -> Miss:
    if isinstance(error, (DeviceError, CudaUnavailable)):
        return Miss(MissReason.UNREADABLE, str(error))
    return Miss(MissReason.BUSY if isinstance(error, Overloaded) else MissReason.NODE_AWAY, str(error))


def _check_tensor(
    number: int,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        found = "nothing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise LayoutError(f"Layer {number} of the cache has {found}, and the model {shape} of {dtype}.")
    if tensor.device != device:  # its copies would not wait for that device's work
        raise LayoutError(
            f"Layer {number} of the cache is on {tensor.device}, and the model on {device}: load it on one device."
        )
