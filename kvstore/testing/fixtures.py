"""pytest's fixtures: `pytest_plugins = ["kvstore.testing.fixtures"]`, and a test takes one of these.

`kv_client` talks to a node in the test's process, `kv_process_client` to one in a process of its own; `kv_node` and
`kv_process_node` are these nodes.

What always holds: one node of a kind serves a whole test session; each client is a tenant, so tests don't see each
other's blocks. A test that stops or kills its node makes one itself.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.local_node import LocalNode
from kvstore.testing.memory_node import MemoryNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client import Client

__all__ = ["kv_client", "kv_node", "kv_process_client", "kv_process_node"]


@pytest.fixture(scope="session")
def kv_node() -> Iterator[MemoryNode]:
    """A node in this process, for all tests of the session."""
    with MemoryNode() as node:
        yield node


@pytest.fixture
def kv_client(kv_node: MemoryNode) -> Iterator[Client]:
    """A client of it, as a tenant of the test's own."""
    with kv_node.client(tenant=secrets.token_hex(8)) as client:
        yield client


@pytest.fixture(scope="session")
def kv_process_node() -> Iterator[LocalNode]:
    """A node in a process of its own, for all tests of the session."""
    with LocalNode() as node:
        yield node


@pytest.fixture
def kv_process_client(kv_process_node: LocalNode) -> Iterator[Client]:
    """A client of that one, as a tenant of the test's own."""
    with kv_process_node.client(tenant=secrets.token_hex(8)) as client:
        yield client
