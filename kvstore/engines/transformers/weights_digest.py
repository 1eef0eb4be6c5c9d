"""A digest of a model's weights: KV made with other weights is different, whatever the model's name."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

__all__ = ["weights_digest"]


def weights_digest(model: Any) -> str:
    """Digest names, shapes and bytes of all parameters and buffers; about a second per gigabyte."""
    state = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
