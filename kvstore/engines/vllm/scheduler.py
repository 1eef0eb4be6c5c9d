"""The scheduler's side: which of a request's blocks are stored, which to load, and which to save when.

What always holds: an offer is less than the whole prompt, in blocks that every group has whole; blocks that were
offered and did not arrive are not offered again; a block is saved once, when all its tokens are known and computed, and
nothing it depends on is missing; a request's state ends with it. No call waits while the engine has work: a step waits
for a load only if nothing else is computed and all of it is a copy of memory that the node shares, or by the settings.
"""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.clock import SystemClock
from kvstore.engines.vllm.chain import Chain
from kvstore.engines.vllm.connector_metadata import Load, Plan, StoredReport, Wanted
from kvstore.engines.vllm.lookup import NOTHING, Lookups
from kvstore.engines.vllm.page_transport import open_client
from kvstore.engines.vllm.request_rules import RequestRules
from kvstore.engines.vllm.session_turns import Turns, domain_named
from kvstore.engines.vllm.stats import Stats
from kvstore.limits import (
    VLLM_LOOKUP_FIRST_WAIT_S,
    VLLM_LOOKUP_NEXT_WAIT_S,
    VLLM_SAVING_MAX,
    VLLM_STEP_LOAD_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Matched
    from kvstore.engines.vllm.groups import Identity
    from kvstore.engines.vllm.lookup import Usable
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Scheduling"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


@dataclass(slots=True)
class _Request:
    request: Any
    chains: dict[int, Chain]
    domain: bytes  # the erase domain of its blocks
    matched: Matched  # what the rules say of it; a denied request has nothing to do with the store
    lookup: Future[Usable] | None = None
    lookup_until_ns: int = 0
    unread: Future[Usable] | None = (
        None  # a look-up that nothing waited for, because the engine had all blocks itself
    )
    is_unasked: bool = False  # such a look-up has yet to be begun
    asked: bool = False  # whether the answer was waited for
    computed_tokens: int = 0  # what the engine had when it was offered more
    accounted_tokens: int = 0  # those, and what was offered and taken: the rest is another connector's
    is_admitted: bool = False  # since the last step
    is_spoilt: bool = False  # it was computed from blocks that did not arrive
    offers: int = 0  # loads that were begun
    known_tokens: int = 0  # stored on the node, from the first on
    waits: bool = False  # the step that computes its other tokens waits for its load
    saved: list[int] = field(default_factory=list)  # blocks, group by group, that need not be saved


class Scheduling:
    """The connector's part in an engine's scheduler."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        *,
        with_events: bool,
        may_wait: bool = True,
        loads: bool = True,
        saves: bool = True,
        model: str = "",
        kernels: bytes = b"",
    ) -> None:
        """`may_wait`: a step may wait for a load, because its failure is known before the next step is planned.

        `model` is the name by which rules know the engine's model; `kernels` is as for `identified`.
        """
        object_bytes = max(group.object_bytes_max for group in identity.groups)
        self._client = open_client(settings, identity, object_bytes)
        self._groups = identity.groups
        self._may_load, self._may_save = loads, saves  # by the engine's `kv_role`
        self._lookup_ns = settings.lookup_timeout_ms * 1_000_000
        self._save_tokens = settings.save_every_tokens
        self._lookups = Lookups(self._client, identity, settings.lookup_timeout_ms / 1000)
        self._domain = settings.reach.domain  # of requests that name none
        self._rules = RequestRules(settings, self._client, model)
        self._turns = Turns(self._rules, identity.groups, self._domain)
        self._may_wait_for_copy = may_wait and len(self._groups) == 1
        self._is_async = settings.is_async(len(self._groups))
        self._workers = len(identity.groups[0].shards)
        self._requests: dict[str, _Request] = {}
        self._kernels, self._epoch = kernels, b""
        self._loads: list[Load] = []
        self._awaited: set[bytes] = set()  # the digests of the blocks that this step waits for
        self._loading: list[list[int]] = []  # the blocks of each request that waits for them
        self._is_idle = True  # whether the last step computed nothing
        self._manager: Any = None
        self._stored_by: dict[tuple[int, bytes], int] = {}
        self._tokens_of: dict[tuple[int, bytes], Any] | None = {} if with_events else None
        self._events: list[Any] = []
        self._clock = SystemClock()
        self.stats = Stats()

    def bind(self, kv_cache_manager: Any) -> None:
        """Receive the engine's block pool, which knows a request's blocks."""
        self._manager = kv_cache_manager

    # --- a new request

    def new_request(self, request: Any) -> None:
        """Look up its stored blocks if the engine is busy, long before it is scheduled.

        An idle engine schedules it at once: then the look-up waits until it is known whether the engine has all blocks.
        """
        known = self._known(request)
        if self._may_load:
            self._turns.arrived(request, known.matched)
        if not self._is_idle:
            self._begin_lookup(known)

    def _known(self, request: Any) -> _Request:
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = self._fresh(request, self._rules.match(request))
        return known

    def _fresh(self, request: Any, matched: Matched) -> _Request:
        chains = {
            group.block_tokens: Chain(request, group.block_tokens, self._kernels + self._epoch)
            for group in self._groups
        }
        domain = domain_named(request, self._domain)
        return _Request(request, chains, domain, matched, saved=[0] * len(self._groups))

    def _begin_lookup(self, known: _Request) -> None:
        digests = [known.chains[group.block_tokens].grow() for group in self._groups]
        if not self._may_load or known.matched.denied or not all(digests):
            return  # a producer, a rule, or no block is full
        known.lookup = self._lookups.begin(digests, known.request.request_id, known.domain)
        known.lookup_until_ns = self._clock.monotonic_ns() + self._lookup_ns
        known.asked = False

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones can be loaded; None: not known yet."""
        known = self._known(request)
        known.accounted_tokens = computed_tokens
        if self._shares_awaited(known, computed_tokens):
            return None, False
        if known.offers > request.num_preemptions:
            return 0, False  # the offered blocks have not arrived, and may never
        known.computed_tokens = computed_tokens
        # At least one token is computed: the next one depends on it.
        step = self._lookups.step_tokens
        most = (request.num_tokens - 1) // step * step
        if most <= computed_tokens:
            known.unread = known.lookup
            may_ask = self._may_load and not known.matched.denied
            known.is_unasked = may_ask and known.lookup is None and computed_tokens > 0
            return 0, False
        return self._offer(known, most)

    def _offer(self, known: _Request, most: int) -> tuple[int | None, bool]:
        """The same for a request of whose first tokens, at most so many, the engine has not all itself."""
        if known.lookup is None:
            self._begin_lookup(known)
        if known.lookup is None:
            return 0, False
        computed_tokens = known.computed_tokens
        try:
            found = known.lookup.result(self._patience_s(known))
        except NotYet:
            known.asked = True
            if self._clock.monotonic_ns() < known.lookup_until_ns:
                return None, False
            found = NOTHING
            self.stats.add("lookups_late")
        known.known_tokens = found.tokens
        usable = min(found.tokens, most)
        if usable <= computed_tokens:
            return 0, False
        known.waits = not self._is_async or self._may_wait(usable - computed_tokens, found)
        return usable - computed_tokens, not known.waits

    def _may_wait(self, tokens: int, found: Usable) -> bool:
        """Whether the step may wait for this load, which takes two steps otherwise.

        Nothing else is computed, and the blocks are copied from memory that the node shares, in milliseconds.
        """
        if not self._may_wait_for_copy or not self._is_idle or self._loads or not found.is_shared:
            return False
        (group,) = self._groups
        return tokens // group.block_tokens * group.block_bytes <= VLLM_STEP_LOAD_BYTES

    def _patience_s(self, known: _Request) -> float:
        """While others compute, nothing waits here; an idle engine that is told to retry would spin."""
        if not self._is_idle:
            return 0.0
        return VLLM_LOOKUP_NEXT_WAIT_S if known.asked else VLLM_LOOKUP_FIRST_WAIT_S

    def _shares_awaited(self, known: _Request, computed_tokens: int) -> bool:
        """Whether the engine's own cache would give it blocks that another request of this step has yet to load.

        If they fail to arrive, vLLM reschedules the other request, and continues this one as if they had.
        """
        if not self._awaited or not computed_tokens:
            return False
        size = self._groups[0].block_tokens
        return not self._awaited.isdisjoint(known.chains[size].grow()[: computed_tokens // size])

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Plan the load of the offered blocks into the request's blocks."""
        known = self._known(request)
        known.is_admitted = True
        known.lookup = None  # a request scheduled again after a preemption is looked up again
        self._are_stored(known, known.known_tokens)
        if not external_tokens:
            return
        wanted = []
        for number, group in enumerate(self._groups):
            size = group.block_tokens
            digests = known.chains[size].grow()
            first = known.computed_tokens // size
            last = (known.computed_tokens + external_tokens) // size
            of_group = blocks.blocks[number]
            wanted += [
                Wanted(number, of_group[at].block_id, digests[at], known.domain)
                for at in range(first, last)
                if not of_group[at].is_null  # outside of the window
            ]
        known.offers += 1
        known.accounted_tokens += external_tokens
        if known.waits:
            self._awaited.update(one.digest for one in wanted)
            self._loading.append([block.block_id for block in blocks.blocks[0]])
        self._loads.append(Load(request.request_id, wanted, known.waits))
        self.stats.add("hit_tokens", external_tokens)

    def _are_stored(self, known: _Request, tokens: int) -> None:
        """The blocks of its first tokens need not be saved."""
        for number, group in enumerate(self._groups):
            known.saved[number] = max(known.saved[number], tokens // group.block_tokens)

    def _is_read(self, known: _Request) -> bool:
        """Whether it is known which of the blocks that the engine had itself are stored.

        They are looked up beside the second step: the first one's token is what the user waits for.
        """
        if known.is_unasked:
            if known.request.num_computed_tokens <= known.computed_tokens:
                return False
            known.is_unasked = False
            self._begin_lookup(known)
            known.unread, known.lookup = known.lookup, None
        if known.unread is None:
            return True
        if not known.unread.done() and self._clock.monotonic_ns() < known.lookup_until_ns:
            return False
        self._are_stored(known, known.unread.result().tokens if known.unread.done() else 0)
        known.unread = None
        return True

    # --- a step

    def plan(self, step: Any) -> Plan:
        """Return the loads and saves of this step."""
        loads, self._loads = self._loads, []
        self._awaited = set()
        self._is_idle = not step.num_scheduled_tokens
        saves: list[Wanted] = []
        try:
            of_step = [
                (known, tokens)
                for request_id, tokens in step.num_scheduled_tokens.items()
                if (known := self._requests.get(request_id)) is not None
            ]
            if not self._has_others_loads([known for known, _ in of_step]):
                for known, tokens in of_step:
                    saves += self._full(known, known.request.num_computed_tokens, tokens)
        except Exception:  # offered loads must be made whatever happens: requests wait for them
            log.exception("Planning saves failed; this step saves nothing.")
            saves = []
        return Plan(loads, saves, is_idle=self._is_idle)

    def _has_others_loads(self, requests: Sequence[_Request]) -> bool:
        """Whether a request begins with tokens that another connector loads.

        Whether they arrived is known only after the step, so its blocks are saved with the next one.
        """
        has = False
        for known in requests:
            has |= known.is_admitted and known.request.num_computed_tokens > known.accounted_tokens
            known.is_admitted = False
        return has

    def _full(self, known: _Request, before_tokens: int, new_tokens: int) -> list[Wanted]:
        """The blocks of a request that are full after this step, not known to be stored, and due to be saved."""
        if known.is_spoilt or known.matched.denied or not self._is_read(known):
            return []
        # Drafts and placeholders don't count as tokens yet.
        tokens = min(before_tokens + new_tokens, len(known.request.all_token_ids))
        full: list[Wanted] = []
        ids: Sequence[Sequence[int]] = ()
        for number, group in enumerate(self._groups):
            # Blocks that are computed although they were reported as stored failed to arrive: save them again.
            first = min(known.saved[number], before_tokens // group.block_tokens)
            last = tokens // group.block_tokens
            if last <= first or not self._may_save:
                continue
            is_answer = before_tokens >= known.request.num_prompt_tokens
            is_leaving = group.may_leave(first, before_tokens + new_tokens)
            if is_answer and not is_leaving and (last - first) * group.block_tokens < self._save_tokens:
                known.saved[number] = first  # a later step saves them
                continue
            digests = known.chains[group.block_tokens].grow()
            ids = ids or self._manager.get_block_ids(known.request.request_id)
            of_group = ids[number]
            full += [
                Wanted(number, of_group[at], digests[at], known.domain)
                for at in range(first, min(last, len(of_group)))
                if of_group[at]  # 0 marks a block that has left the window
            ]
            known.saved[number] = last
            if self._tokens_of is not None:
                for at in range(first, last):
                    before = digests[at - 1] if at else None
                    _remember(self._tokens_of, (number, digests[at]), (known.request, at, before))
        return full

    def settled(self, missing: set[int]) -> None:
        """A step has ended, and these of its blocks did not arrive, from any connector: remove them.

        vLLM has rescheduled their requests by now, but it leaves such blocks, and those computed after them, in its own
        cache, where the next request would find them.
        """
        loading, self._loading = self._loading, []
        if not missing or len(self._groups) > 1:
            return
        size = self._groups[0].block_tokens
        tables = list(loading)
        for request_id, known in self._requests.items():
            (blocks,) = self._manager.get_block_ids(request_id)
            tables.append(blocks)
            first = _first_of(missing, blocks)
            known.is_spoilt |= known.request.num_computed_tokens > first * size
        spoilt = {block for blocks in tables for block in blocks[_first_of(missing, blocks) :]}
        self._manager.evict_blocks(spoilt | missing)

    def process_report(self, report: StoredReport | None) -> None:
        """Process the workers' reports of stored blocks."""
        for name, workers in (report.stored if report is not None else {}).items():
            so_far = self._stored_by.pop(name, 0) + workers
            if so_far < self._workers:
                _remember(self._stored_by, name, so_far)
                continue
            self.stats.add("stored_blocks")
            if self._tokens_of is not None and (about := self._tokens_of.pop(name, None)) is not None:
                self._events.append(self._event(name, *about))

    def _event(self, name: tuple[int, bytes], request: Any, at: int, before: bytes | None) -> Any:
        from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored  # noqa: PLC0415  # only if wanted

        number, digest = name
        size = self._groups[number].block_tokens
        adapter = request.lora_request
        return BlockStored(
            block_hashes=[digest],
            parent_block_hash=before,
            token_ids=list(request.all_token_ids[at * size : (at + 1) * size]),
            block_size=size,
            lora_id=adapter.lora_int_id if adapter else None,
            medium=MEDIUM_STORAGE,
            lora_name=adapter.lora_name if adapter else None,
            group_idx=number,
        )

    def count_rules(self) -> None:
        """Add what each rule has seen to the counters."""
        self._rules.add_to(self.stats)

    def take_events(self) -> list[Any]:
        """The blocks stored since the last call."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Ignore everything stored so far: the weights may have changed.

        Requests under way are renamed as well, and are recomputed.
        """
        self._epoch = secrets.token_bytes(16)
        self._rename()

    def identified(self, kernels: bytes) -> None:
        """Name blocks by the workers' attention kernels, on which their bytes depend."""
        self._kernels = kernels
        self._rename()

    def _rename(self) -> None:
        self._requests = {
            name: self._fresh(known.request, known.matched) for name, known in self._requests.items()
        }

    # --- a request ends

    def finished(self, request: Any) -> None:
        """Forget it; if it belongs to a session, its blocks are appended as a turn."""
        known = self._requests.pop(request.request_id, None)
        if known is not None and self._may_save:
            if known.is_unasked or not self._is_read(known):
                # The node checks that all blocks of a session are stored.
                self._are_stored(known, known.computed_tokens)
            self._turns.finished(request, lambda: self._saved_of(known))

    def _saved_of(self, known: _Request) -> list[list[bytes]]:
        """The digests of its saved blocks, group by group."""
        return [
            known.chains[group.block_tokens].grow()[: known.saved[number]]
            for number, group in enumerate(self._groups)
        ]


def _first_of(missing: set[int], blocks: Sequence[int]) -> int:
    """The position of the first of them in a request's blocks; the number of blocks if none is."""
    return next((at for at, block in enumerate(blocks) if block in missing), len(blocks))


def _remember(memory: dict[tuple[int, bytes], Any], name: tuple[int, bytes], what: Any) -> None:
    """Keep only the newest entries, a bounded number."""
    memory[name] = what
    if len(memory) > VLLM_SAVING_MAX:
        del memory[next(iter(memory))]
