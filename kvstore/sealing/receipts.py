"""The receipt of an erasure, whose line is also the line in the audit log.

    {"at_ms":1763716000000,"at":"2025-11-21T09:06:40.000Z","what":"erase-domain","how":"keys destroyed",...}

What always holds: a receipt says what was done, which keys were destroyed, each once, separately those that an earlier
erasure destroyed, and which slots were overwritten without knowing whose keys they had. It contains no key, no token
and no user's name, because the user asked to be forgotten: a domain is named by its digest. Its length is bounded, and
its digest covers all destroyed keys.
What it doesn't do: prove anything to a person who doesn't trust the node: it isn't signed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from kvstore.limits import RECEIPT_KEYS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.sealing.domain_key import Erased

__all__ = ["Receipt", "keys_digest"]

_DIGEST_BYTES: Final = 32
_KEYS_DESTROYED: Final = "keys destroyed"
_BOTH: Final = "keys destroyed, the rest overwritten"
_EARLIER: Final = "keys destroyed earlier"
_EARLIER_AND_REST: Final = "keys destroyed earlier, the rest overwritten"
_SLOTS_OVERWRITTEN: Final = "unreadable slots overwritten"
_SLOTS_AND_BLOCKS: Final = "unreadable slots and blocks overwritten"
_OVERWRITTEN: Final = "overwritten"
_NOTHING: Final = "nothing was stored"


def keys_digest(keys: Sequence[Erased]) -> str:
    """A digest of which keys were destroyed now: of slot numbers (u32) and ids, in the order of the numbers."""
    state = blake2b(digest_size=_DIGEST_BYTES, person=b"tkv receipt")
    for number, key_id in sorted(_destroyed(keys)):
        state.update(number.to_bytes(4, "little") + key_id)
    return state.hexdigest()


def _destroyed(keys: Sequence[Erased], *, is_earlier: bool = False) -> set[tuple[int, bytes]]:
    its = (key for key in keys if key.is_earlier == is_earlier)
    return {(key.number, key.id) for key in its if key.number is not None and key.id is not None}


def _named(keys: Sequence[tuple[int, bytes]]) -> str:
    return ",".join(f"{number}:{key_id.hex()}" for number, key_id in keys[:RECEIPT_KEYS_MAX])


def _shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Receipt:
    """One erasure on one node: of an erase domain, or of a tenant."""

    at_ms: int
    tenant: str  # as in the node's tenants file
    domain: bytes | None  # None: all of the tenant
    blocks: int
    overwritten: int  # of these: they were in the clear, or encrypted with a key that was not destroyed
    size_bytes: int
    keys: tuple[Erased, ...]  # none on a node without encryption, which overwrites
    node: str
    store_uuid: bytes
    drives: tuple[int, ...]
    sessions: int
    is_encrypted: bool
    clear_bytes: int  # what may be in the clear on the drives of a node that encrypts, free pages included
    peer: str = ""  # the caller

    @property
    def at(self) -> str:
        """The time, in UTC."""
        return _shown(self.at_ms)

    def fields(self) -> dict[str, str | int]:
        """All fields except the time, the tenant and the caller, which each line of the audit log has."""
        destroyed = self.destroyed
        earlier = sorted(_destroyed(self.keys, is_earlier=True).difference(destroyed))
        unread = sorted(key.number for key in self.keys if key.number is not None and key.is_unread)
        lost = sum(key.is_lost for key in self.keys)
        said: dict[str, str | int] = {
            "at": self.at,
            "how": self._how(destroyed, earlier, unread),
            "domain": "" if self.domain is None else self.domain.hex(),
            "blocks": self.blocks,
            "overwritten": self.overwritten,
            "sessions": self.sessions,
            "bytes": self.size_bytes,
            "keys": len(destroyed),
            "key_ids": _named(destroyed),
            "keys_digest": keys_digest(self.keys) if destroyed else "",
            "node": self.node,
            "store": self.store_uuid.hex(),
            "drives": ",".join(map(str, self.drives)),
        }
        if self.is_encrypted:
            said["clear_bytes"] = self.clear_bytes
        if earlier:
            said["earlier_keys"] = len(earlier)
            said["earlier_key_ids"] = _named(earlier)
            said["earlier_at"] = _shown(max(key.at_ms for key in self.keys if key.is_earlier))
        if lost:
            said["lost_slots"] = lost
        if unread:
            said["unread_slots"] = len(unread)
            said["unread"] = ",".join(map(str, unread[:RECEIPT_KEYS_MAX]))
        return said

    @property
    def destroyed(self) -> list[tuple[int, bytes]]:
        """The keys that this erasure destroyed and that are known to belong to what it erased, by slot and id."""
        return sorted(_destroyed(self.keys))

    def _how(self, destroyed: Sequence[object], earlier: Sequence[object], unread: Sequence[object]) -> str:
        if destroyed:
            return _BOTH if self.overwritten else _KEYS_DESTROYED
        if earlier and self.blocks > self.overwritten:  # an interrupted erasure had not reached these
            return _EARLIER_AND_REST if self.overwritten else _EARLIER
        if unread:
            return _SLOTS_AND_BLOCKS if self.overwritten else _SLOTS_OVERWRITTEN
        return _OVERWRITTEN if self.blocks or self.sessions else _NOTHING

    @property
    def what(self) -> str:
        """What kind of erasure it was."""
        return "erase-tenant" if self.domain is None else "erase-domain"

    def line(self) -> str:
        """One line of JSON, as in the audit log."""
        head = {
            "at_ms": self.at_ms,
            "what": self.what,
            "tenant": self.tenant,
            "peer": self.peer,
            "outcome": "ok",
        }
        return json.dumps({**head, **self.fields()}, separators=(",", ":"))
