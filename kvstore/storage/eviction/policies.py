"""The policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.s3fifo import S3Fifo

if TYPE_CHECKING:
    from kvstore.storage.eviction.policy import Policy

__all__ = ["POLICY_DEFAULT", "POLICY_NAMES", "check_policy_name", "new_policy"]

POLICY_DEFAULT: Final = Lru.name
POLICY_NAMES: Final = (Lru.name, S3Fifo.name)


def check_policy_name(name: str) -> None:
    """Refuse a name that no policy has."""
    if name not in POLICY_NAMES:
        raise ConfigError(f"{name!r} is no eviction policy; choose one of {', '.join(POLICY_NAMES)}.")


def new_policy(name: str, capacity_pages: int) -> Policy:
    """Make the policy of this name for a drive of this size."""
    check_policy_name(name)
    return Lru() if name == Lru.name else S3Fifo(capacity_pages)
