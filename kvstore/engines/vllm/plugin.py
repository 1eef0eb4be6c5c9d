"""What vLLM calls in each of its processes (`vllm.general_plugins` in pyproject.toml): our connectors have names there.

What always holds: importing this, and calling `register` any number of times, costs nothing: a connector is imported
when it is used.
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
    """Make the connectors known, as parts of a MultiConnector too, which finds them by name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM calls

    for name, module in _CONNECTORS.items():
        with suppress(ValueError):  # it is known already
            KVConnectorFactory.register_connector(name, module, name)
