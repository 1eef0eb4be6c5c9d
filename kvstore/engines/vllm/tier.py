"""A tier of vLLM's multi-tier offloading on our node, behind vLLM's own pool of host memory.

    "secondary_tiers": [{"type": "triggerkv", "node": "127.0.0.1:7070"}]

vLLM copies chunks (several blocks of tokens, all layers and ranks) between the device and its pool, keeps those in use,
and has this tier store and load the others. The pool is registered once with our client: puts read it and gets write to
it, without a further copy. It needs `tiering_connector`, which gives it the model's identity.

What always holds: no call of the scheduler's waits for the node while the engine computes anything, and an idle
engine's waits for a moment; our own threads do the work. A job ends by its deadline, counted from its submission, and
then nothing reads or writes its chunks any more. A load reports which chunks arrived, whole and checked. Two engines
share a chunk only if they would share the connector's pages (`identity`). `shutdown` ends all jobs, or raises, and then
vLLM keeps the memory.
What it doesn't do: name sessions; ranks on several hosts, whose pools are several.
"""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.client import as_request
from kvstore.clock import SystemClock
from kvstore.engines.carrier import Carrier, Place
from kvstore.engines.vllm.model_hints import Adapter, Engine
from kvstore.engines.vllm.settings import ENGINE, TierSettings
from kvstore.errors import ConfigError, DeadlineExceeded
from kvstore.limits import (
    VLLM_LOAD_THREADS,
    VLLM_LOADING_WAIT_S,
    VLLM_SHUTDOWN_MS,
    VLLM_TIER_STORING_PART,
)
from kvstore.names import block_key, block_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["TriggerKvTier"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


_SHUTDOWN_S = VLLM_SHUTDOWN_MS / 1000
_COUNTS = {
    "loaded_chunks": "Chunks received from the node",
    "missing_chunks": "Chunks promised but not received, and computed",
    "stored_chunks": "Chunks stored on the node",
    "unsaved_chunks": "Chunks that the node did not accept in time",
    "skipped_chunks": "Chunks not stored because earlier ones still waited for the node",
    "evicted_chunks": "Chunks received, but evicted by a too small pool before use",
    "late_lookups": "Chunks that the node did not answer for in time",
}


@dataclass(slots=True)
class _Seen:
    """The state of a request, until it is preempted or ends."""

    since_ns: int  # when it began to wait for the node's answers
    has_asked: bool = False  # for all of its chunks at once
    asked: tuple[list[bytes], Future[list[bool]]] | None = None  # these chunks, and the answers to come
    known: dict[bytes, bool | None] = field(default_factory=dict)  # whether the node has it; None: asked for
    brought: set[bytes] = field(default_factory=set)  # what has arrived for it, and is not known any more

    def take_answers(self) -> None:
        """Learn the answers, if they are there."""
        if self.asked is None or not self.asked[1].done():
            return
        (keys, answers), self.asked = self.asked, None
        for key, is_here in zip(keys, answers.result(), strict=True):
            if self.known.get(key, is_here) is None:
                self.known[key] = is_here


class _Job(NamedTuple):
    keys: list[bytes]
    more: bytes  # behind each key in its name
    chunks: list[int]
    until_ns: int
    request_id: str


class _Moved(NamedTuple):
    whole: list[bool]  # for each chunk, whether all of it is in place
    seconds: float


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Looks chunks up in a thread; vLLM's own calls come from the scheduler alone."""

    def __init__(self, tier_type: str, present: Callable[[list[bytes]], list[bool]]) -> None:
        self._present = present  # before the thread starts
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        """Ask the node about chunks of one request."""
        with as_request(req_context.req_id):  # for `kvstore explain`
            return self._present(keys)


class TriggerKvTier(SecondaryTierManager):  # type: ignore[misc]
    """One of a scheduler's tiers. All calls except the threads' own come from the scheduler's thread."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **given: Any,
    ) -> None:
        """Register the pool; the node is not called yet. `given` are vLLM's own arguments and `TierSettings`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        engine = given.pop(ENGINE, None)
        if not isinstance(engine, Engine):
            raise ConfigError(
                "A tier needs the model's identity: "
                'set kv_connector to "TriggerKvTieringConnector", not "OffloadingConnector".'
            )
        self._engine = engine
        settings = TierSettings.of(given, where=f"The tier {tier_type!r}")
        self.locality = None if locality is None else Locality(locality)
        may_tell = offloading_spec.kv_events_config.enable_kv_cache_events  # else they would never be taken
        self._events: list[OffloadingEvent] | None = [] if enable_kv_events and may_tell else None
        if enable_kv_events and not may_tell:
            log.warning("enable_kv_events does nothing: vLLM's kv_events_config is not set.")
        self._load_ns, self._save_ns, self._lookup_ns = (
            ms * 1_000_000
            for ms in (settings.load_timeout_ms, settings.save_timeout_ms, settings.lookup_timeout_ms)
        )
        self._size = self.block_size_bytes
        # A chunk that waits to be stored can't be evicted: most of the pool stays a cache while the node is slow.
        self._storing, self._storing_max = 0, len(primary_kv_view) // VLLM_TIER_STORING_PART
        per_token = sum(
            1 / (tokens * offloading_spec.blocks_per_chunk) for tokens in offloading_spec.tokens_per_block
        )
        self._tokens_max = (len(primary_kv_view) - self._storing_max) / per_token
        self._layout = engine.layout + _form(offloading_spec, self._size)
        self._root = block_key(self._layout)  # hashed once: it is long, and each name has it
        self._clock = SystemClock()
        self._address: int = np.asarray(primary_kv_view).ctypes.data
        self._carrier = Carrier(settings, self._layout, self._size)
        try:
            self._carrier.register(self._address, primary_kv_view.nbytes)
        except BaseException:
            self._carrier.close()
            raise
        self._news = (
            threading.Event()
        )  # a load or a look-up has ended since `get_finished_jobs` was last called
        self._is_asking = False  # whether the last step was told to look something up again
        self._lookups = _Lookups(tier_type, self._present)
        self._seen: dict[str, _Seen] = {}
        self._asks = ThreadPoolExecutor(1, "kvstore-tier-ask")
        self._loads = ThreadPoolExecutor(VLLM_LOAD_THREADS, "kvstore-tier-load")
        self._saves = ThreadPoolExecutor(1, "kvstore-tier-save")
        self._under_way: dict[int, tuple[bool, _Job, Future[_Moved]]] = {}
        self._ended: list[JobResult] = []
        self._counts: dict[str, int] = {}
        log.info(
            "Chunks of %d bytes are stored on %s, over %s.",
            self._size,
            ", ".join(settings.reach.nodes),
            self._carrier.name,
        )

    # --- look-ups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk can be loaded, decided once per request; RETRY until the node has answered or is late."""
        seen = self._seen.get(req_context.req_id)
        is_known = None if seen is None else seen.known.get(key)
        if is_known is not None:
            return LookupResult.HIT if is_known else LookupResult.MISS
        if not self._engine.loads or self._is_too_late(key, req_context):
            return LookupResult.MISS
        if seen is None:
            seen = self._seen[req_context.req_id] = _Seen(self._clock.monotonic_ns())
        if key in seen.brought:  # concurrent requests would evict each other's for ever
            self._count("evicted_chunks", 1)
            return LookupResult.MISS
        if self._engine.is_idle:
            self._ask_for_all(seen, req_context)
        seen.take_answers()
        found: bool | None
        if key in seen.known:
            found = seen.known[key]
        else:
            found = self._lookups.lookup(key + self._more(req_context), req_context)
        if found is None:
            if self._clock.monotonic_ns() - seen.since_ns <= self._lookup_ns:
                self._is_asking = True
                return LookupResult.RETRY
            self._count("late_lookups", 1)
        return LookupResult.HIT if found else LookupResult.MISS

    def _is_too_late(self, key: bytes, req_context: Any) -> bool:
        """Whether a chunk is behind what the pool holds of a prompt: it would evict earlier ones before use."""
        end_token = req_context.get_offload_key_position(key)
        return end_token is not None and end_token > self._tokens_max

    def _ask_for_all(self, seen: _Seen, req_context: Any) -> None:
        """Ask for all chunks of a request at its first one, and wait a moment, because the engine is idle.

        A busy engine's look-ups are made at the end of the step, by one call.
        """
        expected, self._engine.expected = self._engine.expected, None
        if expected is None:
            return
        if not seen.has_asked and (keys := expected()):
            if self._is_too_late(keys[-1], req_context):
                keys = [key for key in keys if not self._is_too_late(key, req_context)]
            more = self._more(req_context)
            names = [key + more for key in keys]
            seen.has_asked, seen.known = True, dict.fromkeys(keys)
            seen.asked = keys, self._asks.submit(self._answers, names, req_context)
        if seen.asked is not None:
            wait([seen.asked[1]], VLLM_LOADING_WAIT_S)

    def _answers(self, names: list[bytes], req_context: Any) -> list[bool]:
        """In a thread: whether the node has these."""
        try:
            return self._lookups.batch_lookup(names, req_context)
        except Exception:  # no error may stop the engine
            log.exception("Chunks could not be looked up.")
            return [False] * len(names)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Record the adapter of a request."""
        if (name := self._engine.adapters.pop(req_context.req_id, None)) is not None:
            req_context.set_state(Adapter(name))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the state of a request."""
        self._seen.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Send this step's look-ups to the node."""
        for request_id in context.preempted_req_ids:  # it is looked up again
            self._seen.pop(request_id, None)
        self._lookups.flush()

    def _more(self, req_context: Any) -> bytes:
        """What vLLM's hashes lack; the same for all chunks of a request."""
        adapter = req_context.get_state(Adapter)
        return self._engine.epoch + (adapter.name if adapter is not None else b"")

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return block_keys(self._root, keys)

    def _present(self, keys: list[bytes]) -> list[bool]:
        names = self._names(keys)  # they say how long the chunks are
        first = self._carrier.prefix(names)  # which costs least, and mostly they are all there
        found = [True] * first + [False] * (first < len(names))
        found += self._carrier.present([(name, self._size) for name in names[first + 1 :]])
        self._news.set()
        return found

    # --- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Queue chunks to be stored, unless too many wait already."""
        chunks = len(job_metadata.chunk_ids)
        if not self._engine.saves:
            self._ended.append(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
        elif self._storing and self._storing + chunks > self._storing_max:
            self._count("skipped_chunks", chunks)
            self._ended.append(JobResult(job_metadata.job_id, success=False))
        else:
            self._storing += chunks
            self._begin(self._saves, self._carrier.put, job_metadata, self._save_ns)

    def submit_load(self, job_metadata: Any) -> None:
        """Queue chunks to be loaded."""
        if (seen := self._seen.get(job_metadata.req_context.req_id)) is not None:
            for key in job_metadata.keys:
                seen.known.pop(key, None)
        self._begin(self._loads, self._carrier.get, job_metadata, self._load_ns)

    def _begin(
        self, threads: ThreadPoolExecutor, move: Callable[..., list[bool]], job_metadata: Any, ns: int
    ) -> None:
        job = _Job(
            list(job_metadata.keys),
            self._more(job_metadata.req_context),
            job_metadata.chunk_ids.tolist(),
            self._clock.monotonic_ns() + ns,
            job_metadata.req_context.req_id,
        )
        future = threads.submit(self._move, move, job)
        self._under_way[job_metadata.job_id] = (job_metadata.is_promotion, job, future)
        if job_metadata.is_promotion:
            future.add_done_callback(lambda _: self._news.set())

    def _move(self, move: Callable[..., list[bool]], job: _Job) -> _Moved:
        """In a thread: put or get."""
        began_ns = self._clock.monotonic_ns()
        whole = [False] * len(job.keys)
        left_ns = job.until_ns - began_ns
        if left_ns > 0:
            try:
                places = [
                    Place(name, self._address + chunk * self._size, self._size)
                    for name, chunk in zip(
                        self._names(key + job.more for key in job.keys), job.chunks, strict=True
                    )
                ]
                with as_request(job.request_id):  # for `kvstore explain`
                    whole = move(places, timeout_s=left_ns / 1e9)
            except Exception:  # no error may stop the engine
                log.exception("Moving chunks failed.")
        return _Moved(whole, (self._clock.monotonic_ns() - began_ns) / 1e9)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call, and the chunks they moved."""
        self._wait_if_idle()
        ended, self._ended = self._ended, []
        for job_id in [number for number, (_, _, future) in self._under_way.items() if future.done()]:
            is_load, job, future = self._under_way.pop(job_id)
            moved = _Moved([False] * len(job.keys), 0.0) if future.cancelled() else future.result()
            ended.append((self._loaded if is_load else self._stored)(job_id, job, moved))
        return ended

    def _wait_if_idle(self) -> None:
        """Wait a moment for the node, because an engine that computes nothing would spin, and keep Python's lock."""
        is_awaited, self._is_asking = self.is_awaited, False
        has_ended = any(future.done() for _, _, future in self._under_way.values())
        if self._engine.is_idle and is_awaited and not has_ended:
            self._news.wait(VLLM_LOADING_WAIT_S)
        self._news.clear()  # before anything is taken: what ends later is news again

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an answer of the node's, or for a load."""
        return self._is_asking or any(is_load for is_load, _, _ in self._under_way.values())

    def _loaded(self, job_id: int, job: _Job, moved: _Moved) -> JobResult:
        here, missing = _parted(job.keys, moved.whole)
        if missing:  # or they would be promised again
            self._lookups.mark_miss([key + job.more for key in missing])
            for request_id, one in self._seen.items():
                one.known.update(
                    (key, False) for key in missing if key in one.known or request_id == job.request_id
                )
        if (seen := self._seen.get(job.request_id)) is not None:
            seen.brought.update(here)
        self._count("loaded_chunks", len(here))
        self._count("missing_chunks", len(missing))
        return JobResult(
            job_id,
            success=not missing,
            successful_keys=here or None,
            transfer_time=moved.seconds,
            transfer_bytes=len(here) * self._size,
        )

    def _stored(self, job_id: int, job: _Job, moved: _Moved) -> JobResult:
        self._storing -= len(job.keys)
        stored, failed = _parted(job.keys, moved.whole)
        self._count("stored_chunks", len(stored))
        self._count("unsaved_chunks", len(failed))
        if self._events is not None and stored:
            self._events.append(
                OffloadingEvent(keys=stored, medium=self.medium, removed=False, locality=self.locality)
            )
        return JobResult(
            job_id,
            success=not failed,
            transfer_time=moved.seconds,
            transfer_bytes=len(stored) * self._size,
        )

    def drain_jobs(self) -> None:
        """Wait for running tasks, which have deadlines; tasks that have not started never will."""
        self._cancel()
        wait([future for _, _, future in self._under_way.values()])

    def _cancel(self) -> None:
        for _, _, future in self._under_way.values():
            future.cancel()

    # --- reports

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which chunks were stored."""
        if self._events is not None:
            events, self._events = self._events, []
            yield from events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Describe the counters of `get_stats`."""
        return {
            _metric(name): OffloadingCounterMetadata(documentation=about) for name, about in _COUNTS.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, {}
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(_metric(name), count)
        return stats

    def _count(self, name: str, count: int) -> None:
        if count:
            self._counts[name] = self._counts.get(name, 0) + count

    # --- the end

    def shutdown(self) -> None:
        """End everything; nothing of ours uses the pool afterwards. DeadlineExceeded if something still may."""
        self._cancel()
        self._carrier.close()  # ends calls that wait for the node
        under_way = [future for _, _, future in self._under_way.values()]
        if wait(under_way, _SHUTDOWN_S).not_done:
            raise DeadlineExceeded("Jobs of the tier have not ended; the pool's memory must stay allocated.")
        for threads in (self._asks, self._loads, self._saves):
            threads.shutdown()
        self._lookups.shutdown()


def _form(spec: Any, size: int) -> bytes:
    """The layout of a chunk in the pool, which its bytes depend on as well."""
    about = [
        *("vllm tier", size, spec.blocks_per_chunk, spec.tokens_per_hash, list(spec.tokens_per_block)),
        *(spec.config.canonical_layout, spec.replicated_layout),
    ]
    return b"\n" + json.dumps(about).encode()


def _parted(keys: Sequence[bytes], whole: Sequence[bool]) -> tuple[list[bytes], list[bytes]]:
    """Split keys into complete ones and the others."""
    pairs = list(zip(keys, whole, strict=True))
    return [key for key, is_whole in pairs if is_whole], [key for key, is_whole in pairs if not is_whole]


def _metric(name: str) -> str:
    return f"vllm:triggerkv_tier_{name}"
