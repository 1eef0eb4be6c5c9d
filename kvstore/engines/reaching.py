"""How an engine's adapter reaches its node: the settings that every engine's extra configuration may hold.

What always holds: a name that is not known, or a value that can't be, is a ConfigError when the engine starts; that is
the only moment at which an adapter raises.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Reaching"]

_TRANSPORTS = ("auto", "fabric", "inline")
_TIMES = ("lookup_timeout_ms", "load_timeout_ms", "save_timeout_ms")


@dataclass(frozen=True, slots=True)
class Reaching:
    """Times are bounds on what a call of the engine's may wait, not on how long a block is kept."""

    node: str  # host:port
    tenant: str = ""
    token: str | None = None
    address: str = "127.0.0.1"  # this machine's own, for the fabric
    provider: str | None = None  # of libfabric; the best there is
    transport: str = "auto"  # the fabric where it opens, else inside gRPC
    weights: str = ""  # what tells these weights from others of the same model name
    lookup_timeout_ms: int = 500
    load_timeout_ms: int = 5_000
    save_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"transport is {' or '.join(_TRANSPORTS)}, not {self.transport!r}.")
        for name in _TIMES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is a whole number above 0, not {value!r}.")

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, where: str, of_engine: Collection[str] = ()) -> Reaching:
        """Read an engine's extra configuration, which stands under `where`; `of_engine` are names the engine reads."""
        given = {name: value for name, value in extra.items() if name not in of_engine}
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(f"{where} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        if not given.get("node"):
            raise ConfigError(f'{where} must name the node: {{"node": "host:port"}}.')
        return cls(**given)
