"""An open keyring: its reads and writes, below `kvstore.sealing.keyring`, which makes and destroys keys.

What always holds: every key in use was authentic in its slot when the keyring was opened; a slot that is not, then or
later, is damaged, and its key is neither used nor considered destroyed. The same goes for a key that a record names and
the keyring doesn't know. After a failed write nothing more is written.
What it doesn't do: decide which keys there are.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from threading import Lock, RLock
from typing import TYPE_CHECKING

from kvstore.errors import Corrupt, ReadOnly, StorageError, WrongKeyring
from kvstore.limits import KEYRING_LOAD_PAGES, KEYRING_TENANTS_UNSEALED_MAX, PAGE_BYTES
from kvstore.sealing.domain_key import DomainKey
from kvstore.sealing.keyring_state import (
    TenantKey,
    found_in,
    header_of,
    status_of,
    unwrapped_root,
)
from kvstore.sealing.keys_protocol import proof
from kvstore.sealing.slot_check import are_authentic
from kvstore.sealing.slot_table import SlotTable, marked
from kvstore.sealing.slots import (
    HEADER_PAGES,
    SLOTS_PER_PAGE,
    Header,
    Kind,
    Slot,
    State,
    pack_header,
    unwrapped,
)
from nic_offload import aead
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.sealing.keyring_file import KeyringFile
    from kvstore.sealing.keyring_state import Found, KeyringStatus
    from kvstore.sealing.master_key import Master
    from kvstore.sealing.slot_check import Good, Some

__all__ = ["OpenKeyring"]


class OpenKeyring(Handle):
    """A keyring's slots, and the keys that wrap their contents."""

    def __init__(
        self, file: KeyringFile, master: Master, store_uuid: bytes, *, clock: Clock, slots_max: int
    ) -> None:
        self._file = file
        self._clock = clock
        self._writing = RLock()  # held while the file is changed
        self._keys = Lock()  # for unsealed tenants' keys
        self._failed = False
        self._root = _no_key()
        self._store_slot = -1
        self._store_id = b""
        self._unsealed: OrderedDict[bytes, memoryview] = (
            OrderedDict()
        )  # tenants' keys by id, latest used last
        self._tenants: dict[bytes, list[TenantKey]] = {}  # live keys by version: the last is in use
        self._gone_tenants: dict[bytes, TenantKey] = {}
        self._twins: list[int] = []
        self._store_key = _no_key()
        try:
            file.sync()  # writes of a killed process count once they are durable
            self._header = header_of(file)
            self._check_store(store_uuid)
            self._root = unwrapped_root(self._header, master)
            if not self._header.slots:
                self._mark_free()
            self._slots = SlotTable(file, self._header.slots, slots_max=slots_max, grown=self._note_slots)
            self._check_others()
            found = found_in(self._slots, self._header.root.id)
            self._tenants, self._gone_tenants, self._twins = found.tenants, found.gone, found.twins
            self._open_store_key(found)
            self._check_domains(met=False)
        except BaseException:
            self._wipe()
            raise

    def _check_store(self, store_uuid: bytes) -> None:
        if self._header.store_uuid != store_uuid:
            raise WrongKeyring(
                f"The keyring is of store {self._header.store_uuid.hex()}, not of {store_uuid.hex()}: restore the"
                " one of this store from a backup."
            )

    def _mark_free(self) -> None:
        """Mark the free slots of a keyring of the format without marks, in which they are zeros."""
        for page in range(HEADER_PAGES, self._file.pages, KEYRING_LOAD_PAGES):
            raw = self._file.read(page, min(KEYRING_LOAD_PAGES, self._file.pages - page))
            self._file.write(page, marked(raw))
        self._file.sync()
        self._note_slots((self._file.pages - HEADER_PAGES) * SLOTS_PER_PAGE)

    def _note_slots(self, slots: int) -> None:
        """Write to the header how many slots there are: all of these are marked, durably."""
        self._write_header(self._header._replace(sequence=self._header.sequence + 1, slots=slots))

    def proof(self, challenge: bytes) -> bytes:
        """The answer to a challenge, which only a holder of the master key can compute."""
        with self._keys:
            return proof(self._root, challenge)

    def _open_store_key(self, found: Found) -> None:
        if found.store is None:
            raise Corrupt("The keyring has no key of the store; it was left unchanged.")
        self._store_slot, slot = found.store
        self._store_id = slot.id
        self._store_key = unwrapped(slot, self._root, self._header.store_uuid, self._store_slot)

    def _check_others(self) -> None:
        """Check the slots that the root key wraps."""
        for number in self._slots.others:
            slot = self._slots.read(number)
            if slot is not None and slot.wrapped_by == self._header.root.id:
                with suppress(Corrupt):  # it is noted
                    aead.wipe(self._unwrapped(slot, self._root, number, met=False))

    def _check_domains(self, *, met: bool) -> None:
        """Check every slot of a domain: one that isn't authentic, or can't be, is damaged."""
        with self._keys:
            ids = {one.slot.id: one for keys in self._tenants.values() for one in keys}
            gone = set(self._gone_tenants)

        def judge(by: bytes, some: Some) -> Good:
            one = ids.get(by)
            if one is None:  # damaged, given up, or destroyed: a tenant's erasure is unfinished
                return some.are_of(gone)
            with self._keys:
                return are_authentic(some, self.store_uuid, self._unsealed_key(one))

        self._slots.check(judge, met=met)

    # Reading

    @property
    def store_key(self) -> memoryview:
        """The key of the store; owned by the keyring, which wipes it when closed."""
        return self._store_key

    @property
    def store_key_id(self) -> bytes:
        """The id of the store's key, which identifies the keyring: no rotation changes it."""
        return self._store_id

    @property
    def sequence(self) -> int:
        """How many times the header was changed."""
        return self._header.sequence

    def count_up(self) -> None:
        """Increase the header's sequence, durably, so that an older copy can be recognized."""
        with self._writing:
            self._check_usable()
            self._write_header(self._header._replace(sequence=self._header.sequence + 1))

    @property
    def store_uuid(self) -> bytes:
        """The store that the keyring belongs to."""
        return self._header.store_uuid

    def domain(self, tenant: bytes, domain: bytes) -> DomainKey | None:
        """The key of a domain; None if it has no usable one."""
        for number, slot in self._slots.find_all(tenant, domain):
            if slot.state == State.LIVE:
                with suppress(Corrupt):
                    key = self._unseal(number, slot.id)
                    if key is not None:
                        return key
        return None

    def by_number(self, number: int, key_id: bytes) -> DomainKey | None:
        """The key that a record names; None if it was destroyed.

        Corrupt if it was not destroyed but its slot is damaged, it is in another slot, its tenant's key is damaged, or
        its slot never had a key, as in an older copy of the keyring.
        """
        return self._unseal(number, key_id)

    def has(self, number: int, key_id: bytes) -> bool:
        """Whether the keyring can decrypt what this key encrypted."""
        with suppress(Corrupt):
            key = self._unseal(number, key_id)
            if key is not None:
                key.close()
                return True
        return False

    def domain_of(self, number: int) -> tuple[bytes, bytes] | None:
        """The tenant and the domain whose key is in this slot; None if there is none."""
        slot = self._slots.read(number)
        if slot is None or slot.kind != Kind.DOMAIN or slot.state != State.LIVE:
            return None
        return slot.tenant, slot.domain

    def erased_ms(self, tenant: bytes, tag: bytes) -> int | None:
        """When the key of a domain with this tag was destroyed; None if it has one, or never had one."""
        found = [slot for _, slot in self._slots.tagged(tenant, tag)]
        if any(slot.state == State.LIVE for slot in found):
            return None
        return max((slot.when_ms for slot in found), default=None)

    def _unseal(self, number: int, key_id: bytes) -> DomainKey | None:
        for is_again in (False, True):  # the tenant's key may be replaced meanwhile
            if not self._slots.is_live(number, key_id):
                if not self._slots.was_destroyed(number):
                    raise Corrupt(
                        f"Slot {number} of the keyring is damaged or never had a key; nothing sealed with it can be"
                        " opened."
                    )
                if self._slots.is_moved(key_id):
                    raise Corrupt(f"The key of slot {number} of the keyring was moved to another slot.")
                return None
            slot = self._slots.read(number)
            if slot is None or slot.id != key_id or slot.kind != Kind.DOMAIN or slot.state != State.LIVE:
                if is_again:  # not an erasure in between
                    self._slots.mark_damaged([number])
                    raise Corrupt(f"Slot {number} of the keyring was changed by somebody else.")
                continue
            with self._keys:
                if slot.tenant in self._gone_tenants:
                    return None
                by = self._tenant_key(slot)
                if by is not None:
                    return DomainKey(number, slot, self._unwrapped(slot, by, number))
        raise Corrupt(f"The key in slot {number} is wrapped by a key that the keyring doesn't have.")

    def _unwrapped(self, slot: Slot, by: memoryview, number: int, *, met: bool = True) -> memoryview:
        try:
            return unwrapped(slot, by, self.store_uuid, number)
        except Corrupt:
            self._slots.mark_damaged([number], met=met)
            raise

    def _tenant_key(self, wraps: Slot) -> memoryview | None:
        """The unsealed key that wraps a domain's; call it with the lock of these held."""
        for one in self._tenants.get(wraps.tenant, ()):
            if one.slot.id == wraps.wrapped_by:
                return self._unsealed_key(one)
        return None

    def _unsealed_key(self, one: TenantKey) -> memoryview:
        """A tenant's key, unsealed; call it with the lock of these held."""
        known = self._unsealed.get(one.slot.id)
        if known is not None:
            self._unsealed.move_to_end(one.slot.id)
            return known
        return self._keep(one.slot.id, unwrapped(one.slot, self._root, self.store_uuid, one.number))

    def _keep(self, key_id: bytes, key: memoryview) -> memoryview:
        while len(self._unsealed) >= KEYRING_TENANTS_UNSEALED_MAX:
            aead.wipe(self._unsealed.popitem(last=False)[1])
        self._unsealed[key_id] = key
        return key

    def _forget(self, key_id: bytes) -> None:
        with self._keys:
            key = self._unsealed.pop(key_id, None)
            if key is not None:
                aead.wipe(key)

    def is_destroyed(self, number: int) -> bool:
        """Whether the key that this slot had was destroyed, and it has no other one."""
        return self._slots.is_gone(number)

    def expect(self, numbers: NDArray[np.int64]) -> int:
        """Mark as damaged those of these slots that are free: records name their keys. Returns how many."""
        return self._slots.expect(numbers)

    def status(self) -> KeyringStatus:
        """Return what the keyring holds."""
        with self._keys:
            tenants = {tenant: list(keys) for tenant, keys in self._tenants.items()}
        return status_of(self._file, self._header, self._slots, tenants, self.store_key_id)

    # Writing

    def _check_usable(self) -> None:
        if self._failed:
            raise ReadOnly(
                "A write to the keyring failed; it accepts no more until the node is started again."
            )

    def _write(self, changes: Mapping[int, Slot | None]) -> None:
        """Overwrite slots, durably before it returns."""
        try:
            self._slots.write(changes)
            self._file.sync()
        except StorageError:
            self._failed = True
            raise

    def _overwrite(self, changes: Mapping[int, Slot | None]) -> None:
        """Destroy keys, durably before it returns; slots without a name may then be reused."""
        if changes:
            self._slots.publish(changes)  # never handed out again, even if the write fails
            self._write(changes)
            for number, slot in changes.items():
                if slot is None or slot.kind == Kind.UNREAD:
                    self._slots.give_back(number)

    def _write_header(self, header: Header) -> None:
        """Write both copies, each durable before the next begins."""
        try:
            for copy in range(HEADER_PAGES):
                self._file.write(copy, pack_header(header).ljust(PAGE_BYTES, b"\0"))
                self._file.sync()
        except StorageError:
            self._failed = True
            raise
        self._header = header

    def close(self) -> None:
        """Wipe the keys and release the file."""
        self._wipe()
        self._file.close()

    def _wipe(self) -> None:
        with self._keys:
            for key in (self._root, *self._unsealed.values(), self._store_key):
                aead.wipe(key)
            self._root, self._store_key = _no_key(), _no_key()
            self._unsealed.clear()


def _no_key() -> memoryview:
    return memoryview(bytearray())
