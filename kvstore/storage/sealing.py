"""The store's interface to the keys that encrypt its records.

Keys belong to erase domains: a tenant's own, or one that it names. `kvstore.sealing` makes, stores and destroys
them. Here they are numbers, which records and index rows contain; the keys are in the vault of the C core, where
lanes and readers find them as well.

Always holds: a record is encrypted with a key that survives power loss, so `ensure` has called back for its domain
before the record is written; without such a key the record is refused. A record whose key was destroyed can't be read
by anyone.

It has no key of its own, and decides nothing about them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from kvstore.errors import NoKeyring
from kvstore.limits import STAGED_IDLE_BYTES_MAX
from nic_offload.memory import undumped

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.errors import StorageError
    from kvstore.wire.record import KeyringMark, Superblock
    from nic_offload.vault import KeyName, Vault

__all__ = ["NO_DOMAIN", "Keys", "OpenKeys", "Staging", "domain_number", "opened_keys"]

NO_DOMAIN: Final = bytes(16)  # the tenant's own


class Keys(Protocol):
    """The keys of all domains of a store."""

    vault: Vault

    @property
    def header_secret(self) -> Buffer:
        """The key of the tags of encrypted records' headers, which stays at its address."""
        ...

    def name_of(self, tenant: bytes, domain: bytes) -> KeyName | None:
        """Return the name of a domain's key, which is then in the vault; None if it has none yet."""
        ...

    def ensure(self, tenant: bytes, domain: bytes, then: Callable[[StorageError | None], None]) -> None:
        """Make a key for a domain, durably; `then` is called by `settle_finished`, which `wake` requests."""
        ...

    def load(self, name: KeyName) -> bool:
        """Put a key into the vault, which has dropped it; False if it was destroyed.

        Corrupt if it was not, and can't be opened; StorageError if that is unknown now.
        """
        ...

    def is_destroyed(self, number: int) -> bool:
        """Return whether the key with this number was destroyed, so that its records can't be read any more."""
        ...

    def expect(self, numbers: NDArray[np.int64]) -> None:
        """Note the keys that a drive's blocks name, by number: these numbers must not be given again."""
        ...

    def domain_of(self, number: int) -> tuple[bytes, bytes] | None:
        """Return the tenant and domain whose key has this number; None if there is none."""
        ...

    def erased_ms(self, tenant: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """Return when the domains that blocks' keys were made for were erased; None: not known, or in use again."""
        ...

    def settle_finished(self) -> None:
        """Call back for the keys that have been made."""
        ...

    @property
    def mark(self) -> KeyringMark:
        """Return the mark of the keyring, which the drives store."""
        ...

    def count_up(self) -> None:
        """Change the mark, durably, so that older copies of the keyring are recognized."""
        ...

    def on_finished(self, wake: Callable[[], object]) -> None:
        """Call this, from any thread, when there is something to settle."""
        ...

    def close(self) -> None:
        """Forget all keys."""
        ...


OpenKeys: TypeAlias = "Callable[[bytes, Sequence[KeyringMark]], Keys]"
"""Opens the keys of the store that has this uuid, and whose drives have these marks: NoKeyring or WrongKeyring."""


def opened_keys(data: Path, superblocks: Iterable[Superblock], open_keys: OpenKeys | None) -> Keys | None:
    """Open the keys of a store with these drives; None if there are none. NoKeyring if its records need some."""
    superblocks = list(superblocks)
    marks = [one.keyring for one in superblocks if one.keyring is not None]
    if open_keys is not None:
        return open_keys(superblocks[0].store_uuid, marks)
    if marks:
        raise NoKeyring(
            f"The records in {data} are encrypted with keyring {marks[0].id.hex()}, and it is lost: restore"
            f" {data}/keyring and give its master key (--master-key), or give up what is encrypted"
            " (`kvstore keys new-keyring`)."
        )
    return None


def domain_number(name: KeyName | None) -> int:
    """Return the number, from 1, of a key in rows and headers; 0: there is none, the record is in the clear."""
    return 0 if name is None else name.number + 1


class Staging:
    """Memory for encrypted records that are being written; returned memory is kept for the next one of its size."""

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._taken: dict[int, mmap.mmap] = {}  # by address
        self._idle_bytes = 0

    def take(self, size_bytes: int) -> int:
        """Return the address of memory of this size, in whole pages."""
        size = 1 << (size_bytes - 1).bit_length()
        idle = self._idle.get(size)
        if idle:
            memory = idle.pop()
            self._idle_bytes -= size
        else:
            memory = undumped(size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._taken[address] = memory
        return address

    def give_back(self, address: int) -> None:
        """Take memory back that no write uses any more."""
        memory = self._taken.pop(address)
        if self._idle_bytes + len(memory) <= STAGED_IDLE_BYTES_MAX:
            self._idle.setdefault(len(memory), []).append(memory)
            self._idle_bytes += len(memory)
