"""A store for the KV cache of language models: the node, the clients and the command `kvstore`.

`help("kvstore.client")` begins with a program to copy. Start a node for it:

    kvstore serve --data ./node --http 127.0.0.1:9100 --ui

What most programs need can be imported from here, and is loaded when it is first used, so `import kvstore` is fast and
needs no fabric library:

- `Client`, `ClusterClient` (several nodes), `AsyncClient` and `AsyncClusterClient` (both for asyncio);
  `help(kvstore.Client)` has examples of all calls;
- `Block` and `block_key`: a block, and its key; `FlagWords`: words whose values fire puts;
- `Hit`, `Miss` and `MissReason`: what a get returns; `Durability`: what a put reaches; `KvError`: all errors.

`kvstore --help` lists the commands: `put`, `get`, `sessions`, `explain`, `doctor`, and others. `kvstore.names` makes
keys, `kvstore.errors` has the errors, `kvstore.testing` has nodes for tests. `kvstore.engines`, which is in the wheel
triggerkv-engines, has adapters for vLLM, transformers, SGLang and LMCache. The other modules are the service's own.
"""

from __future__ import annotations

from importlib import import_module

from kvcli.version import VERSION

TYPE_CHECKING = False  # to import it takes longest of all, and kvcli/version.py says why that matters
if TYPE_CHECKING:
    from typing import Any

    from kvstore.client import AsyncClient, AsyncClusterClient, Block, Client, ClusterClient, Hit
    from kvstore.durability import Durability
    from kvstore.errors import KvError
    from kvstore.miss import Miss, MissReason
    from kvstore.names import block_key
    from nic_offload.flags import FlagWords

__all__ = [
    "AsyncClient",
    "AsyncClusterClient",
    "Block",
    "Client",
    "ClusterClient",
    "Durability",
    "FlagWords",
    "Hit",
    "KvError",
    "Miss",
    "MissReason",
    "block_key",
]

__version__ = VERSION

_HOMES = {
    "AsyncClient": "kvstore.client",
    "AsyncClusterClient": "kvstore.client",
    "Block": "kvstore.client",
    "Client": "kvstore.client",
    "ClusterClient": "kvstore.client",
    "Durability": "kvstore.durability",
    "FlagWords": "nic_offload.flags",
    "Hit": "kvstore.client",
    "KvError": "kvstore.errors",
    "Miss": "kvstore.miss",
    "MissReason": "kvstore.miss",
    "block_key": "kvstore.names",
}


def __dir__() -> list[str]:
    """What completion in a shell and `help` list, whether it is loaded or not."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]


def __getattr__(name: str) -> Any:
    """Load one of `__all__` when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
