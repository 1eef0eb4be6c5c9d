"""The settings that all engine adapters share: how to reach the nodes (`kvstore.reach`), and how to use them.

What always holds: an unknown name or an invalid value is a ConfigError when the engine starts. An adapter raises at no
other time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstore.errors import ConfigError
from kvstore.names import in_domain
from kvstore.reach import Reach, reach_settings, split_reach

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine. Timeouts limit how long a call of the engine waits; blocks are kept longer."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    reach: Reach
    replicas: int | None = None  # of a block in a cluster; None: as many as it keeps for the tenant
    weights: str = ""  # distinguishes these weights from others under the same model name
    lookup_timeout_ms: int = 500
    load_timeout_ms: int = 5_000
    save_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for one in fields(self)[1:]:
            value, choices = getattr(self, one.name), self.choices.get(one.name)
            if choices is not None and value not in choices:
                raise ConfigError(f"{one.name} is {' or '.join(choices)}, not {value!r}.")
            if one.default is None and value is None:
                continue
            if isinstance(one.default, int | None):
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{one.name} is a whole number above 0, not {value!r}.")
            elif not isinstance(value, str):
                raise ConfigError(f"{one.name} is a text, not {value!r}.")

    def named(self, key: bytes) -> bytes:
        """The key of a block of a request that names no erase domain."""
        return in_domain(key, self.reach.domain)

    @property
    def is_clustered(self) -> bool:
        """Whether blocks are set to be spread over several nodes or replicated."""
        return len(self.reach.nodes) > 1 or (self.replicas or 1) > 1

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, where: str, of_engine: Collection[str] = ()) -> Self:
        """Parse an engine's extra configuration, found under `where`; `of_engine` are names that the engine reads."""
        reach, given = split_reach(
            {name: value for name, value in extra.items() if name not in of_engine}, where=where
        )
        known = {field.name for field in fields(cls)} - {"reach"}
        if unknown := sorted(set(given) - known):
            names = ", ".join(sorted(known | reach_settings()))
            raise ConfigError(f"{where} has no {', '.join(unknown)}; it has {names}.")
        return cls(reach, **given)
