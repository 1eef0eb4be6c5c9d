"""The names of the pages in SGLang's host pools, and where their bytes are.

SGLang names a page by the chained hash of its tokens (adapter and salt are in the chain's seed). Everything else that
determines its bytes is in the pool's `Layout`: model, weights, shard, stage, number format, page size, and, because the
order of bytes is the engine's own, the pool's class, its layout and the sizes of a page's pieces. That layout's
fingerprint is part of every key, so pages of pools that differ in any of it never match.

What always holds: a pool whose bytes are the same on all tensor-parallel ranks (MLA) has one name on all of them, any
other pool one per rank; if in doubt it is one per rank, which costs hits but never serves wrong bytes.
What it doesn't do: share heads between tensor-parallel degrees (`tp_lcm_size`); each degree has its own pages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from kvstore.engines.carrier import Place
from kvstore.errors import LayoutError
from kvstore.layout import ELEMENT_BYTES, Layer, Layout, Order
from kvstore.names import block_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = ["Pool", "anchor_layout"]

_DTYPES = {"float8_e4m3fn": "float8_e4m3", "uint8": "int8"}
_KV = "kv"
_MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class Pool:
    """A host pool as it was registered."""

    name: str
    host: Any
    layout: Layout
    page_tokens: int  # 0: it has no bytes; its pages belong to other pools
    sizes: tuple[int, ...]  # of a page's pieces

    @classmethod
    def of(cls, name: str, host: Any, config: HiCacheStorageConfig, weights: str) -> Pool:
        """Describe a pool; LayoutError if its pages have no pieces that can be named."""
        page_tokens = int(getattr(host, "logical_page_size", None) or getattr(host, "page_size", None) or 1)
        sizes = _sizes(host, page_tokens) if _has_bytes(host) else ()
        if not sizes:
            page_tokens = 0
        return cls(name, host, _layout(name, host, config, weights, sizes), page_tokens, sizes)

    @property
    def pieces(self) -> int:
        """How many objects a page is stored as."""
        return len(self.sizes)

    def keys(self, page: str) -> list[bytes]:
        """Name a page's pieces."""
        mine = self.layout.fingerprint
        return [block_key(mine, page.encode(), b"piece %d" % number) for number in range(self.pieces)]

    def flat_key(self, page: str) -> bytes:
        """Name a page as SGLang's generic calls pass it: one flat tensor."""
        return block_key(self.layout.fingerprint, page.encode(), b"flat")

    def buffers(self) -> list[torch.Tensor]:
        """The memory that holds its pages."""
        given = getattr(self.host, "get_hybrid_pool_buffer", None)
        some = given() if given is not None else [getattr(self.host, "kv_buffer", None)]
        return [one for one in some if one is not None and one.numel()]

    def places(self, pages: Sequence[str], indices: torch.Tensor | None) -> list[Place]:
        """Return where the pieces of pages are, page by page; LayoutError if the number of indices doesn't match."""
        count = 0 if indices is None else indices.numel()
        if indices is None or not self.pieces or count != len(pages) * self.page_tokens:
            raise LayoutError(f"{len(pages)} pages of the pool {self.name} do not have {count} indices.")
        pointers, sizes = self.host.get_page_buffer_meta(indices)
        if tuple(sizes) != self.sizes * len(pages) or len(pointers) != len(sizes):
            raise LayoutError(f"The pages of the pool {self.name} are not those that it was registered with.")
        names = [key for page in pages for key in self.keys(page)]
        return [Place(*one) for one in zip(names, pointers, sizes, strict=True)]


def anchor_layout(config: HiCacheStorageConfig, weights: str) -> bytes:
    """The metadata of every object of this engine, of any pool."""
    parts = [_version(), config.model_name or "", weights, config.pp_rank, config.pp_size]
    return json.dumps(parts).encode()


def _has_bytes(host: Any) -> bool:
    """Whether it has bytes of its own, and is not only an index of other pools."""
    return hasattr(host, "get_page_buffer_meta") and (
        getattr(host, "kv_buffer", None) is not None or hasattr(host, "get_hybrid_pool_buffer")
    )


def _sizes(host: Any, page_tokens: int) -> tuple[int, ...]:
    pointers, sizes = host.get_page_buffer_meta(torch.arange(page_tokens))
    if len(pointers) != len(sizes) or any(size < 1 for size in sizes):
        raise LayoutError(f"The pages of a {type(host).__name__} have no pieces that can be named.")
    return tuple(int(size) for size in sizes)


def _is_replicated(name: str, host: Any, config: HiCacheStorageConfig) -> bool:
    """Whether every tensor-parallel rank has the same bytes. A draft of another kind than its target has its own."""
    kinds = {kind.__name__ for kind in type(host).__mro__}
    return bool(config.is_mla_model) and name != _MAMBA and not any("MHA" in kind for kind in kinds)


def _layout(name: str, host: Any, config: HiCacheStorageConfig, weights: str, sizes: Sequence[int]) -> Layout:
    is_replicated = _is_replicated(name, host, config)
    said = str(getattr(host, "dtype", "")).removeprefix("torch.")
    dtype = _DTYPES.get(said, said)
    if dtype not in ELEMENT_BYTES:
        dtype = "int8"  # its description is in `engine`
    shard, shards = (config.dcp_rank, config.dcp_size) if is_replicated else (config.tp_rank, config.tp_size)
    page_tokens = max(1, int(getattr(host, "page_size", None) or 1))
    engine = [
        "sglang",
        _version(),
        name,
        type(host).__name__,
        said,
        str(getattr(host, "layout", "")),
        str(getattr(host, "storage_format_tag", "")),
        list(sizes),
        [getattr(host, one, None) for one in ("layer_num", "head_num", "head_dim", "v_head_dim")],
        [getattr(host, one, None) for one in ("start_layer", "end_layer", "kv_cache_dim")],
        [config.attn_cp_rank, config.attn_cp_size, is_replicated, config.should_split_heads],
        [config.dcp_rank, config.dcp_size, config.logical_page_size],
    ]
    return Layout(
        model=config.model_name or "",
        weights=weights,
        dtype=dtype,
        block_tokens=page_tokens,
        layers=tuple(Layer(1, size // page_tokens, 0, split=False) for size in sizes) or (Layer(0, 0, 0),),
        order=Order.OPAQUE,
        shard=shard,
        shards=shards,
        stage=config.pp_rank,
        stages=config.pp_size,
        engine=json.dumps(engine, default=str),
    )


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
