"""What a user's own tests need: a real node, small and gone afterwards.

    from kvstore.testing import LocalNode

    with LocalNode() as node, node.client() as client:
        client.put_inline(key, data)

As pytest fixtures: `pytest_plugins = ["kvstore.testing.fixtures"]` in a test module or in the top `conftest.py`.

What always holds: it is `kvstore serve` itself, in a child process on loopback, so what passes here passes there; its
folder, its drive and its process are gone when it is closed, and the process also when the test's own dies.
What it doesn't do: pretend. There is no node in memory, because a drive, a crash and a restart are what tests are for.
"""

from kvstore.testing.local_node import LocalNode

__all__ = ["LocalNode"]
