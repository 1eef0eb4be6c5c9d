"""The connector's counters, as vLLM's log and its Prometheus page show them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

__all__ = ["COUNTS", "PromMetrics", "Stats"]

# Each is a count since the last report.
COUNTS = {
    "hit_tokens": "Tokens whose KV was found on the node and not in the engine",
    "loaded_bytes": "Bytes of KV received from the node",
    "load_ns": "Nanoseconds spent in loads; concurrent ones count twice",
    "missing_blocks": "Blocks promised but not received, and computed",
    "stored_blocks": "Blocks stored with all their pages, on all workers",
    "saved_pages": "Pages sent to the node",
    "saved_bytes": "Bytes of KV sent to the node",
    "unsaved_pages": "Pages that the node did not accept in time",
    "skipped_pages": "Pages not saved because earlier ones still waited for the node",
    "withheld_pages": "Pages not saved because a load of their step had failed",
    "lookups_late": "Look-ups that the node did not answer in time",
}
# The same for each rule of the match-action table.
OF_RULES = {
    "rule_hits": "Requests that hit a rule",
    "rule_bytes": "Bytes that the node read into its memory because of a rule",
}
_OF = " of rule "


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name."""

    data: dict[str, int]

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        assert name in COUNTS or name.split(_OF, 1)[0] in OF_RULES
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def add_of_rule(self, name: str, rule: str, count: int) -> None:
        """Count for a rule; "" is all rules beyond a number."""
        self.add(f"{name}{_OF}{rule}", count)

    def reset(self) -> None:
        """Start again."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts to these."""
        for name, count in other.data.items():
            self.add(name, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures for the log, with a rate instead of nanoseconds."""
        shown: dict[str, int | float] = {
            name: count for name, count in self.data.items() if name != "load_ns"
        }
        if load_ns := self.data.get("load_ns", 0):
            shown["load_GBps"] = round(self.data.get("loaded_bytes", 0) / load_ns, 3)
        return shown

    def is_empty(self) -> bool:
        """Whether all counts are zero."""
        return not self.data

    def take(self) -> Stats | None:
        """Return the counts since the last call; None if there are none."""
        taken, self.data = Stats(data=self.data), {}
        return None if taken.is_empty() else taken


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each of the counts, with the engine as a label."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:triggerkv_{name}", documentation=about, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, about in COUNTS.items()
        }
        self._of_rules = {
            name: self._counter_cls(
                name=f"vllm:triggerkv_{name}", documentation=about, labelnames=[*self._labelnames, "rule"]
            )
            for name, about in OF_RULES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts."""
        for name, count in transfer_stats_data.items():
            kind, is_of_rule, rule = name.partition(_OF)
            if is_of_rule:
                labels = self.per_engine_labelvalues[engine_idx]
                self._of_rules[kind].labels(*labels, rule).inc(count)
            else:
                self._counters[name][engine_idx].inc(count)
