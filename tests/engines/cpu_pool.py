"""vLLM's multi-tier offloading on a CPU; only the worker, which copies between two memories, is ours.

vLLM's own worker copies by CUDA and refuses a CPU. Pool, managers, look-ups and jobs are untouched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from nic_offload.memory import copy_runs

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The same as on a GPU, for one rank."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copies(kv_caches, region)
        return self._worker


class _Copies(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._blocks = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self._chunks = [region.create_next_worker_view(one.page_size_bytes) for one in caches.tensors]
        self._groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
        self._region = region
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._places(src_spec, dst_spec):
            _copy_rows(self._chunks[tensor], chunks, self._blocks[tensor], blocks)
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._places(dst_spec, src_spec):
            _copy_rows(self._blocks[tensor], blocks, self._chunks[tensor], chunks)
        return self._done(job_id)

    def _places(self, blocks: Any, chunks: Any) -> list[tuple[int, Any, Any]]:
        assert len(blocks.block_ids) == len(chunks.chunk_ids)
        places, first = [], 0
        for tensors, count in zip(self._groups, blocks.group_sizes, strict=True):
            some = slice(first, first + count)
            places += [(one, blocks.block_ids[some], chunks.chunk_ids[some]) for one in tensors if count]
            first += count
        return places

    def _done(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Wait until a submitted job is done."""

    def shutdown(self) -> None:
        self._blocks, self._chunks = [], []
        self._region.cleanup()


def _copy_rows(target: Any, to: Any, source: Any, rows: Any) -> None:
    """Copy rows of one tensor to rows of another, as a device would: without Python for each, and without its lock."""
    runs = np.zeros((len(rows), 4), np.uint64)
    runs[:, 1], runs[:, 2] = np.asarray(rows) * source.stride(0), np.asarray(to) * target.stride(0)
    runs[:, 3] = source.shape[1]
    copy_runs(runs.data, [source.data_ptr()], target.data_ptr())
