"""What the scheduler's side sends to the worker's: the blocks to load and to save in this step.

Plain values, so that any executor of vLLM can carry them to its workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.engines.vllm.groups import Load, Wanted

__all__ = ["Load", "Plan", "StoredReport", "Wanted"]


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Wanted] = field(default_factory=list)
    is_idle: bool = False  # nothing is computed in this step, so loads may be waited for


@dataclass
class StoredReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' reply: blocks of which all pages are stored, and how many workers reported each."""

    stored: dict[tuple[int, bytes], int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another worker's."""
        assert isinstance(other, StoredReport)
        for name, workers in other.stored.items():
            self.stored[name] = self.stored.get(name, 0) + workers
        return self
