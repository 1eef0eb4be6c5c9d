"""How `kvstore keys` talks to the node that has a data folder open: a socket in that folder, lines of JSON.

    node      {"challenge": HEX, "clear": {DRIVE: [BYTES, WHY], ...}, "damaged": SLOTS}
    command   {"do": "rotate-tenant", "tenant": HEX or null, "proof": HEX}
              {"do": "rotate-master", "new_master_key": "KIND:WHERE", "proof": HEX}
    node      {"done": ...}   or   {"error": SENTENCE, "kind": NAME}

What always holds: only the node's user and root can open the socket. A caller that requests a change proves that it has
the current master key: it unwraps the keyring's root key with it, and returns a digest of the node's challenge under
the root key. So another process of the node's user, which can't read the node's memory, can't replace the master key
with its own. No key is sent.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from kvstore import errors
from kvstore.errors import KvError, NodeUnavailable
from kvstore.limits import CONTROL_CALL_MS, CONTROL_LINE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = ["SOCKET_NAME", "Control", "address_in", "find_control", "line_of", "proof"]

SOCKET_NAME: Final = "control"
_GONE: Final = "The node ended before it had answered; `kvstore keys status` shows the result."


def proof(root_key: Buffer, challenge: bytes) -> bytes:
    """The answer to a challenge, which only a holder of the root key can compute."""
    return blake2b(challenge, key=root_key, digest_size=32, person=b"tkv control").digest()


@contextmanager
def address_in(data: Path) -> Iterator[str]:
    """The socket's address, however long the folder's name is."""
    folder = os.open(data, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET_NAME}"
    finally:
        os.close(folder)


def line_of(said: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


class Control:
    """A connection to a node."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        hello = self._read_answer()
        self.challenge = bytes.fromhex(hello["challenge"])
        self.damaged = int(hello["damaged"])  # slots of the keyring, including moved ones
        # How many bytes of each drive are still to be encrypted, and why that has stopped, if it has.
        self.clear = {int(drive): (int(size), str(why)) for drive, (size, why) in hello["clear"].items()}

    def ask(self, **what: Any) -> Any:
        """Send a command; returns the result. Raises the error that the node answers with, or NodeUnavailable."""
        with suppress(OSError):  # the answer that it sent before it ended is still read
            self._connection.sendall(line_of(what))
        answer = self._read_answer()
        if "error" in answer:
            kind = getattr(errors, str(answer.get("kind")), KvError)
            raise kind(answer["error"])
        return answer["done"]

    def _read_answer(self) -> dict[str, Any]:
        try:
            said = json.loads(self._lines.readline(CONTROL_LINE_BYTES_MAX))
        except TimeoutError:
            raise NodeUnavailable(f"The node did not answer within {CONTROL_CALL_MS // 1000} s.") from None
        except (OSError, ValueError):
            raise NodeUnavailable(_GONE) from None
        if not isinstance(said, dict):
            raise NodeUnavailable(_GONE)
        return said

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()


def find_control(data: Path) -> Control | None:
    """Call the node that has a data folder open; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONTROL_CALL_MS / 1000)
    try:
        with address_in(data) as address:
            connection.connect(address)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise NodeUnavailable(f"The node's socket {data}/{SOCKET_NAME}: {error.strerror}.") from error
    return Control(connection)
