"""Labels of sessions as the index has them: sealed with their user's key, if the store has keys.

A sealed label is 0xFF, which no text in UTF-8 has, the number (4 bytes) and the id (8) of the key, little-endian, a
nonce (12), and the encrypted label with its tag (16). What it belongs to (tenant, user, session) is authenticated.

What always holds: with keys no label gets into the index in the clear, except those of records that are in the clear
themselves until they are rewritten. The label of an erased user can't be read in any copy of an index.
What it doesn't do: hide the length of a label.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore.errors import Corrupt
from nic_offload.aead import NONCE_BYTES, TAG_BYTES, NotAuthentic
from nic_offload.vault import KeyName

if TYPE_CHECKING:
    from kvstore.storage.sealing import Keys

__all__ = ["LOST_LABEL", "SEALED_MORE_BYTES", "Labels", "is_sealed_label", "number_of_key"]

LOST_LABEL: Final = b"\xff"  # its user's key was destroyed before it was written
_KEY: Final = struct.Struct("<IQ")
SEALED_MORE_BYTES: Final = 1 + _KEY.size + NONCE_BYTES + TAG_BYTES  # in addition to the label's own


def is_sealed_label(label: bytes) -> bool:
    """Return whether a label is sealed, rather than as its owner wrote it."""
    return label.startswith(LOST_LABEL)


def number_of_key(label: bytes) -> int | None:
    """Return the number of the key that seals a label; None if it has none."""
    is_whole = is_sealed_label(label) and len(label) >= SEALED_MORE_BYTES
    return int(_KEY.unpack_from(label, 1)[0]) if is_whole else None


class Labels:
    """The labels of a store's sessions."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def seal(self, tenant: bytes, user: bytes, row_name: bytes, label: bytes) -> bytes:
        """Return the label for the index."""
        if self._keys is None:
            return label
        key = self._keys.name_of(tenant, user)
        if key is not None:
            nonce = os.urandom(NONCE_BYTES)
            sealed = self._keys.vault.seal_text(key, nonce, row_name, label)
            with suppress(Corrupt):
                if sealed is None and self._keys.load(key):
                    sealed = self._keys.vault.seal_text(key, nonce, row_name, label)
            if sealed is not None:
                return LOST_LABEL + _KEY.pack(*key) + nonce + sealed
        return LOST_LABEL  # the user is being erased

    def unseal(self, row_name: bytes, label: bytes) -> bytes | None:
        """Return the label; None if its key is lost, Corrupt if it is damaged, StorageError if it isn't known now."""
        if not is_sealed_label(label):
            return label
        if self._keys is None or len(label) < SEALED_MORE_BYTES:
            return None
        key = KeyName(*_KEY.unpack_from(label, 1))
        sealed_at = 1 + _KEY.size + NONCE_BYTES
        nonce, sealed = label[1 + _KEY.size : sealed_at], label[sealed_at:]
        try:
            text = self._keys.vault.unseal_text(key, nonce, row_name, sealed)
            if text is None and self._keys.load(key):
                text = self._keys.vault.unseal_text(key, nonce, row_name, sealed)
        except NotAuthentic:
            return None
        return text
