"""Nodes for a user's own tests, in the test's process or in a process of their own, removed afterwards.

    from kvstore.testing import MemoryNode

    with MemoryNode() as node, node.client() as client:
        client.put_inline(key, data)

`MemoryNode` runs the node's code in the test's process, over a drive in memory: it starts in milliseconds, and needs
neither libfabric nor a drive. `LocalNode` is `kvstore serve` itself, in a child process on loopback, for tests of what
a process alone can do: be killed, and find its blocks on a drive.

As pytest fixtures: `pytest_plugins = ["kvstore.testing.fixtures"]` in a test module or in the top `conftest.py`.

What always holds: the same `Client` talks to both, and gets the same results; when a node is closed, its folder, drive,
thread and process are gone. The process also ends when the test's own process dies.
What it doesn't do: mock. A test that needs an error causes it: `stop` makes misses, `kill` a crash.
"""

from kvstore.testing.local_node import LocalNode
from kvstore.testing.memory_node import MemoryNode

__all__ = ["LocalNode", "MemoryNode"]
