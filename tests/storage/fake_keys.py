"""Keys of a store that outlive its process, as a keyring's do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.wire.record import KeyringMark
from nic_offload.vault import KeyName, Vault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.errors import StorageError

VAULT_KEYS = 4  # so few that they take turns


class FakeKeyring:
    """The durable part of a keyring."""

    def __init__(self) -> None:
        self.header_secret = os.urandom(32)
        self.keys: dict[tuple[bytes, bytes], tuple[KeyName, bytes]] = {}
        self._numbers = 0
        self.erased_ms: dict[tuple[bytes, bytes], int] = {}  # by tenant and key of a block
        self.mark = KeyringMark(os.urandom(8), 1)

    def make(self, tenant: bytes, domain: bytes) -> None:
        if (tenant, domain) not in self.keys:
            self.keys[tenant, domain] = KeyName(self._numbers, 1000 + self._numbers), os.urandom(32)
            self._numbers += 1

    def erase(self, tenant: bytes, domain: bytes) -> None:
        del self.keys[tenant, domain]

    def open(self, _: bytes, marks: Sequence[KeyringMark]) -> FakeKeys:
        assert all(mark.id == self.mark.id and mark.sequence <= self.mark.sequence for mark in marks)
        return FakeKeys(self)


class FakeKeys:
    """A process's view of the keyring."""

    def __init__(self, ring: FakeKeyring) -> None:
        self.ring = ring
        self.vault = Vault(VAULT_KEYS)
        self.header_secret = ring.header_secret
        self._wake: Callable[[], object] = lambda: None
        self._finished: list[tuple[bytes, bytes, Callable[[StorageError | None], None]]] = []

    def name_of(self, tenant: bytes, domain: bytes) -> KeyName | None:
        name, secret = self.ring.keys.get((tenant, domain), (None, b""))
        if name is not None:
            self.vault.put(tenant, domain, name, secret)
        return name

    def ensure(self, tenant: bytes, domain: bytes, then: Callable[[StorageError | None], None]) -> None:
        self._finished.append((tenant, domain, then))
        self._wake()

    def load(self, name: KeyName) -> bool:
        for (tenant, domain), (one, secret) in self.ring.keys.items():
            if one == name:
                self.vault.put(tenant, domain, name, secret)
                return True
        return False

    def is_destroyed(self, number: int) -> bool:
        return number < self.ring._numbers and self.domain_of(number) is None

    def expect(self, numbers: NDArray[np.int64]) -> None:
        assert all(number < self.ring._numbers for number in numbers)

    @property
    def mark(self) -> KeyringMark:
        return self.ring.mark

    def count_up(self) -> None:
        self.ring.mark = self.ring.mark._replace(sequence=self.ring.mark.sequence + 1)

    def domain_of(self, number: int) -> tuple[bytes, bytes] | None:
        return next((names for names, (one, _) in self.ring.keys.items() if one.number == number), None)

    def erased_ms(self, tenant: bytes, keys: Sequence[bytes]) -> list[int | None]:
        return [self.ring.erased_ms.get((tenant, key)) for key in keys]

    def settle_finished(self) -> None:
        finished, self._finished = self._finished, []
        for tenant, domain, then in finished:
            self.ring.make(tenant, domain)
            then(None)

    def on_finished(self, wake: Callable[[], object]) -> None:
        self._wake = wake

    def close(self) -> None:
        self.vault.close()
