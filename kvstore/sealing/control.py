"""How `kvstore keys` speaks to the node that has a data folder open: a socket in that folder, lines of JSON.

    node      {"challenge": HEX, "clear": {DRIVE: [BYTES, WHY], ...}, "damaged": SLOTS}
    command   {"do": "rotate-tenant", "tenant": HEX or null, "proof": HEX}
              {"do": "rotate-master", "new_master_key": "KIND:WHERE", "proof": HEX}
    node      {"done": ...}   or   {"error": SENTENCE, "kind": NAME}

What always holds: only the node's user and root can open the socket; whoever asks for a change proves that they have
the current master key: with it they have unwrapped the root key in the keyring, under which they take a digest of the
node's challenge. So another process of the node's user, which may not look into the node's memory, can't put its own
master key in the place of the one in use. No key is sent.
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
_GONE: Final = "The node ended before it had answered; `kvstore keys status` says what is so."


def proof(root_key: Buffer, challenge: bytes) -> bytes:
    """What only those can give that have the root key."""
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
    """One line."""
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


class Control:
    """One call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        hello = self._heard()
        self.challenge = bytes.fromhex(hello["challenge"])
        self.damaged = int(hello["damaged"])  # slots of the keyring, those that were moved among them
        # What of each drive is in the clear and being encrypted, and why that doesn't go on.
        self.clear = {int(drive): (int(size), str(why)) for drive, (size, why) in hello["clear"].items()}

    def ask(self, **what: Any) -> Any:
        """Have it do something; the error that it answers with, or NodeUnavailable."""
        with suppress(OSError):  # what it said before it ended is read all the same
            self._connection.sendall(line_of(what))
        answer = self._heard()
        if "error" in answer:
            kind = getattr(errors, str(answer.get("kind")), KvError)
            raise kind(answer["error"])
        return answer["done"]

    def _heard(self) -> dict[str, Any]:
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
        """Hang up."""
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
