"""Which attention kernels an engine runs, and how they see its KV memory: what its configuration leaves to vLLM.

vLLM chooses an attention backend by the hardware and by what is installed, and the backend chooses the size of its own
blocks and the order of a page's numbers. Only a worker knows the result, so it is digested there, and the scheduler
puts the digest into the names of blocks (`handshake`).

What always holds: two engines have the same digest only if each of their layers has the same backend, which sees the
bytes of a block in the same way. It doesn't depend on the number of blocks. Importing this needs no engine.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DIGEST_BYTES", "combined", "form_of", "kernels_of"]

DIGEST_BYTES = 16


def form_of(shape: Sequence[int], strides: Sequence[int], blocks: int) -> list[list[int]]:
    """How the numbers of a block lie in memory, outermost first: each dimension's place in the cache's shape, its size.

    The dimension that counts blocks has the place -1, and as its size how many of the kernel's form a block.
    """
    at = next((at for at in (0, 1) if at < len(shape) and blocks and not shape[at] % blocks), len(shape))
    places = [one for one in range(len(shape)) if one != at]
    inner = [(strides[one], number, shape[one]) for number, one in enumerate(places)]
    if at < len(shape):
        inner.append((strides[at], -1, shape[at] // blocks))
    return [[number, size] for _, number, size in sorted(inner, reverse=True) if size > 1]


def kernels_of(layers: Mapping[str, Any], groups: Sequence[Sequence[str]], blocks: int) -> bytes | None:
    """Digest the backends of an engine's layers, by their groups, and their views of the memory; None: unknown.

    `layers` are vLLM's, with the caches that their kernels use.
    """
    about = []
    for names in groups:
        of_group = []
        for name in names:
            layer = layers.get(name)
            cache = getattr(layer, "kv_cache", None)
            if layer is None or cache is None or not hasattr(layer, "get_attn_backend"):
                return None
            caches = cache if isinstance(cache, (list, tuple)) else [cache]
            backend = ".".join(layer.get_attn_backend().full_cls_name())
            forms = [[str(one.dtype), form_of(one.shape, one.stride(), blocks)] for one in caches]
            of_group.append([backend, forms])
        about.append(of_group)
    return blake2b(json.dumps(about).encode(), digest_size=DIGEST_BYTES).digest()


def combined(of_ranks: Mapping[tuple[int, int], bytes]) -> bytes:
    """One digest of all ranks."""
    of_each = [[*rank, digest.hex()] for rank, digest in sorted(of_ranks.items())]
    return blake2b(json.dumps(of_each).encode(), digest_size=DIGEST_BYTES).digest()
