"""Which domains were erased and are not in use again, so that blocks of theirs that are unknown are said to be erased.

The keyring keeps whose keys were destroyed, and nothing of blocks. A key that `in_domain` made can be checked against
a domain, so the two together explain a miss, also after a restart.

Always holds: a domain that has a key is none of these. Of a tenant, the `ERASED_DOMAINS_COMPARED_MAX` domains that were
erased last are compared; of the keys of one question, at most `ERASED_SEARCHES_MAX` with all of these, and others with
those that one of the keys was found to be of.

What it doesn't do: know whether a block of such a domain was ever stored. One thread changes it, another may ask.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.limits import ERASED_DOMAINS_COMPARED_MAX, ERASED_SEARCHES_MAX, ERASED_TENANTS_KNOWN_MAX
from kvstore.names import fitting_domain, is_in_domain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ErasedDomains"]


class ErasedDomains:
    """The erased domains of a store."""

    def __init__(self, found: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Begin with tenants, their domains, and when these were erased, the latest last."""
        # By tenant, the one that erased last at the end. A tenant's are replaced, never changed: others read them.
        self._of: OrderedDict[bytes, dict[bytes, int]] = OrderedDict()
        for tenant, domain, at_ms in found:
            self.note(tenant, domain, at_ms)

    def note(self, tenant: bytes, domain: bytes, at_ms: int) -> None:
        """Note that a domain's key was destroyed."""
        others = {one: at for one, at in self._of.get(tenant, {}).items() if one != domain}
        kept = list(others.items())[: ERASED_DOMAINS_COMPARED_MAX - 1]
        self._of[tenant] = {domain: at_ms, **dict(kept)}
        self._of.move_to_end(tenant)
        if len(self._of) > ERASED_TENANTS_KNOWN_MAX:
            self._of.popitem(last=False)

    def in_use(self, tenant: bytes, domain: bytes) -> None:
        """Note that a domain has a key again."""
        known = self._of.get(tenant, {})
        if domain in known:
            self._of[tenant] = {one: at for one, at in known.items() if one != domain}

    def erased_ms(self, tenant: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """Return for each key when the domain that it was made for was erased; None if that is not known."""
        known = self._of.get(tenant)
        if not known:
            return [None] * len(keys)
        found: dict[bytes, None] = {}
        searches = 0
        answers = []
        for key in keys:
            domain = fitting_domain(key, found) if is_in_domain(key) else None
            if domain is None and searches < ERASED_SEARCHES_MAX and is_in_domain(key):
                searches += 1
                domain = fitting_domain(key, known)
            if domain is not None:
                found[domain] = None
            answers.append(None if domain is None else known[domain])
        return answers
