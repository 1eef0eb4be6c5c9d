"""The interface of a master key, and one whose 32 bytes are in this process.

What always holds: no error, log line or `repr` contains a key or the output of a source.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import WrongMasterKey
from nic_offload import aead

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LocalMaster", "Master"]

_ID_BYTES: Final = 8


class Master(Protocol):
    """Wraps the root keys of keyrings."""

    @property
    def id(self) -> str:
        """Identifies the master key; not secret."""
        ...

    def wrap(self, associated: bytes, key: Buffer) -> bytes:
        """Encrypt a key; MasterKeyUnavailable if that is impossible now."""
        ...

    def unwrap(self, associated: bytes, wrapped: bytes) -> memoryview:
        """Decrypt a key, into locked memory that the caller wipes; WrongMasterKey if another master key wrapped it."""
        ...

    def close(self) -> None:
        """Wipe the key in memory, if any."""
        ...


class LocalMaster:
    """A master key in this process's memory, which it owns and wipes."""

    def __init__(self, key: bytearray) -> None:
        assert len(key) == aead.KEY_BYTES, len(key)
        self._key = key
        self.id = f"key:{blake2b(key, digest_size=_ID_BYTES, person=b'tkv master').hexdigest()}"

    def __repr__(self) -> str:
        return f"LocalMaster({self.id})"

    def wrap(self, associated: bytes, key: Buffer) -> bytes:
        """Encrypt a key: nonce, encrypted key, tag."""
        nonce = secrets.token_bytes(aead.NONCE_BYTES)
        return nonce + aead.seal(self._key, nonce, associated, key)

    def unwrap(self, associated: bytes, wrapped: bytes) -> memoryview:
        """Decrypt a key."""
        nonce, sealed = wrapped[: aead.NONCE_BYTES], wrapped[aead.NONCE_BYTES :]
        try:
            return aead.unseal_key(self._key, nonce.ljust(aead.NONCE_BYTES, b"\0"), associated, sealed)
        except aead.NotAuthentic as error:
            raise WrongMasterKey(f"The master key {self.id} did not wrap this key.") from error

    def close(self) -> None:
        """Wipe the master key."""
        aead.wipe(self._key)
