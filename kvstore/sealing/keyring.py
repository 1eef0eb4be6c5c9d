"""The keyring of a store: wrapped keys of its tenants and erase domains, each in a slot that is overwritten in place.

    keyring = Keyring.open(path, master, store_uuid)
    (key,) = keyring.ensure([(tenant, domain)])  # durable before it is returned

The master key wraps a root key, which wraps the store's key and a key per tenant, which wraps that tenant's domain
keys; docs/sealing.md has the format, and says what an attacker can do with which of them.

What always holds: a key is durable before it is returned to anybody; a destroyed one is overwritten, durably, before
`erase` returns; a slot gets another id whenever it is reused. A crash of the process or the machine at any step leaves
each key in its old or its new state: an interrupted erasure or rotation is finished by the next opening or by repeating
it. After a failed write nothing more is written.

An erasure checks everything first: a slot that was moved or damaged is never taken for another's key.

What it doesn't do: keep unsealed domain keys, which the caller must wipe; or notice that its file was replaced by an
older one. Several threads may use it: one changes it at a time, and others read meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvstore.clock import SystemClock
from kvstore.errors import Corrupt
from kvstore.limits import KEYRING_SLOTS_MAX, KEYRING_STRAYS_MAX
from kvstore.sealing.domain_key import DomainKey, Erased
from kvstore.sealing.keyring_file import FolderFile, create_file
from kvstore.sealing.keyring_state import (
    TenantKey,
    header_sectors,
)
from kvstore.sealing.new_keyring import new_image
from kvstore.sealing.rotation import RotatingKeyring
from kvstore.sealing.slot_check import home_of
from kvstore.sealing.slots import (
    HEADER_PAGES,
    NO_ID,
    NO_NAME,
    Kind,
    Slot,
    State,
    fresh_key,
    overwritten,
    pack_header,
    parse_slot,
    wrapped,
)
from nic_offload import aead

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.sealing.keyring_file import KeyringFile
    from kvstore.sealing.master_key import Master

__all__ = ["Keyring"]

Name = tuple[bytes, bytes]  # of a tenant and a domain


class Keyring(RotatingKeyring):
    """An open keyring, in which keys can be made and destroyed."""

    def __init__(
        self, file: KeyringFile, master: Master, store_uuid: bytes, *, clock: Clock, slots_max: int
    ) -> None:
        super().__init__(file, master, store_uuid, clock=clock, slots_max=slots_max)
        self._homes: dict[bytes, int | None] = {}  # the right slots of moved ones, by their bytes
        try:
            self._finish()
        except BaseException:
            self._wipe()
            raise

    @classmethod
    def create(cls, path: Path, master: Master, store_uuid: bytes, clock: Clock | None = None) -> None:
        """Make a keyring with a key for the store, durably."""
        create_file(path, new_image(master, store_uuid, clock or SystemClock()))

    @classmethod
    def open(cls, path: Path, master: Master, store_uuid: bytes, clock: Clock | None = None) -> Self:
        """Open the keyring of a store, and finish what a process left unfinished when it died."""
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
        """Open a keyring in any kind of file; the keyring owns the file, which is closed if opening fails."""
        try:
            return cls(file, master, store_uuid, clock=clock or SystemClock(), slots_max=slots_max)
        except BaseException:
            file.close()
            raise

    def _finish(self) -> None:
        """Finish what a process left unfinished when it died."""
        if header_sectors(self._file) != [pack_header(self._header)] * HEADER_PAGES:
            self._write_header(self._header)
        self._free(self._twins)
        for tenant in list(self._gone_tenants):
            self._destroy_rest_of(tenant)

    # Making keys

    def ensure(self, names: Sequence[Name]) -> list[DomainKey]:
        """The keys of these domains; missing ones are made, and made durable with one sync."""
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
        places = {name: self._gone_place(name) for name in names}
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

    def _gone_place(self, name: Name) -> tuple[int, Slot] | None:
        """The slot of a domain whose key was destroyed."""
        return next((one for one in self._slots.find_all(*name) if one[1].state == State.GONE), None)

    # Destroying keys

    def erase(self, names: Iterable[Name]) -> list[Erased]:
        """Destroy the keys of domains, in all of their slots, durably before it returns; some domains have none.

        All is checked before anything is destroyed. A damaged slot that may have a key of theirs is overwritten too,
        and reported without an id. So are lost slots, which are not overwritten.
        """
        with self._writing:
            self._check_usable()
            wanted = list(dict.fromkeys(names))
            if self._slots.have_changed() or not all(self._is_sound(name) for name in wanted):
                self._check_domains(met=True)  # a copy of a slot may be anywhere
            plan = _Plan(wanted, self._clock.wall_ms())
            self._plan_whole(plan)
            self._plan_damaged(plan)
            plan.marks_homes()
            self._overwrite(plan.changes)
            return plan.answers()

    def _plan_whole(self, plan: _Plan) -> None:
        for name in plan.of:
            for number, slot in self._slots.find_all(*name):
                if slot.state == State.LIVE:
                    plan.destroys(name, number, number, slot)
                else:
                    plan.of[name].append(Erased(*name, number, slot.id, slot.when_ms, is_earlier=True))

    def _plan_damaged(self, plan: _Plan) -> None:
        """Spare damaged slots known to be others', and overwrite those that may be one of these domains'."""
        known = {number: name for name in plan.of for number in self._slots.numbers_of(*name)}
        for number in self._slots.damaged():
            stray = self._stray(number)
            if stray is not None:  # authentic, so its name is known
                slot, home = stray
                name = slot.tenant, slot.domain
                if slot.kind == Kind.DOMAIN and name in plan.of:
                    plan.destroys(name, number, home, slot)
            elif self._slots.was_met(number):
                if number in known:
                    lost = Slot(State.LIVE, Kind.DOMAIN, self._slots.id_of(number), *known[number], 0, NO_ID)
                    plan.destroys(known[number], number, number, lost)
            elif self._slots.is_lost(number):
                plan.lost.append(number)
            else:
                plan.overwrites(number)

    def _is_sound(self, name: Name) -> bool:
        """Whether the slots of a domain are unchanged, and have its keys."""
        for number in self._slots.numbers_of(*name):
            if self._slots.is_damaged(number):
                continue
            try:
                slot = self._slots.read(number)
                if slot is None or not self._slots.has_id(number, slot.id):
                    return False
                with self._keys:
                    by = self._tenant_key(slot) if slot.state == State.LIVE else None
                    if by is not None:
                        aead.wipe(self._unwrapped(slot, by, number))
            except Corrupt:
                return False
        return True

    def _stray(self, number: int) -> tuple[Slot, int] | None:
        """The contents of a damaged slot that was moved, and its right number; None if that is unknown."""
        row = self._slots.row(number)
        try:
            slot = parse_slot(row)
        except Corrupt:
            return None
        if slot is None or slot.state != State.LIVE:
            return None
        if row not in self._homes:
            if len(self._homes) >= KEYRING_STRAYS_MAX:
                return None
            with self._keys:
                by = self._tenant_key(slot) if slot.kind == Kind.DOMAIN else self._root
                home = None if by is None else home_of(row, len(self._slots), self.store_uuid, by)
            self._homes[row] = home
        home = self._homes[row]
        return None if home is None else (slot, home)

    def erase_tenant(self, tenant: bytes) -> list[Erased]:
        """Destroy all keys of a tenant, durably before it returns. The first answer is for its own key, if it had one.

        As in `erase`, all is checked first, and damaged slots that may be the tenant's are overwritten.
        """
        with self._writing:
            self._check_usable()
            self._check_domains(met=True)
            now_ms = self._clock.wall_ms()
            strays, unread, lost = self._damaged_of(tenant)
            self._overwrite({number: slot.gone(now_ms) for number, (slot, _) in strays.items()})
            self._overwrite(dict.fromkeys(unread, overwritten(now_ms)))
            known = self._gone_tenants.get(tenant)
            answers: list[Erased] = []
            if tenant in self._tenants:
                latest = self._tenants[tenant][-1]
                gone = TenantKey(latest.number, latest.slot.gone(now_ms))
                self._write({gone.number: gone.slot})  # from here on the next opening finishes it
                self._slots.publish({gone.number: gone.slot})
                with self._keys:
                    self._gone_tenants[tenant] = gone
                answers = self._destroy_rest_of(tenant)
            elif known is not None:
                # A repetition, perhaps after an interruption: the receipt lists the keys destroyed before as earlier.
                before = [
                    _erased(tenant, known)._replace(is_earlier=True),
                    *self._slots.gone_with(known.slot),
                ]
                answers = [*before, *self._destroy_domains(tenant, known.slot.when_ms)]
            else:  # its own key's slot was damaged
                answers = self._destroy_domains(tenant, now_ms)
            answers += [Erased(tenant, slot.domain, home, slot.id, now_ms) for slot, home in strays.values()]
            return [*answers, *_unread(unread, now_ms), *_unread(lost, now_ms, are_lost=True)]

    def _damaged_of(self, tenant: bytes) -> tuple[dict[int, tuple[Slot, int]], list[int], list[int]]:
        """Damaged slots with keys of a tenant, those of unknown tenants, and lost ones."""
        strays, unread, lost = {}, [], []
        of_keys = {self._store_slot, *(key.number for keys in self._tenants.values() for key in keys)}
        others = self._tenants.keys() - {tenant}
        for number in self._slots.damaged():
            stray = self._stray(number)
            if stray is not None:
                if stray[0].tenant == tenant:
                    strays[number] = stray
            elif not self._slots.was_met(number) and self._slots.is_lost(number):
                lost.append(number)
            elif not self._slots.was_met(number) or (
                number not in of_keys and self._slots.tenant_of(number) not in others
            ):
                unread.append(number)
        return strays, unread, lost

    def _destroy_rest_of(self, tenant: bytes) -> list[Erased]:
        """Destroy a tenant's earlier keys and its domains' keys; its latest key is destroyed already."""
        gone = self._gone_tenants[tenant]
        with self._keys:
            keys = self._tenants.pop(tenant, [])
        for key in keys:
            self._forget(key.slot.id)
        answers = [_erased(tenant, gone)]
        self._free([key.number for key in keys if key.number != gone.number])
        return [*answers, *self._destroy_domains(tenant, gone.slot.when_ms)]

    def _destroy_domains(self, tenant: bytes, at_ms: int) -> list[Erased]:
        answers = []
        for numbers in self._slots.live_where(tenant=tenant):
            changes: dict[int, Slot | None] = {}
            for number in numbers:
                slot = self._slots.read(number)
                assert slot is not None
                changes[number] = slot.gone(at_ms)
                answers.append(Erased(tenant, slot.domain, number, slot.id, at_ms))
            self._overwrite(changes)
        return answers


class _Plan:
    """The keys that an erasure of domains will destroy, and its answers."""

    def __init__(self, names: Iterable[Name], now_ms: int) -> None:
        self.of: dict[Name, list[Erased]] = {name: [] for name in names}
        self.changes: dict[int, Slot] = {}
        self._now_ms = now_ms
        self._unread: list[int] = []
        self.lost: list[int] = []
        self._homes: dict[int, Slot] = {}

    def destroys(self, name: Name, number: int, home: int, slot: Slot) -> None:
        """Plan to destroy the key in a slot; records refer to it by `home`, the number of its right slot."""
        self.changes[number] = slot.gone(self._now_ms)
        self._homes[home] = self.changes[number]
        self.of[name].append(Erased(*name, home, slot.id, self._now_ms))

    def marks_homes(self) -> None:
        """Plan to mark lost slots as destroyed whose keys were found elsewhere."""
        self.changes.update({one: self._homes[one] for one in self.lost if one in self._homes})

    def overwrites(self, number: int) -> None:
        """Plan to overwrite a slot that can't be read."""
        self.changes[number] = overwritten(self._now_ms)
        self._unread.append(number)

    def answers(self) -> list[Erased]:
        """The answers for each name, and for slots that could not be read."""
        answers: list[Erased] = []
        for name, erased in self.of.items():
            answers += erased or [Erased(*name, None, None, self._now_ms)]
        lost = _unread((one for one in self.lost if one not in self.changes), self._now_ms, are_lost=True)
        return answers + _unread(self._unread, self._now_ms) + lost


def _unread(numbers: Iterable[int], at_ms: int, *, are_lost: bool = False) -> list[Erased]:
    return [Erased(NO_NAME, NO_NAME, number, None, at_ms, is_lost=are_lost) for number in numbers]


def _erased(tenant: bytes, gone: TenantKey) -> Erased:
    return Erased(tenant, NO_NAME, gone.number, gone.slot.id, gone.slot.when_ms)
