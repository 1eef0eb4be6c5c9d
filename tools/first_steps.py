"""A new user's first steps with an installed wheel: import, help, put, get, resume, explain. Prints one line.

`tools/test_ends.sh --short` runs it from an empty folder. It uses nothing of this tree but the wheel.
"""

from __future__ import annotations

import pydoc
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import kvstore
from kvstore import Block, Client, FlagWords, Hit, Miss, block_key
from kvstore.testing import LocalNode, MemoryNode

SIZE = 4096


def main() -> None:
    """Take them, at a node in this process and at one in its own."""
    assert "site-packages" in str(kvstore.__file__), f"{kvstore.__file__} is not the wheel's"
    for name in kvstore.__all__:
        assert getattr(kvstore, name).__doc__
    assert "help" in pydoc.render_doc(kvstore)
    assert all(name in pydoc.render_doc(Client) for name in ("put", "arm", "get", "session", "explain"))
    for kind in (MemoryNode, LocalNode):
        with kind() as node, node.client() as client:
            _put_get_and_resume(client)
            command = [str(Path(sys.executable).with_name("kvstore")), "stats", "--node", node.target]
            printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            assert "puts" in printed
    versions = [
        f"{name} {metadata.version(name)}" for name in ("grpcio", "protobuf", "numpy", "lmdb", "cffi")
    ]
    sys.stdout.write(
        f"put, got, resumed and explained with Python {sys.version.split()[0]}, {', '.join(versions)}\n"
    )


def _put_get_and_resume(client: Client) -> None:
    memory = bytearray(b"KV! " * (2 * SIZE // 4))
    kv = client.register(memory)
    blocks = [
        Block(block_key(bytes([number])), kv, number * SIZE, SIZE, threshold=number + 1) for number in (0, 1)
    ]
    with FlagWords.create(1) as flags:
        puts = client.arm(blocks, flags[0])
        flags[0].store(2)
        assert [one.error for one in puts.wait(timeout_s=20)] == [None, None]
    client.session("ada", "chat").append([one.key for one in blocks], tokens=32)
    memory[:] = bytes(len(memory))
    back = client.session("ada", "chat").resume(lambda number, _: blocks[number])
    assert back.is_whole
    assert memory == b"KV! " * (2 * SIZE // 4)
    hit, miss = client.get([blocks[0], Block(block_key(b"never put"), kv, 0, SIZE)])
    assert isinstance(hit, Hit)
    assert isinstance(miss, Miss)
    assert not client.explain([block_key(b"never put")])[0].stored


if __name__ == "__main__":
    main()
