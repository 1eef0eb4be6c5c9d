"""A keyring's rotations: a new master key for it, or a new key for a tenant's domains.

What always holds: no domain key changes, and no data is rewritten. An interrupted rotation is complete or continues.
None begins or ends while a slot is damaged: with the old key gone, the slot's bytes from a backup would open nothing.
What it doesn't do: check who may request one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import Closed, Corrupt, KvError, StorageError, WrongMasterKey
from kvstore.sealing.keyring_state import TenantKey
from kvstore.sealing.open_keyring import OpenKeyring
from kvstore.sealing.slots import (
    Kind,
    Root,
    Slot,
    State,
    fresh_id,
    fresh_key,
    overwritten,
    root_associated,
    wrapped,
)
from nic_offload import aead

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.sealing.master_key import Master

__all__ = ["RotatingKeyring"]


class RotatingKeyring(OpenKeyring):
    """An open keyring that can make and replace tenants' keys."""

    @property
    def tenants(self) -> list[bytes]:
        """Return the tenants that have keys."""
        with self._keys:
            return sorted(self._tenants)

    @property
    def rotating(self) -> list[bytes]:
        """Tenants with an unfinished rotation."""
        with self._keys:
            return sorted(tenant for tenant, keys in self._tenants.items() if len(keys) > 1)

    def rotate_master(self, new: Master) -> None:
        """Seal the keyring with another master key, under a new root key. No data is rewritten.

        The keys that the root key wraps are wrapped by the new one in other slots; the header, which has one root key,
        decides which of them count. So the old root key is never wrapped by the new master key.
        """
        root_id, root = fresh_id(), fresh_key()
        try:
            new_root = self._wrapped_root(new, root_id, root)  # it may take seconds, so no lock is held
        except KvError:
            aead.wipe(root)
            raise
        with self._writing:
            try:
                self._check_usable()
                self._check_undamaged()
                old = [self._store_slot, *(key.number for keys in self._tenants.values() for key in keys)]
                moves = dict(zip(old, self._take(len(old)), strict=True))
            except KvError:
                aead.wipe(root)
                raise
            header = self._header._replace(
                sequence=self._header.sequence + 1, master_id=new.id, root=new_root
            )
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

    def _check_undamaged(self) -> None:
        """StorageError if a slot is damaged: without the key that wraps it, it could never be restored."""
        if damaged := self._slots.damaged():
            raise StorageError(
                f"{len(damaged)} slots of the keyring are damaged (first: {damaged[0]}), and a rotation would make that"
                " final: restore them from a copy of the keyring, or give them up (`kvstore keys accept-keyring` on the"
                " stopped node)."
            )

    def give_up_damaged(self) -> list[int]:
        """Overwrite all damaged slots, durably; returns their numbers. What their keys encrypted counts as erased."""
        with self._writing:
            self._check_usable()
            damaged = self._slots.damaged()
            self._overwrite(dict.fromkeys(damaged, overwritten(self._clock.wall_ms())))
            return damaged

    def _take(self, count: int) -> list[int]:
        """Take this many free slots."""
        self._slots.check_room(count, kept=len(self._gone_tenants))
        taken: list[int] = []
        for _ in range(count):
            taken.append(self._slots.take(taken))
        return taken

    def _wrapped_root(self, master: Master, root_id: bytes, key: memoryview) -> Root:
        """Wrap a root key, and check that unwrapping returns it, before anything depends on it."""
        associated = root_associated(self.store_uuid, root_id)
        blob = master.wrap(associated, key)
        back = master.unwrap(associated, blob)
        same = back == key
        aead.wipe(back)
        if not same:
            raise WrongMasterKey(f"Master key {master.id} doesn't give back what it wrapped.")
        return Root(root_id, blob)

    def rotate_tenant(self, tenant: bytes, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Give a tenant a new key, and wrap its domains' keys with it; returns how many. Continues an unfinished one.

        Raises Closed, and remains unfinished, as soon as `goes_on` returns False.
        """
        with self._writing:
            self._check_usable()
            self._check_undamaged()
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
            self._check_undamaged()
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
            try:
                slot = self._slots.read(number)
            except Corrupt:
                continue  # it was marked damaged; the others move
            if slot is None or slot.state != State.LIVE or slot.wrapped_by != old_id:
                continue  # destroyed meanwhile, or rewrapped by another rotation
            with self._keys:
                old, new = self._tenant_key(slot), self._tenant_key(slot._replace(wrapped_by=new_id))
                if old is not None and new is not None:
                    with suppress(Corrupt):
                        changes[number] = self._rewrapped(slot, (number, old), (number, new_id, new))
        if changes:
            self._write(changes)
        return len(changes)

    def _rewrapped(self, slot: Slot, by: tuple[int, memoryview], to: tuple[int, bytes, memoryview]) -> Slot:
        """Wrap a slot's key by another. `by`: its number and wrapping key; `to`: the new number, key id and key."""
        key = self._unwrapped(slot, by[1], by[0])
        try:
            return wrapped(slot._replace(wrapped_by=to[1]), key, to[2], self.store_uuid, to[0])
        finally:
            aead.wipe(key)

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
        """A slot, and an id other than its last one: the slot of the destroyed key of the same name, or another."""
        number = self._slots.take(taken) if gone is None else gone[0]
        while self._slots.has_id(number, key_id := fresh_id()):
            pass
        return number, key_id

    def _free(self, numbers: Sequence[int]) -> None:
        """Free the slots of tenants' keys that no longer wrap anything."""
        self._overwrite(dict.fromkeys(numbers))
