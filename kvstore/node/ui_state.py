"""What the node's web page shows, as one value: bounded, and with a tenant's own things for it alone.

What always holds: so many puts, one page of sessions, so many drives and reasons; durations are in milliseconds and
end in `_ms`. Sessions are those of the asking tenant, and everybody's if it observes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.limits import LANDING_BYTES_MAX, UI_SESSIONS_MAX
from kvstore.steps import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.timings import Histogram, PutSeen

__all__ = ["state"]

_NS_PER_MS = 1_000_000


def state(node: Node, tenants: Tenants, asking: Tenant, version: str, after: bytes) -> dict[str, Any]:
    """All of it."""
    whose = b"" if tenants.observes(asking.name) else asking.id
    store, memory, counters = node.store.statistics(), node.hot.pages.statistics(), node.counters
    quota = node.store.quota(asking.id)
    return {
        "node": node.store.name,
        "version": version,
        "provider": node.fabric.provider,
        "eviction": store.eviction.policy,
        "now_unix_ms": node.clock.wall_ms(),
        "uptime_ms": (node.clock.monotonic_ns() - node.began_ns) // _NS_PER_MS,
        "tenant": "" if not whose else asking.name,
        "takes_puts": store.takes_puts,
        "counters": {
            "puts": counters.puts,
            "put_bytes": counters.put_bytes,
            "puts_failed": counters.puts_failed,
            "hits_memory": counters.hits_memory,
            "hits_drive": counters.hits_drive,
            "got_bytes": counters.got_bytes,
            "refused": counters.refused,
        },
        "misses": {one.name.lower(): count for one, count in sorted(counters.misses.items())},
        "gone": {
            one.name.lower(): tally.blocks
            for one, tally in sorted(store.eviction.gone.items())
            if tally.blocks
        },
        "waiting": {
            "fetches": node.fetches.waiting,
            "puts": store.puts_pending,
            "for room": store.waiting_for_room,
            "for quota": store.waiting_for_quota,
            "gets": store.gets_pending,
            "deletes": store.deletes_pending,
        },
        "clients": {
            "attached": len(node),
            "leases": node.leases,
            "pins": node.pins.count,
            "watching": len(node.watchers),
        },
        "tiers": [
            _tier("landing memory", node.landing_bytes, LANDING_BYTES_MAX, "given to clients to put into"),
            _tier("hot memory", memory.kept_bytes, memory.capacity_bytes, f"{memory.kept} blocks"),
            _tier(
                "drives",
                store.capacity_bytes - store.free_bytes,
                store.capacity_bytes,
                f"{store.blocks} blocks",
            ),
            *(
                [_tier("your quota", quota.used_bytes, quota.bytes_max, asking.name)]
                if quota.bytes_max
                else []
            ),
        ],
        "drives": [_drive(one.number, one.statistics, one.failure) for one in node.store.drive_states()],
        "times": {
            **{
                f"put, landed to {one.name.lower()}": _times(each)
                for one, each in sorted(node.timings.kept.items())
            },
            "get from memory": _times(node.timings.got_from_memory),
            "get from the drive": _times(node.timings.got_from_drive),
            "look-up of a batch": _times(node.timings.lookups),
        },
        "puts": _puts(node, whose),
        "sessions": _sessions(node, whose, after),
    }


def _tier(name: str, used_bytes: int, capacity_bytes: int, detail: str) -> dict[str, Any]:
    return {"name": name, "used_bytes": used_bytes, "capacity_bytes": capacity_bytes, "detail": detail}


def _drive(number: int, now: Any, failure: str) -> dict[str, Any]:
    told: dict[str, Any] = {"number": number, "here": now is not None, "failure": failure}
    if now is not None:
        told |= {
            "blocks": now.blocks,
            "used_bytes": now.capacity_bytes - now.free_bytes,
            "capacity_bytes": now.capacity_bytes,
            "takes_puts": now.takes_puts,
            "queued": now.drive_queued,
            "in_flight": now.drive_in_flight,
            "quarantined": now.quarantined,
        }
    return told


def _times(histogram: Histogram) -> dict[str, Any]:
    def ms(share: float) -> float | None:
        bound_s = histogram.quantile_s(share)
        return None if bound_s is None else bound_s * 1000

    return {"count": histogram.count, "p50_ms": ms(0.5), "p99_ms": ms(0.99)}


def _puts(node: Node, whose: bytes) -> list[dict[str, Any]]:
    now_ns = node.clock.monotonic_ns()
    return [_put(one, now_ns) for one in reversed(node.timings.puts.values()) if whose in (b"", one.tenant)]


def _put(put: PutSeen, now_ns: int) -> dict[str, Any]:
    """One row of the time line, in milliseconds since its slots were leased or its first byte came."""
    marks: Mapping[Step, int] = {}
    if put.trace is not None:
        marks = {
            seen.step: seen.at_ns
            for seen in reversed(put.trace.in_order())
            if seen.step in (Step.ARMED, Step.FIRED) and put.began_ns <= seen.at_ns <= put.landed_ns
        }

    def ms(at_ns: int | None) -> float | None:
        return None if at_ns is None else round((at_ns - put.began_ns) / _NS_PER_MS, 3)

    return {
        "inline": put.inline,
        "blocks": put.blocks,
        "size_bytes": put.size_bytes,
        "durability": put.durability.name.lower(),
        "age_ms": (now_ns - put.kept_ns) // _NS_PER_MS,
        "armed_ms": ms(marks.get(Step.ARMED)),
        "flag_ms": ms(marks.get(Step.FIRED)),
        "landed_first_ms": ms(put.landed_first_ns),
        "landed_ms": ms(put.landed_ns),
        "kept_ms": ms(put.kept_ns),
    }


def _sessions(node: Node, whose: bytes, after: bytes) -> dict[str, Any]:
    if not after.startswith(whose):
        after = b""  # the page of another tenant: this one's own begins at its beginning
    page, more = node.store.manifests.page(whose, after, UI_SESSIONS_MAX)
    now_ms = node.clock.wall_ms()
    return {
        "total": None if whose else len(node.store.manifests),
        "next": b"".join(page[-1][0]).hex() if more else None,
        "page": [
            {
                "session": one.label.decode(errors="replace"),
                "user": name.user.hex()[:8],
                "blocks": one.blocks,
                "turns": one.turns,
                "tokens": one.tokens,
                "last_turn_unix_ms": one.at_ms,
                "expires_unix_ms": one.expires_ms,
            }
            for name, one in page
            if not 0 < one.expires_ms <= now_ms
        ],
    }
