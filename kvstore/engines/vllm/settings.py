"""The settings in `kv_connector_extra_config`, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstore.engines.common_settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENGINE", "Settings", "TierSettings"]

ENGINE = "triggerkv engine"  # where our connectors put what they know of their engine, for a spec or a tier
# What vLLM itself reads from the same place.
_OF_VLLM = frozenset({"spec_name", "spec_module_path", "self_describing_kv_events", "offload_prompt_only"})


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """A scheduler waits for look-ups, so its bounds are tighter than other engines'."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **EngineSettings.choices,
        "load": ("async", "sync"),
        "five_tuple": ("unknown", "request"),
    }

    lookup_timeout_ms: int = 200
    save_timeout_ms: int = 1_000
    save_every_tokens: int = 1  # of an answer; a prompt's blocks are saved as they are computed
    load: str = "async"  # or "sync": the step waits for the load
    host_bytes: int = 256 << 20  # of an OffloadingSpec's memory between engine and node
    rules: str = ""  # a file of rules of the match-action table
    five_tuple: str = "unknown"  # or "request": a front end puts the connection's into `kv_transfer_params`

    def is_async(self, groups: int) -> bool:
        """Whether loads run beside the steps. An engine of several groups takes a failed load back only then."""
        return self.load == "async" or groups > 1

    @classmethod
    def of_vllm(cls, extra: Mapping[str, Any]) -> Self:
        """Read an engine's `kv_connector_extra_config`."""
        return cls.of(extra, where="kv_connector_extra_config", of_engine=_OF_VLLM | {ENGINE})


@dataclass(frozen=True, slots=True)
class TierSettings(EngineSettings):
    """The settings of a tier of vLLM's multi-tier offloading, where a request waits for its look-ups."""

    lookup_timeout_ms: int = 200
