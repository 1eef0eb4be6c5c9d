"""A node for a test: `kvstore serve` as a child process, with its own drive in a temporary folder.

What always holds: it listens on loopback on a port that it keeps over restarts; what was acknowledged as written is
there after `kill` and `start`; nothing of it is left once it is closed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import Client
from kvstore.config import parse_size
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import HOT_BYTES_MIN
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LocalNode"]

_SLOTS, _BLOCK_BYTES = 16, 1 << 20  # of a client: 16 MiB of the node's memory


class LocalNode(Handle):
    """A storage node of a test's own, with as little memory as a node takes, and a small drive.

    >>> from kvstore.names import block_key
    >>> from kvstore.testing import LocalNode
    >>> with LocalNode() as node, node.client() as client:
    ...     _ = client.put_inline(block_key(b"page 1"), b"KV")
    ...     node.kill()  # SIGKILL
    ...     node.start()
    ...     client.status(wait_s=10).read_only
    ...     client.get_inline(block_key(b"page 1"), length=2)
    False
    b'KV'
    """

    def __init__(self, *, drive: str = "64MiB", arguments: Sequence[str] = ()) -> None:
        """Start it, and wait until it serves; NodeUnavailable with its last log line if it does not start.

        `arguments` are further arguments of `kvstore serve`, such as `("--eviction", "s3fifo")`.
        """
        parse_size(drive)  # an invalid one is refused before a process starts
        self._folder = tempfile.TemporaryDirectory(prefix="triggerkv-")
        try:
            self._process = NodeProcess(
                Path(self._folder.name) / "node",
                capacity=drive,
                arguments=("--hot", str(HOT_BYTES_MIN), *arguments),
            )
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def target(self) -> str:
        """Its address, HOST:PORT; the same after a restart."""
        return self._process.target

    def client(self, **more: Any) -> Client:
        """A client of it, which takes 16 MiB of the node unless `more`, the arguments of `Client`, says otherwise.

        >>> with LocalNode() as node, node.client(tenant="acme") as client:
        ...     client.tenant
        'acme'
        """
        return Client(self.target, **({"slots": _SLOTS, "block_bytes_max": _BLOCK_BYTES} | more))

    def kill(self) -> None:
        """Send SIGKILL: blocks not acknowledged as written may be lost. `start` restarts it.

        >>> with LocalNode() as node:
        ...     node.kill()
        """
        self._process.kill()

    def stop(self) -> int:
        """Send SIGTERM, as a service manager does, and wait; returns the exit status. `start` restarts it.

        >>> with LocalNode() as node:
        ...     node.stop()
        0
        """
        return self._process.stop()

    def start(self) -> None:
        """Restart it after `kill` or `stop`, on the same drive, and wait until it serves.

        >>> with LocalNode() as node:
        ...     before = node.target
        ...     _ = node.stop()
        ...     node.start()
        ...     node.target == before
        True
        """
        self._process.start()

    def log(self) -> str:
        """Its output on standard error since it was created.

        >>> with LocalNode() as node:
        ...     "fabric" in node.log()
        True
        """
        return self._process.log()

    def close(self) -> None:
        """Stop it, and remove its folder.

        >>> LocalNode().close()
        """
        self._process.stop()
        self._folder.cleanup()
