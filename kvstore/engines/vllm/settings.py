"""What `kv_connector_extra_config` may say, and what holds where it says nothing.

What always holds: a name that is not known, or a value that can't be, is a ConfigError when the engine starts; that is
the only moment at which anything here raises.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENGINE", "Settings"]

ENGINE = "triggerkv engine"  # where our offloading connector puts what it knows of its engine
# What vLLM itself reads from the same place.
_OF_VLLM = frozenset({"spec_name", "spec_module_path", "self_describing_kv_events", "offload_prompt_only"})
_CHOICES = {"transport": ("auto", "fabric", "inline"), "load": ("async", "sync")}


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are bounds on what the engine may wait, not on how long a block is kept."""

    node: str  # host:port
    tenant: str = ""
    token: str | None = None
    address: str = "127.0.0.1"  # this machine's own, for the fabric
    provider: str | None = None  # of libfabric; the best there is
    transport: str = "auto"  # the fabric where it opens, else inside gRPC
    load: str = "async"  # or "sync": the step waits for it
    weights: str = ""  # what tells these weights from others; "": found out, see `identity`
    lookup_timeout_ms: int = 200
    load_timeout_ms: int = 5_000
    save_timeout_ms: int = 1_000
    host_bytes: int = 256 << 20  # of an OffloadingSpec's memory between engine and node

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {' or '.join(choices)}, not {getattr(self, name)!r}.")
        for name in ("lookup_timeout_ms", "load_timeout_ms", "save_timeout_ms", "host_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is a whole number above 0, not {value!r}.")

    def is_async(self, groups: int) -> bool:
        """Whether loads run beside the steps. An engine of several groups takes a failed load back only then."""
        return self.load == "async" or groups > 1

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Read an engine's `kv_connector_extra_config`."""
        given = {name: value for name, value in extra.items() if name not in {*_OF_VLLM, ENGINE}}
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"kv_connector_extra_config has no {', '.join(unknown)}; it has {', '.join(sorted(known))}."
            )
        if not given.get("node"):
            raise ConfigError('kv_connector_extra_config must name the node: {"node": "host:port"}.')
        return cls(**given)
