"""LMCache's objects: their names on the node, and where their bytes are.

LMCache's own keys name model, rank and chunk, salt and adapter. They don't identify the weights or, on the server, the
number format; both are in our keys. The length is checked with every get.

What always holds: an object whose bytes are not contiguous in ordinary memory is a LayoutError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.engines.carrier import Place
from kvstore.errors import LayoutError
from kvstore.names import block_key

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["chunk_key", "formats", "formats_of", "object_key", "place"]


def formats(dtypes: Iterable[Any]) -> str:
    """Return number formats as text."""
    return " ".join(str(one).removeprefix("torch.") for one in dtypes)


def formats_of(memory: Any) -> str:
    """Return an object's number formats as text; one for each of its groups of layers."""
    meta = memory.metadata
    return formats(meta.dtypes or ([] if meta.dtype is None else [meta.dtype]))


def object_key(key: Any, written: str, weights: str) -> bytes:
    """Name an object of the server's, of these number formats."""
    group = f"{key.kv_rank} {key.object_group_id}"
    parts = ("lmcache mp", key.model_name, group, key.cache_salt, weights, written)
    return block_key(*(one.encode() for one in parts), key.chunk_hash)


def chunk_key(key: Any, weights: str) -> bytes:
    """Name a chunk of an engine's; LMCache's key as text includes the number format and the request's tags."""
    return block_key(b"lmcache", key.to_string().encode(), weights.encode())


def place(name: bytes, memory: Any) -> Place:
    """Return where an object is in memory; LayoutError if it is not plain memory."""
    raw = memory.raw_tensor
    if raw is None or raw.device.type != "cpu" or not raw.is_contiguous():
        raise LayoutError("An object of LMCache is not in plain memory.")
    length = memory.get_size()
    if not 0 < length <= raw.nbytes:
        raise LayoutError(f"An object of LMCache has {length} bytes in {raw.nbytes} bytes of memory.")
    return Place(name, raw.data_ptr(), length)
