"""The data of the node's web page, of bounded size: the state, a session's trace, and explained misses.

What always holds: durations are in milliseconds and end in `_ms`. Puts, sessions, traces and look-ups are the calling
tenant's own. An observer sees those of all tenants, or of the tenant it chooses. Nothing here changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.cluster.map import DRAINING
from kvstore.config import counted
from kvstore.errors import ProtocolError, TenantDenied
from kvstore.explanations import ASKED, advice, lookup_document, outcome_text, placed
from kvstore.limits import (
    LANDING_BYTES_MAX,
    TENANT_BYTES,
    UI_MEMBERS_MAX,
    UI_SESSIONS_MAX,
    UI_TENANTS_MAX,
    USER_BYTES,
)
from kvstore.lookups import HITS, Outcome, outcome_of_miss
from kvstore.miss import MissReason
from kvstore.node.rate_history import FIELDS
from kvstore.node.statistics import collected
from kvstore.storage.manifests import SessionName
from kvstore.wire.lookup_messages import lookup_of

if TYPE_CHECKING:
    from kvstore.cluster.membership import Membership
    from kvstore.node.node import Node
    from kvstore.node.rate_history import History
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.timings import Histogram, PutSeen
    from kvstore.node.upkeep import Upkeep

__all__ = ["cluster", "misses", "state", "trace", "whose"]

_NS_PER_MS = 1_000_000
# One reason on the wire covers several outcomes.
_OUTCOMES = {
    MissReason.UNKNOWN: {Outcome.NEVER, Outcome.DELETED, Outcome.LEASE_EXPIRED, Outcome.NO_SESSION},
    MissReason.EVICTED: {Outcome.EVICTED, Outcome.STRANDED, Outcome.CLEARED},
}


def whose(tenants: Tenants, asking: Tenant, chosen: str) -> tuple[bytes, str]:
    """Return the id and name of the tenant whose puts, sessions and look-ups to show; both empty for all tenants."""
    if not tenants.observes(asking.name):
        if chosen not in ("", asking.name):
            raise TenantDenied(f"{asking.name} is no observer and can't see another tenant.")
        return asking.id, asking.name
    if not chosen:
        return b"", ""
    for tenant, (name, _) in tenants.names().items():
        if name == chosen:
            return tenant, name
    raise TenantDenied(f"There is no tenant {chosen[:64]!r}.")


def state(
    node: Node, tenants: Tenants, asking: Tenant, version: str, chosen: str, after: bytes, history: History
) -> dict[str, Any]:
    """The data of the page's first view."""
    tenant, name = whose(tenants, asking, chosen)
    store, memory, counters = node.store.statistics(), node.hot.pages.statistics(), node.counters
    quota = node.store.quota(tenant or asking.id)
    return {
        "node": node.store.name,
        "version": version,
        "provider": node.fabric.provider,
        "eviction": store.eviction.policy,
        "now_unix_ms": node.clock.wall_ms(),
        "uptime_ms": (node.clock.monotonic_ns() - node.began_ns) // _NS_PER_MS,
        "tenant": name,
        "tenants": _tenants(node, tenants) if tenants.observes(asking.name) else [],
        "history": {"fields": FIELDS, "points": history.points()},
        "takes_puts": store.takes_puts,
        "counters": {
            "puts": counters.puts,
            "put_bytes": counters.put_bytes,
            "puts_failed": counters.puts_failed,
            "hits_memory": counters.hits_memory,
            "hits_drive": counters.hits_drive,
            "got_bytes": counters.got_bytes,
            "refused": counters.refused,
            "armed": counters.leased,
            "fired": node.traces.fired_blocks,
            "landed": counters.landed,
            "late": counters.leases_expired,
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
            _tier("landing memory", node.landing.total, LANDING_BYTES_MAX, "given to clients to put into"),
            _tier("hot memory", memory.kept_bytes, memory.capacity_bytes, counted(memory.kept, "block")),
            _tier(
                "drives",
                store.capacity_bytes - store.free_bytes,
                store.capacity_bytes,
                counted(store.blocks, "block"),
            ),
            *(
                [_tier("quota", quota.used_bytes, quota.bytes_max, name or asking.name)]
                if quota.bytes_max
                else []
            ),
        ],
        "drives": [_drive(one.number, one.statistics, one.failure) for one in node.store.drive_states()],
        "times": {
            "put, flag to landed": _times(node.timings.fired),
            **{
                f"put, landed to {one.name.lower()}": _times(each)
                for one, each in sorted(node.timings.kept.items())
            },
            "get from memory": _times(node.timings.got_from_memory),
            "get from the drive": _times(node.timings.got_from_drive),
            "look-up of a batch": _times(node.timings.lookups),
        },
        "puts": _puts(node, tenant),
        "sessions": _sessions(node, tenant, after),
        "cluster": node.membership and cluster(node.membership, node.upkeep, node.store.name),
    }


def cluster(membership: Membership, upkeep: Upkeep | None, name: str) -> dict[str, Any]:
    """The members of the cluster on this node's map, which are absent, and the node's blocks with one copy."""
    now = membership.map
    members = [
        {
            "name": one.name,
            "node": one.node,
            "weight": one.weight,
            "version": one.version,
            "draining": one.state == DRAINING,
            "zone": one.zone,
            "share": share,
            "is_this": one.name == name,
        }
        for one, share in zip(now.members, now.shares(), strict=True)
    ]
    return {
        "total": len(members),
        "members": members[:UI_MEMBERS_MAX],
        "absent": [{"name": one.name, "node": one.node} for one in now.absent[:UI_MEMBERS_MAX]],
        "outside": membership.outside,
        "etcd_away_ms": membership.away_ms,
        "one_copy": None if upkeep is None or upkeep.known is None else upkeep.known.one_copy,
        "keeps_copies": upkeep is not None,
    }


def _tenants(node: Node, tenants: Tenants) -> list[dict[str, Any]]:
    rows = []
    for tenant, (name, _) in sorted(tenants.names().items(), key=lambda one: one[1])[:UI_TENANTS_MAX]:
        quota = node.store.quota(tenant)
        used_bytes = quota.used_bytes if quota.bytes_max else None  # without a quota, use is not counted
        rows.append({"name": name, "used_bytes": used_bytes, "quota_bytes": quota.bytes_max})
    return rows


def trace(node: Node, tenant: bytes, session: bytes) -> dict[str, Any]:
    """The recorded steps of a session; times count from the first one."""
    user_end = TENANT_BYTES + USER_BYTES
    name = SessionName(session[:TENANT_BYTES], session[TENANT_BYTES:user_end], session[user_end:])
    if tenant not in (b"", name.tenant):
        raise ProtocolError(f"Your tenant has no session with the id {session.hex()}.")
    found = node.traces.find(name)
    seen = [] if found is None else found.in_order()
    now_ns = node.clock.monotonic_ns()
    return {
        "seen": [
            {
                "step": one.step.number,
                "sentence": one.step.sentence,
                "by": "node" if one.by_node else "client",
                "at_ms": round((one.at_ns - seen[0].at_ns) / _NS_PER_MS, 3),
                "age_ms": (now_ns - one.at_ns) // _NS_PER_MS,
                "blocks": one.blocks,
                "size_bytes": one.size_bytes,
                "tokens": one.tokens,
                "detail": one.detail,
            }
            for one in seen
        ]
    }


def misses(node: Node, asking: Tenant, tenant: bytes, reason: MissReason | None) -> dict[str, Any]:
    """The last look-ups that missed for a reason, or for any, explained, and how to fix them."""
    wanted = set(Outcome) - HITS if reason is None else _OUTCOMES.get(reason, {outcome_of_miss(reason)})
    lookups = [lookup_of(one) for one in node.lookups.missed(tenant, wanted)]
    now_ms = node.clock.wall_ms()
    shown = []
    for one, first in placed(lookups[::-1]):
        document = lookup_document(one, first)
        document["asked"] = ASKED[one.kind].format(counted(one.blocks, "block"))
        document["sentences"] = [outcome_text(run, one, now_ms) for run in one.runs]
        shown.append(document)
    return {
        "now_unix_ms": now_ms,
        "lookups": shown[::-1],
        "advice": advice(lookups, collected(node, asking)) if lookups else [],
    }


def _tier(name: str, used_bytes: int, capacity_bytes: int, detail: str) -> dict[str, Any]:
    return {"name": name, "used_bytes": used_bytes, "capacity_bytes": capacity_bytes, "detail": detail}


def _drive(number: int, now: Any, failure: str) -> dict[str, Any]:
    shown: dict[str, Any] = {"number": number, "here": now is not None, "failure": failure}
    if now is not None:
        shown |= {
            "blocks": now.blocks,
            "used_bytes": now.capacity_bytes - now.free_bytes,
            "capacity_bytes": now.capacity_bytes,
            "takes_puts": now.takes_puts,
            "queued": now.drive_queued,
            "in_flight": now.drive_in_flight,
            "quarantined": now.quarantined,
        }
    return shown


def _times(histogram: Histogram) -> dict[str, Any]:
    def ms(share: float) -> float | None:
        bound_s = histogram.quantile_s(share)
        return None if bound_s is None else bound_s * 1000

    return {"count": histogram.count, "p50_ms": ms(0.5), "p99_ms": ms(0.99)}


def _puts(node: Node, tenant: bytes) -> list[dict[str, Any]]:
    now_ns = node.clock.monotonic_ns()
    return [_put(one, now_ns) for one in reversed(node.timings.puts.values()) if tenant in (b"", one.tenant)]


def _put(put: PutSeen, now_ns: int) -> dict[str, Any]:
    """One row of the time line, in milliseconds since its slots were leased or its first byte arrived."""

    def ms(at_ns: int) -> float | None:
        return round((at_ns - put.began_ns) / _NS_PER_MS, 3) if at_ns else None

    return {
        "inline": put.inline,
        "blocks": put.blocks,
        "size_bytes": put.size_bytes,
        "durability": put.durability.name.lower(),
        "age_ms": (now_ns - put.kept_ns) // _NS_PER_MS,
        "failed": put.failed,
        "failure": put.failure,
        "flag_ms": ms(put.flag_ns),
        "landed_first_ms": ms(put.landed_first_ns),
        "landed_ms": ms(put.landed_ns),
        "kept_ms": ms(put.kept_ns),
    }


def _sessions(node: Node, tenant: bytes, after: bytes) -> dict[str, Any]:
    if not after.startswith(tenant):
        after = b""  # a page token of another tenant: begin with this tenant's first page
    page, more = node.store.manifests.page(tenant, after, UI_SESSIONS_MAX)
    now_ms = node.clock.wall_ms()
    return {
        "total": None if tenant else len(node.store.manifests),
        "next": b"".join(page[-1][0]).hex() if more else None,
        "page": [
            {
                "name": b"".join(name).hex(),
                "session": one.label.decode(errors="replace"),
                "user": name.user.hex()[:8],
                "blocks": one.blocks,
                "turns": one.turns,
                "tokens": one.tokens,
                "last_turn_unix_ms": one.at_ms,
                "expires_unix_ms": one.expires_ms,
            }
            for name, one in page
            if one.label is not None and not 0 < one.expires_ms <= now_ms
        ],
    }
