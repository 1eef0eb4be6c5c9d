"""vLLM's own scheduler with our connector, a model whose KV is a chain of sums, and a node that is a dict.

A token's KV depends on all KV before it, as it lies in memory: whatever is computed from a block that did not come is
wrong, and stays recognisable. All of it runs in one thread, and the same seed gives the same run.
"""

from __future__ import annotations

import importlib
import random
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-engines only: make test-engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn of much, and here warnings are errors
    importlib.import_module("vllm.v1.core.sched.scheduler")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstore.client import Prefix
from kvstore.engines.vllm import loading, lookup, saving, scheduler, worker
from kvstore.engines.vllm.chain import Chain
from kvstore.engines.vllm.connector import TriggerKvConnector
from kvstore.engines.vllm.kernels import combined
from kvstore.engines.vllm.saving import Copied, Saves, staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from kvstore.engines.vllm.kv_memory import KvMemory
    from kvstore.engines.vllm.page_transport import Object

__all__ = [
    "BLOCK",
    "LAYERS",
    "FakeNode",
    "OtherConnector",
    "Pretend",
    "RequestStatus",
    "answer_of",
    "model_folder",
]

BLOCK = 16
LAYERS = 2
VOCABULARY = 1000
_MASK = (1 << 63) - 1


def _fold(state: int, kv: Iterable[int]) -> int:
    for number in kv:
        state = ((state ^ number) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK
    return state


def _kv(before: int, token: int) -> list[int]:
    """A token's KV in each layer, from all KV before it."""
    return [_fold(before ^ (before >> 29), (token, layer)) for layer in range(LAYERS)]


def kv_of(tokens: Sequence[int]) -> tuple[list[list[int]], int]:
    """The KV of tokens, layer by layer, and the state from which the next token is computed."""
    state, rows = 0, []
    for token in tokens:
        rows.append(_kv(state, token))
        state = _fold(state, rows[-1])
    return [[row[layer] for row in rows] for layer in range(LAYERS)], state


def _said(state: int) -> int:
    return (state >> 20) % VOCABULARY


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    """The answer of an engine without failures."""
    _, state = kv_of(prompt)
    answer = [_said(state)]
    while len(answer) < tokens:
        state = _fold(state, _kv(state, answer[-1]))
        answer.append(_said(state))
    return answer


class Immediately:
    """An executor that runs a thread's work in the calling thread."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


@dataclass
class FakeNode:
    """Objects by key. With the probability `losing`, one that was found is lost before it is fetched."""

    losing: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    objects: dict[bytes, bytes] = field(default_factory=dict)
    shares: bool = False  # its memory, with the engine
    lost: int = 0

    def prefix(self, keys: Sequence[bytes], timeout_s: float) -> Any:  # noqa: ARG002
        missing = (at for at, key in enumerate(keys) if key not in self.objects)
        found = next(missing, len(keys))
        return Prefix(found, None, is_shared=self.shares and found == len(keys))

    def exists(self, keys: Sequence[bytes], timeout_s: float) -> list[Any]:  # noqa: ARG002
        return [None for _ in keys]


class FakeTransport:
    name = "a dict"

    def __init__(self, node: FakeNode, memory: KvMemory) -> None:
        self._node, self._memory = node, memory
        self._copies = staging(memory, 1 << 20)
        self.saves = Saves(memory, self._copies, self)

    def send(self, objects: Sequence[Copied], copying_s: float = 0.0) -> Any:  # noqa: ARG002
        for one in objects:
            content = self._copies[one.offset : one.offset + one.length]
            self._node.objects.setdefault(one.key, content)
        return SimpleNamespace(outcome=lambda wait_s: [True] * len(objects))  # noqa: ARG005

    def before_loads(self) -> None:
        pass

    def after_loads(self) -> None:
        pass

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:  # noqa: ARG002
        here = []
        for one in objects:
            content = self._node.objects.get(one.key)
            is_lost = content is None or self._node.dice.random() < self._node.losing
            if is_lost:
                self._node.lost += 1
                self._node.objects.pop(one.key, None)
            at = 0
            for buffer, length, offset in one.pieces.tolist():
                place = self._memory.bytes_of(buffer, offset, length)
                if is_lost:
                    place[:] = bytes(byte ^ 0xA5 for byte in place)  # whatever lay there
                else:
                    assert content is not None
                    place[:] = content[at : at + length]
                at += length
            assert at == one.length
            here.append(not is_lost)
        return here


@dataclass
class _OtherPlan(KVConnectorMetadata):  # type: ignore[misc]
    blocks: list[int]


class OtherConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A second connector, which promises two blocks of every prompt and never delivers them."""

    promised: list[int] = []  # noqa: RUF012  # of the scheduler's side, taken by the worker's
    failed: set[int] = set()  # noqa: RUF012

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        is_new = not num_computed_tokens and not request.num_preemptions and request.num_tokens > 3 * BLOCK
        return (2 * BLOCK if is_new else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        if num_external_tokens:
            self.promised += [block.block_id for block in blocks.blocks[0][:2]]

    def build_connector_meta(self, scheduler_output: Any) -> _OtherPlan:  # noqa: ARG002
        promised, self.promised[:] = list(self.promised), []
        return _OtherPlan(promised)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ARG002
        self.failed |= set(cast("_OtherPlan", self._connector_metadata).blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = set(self.failed)
        self.failed.clear()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def model_folder(folder: Path) -> Path:
    """A model that consists of its configuration only."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


OURS = {
    "kv_connector": "TriggerKvConnector",
    "kv_connector_module_path": "kvstore.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.engines.pretend",
    "kv_role": "kv_both",
}


class Pretend:
    """One simulated engine."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        node: FakeNode,
        *,
        load: str = "sync",
        blocks: int = 64,
        step_tokens: int = 64,
        prompt_tokens: int = 0,
        beside: bool = False,
        plans_ahead: bool = False,
        policy: str = "recompute",
        backend: str = "SUMS",
    ) -> None:
        for module in (loading, lookup, saving):
            monkeypatch.setattr(module, "ThreadPoolExecutor", Immediately)
        monkeypatch.setattr(scheduler, "open_client", lambda *_: node)
        monkeypatch.setattr(worker, "open_transport", lambda *given: FakeTransport(node, given[-1]))
        ours = OURS | {
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "node": "127.0.0.1:9",
                "load": load,
                "weights": "w",
            },
        }
        transfer: dict[str, Any] = ours
        if beside:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [OTHER, ours]},
            }
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=512
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=step_tokens,
                max_num_seqs=8,
                max_model_len=512,
                long_prefill_token_threshold=prompt_tokens,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.scheduler_config.async_scheduling = plans_ahead
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        names = [f"layer.{layer}" for layer in range(LAYERS)]
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)])
        self.scheduler = Scheduler(
            self.config, cache, StructuredOutputManager(self.config), block_size=BLOCK, log_stats=True
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.kv = torch.zeros((LAYERS, blocks, BLOCK), dtype=torch.int64)
        caches = {
            name: self.kv[layer].view(torch.float32).view(blocks, 1, BLOCK, 2)
            for layer, name in enumerate(names)
        }
        self.worker.register_kv_caches(caches)
        self.config.compilation_config.static_forward_context.update(
            {
                name: SimpleNamespace(
                    kv_cache=cache,
                    get_attn_backend=lambda: SimpleNamespace(full_cls_name=lambda: ("pretend", backend)),
                )
                for name, cache in caches.items()
            }
        )
        found = self.worker.get_handshake_metadata()  # as in the engine's core
        self.kernels = b"" if found is None else combined({(0, 0): found.digest})
        if found is not None:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): found})
        self.names = names
        self.answers: dict[str, list[int]] = {}
        self.said: dict[str, tuple[list[int], int]] = {}
        self._numbers = self.kv.numpy()
        self.layers_run = LAYERS  # fewer: the forward pass ends in the middle

    @property
    def ours(self) -> TriggerKvConnector:
        """The worker's side of ours."""
        if isinstance(self.worker, TriggerKvConnector):
            return self.worker
        return cast("TriggerKvConnector", self.worker.sub_connectors[1])

    @property
    def scheduling(self) -> Any:
        """The scheduler's side of ours."""
        connector: Any = self.scheduler.connector
        return connector._scheduling

    @property
    def saves(self) -> Any:
        working_side = self.ours._working
        assert isinstance(working_side, worker.Working)
        return working_side._saves

    def count(self, name: str) -> int:
        working_side = self.ours._working
        assert working_side is not None
        return working_side.stats.data.get(name, 0)

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        self.said[name] = (list(prompt), tokens)
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=how,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        self.said.pop(name, None)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def step(self, *, abort: str | None = None) -> None:
        """One step, as in the engine's core; a request may be aborted during it."""
        order = self.scheduler.schedule()
        sampled, output = self._execute(order)
        if abort is not None:
            self.abort(abort)
        names = list(order.num_scheduled_tokens)
        outputs = self.scheduler.update_from_output(
            order,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=output,
            ),
        )
        for of_client in outputs.values():
            for one in of_client.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)

    def run(self) -> None:
        steps = 0
        while self.is_busy:
            self.step()
            steps += 1
            assert steps < 2000, "the engine stands still"
        self.settle()

    def settle(self) -> None:
        """Process the results of the last step's saves."""
        for _ in range(2):
            self.step()

    def forget(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def _execute(self, order: Any) -> tuple[list[list[int]], KVConnectorOutput]:
        worker = self.worker
        worker.bind_connector_metadata(order.kv_connector_metadata)
        if order.has_sync_kv_loads:
            worker.start_load_kv(None)
        begins = {one.req_id: one.num_computed_tokens for one in order.scheduled_new_reqs}
        cached = order.scheduled_cached_reqs
        begins |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            self._forward(name, begins[name], tokens) for name, tokens in order.num_scheduled_tokens.items()
        ]
        if sampled and worker.has_connector_metadata():  # as vLLM's layers ask
            for layer in range(self.layers_run):
                worker.save_kv_layer(self.names[layer], None, None)
        if not order.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(order.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return sampled, output

    def _forward(self, name: str, begin: int, tokens: int) -> list[int]:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        said = list(request.all_token_ids)
        context = self._numbers[:, blocks].reshape(LAYERS, -1)[:, :begin]
        state = _fold(0, context.T.ravel().tolist())
        for at in range(begin, begin + tokens):
            kv = _kv(state, said[at])
            self._numbers[:, blocks[at // BLOCK], at % BLOCK] = kv
            state = _fold(state, kv)
        return [_said(state)] if begin + tokens == len(said) else []

    # --- what must hold

    def check_answers(self, names: Iterable[str] | None = None) -> None:
        for name in names if names is not None else self.said:
            prompt, tokens = self.said[name]
            assert self.answers[name] == answer_of(prompt, tokens), name

    def check_pages(self, node: FakeNode, conversations: Iterable[Sequence[int]]) -> int:
        """Each page in the node equals a clean engine's page of that name; returns their number."""
        identity = self.ours._identity
        assert identity is not None
        (group,) = identity.groups
        clean: dict[bytes, bytes] = {}
        for tokens in conversations:
            rows, _ = kv_of(tokens)
            fake = SimpleNamespace(
                all_token_ids=list(tokens),
                cache_salt=None,
                lora_request=None,
                prompt_embeds=None,
                mm_features=[],
            )
            for number, digest in enumerate(Chain(fake, BLOCK, self.kernels).grow()):
                (key,) = group.objects([digest], 0)
                pages = [layer[number * BLOCK : (number + 1) * BLOCK] for layer in rows]
                clean[key] = torch.tensor(pages, dtype=torch.int64).numpy().tobytes()
        assert not set(node.objects) - set(clean), "objects of unknown names"
        poisoned = [key for key, content in node.objects.items() if clean[key] != content]
        assert not poisoned, f"{len(poisoned)} of {len(node.objects)} are not what a clean engine has"
        return len(node.objects) * LAYERS
