"""LMCache's real interfaces from its wheel, imported without its warnings and its usage reports."""

from __future__ import annotations

import importlib
import os
import warnings
from importlib.util import find_spec

import pytest

_MODULES = (
    "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter",
    "lmcache.v1.memory_management",
    "lmcache.v1.storage_backend.connector.base_connector",
)


def load() -> None:
    """Import what the tests use; skips where the wheel is not installed."""
    if find_spec("lmcache") is None:
        pytest.skip("lmcache is in .venv-engines only: make test-engines", allow_module_level=True)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # read when it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its logging is of OpenTelemetry's old kind
        for name in _MODULES:
            importlib.import_module(name)
