"""pytest's fixtures: `pytest_plugins = ["kvstore.testing.fixtures"]`, and a test takes `kv_node` or `kv_client`.

What always holds: one node serves a whole test session, since it takes half a second to start; each `kv_client` is a
tenant, so tests don't see each other's blocks. A test that kills its node makes a `LocalNode` itself.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.local_node import LocalNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client import Client

__all__ = ["kv_client", "kv_node"]


@pytest.fixture(scope="session")
def kv_node() -> Iterator[LocalNode]:
    """A node for all tests of the session."""
    with LocalNode() as node:
        yield node


@pytest.fixture
def kv_client(kv_node: LocalNode) -> Iterator[Client]:
    """A client of it, as a tenant of the test's own."""
    with kv_node.client(tenant=secrets.token_hex(8)) as client:
        yield client
