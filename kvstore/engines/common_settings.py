"""What every engine's extra configuration may say: how the node is reached (`kvstore.reach`), and how it is used.

What always holds: a name that is not known, or a value that can't be, is a ConfigError when the engine starts; that is
the only moment at which an adapter raises.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstore.errors import ConfigError
from kvstore.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Times are bounds on what a call of the engine's may wait, not on how long a block is kept."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"transport": ("auto", "fabric", "inline")}

    reach: Reach
    transport: str = "auto"  # the fabric where it opens, else inside gRPC
    replicas: int = 1  # how many nodes of a cluster keep a block
    weights: str = ""  # what tells these weights from others of the same model name
    lookup_timeout_ms: int = 500
    load_timeout_ms: int = 5_000
    save_timeout_ms: int = 5_000

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        for one in fields(self)[1:]:
            value, choices = getattr(self, one.name), self.choices.get(one.name)
            if choices is not None and value not in choices:
                raise ConfigError(f"{one.name} is {' or '.join(choices)}, not {value!r}.")
            if isinstance(one.default, int):
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{one.name} is a whole number above 0, not {value!r}.")
            elif not isinstance(value, str):
                raise ConfigError(f"{one.name} is a text, not {value!r}.")

    @property
    def is_clustered(self) -> bool:
        """Whether blocks are spread over the nodes, or kept on several of them."""
        return len(self.reach.nodes) > 1 or self.replicas > 1

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, where: str, of_engine: Collection[str] = ()) -> Self:
        """Read an engine's extra configuration, which stands under `where`; `of_engine` are names the engine reads."""
        reach, given = Reach.split_from(
            {name: value for name, value in extra.items() if name not in of_engine}, where=where
        )
        known = {field.name for field in fields(cls)} - {"reach"}
        if unknown := sorted(set(given) - known):
            names = ", ".join(sorted(known | Reach.settings()))
            raise ConfigError(f"{where} has no {', '.join(unknown)}; it has {names}.")
        return cls(reach, **given)
