"""The node's metrics for Prometheus: each with its help and labels, in one place.

What always holds: names end in their unit, and counters in `_total`. Labels have few values: reasons, calls, statuses
and drives are few, tenants are those of the node's file, and no user, session or key is one. Values are collected on
the node's thread, from existing counters, and formatted on another.
What it doesn't do: take a lock that is used in moving a block.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvstore.durability import Durability
from kvstore.errors import KeyTaken, LeaseExpired
from kvstore.limits import LANDING_BYTES_MAX, PINS_MAX
from kvstore.miss import MissReason
from kvstore.node.timings import BUCKETS_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore.cluster.membership import Membership
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.timings import Histogram
    from kvstore.node.upkeep import Upkeep
    from kvstore.storage.items import DriveState

__all__ = ["CONTENT_TYPE", "gathered", "rendered"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NS: Final = 1_000_000_000


class _Gathered:
    """Metrics collected at one moment, for a registry that formats them as text."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._metrics


def rendered(metrics: Sequence[Metric]) -> bytes:
    """Return all metrics as text, with those of the process itself."""
    registry = CollectorRegistry()
    registry.register(_Gathered(metrics))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def gathered(node: Node, tenants: Tenants, asking: Tenant, version: str) -> list[Metric]:
    """Gather all metrics. Quotas are the caller's own, or all tenants' if it is an observer."""
    return [
        *_of_node(node, version),
        *_of_cluster(node.membership),
        *_of_upkeep(node.upkeep),
        *_of_blocks(node),
        *_of_bounds(node),
        *_of_times(node),
        *_of_drives(node.store.drive_states()),
        *_of_tenants(node, tenants, asking),
    ]


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = CounterMetricFamily(name, text, labels=[label])
    for each, value in values.items():
        metric.add_metric([each], value)
    return metric


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=[label])
    for each, value in values.items():
        metric.add_metric([each], value)
    return metric


def _histograms(name: str, text: str, label: str, values: Mapping[str, Histogram]) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=[label])
    for each, histogram in values.items():
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        metric.add_metric([each], buckets, sum_value=histogram.sum_ns / _NS)
    return metric


def _of_node(node: Node, version: str) -> list[Metric]:
    store = node.store.statistics()
    up_ms = (node.clock.monotonic_ns() - node.began_ns) // 1_000_000
    info = {
        "node": node.store.name,
        "version": version,
        "provider": node.fabric.provider,
        "eviction": store.eviction.policy,
    }
    return [
        InfoMetricFamily(
            "kvstore_node", "The node's name, version, fabric provider and eviction policy.", value=info
        ),
        _gauge(
            "kvstore_start_time_seconds",
            "Unix time at which the node started.",
            (node.clock.wall_ms() - up_ms) / 1000,
        ),
        _gauge("kvstore_takes_puts", "1 if at least one drive accepts puts.", float(store.takes_puts)),
        _gauge("kvstore_blocks", "Stored blocks.", store.blocks),
        _gauge("kvstore_sessions", "Stored sessions.", len(node.store.manifests)),
        _gauge(
            "kvstore_sessions_protected",
            "Sessions protected from eviction.",
            store.eviction.protected_sessions,
        ),
        _gauge(
            "kvstore_eviction_idle_seconds",
            "Idle time of the last block evicted for room; 0 if none was.",
            store.eviction.space_idle_ms / 1000,
        ),
        _counter("kvstore_syncs_total", "Syncs of drives.", store.syncs),
        _counter(
            "kvstore_corrupt_blocks_total",
            "Blocks that failed a check or could not be read, and were dropped.",
            store.quarantined,
        ),
        _counter(
            "kvstore_foreign_words_total",
            "Fabric messages rejected as not authentic; more than a few suggest forgery.",
            node.fabric.statistics().stale_words,
        ),
    ]


def _of_cluster(membership: Membership | None) -> list[Metric]:
    """The cluster's metrics: 0 on a node outside a cluster."""
    members = 0 if membership is None else len(membership.map.members)
    absent = 0 if membership is None else len(membership.map.absent)
    is_member = membership is not None and not membership.outside
    away_ms = 0 if membership is None else membership.away_ms
    losses = 0 if membership is None else membership.memory.losses
    return [
        _gauge("kvstore_cluster_members", "Nodes on this node's map of the cluster.", members),
        _gauge(
            "kvstore_cluster_absent_nodes",
            "Former members that may come back; no deletion is acknowledged without them.",
            absent,
        ),
        _gauge("kvstore_cluster_member", "1 if this node is on the map.", float(is_member)),
        _gauge(
            "kvstore_cluster_etcd_away_seconds",
            "Seconds since etcd last answered; 0 if it is answering.",
            away_ms / 1000,
        ),
        _counter(
            "kvstore_cluster_etcd_losses_total",
            "How often etcd was found to have lost data that it had confirmed.",
            losses,
        ),
    ]


def _of_upkeep(upkeep: Upkeep | None) -> list[Metric]:
    """The metrics of copies: 0 on a node that maintains none, NaN if no scan by the present map has ended."""
    one_copy = unsure = full = 0.0 if upkeep is None else nan
    if upkeep is not None and (known := upkeep.known) is not None:
        one_copy, unsure, full = known.one_copy, known.unsure, known.full
    return [
        _gauge(
            "kvstore_cluster_one_copy_blocks",
            "Blocks still to be copied to another owner, as of the last scan; NaN if there was none by this map.",
            one_copy,
        ),
        _gauge(
            "kvstore_cluster_unsure_blocks",
            "Of these, blocks not copied because a deletion may have been missed while the node was down.",
            unsure,
        ),
        _gauge(
            "kvstore_cluster_full_blocks",
            "Of these, blocks for which the other owner has no room.",
            full,
        ),
        _gauge(
            "kvstore_cluster_sessions_one_copy",
            "Groups of users whose sessions should be on a standby as well, and aren't.",
            0 if upkeep is None else upkeep.moves.standbys.lots_alone,
        ),
        _gauge(
            "kvstore_cluster_session_blocks_left",
            "Blocks of sessions still to be copied to their standby.",
            0 if upkeep is None else upkeep.moves.hand_overs.copies_left,
        ),
        _counter(
            "kvstore_cluster_copied_blocks_total",
            "Blocks copied to another owner.",
            0 if upkeep is None else upkeep.copied_blocks,
        ),
        _counter(
            "kvstore_cluster_copied_bytes_total",
            "Bytes copied to another owner.",
            0 if upkeep is None else upkeep.copied_bytes,
        ),
    ]


def _of_blocks(node: Node) -> list[Metric]:
    counters, store = node.counters, node.store.statistics()
    return [
        _counter("kvstore_puts_total", "Blocks stored.", counters.puts),
        _counter("kvstore_put_bytes_total", "Bytes stored.", counters.put_bytes),
        _counters(
            "kvstore_puts_failed_total",
            "Blocks that were not stored, by the error's type.",
            "reason",
            {KeyTaken.__name__: 0, LeaseExpired.__name__: 0} | counters.failed,
        ),
        _counters(
            "kvstore_triggered_puts_total",
            "Blocks of triggered puts: armed (reserved; put by a grant, when it lands), fired (as far as the node"
            " knows), landed, and late (reserved, and the lease ended first; a late put by a grant is not known here).",
            "state",
            {
                "armed": counters.leased,
                "fired": node.traces.fired_blocks,
                "landed": counters.landed,
                "late": counters.leases_expired,
            },
        ),
        _counters(
            "kvstore_landed_lost_total",
            "Blocks acknowledged only as landed and then not stored, by reason.",
            "reason",
            {"taken": counters.landed_taken, "failed": counters.landed_failed},
        ),
        _counters(
            "kvstore_hits_total",
            "Blocks sent, by tier.",
            "tier",
            {"memory": counters.hits_memory, "drive": counters.hits_drive},
        ),
        _counter("kvstore_got_bytes_total", "Bytes sent.", counters.got_bytes),
        _counters(
            "kvstore_misses_total",
            "Blocks requested and not sent, by reason.",
            "reason",
            {one.name.lower(): counters.misses.get(one, 0) for one in MissReason},
        ),
        _counters(
            "kvstore_gone_total",
            "Blocks removed from the store, by reason.",
            "reason",
            {one.name.lower(): tally.blocks for one, tally in sorted(store.eviction.gone.items())},
        ),
        _counter(
            "kvstore_refused_total", "Calls, and blocks in streams, refused at a limit.", counters.refused
        ),
    ]


def _of_bounds(node: Node) -> list[Metric]:
    store, memory = node.store.statistics(), node.hot.pages.statistics()
    waiting = {
        "fetch": node.fetches.waiting,
        "put": store.puts_pending,
        "put_for_room": store.waiting_for_room,
        "put_for_quota": store.waiting_for_quota,
        "get": store.gets_pending,
        "delete": store.deletes_pending,
        "session_step": store.sessions_pending,
        "wipe": store.wipes_pending,
    }
    return [
        _gauges("kvstore_waiting", "Accepted work that is not done, by kind.", "what", waiting),
        _gauge("kvstore_connections", "Attached clients.", len(node)),
        _gauge(
            "kvstore_connections_mapped",
            "Attached clients on this machine that read the hot memory directly.",
            0 if node.sharing is None else len(node.sharing),
        ),
        _gauge("kvstore_connections_limit", "Maximum number of attached clients.", node.places.capacity),
        _gauge("kvstore_leases", "Slots that are leased or hold blocks not yet on the drive.", node.leases),
        _gauge("kvstore_pins", "Active pins.", node.pins.count),
        _gauge("kvstore_pins_limit", "Maximum number of pins.", PINS_MAX),
        _gauge("kvstore_watchers", "Clients watching events.", len(node.watchers)),
        _gauge("kvstore_landing_bytes", "Landing memory given to clients.", node.landing.total),
        _gauge("kvstore_landing_limit_bytes", "Maximum landing memory.", LANDING_BYTES_MAX),
        _gauge("kvstore_memory_bytes", "Size of the hot memory.", memory.capacity_bytes),
        _gauge("kvstore_memory_kept_bytes", "Hot memory that holds blocks.", memory.kept_bytes),
        _counter("kvstore_memory_evictions_total", "Blocks evicted from the hot memory.", memory.evicted),
    ]


def _of_times(node: Node) -> list[Metric]:
    timings = node.timings
    failed = CounterMetricFamily(
        "kvstore_calls_failed_total",
        "Calls that ended with a status other than OK.",
        labels=["call", "code"],
    )
    for (call, code), count in timings.calls_failed.items():
        failed.add_metric([call, code], count)
    return [
        _histograms(
            "kvstore_put_seconds",
            "Time from landing in memory to written or synced.",
            "durability",
            {Durability(one).name.lower(): histogram for one, histogram in sorted(timings.kept.items())},
        ),
        _histograms(
            "kvstore_trigger_seconds",
            "Time from the flag, where a client reported it, until the put's last block landed.",
            "what",
            {"landed": timings.fired},
        ),
        _histograms(
            "kvstore_get_seconds",
            "Time from the request for a block until it is sent, by tier.",
            "tier",
            {"memory": timings.got_from_memory, "drive": timings.got_from_drive},
        ),
        _histograms(
            "kvstore_lookup_seconds",
            "Time to look up one batch of keys, without its call.",
            "what",
            {"blocks": timings.lookups},
        ),
        _histograms("kvstore_call_seconds", "Duration of gRPC calls, by name.", "call", timings.calls),
        failed,
    ]


def _of_drives(states: Sequence[DriveState]) -> list[Metric]:
    here = {str(state.number): state.statistics for state in states if state.statistics is not None}
    away = {str(state.number): 0.0 for state in states if state.statistics is None}
    return [
        _gauges(
            "kvstore_drive_here", "1 if the drive is open.", "drive", {**dict.fromkeys(here, 1.0), **away}
        ),
        _gauges(
            "kvstore_drive_takes_puts",
            "1 if the drive accepts puts.",
            "drive",
            {**{number: float(one.takes_puts) for number, one in here.items()}, **away},
        ),
        _gauges(
            "kvstore_drive_capacity_bytes",
            "Capacity of the drive.",
            "drive",
            {number: one.capacity_bytes for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_free_bytes",
            "Free space on the drive.",
            "drive",
            {number: one.free_bytes for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_blocks",
            "Blocks on the drive.",
            "drive",
            {number: one.blocks for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_queued",
            "Reads and writes queued for the drive.",
            "drive",
            {number: one.drive_queued for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_in_flight",
            "Reads and writes in flight.",
            "drive",
            {number: one.drive_in_flight for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_doubted_blocks",
            "Blocks not verified since a crash.",
            "drive",
            {number: one.doubted for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_quarantined_bytes",
            "Space that failed a check or could not be read, and is not in use again.",
            "drive",
            {number: one.quarantined_bytes for number, one in here.items()},
        ),
        _gauges(
            "kvstore_drive_clear_bytes",
            "What may be in the clear of a drive that is being encrypted, at most.",
            "drive",
            {number: one.clear_bytes for number, one in here.items()},
        ),
    ]


def _of_tenants(node: Node, tenants: Tenants, asking: Tenant) -> list[Metric]:
    names = [name for name in tenants.limited() if name == asking.name or tenants.observes(asking.name)]
    quotas = {name: node.store.quota(tenants.named(name).id) for name in names}
    return [
        _gauges(
            "kvstore_tenant_quota_bytes",
            "The tenant's quota on the drives, if it has one.",
            "tenant",
            {name: quota.bytes_max for name, quota in quotas.items()},
        ),
        _gauges(
            "kvstore_tenant_used_bytes",
            "Bytes of its quota that the tenant uses.",
            "tenant",
            {name: quota.used_bytes for name, quota in quotas.items()},
        ),
    ]
