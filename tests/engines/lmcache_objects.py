"""Real LMCache objects in the memory of a real allocator."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.memory_management import MemoryObj, MemoryObjMetadata, TensorMemoryObj

SHAPE = torch.Size([2, 3, 16, 64])  # 12 KiB in bf16
OBJECT_BYTES = 12_288


class Arena:
    """L1 memory with objects in a row."""

    def __init__(self, objects: int = 16, dtype: Any = torch.bfloat16) -> None:
        self.dtype = dtype
        self.memory = torch.zeros(objects * OBJECT_BYTES, dtype=torch.uint8)
        self.desc = L1MemoryDesc(self.memory.data_ptr(), self.memory.nbytes, 4096)

    def raw(self, number: int) -> torch.Tensor:
        return self.memory[number * OBJECT_BYTES : (number + 1) * OBJECT_BYTES]

    def object(self, number: int) -> MemoryObj:
        meta = MemoryObjMetadata(
            SHAPE, self.dtype, number * OBJECT_BYTES, OBJECT_BYTES, 1, shapes=[SHAPE], dtypes=[self.dtype]
        )
        return TensorMemoryObj(self.raw(number), meta, None)

    def fill(self, seed: int) -> None:
        given = torch.Generator().manual_seed(seed)
        self.memory.copy_(torch.randint(0, 256, self.memory.shape, dtype=torch.uint8, generator=given))


def key(name: str, *, model: str = "llama", rank: int = 0, group: int = 0, salt: str = "") -> ObjectKey:
    return ObjectKey(name.encode(), model, rank, group, salt)
