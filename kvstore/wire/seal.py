"""Keys with which the two ends of a connection authenticate words, heads, calls and answers over the fabric.

The node makes a secret for each connection and sends it in the answer to `Attach`, inside TLS where there is TLS. Each
direction has its own key, derived from it; `nic_offload/seal.c` says what is tagged with them, and how.

What always holds: a secret is used for one connection, and its repr doesn't show it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from kvstore.errors import ProtocolError

if TYPE_CHECKING:
    from nic_offload.fabric import Endpoint, Region

__all__ = ["SECRET_BYTES", "Seal"]

SECRET_BYTES = 16
_TO_NODE, _TO_CLIENT = b"kv to node", b"kv to client"


class Seal:
    """The secret of one connection."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ProtocolError(f"A connection's secret has {SECRET_BYTES} bytes, not {len(secret)}.")
        self._secret = secret

    @classmethod
    def fresh(cls) -> Seal:
        """Make a new secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @property
    def secret(self) -> bytes:
        """The secret sent to the other end."""
        return self._secret

    def _key(self, direction: bytes) -> bytes:
        return hashlib.blake2b(key=self._secret, person=direction, digest_size=SECRET_BYTES).digest()

    def put_on_node(self, endpoint: Endpoint) -> None:
        """Seal the node's endpoint."""
        endpoint.seal(self._key(_TO_CLIENT), self._key(_TO_NODE))

    def put_on_client(self, endpoint: Endpoint, words: Region) -> None:
        """Seal the client's endpoint, whose acknowledgements arrive in `words`."""
        endpoint.seal(self._key(_TO_NODE), self._key(_TO_CLIENT), words)
