"""The interface of a master key, and one whose 32 bytes this process has.

What always holds: neither a key nor what a source said is in an error, a log line or a `repr`.
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
    """What wraps the root keys of keyrings."""

    @property
    def id(self) -> str:
        """Says which master key it is; no secret."""
        ...

    def wrap(self, associated: bytes, key: Buffer) -> bytes:
        """Encrypt a key; MasterKeyUnavailable if that can't be done now."""
        ...

    def unwrap(self, associated: bytes, wrapped: bytes) -> memoryview:
        """Give the key back, in locked memory that the caller wipes; WrongMasterKey if it didn't wrap it."""
        ...

    def close(self) -> None:
        """Wipe what is in memory."""
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
        """Nonce, encrypted key, tag."""
        nonce = secrets.token_bytes(aead.NONCE_BYTES)
        return nonce + aead.seal(self._key, nonce, associated, key)

    def unwrap(self, associated: bytes, wrapped: bytes) -> memoryview:
        """Give the key back."""
        nonce, sealed = wrapped[: aead.NONCE_BYTES], wrapped[aead.NONCE_BYTES :]
        try:
            return aead.unseal_key(self._key, nonce.ljust(aead.NONCE_BYTES, b"\0"), associated, sealed)
        except aead.NotAuthentic as error:
            raise WrongMasterKey(f"The master key {self.id} did not wrap this key.") from error

    def close(self) -> None:
        """Wipe it."""
        aead.wipe(self._key)
