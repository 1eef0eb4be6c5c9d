"""The identity of an engine's blocks: a layout for each of its KV cache groups, from which their objects are named.

The stored unit is a block of tokens: its pages, each the KV of one layer as in the engine's memory, contiguous in one
object, or in several of some layers each if one would be too large. A page's byte order is private to the engine
(`Order.OPAQUE`), so everything that may change it is in the fingerprint: vLLM's version, the device and, on CPUs, the
instruction set, the layout of the cache, its number format. What only workers know, the attention backend that vLLM
chose and the size of its blocks, is in the digests of blocks (`kernels`).

What always holds: two engines name the same object only if model, weights, shard, layers and all tokens before it are
the same. `model_of` identifies model and weights, for the connector's objects and for an OffloadingSpec's chunks.
Models that can't be named so (recurrent state, blocks split over context-parallel ranks, attention that looks ahead)
make the connector inactive.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore.engines.vllm.groups import Group, Identity
from kvstore.engines.vllm.weights import weights_name
from kvstore.errors import LayoutError
from kvstore.layout import Layer, Layout, Order

__all__ = ["Model", "identify", "identify_chunks", "model_of"]

_DTYPES = {"float8_e4m3fn": "float8_e4m3", "uint8": "int8"}
_FORM = "pages of layers in one object"  # what was stored page by page is never taken for one of these
# Paths and versions of tools are no part of what a model computes.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


class Model(NamedTuple):
    """What determines the bytes of all KV of an engine, in any kind of layer."""

    name: str
    weights: str  # with all that is said about how to compute with them
    engine: str  # who computes, and in which number format and order the cache is kept


def identify(vllm_config: Any, kv_cache_config: Any, weights: str) -> Identity:
    """Identify this engine's KV; LayoutError if that is impossible."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("Context-parallel ranks are not supported.")
    model = model_of(vllm_config, kv_cache_config, weights)
    groups = tuple(
        _group(number, group, vllm_config, model)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    if not groups:
        raise LayoutError("The model has no KV cache.")
    return Identity(groups, b"\n".join(group.shards[0].canonical for group in groups))


def _forbids_cached_context(vllm_config: Any) -> bool:
    """Whether the platform has turned vLLM's own prefix cache off because its kernels would not look at it."""
    return (
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.cache_config.enable_prefix_caching
    )


def identify_chunks(vllm_config: Any, kv_cache_config: Any, weights: str) -> bytes:
    """Identify an OffloadingSpec's chunks, which have all groups and ranks; LayoutError if that is impossible."""
    parallel = vllm_config.parallel_config
    groups = [
        [[_kind(spec), _isa(vllm_config, spec), list(group.layer_names)] for spec in _specs(group)]
        for group in kv_cache_config.kv_cache_groups
    ]
    ranks = [
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.world_size,
    ]
    about = ["vllm offloading", *model_of(vllm_config, kv_cache_config, weights), ranks, groups]
    return json.dumps(about).encode()


def model_of(vllm_config: Any, kv_cache_config: Any, weights: str) -> Model:
    """Identify the model, its weights and the engine; `weights` is the user's name for them.

    LayoutError if no KV may be reused.
    """
    if _forbids_cached_context(vllm_config):
        raise LayoutError(
            "On this CPU vLLM computes MLA from the tokens of one step only, and caches no prefix."
        )
    model = vllm_config.model_config
    drafts = getattr(vllm_config.speculative_config, "draft_model_config", None)
    is_dummy = str(vllm_config.load_config.load_format) == "dummy"  # no file of the folder is read
    about = [
        _weights(model, weights or is_dummy * "dummy"),
        _weights(drafts, is_dummy * "dummy") if drafts is not None else None,
        is_dummy,
    ]
    engine = [
        "vllm",
        vllm.__version__,
        current_platform.device_name,
        str(vllm_config.attention_config.backend),
        kv_cache_config.kv_cache_layout,
        str(vllm_config.cache_config.cache_dtype),
        list(vllm_config.cache_config.kv_cache_dtype_skip_layers),
    ]
    return Model(_model(model), json.dumps(about, sort_keys=True, default=str), json.dumps(engine))


def _specs(group: Any) -> list[Any]:
    """The description of a group's layers, one for each where they differ."""
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    of_layers = [specs.get(name, spec) for name in group.layer_names]
    for one in of_layers:
        if getattr(one, "non_causal", False):
            raise LayoutError("With attention that looks ahead, KV depends on later tokens.")
    return of_layers


def _kind(spec: Any) -> list[str]:
    """The properties of a layer's KV that determine its bytes."""
    names = ("block_size", "page_size_bytes", "dtype", "num_kv_heads", "head_size", "head_size_v")
    more = ("sliding_window", "attention_chunk_size", "kv_quant_mode", "shapes", "dtypes")
    return [type(spec).__name__, *(str(getattr(spec, name, None)) for name in (*names, *more))]


def _group(number: int, group: Any, vllm_config: Any, model: Model) -> Group:
    of_layers = _specs(group)
    for one in of_layers:
        if type(one) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
            raise LayoutError(f"KV of the kind {type(one).__name__} can't be stored by its tokens.")
    first = of_layers[0]
    if len({(one.page_size_bytes, one.block_size, str(one.dtype)) for one in of_layers}) > 1:
        raise LayoutError("Layers of one group have pages of different sizes.")
    parallel = vllm_config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if stages > 1:
        raise LayoutError("Pipeline stages are not supported: the scheduler does not know all layers.")
    layers = tuple(
        Layer(
            heads=one.num_kv_heads * ranks,
            k_numbers=one.head_size,
            v_numbers=0 if isinstance(one, MLAAttentionSpec) else one.head_size_v,
        )
        for one in of_layers
    )
    name = str(first.dtype).removeprefix("torch.")
    layout = Layout(
        model=model.name,
        weights=model.weights,
        dtype=_DTYPES.get(name, name),
        block_tokens=first.block_size,
        layers=layers,
        order=Order.OPAQUE,
        shards=ranks,
        isa=_isa(vllm_config, first),
        engine=json.dumps([model.engine, _kind(first), _FORM]),
    )
    return Group(
        number=number,
        block_tokens=first.block_size,
        window_tokens=first.sliding_window if isinstance(first, SlidingWindowSpec) else 0,
        layer_names=tuple(group.layer_names),
        shards=tuple(layout.of_shard(rank, ranks) for rank in range(ranks)),
        page_bytes=first.page_size_bytes,
    )


def _model(model_config: Any) -> str:
    name = str(model_config.model)
    return Path(name).resolve().name if Path(name).is_dir() else name


def _weights(model_config: Any, given: str) -> list[Any]:
    """The weights, by the user's name if there is one, and the settings that affect computation with them."""
    about = json.loads(model_config.hf_config.to_json_string(use_diff=False))
    for name in _NOT_THE_MODEL:
        about.pop(name, None)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    # If weights are not loaded from the model's own folder, vLLM's settings name the source.
    weights = model_config.model_weights or model_config.model
    found = given or weights_name(str(weights), model_config.revision, commit)
    if not found:
        raise LayoutError(f"{weights} has no weights to identify: set `weights`.")
    return [
        found,
        # A user who names the weights may forget to rename them for another revision.
        commit or model_config.revision,
        model_config.code_revision,
        about,
        str(model_config.dtype),
        str(model_config.quantization),
        str(model_config.quantization_config),
        model_config.disable_sliding_window,
    ]


def _isa(vllm_config: Any, spec: Any) -> str:
    """The byte order of a CPU's blocks: its kernels pack them for its instruction set."""
    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  # only where it is a CPU

    kernel = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        getattr(spec, "head_size", None),  # recurrent state has none
        vllm_config.cache_config.cache_dtype,
    )
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {kernel}"
