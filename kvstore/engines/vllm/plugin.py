"""vLLM's plugin entry point (`vllm.general_plugins` in pyproject.toml): registers our connectors in each process.

What always holds: importing this and calling `register` any number of times is cheap; a connector is imported when it
is used.
"""

from __future__ import annotations

from contextlib import suppress

__all__ = ["register"]

_CONNECTORS = {
    "TriggerKvConnector": "kvstore.engines.vllm.connector",
    "TriggerKvOffloadingConnector": "kvstore.engines.vllm.offloading_connector",
    "TriggerKvTieringConnector": "kvstore.engines.vllm.tiering_connector",
}


def register() -> None:
    """Register the connectors by name, which is how a MultiConnector finds its parts, too."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM calls

    for name, module in _CONNECTORS.items():
        with suppress(ValueError):  # it is already registered
            KVConnectorFactory.register_connector(name, module, name)
