"""The keys of an open store: the C core's vault as a cache of the keyring.

    open_keys = keys_opener(data, "file:/etc/triggerkv/master.key")
    store = Store.open(data, open_keys=open_keys, ...)

What always holds: a key is durable before it is returned. Keys are made and destroyed on a thread of their own, since
that waits for the drive; `settle_finished` calls callers back, in the order of their requests. A data folder that has
a keyring is not opened without its master key: its records would look damaged.

What it doesn't do: keep unwrapped keys anywhere but in the vault, which evicts those not used recently.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final

from kvstore.errors import (
    ConfigError,
    Corrupt,
    KvError,
    NoKeyring,
    StorageError,
    WrongKeyring,
)
from kvstore.limits import (
    KEYRING_DAMAGED_LOGGED_MAX,
    VAULT_KEYS_MAX,
    VAULT_NAMES_MAX,
)
from kvstore.names import domain_tag, domain_tag_in
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import why_not_the_drives
from kvstore.sealing.masters import check_master, open_master
from kvstore.sealing.slots import NO_NAME
from kvstore.wire.record import KeyringMark
from nic_offload.secret_keys import are_locked
from nic_offload.vault import KeyName, Vault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing.domain_key import DomainKey, Erased
    from kvstore.sealing.keyring_state import KeyringStatus

    Then = Callable[[StorageError | None], None]

__all__ = ["StoreKeys", "keys_opener"]

log = logging.getLogger(__name__)

_SHARED_TAG: Final = domain_tag(NO_NAME)  # the domain of blocks without a tag in their keys


class StoreKeys:
    """The keys of a store. All calls come from one thread, except `wake`."""

    def __init__(self, keyring: Keyring) -> None:
        """Take ownership of an open keyring."""
        self._keyring = keyring
        self.vault = Vault(VAULT_KEYS_MAX)
        self.header_secret = keyring.store_key
        if not (self.vault.is_locked and are_locked()):
            log.warning(
                "The system doesn't let this process lock its keys in memory, so they may be swapped: raise ulimit -l"
                " (LimitMEMLOCK= of the unit), or use encrypted swap or none."
            )
        if damaged := keyring.status().damaged:
            log.warning(
                "%d slots of the keyring are damaged: the blocks that they encrypted miss until the keyring is restored"
                " from a copy, or they are given up (`kvstore keys accept-keyring` on the stopped node).",
                damaged,
            )
        self._names: OrderedDict[tuple[bytes, bytes], KeyName] = OrderedDict()  # the last used
        self._erasing: Counter[tuple[bytes, bytes | None]] = Counter()
        self._worker = ThreadPoolExecutor(1, "kvstore-keys")
        self._rotator = ThreadPoolExecutor(1, "kvstore-rotation")  # a long rotation doesn't delay new keys
        self._closing = False
        self._warned: set[int] = set()  # damaged slots that were logged
        self._lock = Lock()  # for these three:
        self._destroyed: list[int] = []  # numbers of keys that the vault may still have
        self._asked: list[tuple[tuple[bytes, bytes], Then]] = []
        self._made: deque[tuple[Then, StorageError | None]] = deque()
        self._wake: Callable[[], object] = lambda: None

    def name_of(self, tenant: bytes, domain: bytes) -> KeyName | None:
        """The key of a domain; None if it has none yet."""
        if self._erasing and (self._erasing[tenant, None] or self._erasing[tenant, domain]):
            return None  # it gets another key after the erasure
        name = self._names.get((tenant, domain))
        if name is not None:
            self._names.move_to_end((tenant, domain))
            return name
        try:
            key = self._keyring.domain(tenant, domain)
        except KvError as error:  # `ensure` reports the same for each write
            log.warning("A key of the keyring can't be used: %s", error)
            return None
        return None if key is None else self._take(key)

    def ensure(self, tenant: bytes, domain: bytes, then: Then) -> None:
        """Make a key for a domain, durably; `then` is called by `settle_finished`."""
        with self._lock:
            self._asked.append(((tenant, domain), then))
            is_first = len(self._asked) == 1
        if is_first:
            self._worker.submit(self._make)

    def erase(self, tenant: bytes, domains: Sequence[bytes] | None) -> Future[list[Erased]]:
        """Destroy the keys of domains, or all of a tenant; from now on nothing is encrypted with them.

        Call `forget_destroyed` when this has ended, and `erased` when nothing is left that the keys encrypted.
        """
        for domain in _each(domains):
            self._forget(tenant, domain)
            self._erasing[tenant, domain] += 1
        return self._worker.submit(self._erase, tenant, domains)

    def forget_destroyed(self, tenant: bytes, domains: Sequence[bytes] | None) -> None:
        """Forget keys that `erase` has destroyed. Call it on the store's thread."""
        with self._lock:
            destroyed, self._destroyed = self._destroyed, []
        for number in destroyed:  # also keys loaded for reads only, whose names may be forgotten
            self.vault.drop(number)
        for domain in _each(domains):
            self._forget(tenant, domain)  # again: a read may have loaded a key before it was destroyed

    def erased(self, tenant: bytes, domains: Sequence[bytes] | None) -> None:
        """Note, on the store's thread, that an erasure has ended or failed: its domains may have keys again."""
        self.forget_destroyed(tenant, domains)
        for domain in _each(domains):
            self._erasing[tenant, domain] -= 1
            if not self._erasing[tenant, domain]:
                del self._erasing[tenant, domain]

    def _forget(self, tenant: bytes, domain: bytes | None) -> None:
        names = [(tenant, domain)] if domain is not None else [one for one in self._names if one[0] == tenant]
        for name in names:
            known = self._names.pop(name, None)
            if known is not None:
                self.vault.drop(known.number)

    def _erase(self, tenant: bytes, domains: Sequence[bytes] | None) -> list[Erased]:
        ring = self._keyring
        gone = (
            ring.erase_tenant(tenant) if domains is None else ring.erase([(tenant, one) for one in domains])
        )
        with self._lock:
            self._destroyed += [one.number for one in gone if one.number is not None]
        unread = sum(one.is_unread for one in gone)
        if unread:
            log.warning(
                "An erasure has overwritten %d damaged slots of the keyring, since these may have had its keys: the"
                " blocks that they encrypted count as erased.",
                unread,
            )
        return gone

    def erased_ms(self, tenant: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """When the domains of these blocks were erased; None for one that has a key, or never had one.

        This comes from the keyring, so it is known after each start. Each domain is looked up once per call.
        """
        tags = [domain_tag_in(key) or _SHARED_TAG for key in keys]
        erased: dict[bytes, int | None] = dict.fromkeys(tags)
        for tag in erased:
            with suppress(StorageError):  # the keyring can't be read now
                erased[tag] = self._keyring.erased_ms(tenant, tag)
        return [erased[tag] for tag in tags]

    def load(self, name: KeyName) -> bool:
        """Load a key into the vault again; False if it was destroyed, Corrupt or StorageError if that is unknown."""
        try:
            key = self._keyring.by_number(name.number, name.id.to_bytes(8, "little"))
        except Corrupt as error:
            self._warn_of(name.number, error)
            raise
        if key is None:
            return False
        self._take(key)
        return True

    def is_destroyed(self, number: int) -> bool:
        """Whether the key with this number was destroyed."""
        return self._keyring.is_destroyed(number)

    def expect(self, numbers: NDArray[np.int64]) -> None:
        """Check the keys that a drive's records name, by number, and log missing ones."""
        if lost := self._keyring.expect(numbers):
            log.warning(
                "The keyring lacks %d keys that blocks and sessions name, as an older copy does: these are misses until"
                " the newest is restored, or they are given up (`kvstore keys accept-keyring` on the stopped node).",
                lost,
            )

    def _warn_of(self, number: int, error: Corrupt) -> None:
        """Log once per slot: each read of a block would repeat it."""
        if number not in self._warned and len(self._warned) < KEYRING_DAMAGED_LOGGED_MAX:
            self._warned.add(number)
            log.warning(
                "Key %d of the keyring can't be used, and its blocks miss until the keyring is restored: %s",
                number,
                error,
            )

    @property
    def mark(self) -> KeyringMark:
        """The mark of the keyring that drives store."""
        return KeyringMark(self._keyring.store_key_id, self._keyring.sequence)

    def count_up(self) -> None:
        """Advance the mark, durably."""
        self._keyring.count_up()

    @property
    def tenants(self) -> list[bytes]:
        """Return the tenants that have keys."""
        return self._keyring.tenants

    @property
    def rotating(self) -> list[bytes]:
        """Tenants whose rotation was interrupted."""
        return self._keyring.rotating

    @property
    def status(self) -> KeyringStatus:
        """The state of the keyring."""
        return self._keyring.status()

    def proof(self, challenge: bytes) -> bytes:
        """The answer to a challenge, which only a holder of the master key can compute."""
        return self._keyring.proof(challenge)

    def rotate_tenant(self, tenant: bytes) -> Future[int]:
        """Wrap the keys of a tenant's domains with a new one; returns how many. `close` interrupts it."""
        return self._rotator.submit(self._keyring.rotate_tenant, tenant, lambda: not self._closing)

    def rotate_master(self, option: str) -> Future[str]:
        """Seal the keyring with another master key; returns its id."""
        return self._rotator.submit(self._rotate_master, option)

    def _rotate_master(self, option: str) -> str:
        master = open_master(option)
        try:
            self._keyring.rotate_master(master)
            return master.id
        finally:
            master.close()

    def domain_of(self, number: int) -> tuple[bytes, bytes] | None:
        """The tenant and the domain of the key with this number; None if it is gone, or can't be read now."""
        try:
            return self._keyring.domain_of(number)
        except KvError as error:
            log.warning("Key %d of the keyring can't be read: %s", number, error)
            return None

    def settle_finished(self) -> None:
        """Call back the callers of finished work."""
        while self._made:
            then, error = self._made.popleft()
            then(error)

    def on_finished(self, wake: Callable[[], object]) -> None:
        """Call `wake`, on the keys' thread, when there is something to settle."""
        self._wake = wake

    def close(self) -> None:
        """Wipe all keys. The fabric and the drives must be closed already."""
        self._closing = True
        self._rotator.shutdown(cancel_futures=True)
        self._worker.shutdown()
        self._keyring.close()
        self.vault.close()

    def _take(self, key: DomainKey) -> KeyName:
        name = KeyName(key.number, int.from_bytes(key.id, "little"))
        with key:
            self.vault.put(key.tenant, key.domain, name, key.key)
        self._names[key.tenant, key.domain] = name
        if len(self._names) > VAULT_NAMES_MAX:
            self._names.popitem(last=False)
        return name

    def _make(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, []
        error = self._ensure([name for name, _ in asked])
        errors: dict[bytes, StorageError | None] = {}
        if error is not None:  # it may concern one tenant only: retry each by itself
            tenants = dict.fromkeys(tenant for (tenant, _), _ in asked)
            errors = {one: self._ensure([name for name, _ in asked if name[0] == one]) for one in tenants}
        self._made.extend((then, errors.get(name[0], error)) for name, then in asked)
        self._wake()

    def _ensure(self, names: Sequence[tuple[bytes, bytes]]) -> StorageError | None:
        try:
            for key in self._keyring.ensure(list(dict.fromkeys(names))):
                key.close()  # the store's thread loads it when it is needed
        except StorageError as error:
            return error
        except KvError as error:
            return StorageError(f"The erase domain's key could not be made: {error}")
        return None


def _each(domains: Sequence[bytes] | None) -> Sequence[bytes | None]:
    return (None,) if domains is None else domains


def keys_opener(
    data: Path, master_key: str | None
) -> Callable[[bytes, Sequence[KeyringMark]], StoreKeys] | None:
    """A function that opens the keys of the store in a data folder; None if its records are not encrypted.

    ConfigError if they are, and no master key is given. The first opening with a master key makes the keyring; if a
    drive has a mark of a keyring, there was one, and no new one is made.
    """
    path = keyring_path(data)
    if master_key is None:
        if path.exists():
            raise ConfigError(
                f"The records in {data} are encrypted: give their master key (--master-key), or delete the"
                " folder and what is in it."
            )
        return None
    check_master(master_key)
    option = master_key

    def open_keys(store_uuid: bytes, marks: Sequence[KeyringMark]) -> StoreKeys:
        if marks and not path.exists():
            raise NoKeyring(
                f"There is no keyring {path}, and the store's records are encrypted with one (id"
                f" {marks[0].id.hex()}): restore it from a backup, or give up what is encrypted (`kvstore keys"
                " new-keyring`)."
            )
        master = open_master(option)
        try:
            if not path.exists():
                Keyring.create(path, master, store_uuid)
            keyring = Keyring.open(path, master, store_uuid)
        finally:
            master.close()
        own = KeyringMark(keyring.store_key_id, keyring.sequence)
        if (why_not := why_not_the_drives(own, marks)) is not None:
            keyring.close()
            raise WrongKeyring(why_not)
        return StoreKeys(keyring)

    return open_keys
