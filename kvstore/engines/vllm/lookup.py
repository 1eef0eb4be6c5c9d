"""Look-ups: for how many of a request's first tokens the node has the KV. The engine doesn't wait.

What always holds: the answer is a length at which every group has the blocks it needs: layers without a window all of
them, layers with one those that reach into it. A node that is away or late has none. Nothing here raises.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client import Stored, as_request
from kvstore.clock import SystemClock
from kvstore.errors import KvError
from kvstore.limits import VLLM_ATTACH_MS, VLLM_LOOKUP_THREADS, VLLM_LOOKUP_TRIES
from kvstore.names import UNSAID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engines.stores import Store
    from kvstore.engines.vllm.groups import Group, Identity

__all__ = ["NOTHING", "Lookups", "Usable"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


class Usable(NamedTuple):
    """What a look-up found."""

    tokens: int  # of the request, from the first on
    is_shared: bool  # all of their blocks are in memory that the node shares with this machine


NOTHING = Usable(0, is_shared=False)


class Lookups:
    """The look-ups of an engine's scheduler."""

    def __init__(self, client: Store, identity: Identity, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._groups = identity.groups
        self.step_tokens = math.lcm(*(group.block_tokens for group in identity.groups))
        self._threads = ThreadPoolExecutor(VLLM_LOOKUP_THREADS, "kvstore-lookup")
        self._attaching = ThreadPoolExecutor(1, "kvstore-attach")
        self._clock, self._attach_ns = SystemClock(), 0
        self._attach_later()

    def begin(
        self, digests: Sequence[Sequence[bytes]], request_id: str = "", domain: bytes = UNSAID
    ) -> Future[Usable]:
        """Ask for the usable tokens of a request; the digests are those of its blocks, group by group."""
        return self._threads.submit(self._ask, [list(one) for one in digests], request_id, domain)

    def _attach_later(self) -> None:
        """In a thread of its own, now and then: it may have lost a node, or a cluster may have a new one."""
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._attach_ns:
            self._attach_ns = now_ns + VLLM_ATTACH_MS * 1_000_000
            self._attaching.submit(self._attach)

    def _attach(self) -> None:
        try:
            self._client.attach()
        except KvError as error:
            log.debug("Blocks are looked up over gRPC: %s", error)
        except Exception:  # as below
            log.exception("Blocks are looked up over gRPC.")

    def _ask(self, digests: list[list[bytes]], request_id: str, domain: bytes) -> Usable:
        self._attach_later()
        try:
            with as_request(request_id):  # for `kvstore explain`
                return self._usable(digests, domain)
        except KvError as error:
            log.debug("A request's blocks could not be looked up: %s", error)
        except Exception:  # no error may stop the engine
            log.exception("A look-up failed; the prompt is computed.")
        return NOTHING

    def _usable(self, digests: list[list[bytes]], domain: bytes) -> Usable:
        tokens = min(len(one) * group.block_tokens for one, group in zip(digests, self._groups, strict=True))
        is_shared = True
        for group, of_group in zip(self._groups, digests, strict=True):
            if not group.window_tokens:
                some = self._prefix(group, of_group[: tokens // group.block_tokens], domain)
                tokens, is_shared = min(tokens, some.tokens), is_shared and some.is_shared
        windowed = [
            (group, of_group)
            for group, of_group in zip(self._groups, digests, strict=True)
            if group.window_tokens
        ]
        for _ in range(VLLM_LOOKUP_TRIES):
            tokens -= tokens % self.step_tokens
            if not tokens:
                break
            reached = min(
                (self._window(group, one, tokens, domain) for group, one in windowed), default=tokens
            )
            if reached == tokens:
                return Usable(tokens, is_shared and not windowed)
            tokens = reached
        return NOTHING

    def _prefix(self, group: Group, digests: Sequence[bytes], domain: bytes) -> Usable:
        """How many tokens are stored, from the first."""
        if not digests:
            return NOTHING
        answer = self._client.prefix(group.all_objects(digests, domain), timeout_s=self._timeout_s)
        return Usable(answer.blocks // group.objects_of_block * group.block_tokens, answer.is_shared)

    def _window(self, group: Group, digests: Sequence[bytes], tokens: int, domain: bytes) -> int:
        """Return the length if everything the next token attends to is stored; else a shorter candidate."""
        last = tokens // group.block_tokens
        first = max(0, tokens - group.window_tokens + 1) // group.block_tokens
        keys = group.all_objects(digests[first:last], domain)
        answers = self._client.exists(keys, timeout_s=self._timeout_s)
        for block in range(last - 1, first - 1, -1):
            begin = (block - first) * group.objects_of_block
            if not all(isinstance(one, Stored) for one in answers[begin : begin + group.objects_of_block]):
                return block * group.block_tokens
        return tokens
