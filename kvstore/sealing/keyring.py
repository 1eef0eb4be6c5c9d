"""The keyring of a store: wrapped keys of its tenants and erase domains, each in a slot that is overwritten in place.

    keyring = Keyring.open(path, master, store_uuid)
    (key,) = keyring.ensure([(tenant, domain)])  # durable before it is given

The master key wraps a root key, which wraps the store's key and a key per tenant, which wraps that tenant's domain
keys; docs/sealing.md has the format, and says what an attacker can do with which of them.

What always holds: a key is durable before it is given to anybody; a destroyed one is overwritten, and that is durable,
before `erase` returns; a slot has another id whenever it is used again. A process or a machine that dies at any step
leaves each key as it was or as it was to be: an erasure or rotation that was under way is finished by the next opening
or by asking again. After a failed write nothing more is written.

What it doesn't do: keep unsealed domain keys, which are their caller's to wipe; notice that its file was replaced by an
older one. It may be used by several threads: one changes it at a time, and others read meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock, RLock
from typing import TYPE_CHECKING, Self

from kvstore.clock import SystemClock
from kvstore.errors import Closed, Corrupt, KvError, ReadOnly, StorageError, WrongMasterKey
from kvstore.limits import KEYRING_SLOTS_MAX, KEYRING_TENANTS_UNSEALED_MAX, PAGE_BYTES
from kvstore.sealing.control import proof
from kvstore.sealing.domain_key import DomainKey, Erased
from kvstore.sealing.keyring_file import FolderFile, create_file
from kvstore.sealing.keyring_state import (
    TenantKey,
    found_in,
    header_of,
    header_sectors,
    status_of,
    unwrapped_root,
)
from kvstore.sealing.new_keyring import new_image
from kvstore.sealing.slot_table import SlotTable
from kvstore.sealing.slots import (
    HEADER_PAGES,
    NO_NAME,
    Header,
    Kind,
    Root,
    Slot,
    State,
    fresh_id,
    fresh_key,
    pack_header,
    root_associated,
    unwrapped,
    wrapped,
)
from nic_offload import aead
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.sealing.keyring_file import KeyringFile
    from kvstore.sealing.keyring_state import Found, KeyringStatus
    from kvstore.sealing.master_key import Master

__all__ = ["Keyring"]

Name = tuple[bytes, bytes]  # of a tenant and a domain


class Keyring(Handle):
    """An open keyring."""

    def __init__(
        self, file: KeyringFile, master: Master, store_uuid: bytes, *, clock: Clock, slots_max: int
    ) -> None:
        self._file = file
        self._clock = clock
        self._writing = RLock()  # of whoever changes the file
        self._keys = Lock()  # of unsealed tenants' keys
        self._failed = False
        self._root = _no_key()
        self._store_slot = -1
        self._store_id = b""
        self._unsealed: OrderedDict[bytes, memoryview] = (
            OrderedDict()
        )  # tenants' keys by id, latest used last
        self._tenants: dict[bytes, list[TenantKey]] = {}  # live ones by version: the last is in use
        self._gone_tenants: dict[bytes, TenantKey] = {}
        self._store_key = _no_key()
        try:
            file.sync()  # what a killed process has written counts, once it is durable
            self._header = header_of(file)
            self._check_store(store_uuid)
            self._root = unwrapped_root(self._header, master)
            self._slots = SlotTable(file, slots_max)
            found = found_in(self._slots, self._header.root.id)
            self._tenants, self._gone_tenants = found.tenants, found.gone
            self._open_store_key(found)
            self._finish(found)
        except BaseException:
            self._wipe()
            raise

    @classmethod
    def create(cls, path: Path, master: Master, store_uuid: bytes, clock: Clock | None = None) -> None:
        """Make a keyring with a key for the store, durably."""
        create_file(path, new_image(master, store_uuid, clock or SystemClock()))

    @classmethod
    def open(cls, path: Path, master: Master, store_uuid: bytes, clock: Clock | None = None) -> Self:
        """Open the keyring of a store, and finish what was under way when a process died."""
        return cls.of(FolderFile(path), master, store_uuid, clock)

    @classmethod
    def of(
        cls,
        file: KeyringFile,
        master: Master,
        store_uuid: bytes,
        clock: Clock | None = None,
        slots_max: int = KEYRING_SLOTS_MAX,
    ) -> Self:
        """Open one of any file, which is closed with it, and if that fails."""
        try:
            return cls(file, master, store_uuid, clock=clock or SystemClock(), slots_max=slots_max)
        except BaseException:
            file.close()
            raise

    def _check_store(self, store_uuid: bytes) -> None:
        if self._header.store_uuid != store_uuid:
            raise StorageError(
                f"The keyring is of store {self._header.store_uuid.hex()}, not of {store_uuid.hex()}."
            )

    def proof(self, challenge: bytes) -> bytes:
        """What only those can give that have its master key."""
        with self._keys:
            return proof(self._root, challenge)

    def _open_store_key(self, found: Found) -> None:
        if found.store is None:
            raise Corrupt("The keyring has no key of the store; it was left unchanged.")
        self._store_slot, slot = found.store
        self._store_id = slot.id
        self._store_key = unwrapped(slot, self._root, self._header.store_uuid, self._store_slot)

    def _finish(self, found: Found) -> None:
        """Continue what a process that died had begun."""
        if header_sectors(self._file) != [pack_header(self._header)] * HEADER_PAGES:
            self._write_header(self._header)
        self._free(found.twins)
        for tenant in list(self._gone_tenants):
            self._destroy_rest_of(tenant)

    # Reading

    @property
    def store_key(self) -> memoryview:
        """The key of the store; the keyring's own, which it wipes when it is closed."""
        return self._store_key

    @property
    def store_key_id(self) -> bytes:
        """The id of the key of the store, which is the keyring's own: no rotation changes it."""
        return self._store_id

    @property
    def sequence(self) -> int:
        """How often its header was changed."""
        return self._header.sequence

    def count_up(self) -> None:
        """Change the header's sequence, durably: a copy from before is known by it."""
        with self._writing:
            self._check_usable()
            self._write_header(self._header._replace(sequence=self._header.sequence + 1))

    @property
    def store_uuid(self) -> bytes:
        """Whose it is."""
        return self._header.store_uuid

    def domain(self, tenant: bytes, domain: bytes) -> DomainKey | None:
        """The key of a domain; None if it has none."""
        found = self._slots.find(tenant, domain)
        return None if found is None else self._unseal(found[0], found[1].id)

    def by_number(self, number: int, key_id: bytes) -> DomainKey | None:
        """The key that a record names; None if it was destroyed, and with an older keyring if it is unknown.

        Corrupt if its slot is damaged: then nobody has destroyed it.
        """
        return self._unseal(number, key_id)

    def has(self, number: int, key_id: bytes) -> bool:
        """Whether it has the key that a record names."""
        return self._slots.is_live(number, key_id)

    def domain_of(self, number: int) -> tuple[bytes, bytes] | None:
        """The tenant and the domain whose key is in this slot; None if there is none."""
        slot = self._slots.read(number)
        if slot is None or slot.kind != Kind.DOMAIN or slot.state != State.LIVE:
            return None
        return slot.tenant, slot.domain

    def erased_ms(self, tenant: bytes, domain: bytes) -> int | None:
        """When the key of a domain that has none was destroyed; None if that isn't known, or not the case."""
        found = self._slots.find(tenant, domain)
        return found[1].when_ms if found is not None and found[1].state == State.GONE else None

    def erased(self, limit: int) -> list[tuple[bytes, bytes, int]]:
        """The domains that were erased last, and have no key now: tenant, domain and when, the latest last."""
        return self._slots.gone_domains(limit) if self._slots.counts()[2] else []

    def _unseal(self, number: int, key_id: bytes) -> DomainKey | None:
        for _ in range(2):  # its tenant's key may be replaced meanwhile, after it was wrapped by the new one
            if self._slots.is_damaged(number):
                raise Corrupt(
                    f"Slot {number} of the keyring is damaged; nothing sealed with its key can be opened."
                )
            if not self._slots.is_live(number, key_id):
                self._check_place(number)
                return None
            slot = self._slots.read(number)
            if slot is None or slot.id != key_id or slot.kind != Kind.DOMAIN or slot.state != State.LIVE:
                return None
            with self._keys:
                if slot.tenant in self._gone_tenants:
                    return None
                by = self._tenant_key(slot)
                if by is not None:
                    return DomainKey(number, slot, unwrapped(slot, by, self.store_uuid, number))
        raise Corrupt(f"The key in slot {number} is wrapped by a key that the keyring doesn't have.")

    def _check_place(self, number: int) -> None:
        """Corrupt if a slot has a key that was made for another: then the one that was here wasn't destroyed."""
        slot = self._slots.read(number) if self._slots.is_used(number) else None
        if slot is None or slot.kind != Kind.DOMAIN or slot.state != State.LIVE:
            return
        with self._keys:
            by = self._tenant_key(slot)
            if by is not None:
                aead.wipe(unwrapped(slot, by, self.store_uuid, number))

    def _tenant_key(self, wraps: Slot) -> memoryview | None:
        """The unsealed key that wraps a domain's, under the lock of these."""
        known = self._unsealed.get(wraps.wrapped_by)
        if known is not None:
            self._unsealed.move_to_end(wraps.wrapped_by)
            return known
        for number, slot in self._tenants.get(wraps.tenant, ()):
            if slot.id == wraps.wrapped_by:
                key = unwrapped(slot, self._root, self.store_uuid, number)
                return self._keep(slot.id, key)
        return None

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

    def status(self) -> KeyringStatus:
        """What there is."""
        with self._keys:
            tenants = {tenant: list(keys) for tenant, keys in self._tenants.items()}
        return status_of(self._file, self._header, self._slots, tenants)

    # Making keys

    def ensure(self, names: Sequence[Name]) -> list[DomainKey]:
        """The keys of these domains; those that are missing are made, and durable with one sync."""
        with self._writing:
            self._check_usable()
            known = {name: self.domain(*name) for name in dict.fromkeys(names)}
            wanted = [name for name, key in known.items() if key is None]
            if wanted:
                known.update(self._make(wanted))
            given: set[Name] = set()
            keys = []
            for name in names:
                key = known[name] if name not in given else self.domain(*name)
                assert key is not None
                keys.append(key)
                given.add(name)
            return keys

    def _make(self, names: Sequence[Name]) -> dict[Name, DomainKey]:
        tenants = {tenant for tenant, _ in names} - self._tenants.keys()
        new_tenants = len(tenants - self._gone_tenants.keys())
        self._slots.check_room(len(names) + new_tenants, kept=len(self._gone_tenants))
        self._slots.check_tenants(names)
        for tenant in dict.fromkeys(tenant for tenant, _ in names):
            if tenant not in self._tenants:
                self._make_tenant(tenant, version=1)
        changes: dict[int, Slot | None] = {}
        made = {}
        places = {name: self._slots.find(*name) for name in names}  # of those that were destroyed
        taken = {place[0] for place in places.values() if place is not None}
        for tenant, domain in names:
            number, key_id = self._place(places[tenant, domain], taken)
            taken.add(number)
            by = self._tenants[tenant][-1].slot.id
            slot = Slot(State.LIVE, Kind.DOMAIN, key_id, tenant, domain, self._clock.wall_ms(), by)
            key = fresh_key()
            with self._keys:
                wrapping = self._tenant_key(slot)
                assert wrapping is not None
                slot = wrapped(slot, key, wrapping, self.store_uuid, number)
            changes[number] = slot
            made[tenant, domain] = DomainKey(number, slot, key)
        self._write(changes)
        self._slots.publish(changes)
        return made

    def _make_tenant(self, tenant: bytes, version: int) -> None:
        """Make the next key of a tenant, durably before it wraps anything."""
        number, key_id = self._place(self._gone_tenants.get(tenant))
        slot = Slot(
            State.LIVE,
            Kind.TENANT,
            key_id,
            tenant,
            version.to_bytes(16, "little"),
            self._clock.wall_ms(),
            self._header.root.id,
        )
        key = fresh_key()
        slot = wrapped(slot, key, self._root, self.store_uuid, number)
        self._write({number: slot})
        self._slots.publish({number: slot})
        with self._keys:
            self._tenants.setdefault(tenant, []).append(TenantKey(number, slot))
            self._keep(slot.id, key)
            self._gone_tenants.pop(tenant, None)

    def _place(self, gone: tuple[int, Slot] | None, taken: Collection[int] = ()) -> tuple[int, bytes]:
        """A slot, that of the same name whose key was destroyed or another, and an id that it didn't have last."""
        number = self._slots.take(taken) if gone is None else gone[0]
        while self._slots.has_id(number, key_id := fresh_id()):
            pass
        return number, key_id

    # Destroying keys

    def erase(self, names: Iterable[Name]) -> list[Erased]:
        """Destroy the keys of domains, in whatever slots, durably before it returns; some domains have none."""
        with self._writing:
            self._check_usable()
            self._free(self._slots.damaged())
            changes: dict[int, Slot | None] = {}
            answers = []
            now_ms = self._clock.wall_ms()
            for tenant, domain in dict.fromkeys(names):
                found = self._slots.find_all(tenant, domain)
                if not found:
                    answers.append(Erased(tenant, domain, None, None, now_ms))
                for number, slot in found:
                    gone = slot.gone(now_ms) if slot.state == State.LIVE else slot
                    if gone is not slot:
                        changes[number] = gone
                    answers.append(Erased(tenant, domain, number, gone.id, gone.when_ms))
            if changes:
                self._slots.publish(changes)  # nobody gets them any more, whatever becomes of the write
                self._write(changes)
            return answers

    def erase_tenant(self, tenant: bytes) -> list[Erased]:
        """Destroy all keys of a tenant, durably before it returns. The first answer is its own key's."""
        with self._writing:
            self._check_usable()
            self._free(self._slots.damaged())
            if tenant not in self._tenants:
                known = self._gone_tenants.get(tenant)
                # Again, after an interruption: the receipt names what was destroyed then.
                return [] if known is None else [_erased(tenant, known), *self._slots.gone_with(known.slot)]
            now_ms = self._clock.wall_ms()
            latest = self._tenants[tenant][-1]
            gone = TenantKey(latest.number, latest.slot.gone(now_ms))
            self._write({gone.number: gone.slot})  # from here on the next opening finishes it
            self._slots.publish({gone.number: gone.slot})
            with self._keys:
                self._gone_tenants[tenant] = gone
            return self._destroy_rest_of(tenant)

    def _destroy_rest_of(self, tenant: bytes) -> list[Erased]:
        """Of a tenant whose latest key is destroyed: its earlier ones and its domains'."""
        gone = self._gone_tenants[tenant]
        with self._keys:
            keys = self._tenants.pop(tenant, [])
        for key in keys:
            self._forget(key.slot.id)
        answers = [_erased(tenant, gone)]
        self._free([key.number for key in keys if key.number != gone.number])
        for numbers in self._slots.live_where(tenant=tenant):
            changes: dict[int, Slot | None] = {}
            for number in numbers:
                slot = self._slots.read(number)
                assert slot is not None
                changes[number] = slot.gone(gone.slot.when_ms)
                answers.append(Erased(tenant, slot.domain, number, slot.id, gone.slot.when_ms))
            self._slots.publish(changes)
            self._write(changes)
        return answers

    def _free(self, numbers: Sequence[int]) -> None:
        """Overwrite keys of tenants that nothing is wrapped by any more, or slots that are damaged."""
        if numbers:
            changes = dict.fromkeys(numbers)
            self._slots.publish(changes)
            self._write(changes)
            for number in numbers:
                self._slots.give_back(number)

    # Rotation

    @property
    def tenants(self) -> list[bytes]:
        """Those that have keys."""
        with self._keys:
            return sorted(self._tenants)

    @property
    def rotating(self) -> list[bytes]:
        """Tenants whose rotation was begun and not finished."""
        with self._keys:
            return sorted(tenant for tenant, keys in self._tenants.items() if len(keys) > 1)

    def rotate_master(self, new: Master) -> None:
        """Seal the keyring with another master key, under a new root key. No data is written anew.

        What the root key wraps is wrapped by the new one in other slots; the header, which has one root key, decides
        which of them count. So the old root key is never wrapped by the new master key.
        """
        root_id, root = fresh_id(), fresh_key()
        try:
            new_root = self._wrapped_root(new, root_id, root)  # it may take seconds: nobody waits for it
        except KvError:
            aead.wipe(root)
            raise
        with self._writing:
            try:
                self._check_usable()
                header = self._header._replace(
                    sequence=self._header.sequence + 1, master_id=new.id, root=new_root
                )
                old = [self._store_slot, *(key.number for keys in self._tenants.values() for key in keys)]
                moves = dict(zip(old, self._take(len(old)), strict=True))
            except KvError:
                aead.wipe(root)
                raise
            changes = {}
            for number, to in moves.items():
                slot = self._slots.read(number)
                if slot is None:
                    raise Corrupt(f"Slot {number} of the keyring lost its key.")
                changes[to] = self._rewrapped(slot, (number, self._root), (to, root_id, root))
            self._write(changes)
            self._write_header(header)
            with self._keys:
                aead.wipe(self._root)
                self._root = root
                self._store_slot = moves[self._store_slot]
                for keys in self._tenants.values():
                    keys[:] = [TenantKey(moves[key.number], changes[moves[key.number]]) for key in keys]
            self._slots.publish(changes)
            self._free(old)

    def _take(self, count: int) -> list[int]:
        """So many free slots."""
        self._slots.check_room(count, kept=len(self._gone_tenants))
        taken: list[int] = []
        for _ in range(count):
            taken.append(self._slots.take(taken))
        return taken

    def _wrapped_root(self, master: Master, root_id: bytes, key: memoryview) -> Root:
        """Wrapped so that it was seen to come back, before anything depends on it."""
        associated = root_associated(self.store_uuid, root_id)
        blob = master.wrap(associated, key)
        back = master.unwrap(associated, blob)
        same = back == key
        aead.wipe(back)
        if not same:
            raise WrongMasterKey(f"Master key {master.id} doesn't give back what it wrapped.")
        return Root(root_id, blob)

    def rotate_tenant(self, tenant: bytes, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Give a tenant a new key, and wrap those of its domains by it; how many. An unfinished rotation goes on.

        Closed, and unfinished, as soon as `goes_on` says no.
        """
        with self._writing:
            self._check_usable()
            keys = self._tenants.get(tenant)
            if keys is None:
                return 0
            if len(keys) == 1:
                self._slots.check_room(1, kept=len(self._gone_tenants))
                self._make_tenant(tenant, keys[0].slot.version + 1)
            *older, latest = self._tenants[tenant]
        count = 0
        for old in older:
            for numbers in self._slots.live_where(tenant=tenant, wrapped_by=old.slot.id):
                if not goes_on():
                    raise Closed("The rotation was interrupted; it goes on when the node is started again.")
                with self._writing:
                    count += self._rewrap_domains(numbers, old.slot.id, latest.slot.id)
        with self._writing:
            self._check_usable()
            ids = {old.slot.id for old in older}
            done = [key for key in self._tenants.get(tenant, ()) if key.slot.id in ids]  # they may have moved
            if done:
                with self._keys:
                    self._tenants[tenant] = [key for key in self._tenants[tenant] if key.slot.id not in ids]
                for key_id in ids:
                    self._forget(key_id)
                self._free([key.number for key in done])
        return count

    def _rewrap_domains(self, numbers: Sequence[int], old_id: bytes, new_id: bytes) -> int:
        self._check_usable()
        changes: dict[int, Slot | None] = {}
        for number in numbers:
            slot = self._slots.read(number)
            if slot is None or slot.state != State.LIVE or slot.wrapped_by != old_id:
                continue  # destroyed meanwhile, or done by another rotation
            with self._keys:
                old, new = self._tenant_key(slot), self._tenant_key(slot._replace(wrapped_by=new_id))
                if old is not None and new is not None:
                    changes[number] = self._rewrapped(slot, (number, old), (number, new_id, new))
        if changes:
            self._write(changes)
        return len(changes)

    def _rewrapped(self, slot: Slot, by: tuple[int, memoryview], to: tuple[int, bytes, memoryview]) -> Slot:
        """A slot with its key wrapped by another: its number and the key that wraps it, then both anew with an id."""
        key = unwrapped(slot, by[1], self.store_uuid, by[0])
        try:
            return wrapped(slot._replace(wrapped_by=to[1]), key, to[2], self.store_uuid, to[0])
        finally:
            aead.wipe(key)

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
        """Wipe the keys and let another process have the file."""
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


def _erased(tenant: bytes, gone: TenantKey) -> Erased:
    return Erased(tenant, NO_NAME, gone.number, gone.slot.id, gone.slot.when_ms)
