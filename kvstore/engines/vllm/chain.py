"""The digests of a request's blocks: each covers its tokens, whatever else determines its KV, and the previous digest.

What always holds: two blocks have one digest only if all tokens up to their ends are the same, and so are the
cache_salt, the adapter (by name and content), images and embeddings, each at its position. It is BLAKE2b over a
canonical form, so it is the same in every process.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.engines.vllm.weights import adapter_name
from kvstore.names import block_key

__all__ = ["Chain"]


class Chain:
    """The chain of a request, in blocks of one size. Blocks of different epochs have different names."""

    def __init__(self, request: Any, block_tokens: int, epoch: bytes = b"") -> None:
        self._request = request
        self._block_tokens = block_tokens
        self._image = 0
        self.digests: list[bytes] = []
        self._last: list[int] = []  # the tokens of the last block
        self._root = block_key(b"vllm", b"%d" % block_tokens, epoch)

    def grow(self) -> list[bytes]:
        """The digests of all full blocks of the request's current tokens."""
        tokens, size = self._request.all_token_ids, self._block_tokens
        end = len(self.digests) * size
        if self._last != list(tokens[max(0, end - size) : end]):
            # A request fed in parts may lose its last token again before anything is computed from it.
            self.digests.clear()
            self._image = 0
        for begin in range(len(self.digests) * size, len(tokens) - size + 1, size):
            extra, self._image = generate_block_hash_extra_keys(
                self._request, begin, begin + size, self._image
            )
            before = self.digests[-1] if self.digests else self._root
            self._last = list(tokens[begin : begin + size])
            numbers = array("q", self._last).tobytes()
            self.digests.append(block_key(before, numbers, _written(extra)))
        return self.digests


def _written(extra: tuple[Any, ...] | None) -> bytes:
    if not extra:
        return b""
    return json.dumps([_portable(one) for one in extra], default=bytes.hex).encode()


def _portable(one: Any) -> Any:
    """An adapter is identified by its content, because its path means nothing on another machine."""
    if isinstance(one, tuple) and one[0] == "lora":
        _, name, path = one
        return ["lora", name, adapter_name(path)]
    return one
