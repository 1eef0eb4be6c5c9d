"""A machine that stops at any write or sync of a keyring, each sector of its file old or new: nothing is lost.

Each step is stopped in several ways: the process dies (what it wrote is there, and not durable), power is lost, or
first one and then the other. Afterwards every key has its old or its new state, acknowledged changes are there, and the
same step, repeated, ends as if it had not been interrupted.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvstore.errors import NoKeyring, WrongMasterKey
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from tests.sealing.rig import (
    ACME,
    STORE,
    ZETA,
    Memory,
    PowerLost,
    keys_of,
    master,
    new_keyring,
    opened,
    users,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.sealing.keyring import Name

ENDS = int(os.environ.get("TRIGGERKV_KEYRING_ENDS", "6"))  # of each step, by different chances
SLOTS_MAX = 1024
OLD = [*users(*range(40)), *users(1, 2, tenant=ZETA)]  # over two pages
ERASED = users(3, 17, 18)
NEW = [*users(*range(100, 140)), *users(7, tenant=b"new".ljust(16, b"."))]


class Change(NamedTuple):
    """A change, and the keys that it may remove or make."""

    act: Callable[[Keyring], object]
    erases: list[Name]
    makes: list[Name]
    is_with_master: int = 0  # the master key that it ends with


CHANGES = {
    "ensure": Change(lambda ring: ring.ensure(NEW), [], NEW),
    "ensure what was erased": Change(lambda ring: ring.ensure(ERASED), [], ERASED),
    "grow": Change(lambda ring: ring.ensure(users(*range(1000, 1070))), [], users(*range(1000, 1070))),
    "erase": Change(lambda ring: ring.erase(users(1, 39)), users(1, 39), []),
    "erase a tenant": Change(lambda ring: ring.erase_tenant(ACME), users(*range(40)), []),
    "rotate a tenant": Change(lambda ring: ring.rotate_tenant(ACME), [], []),
    "rotate the master": Change(lambda ring: ring.rotate_master(master(1)), [], [], 1),
}


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make keyrings grow by only one or two pages, so that they grow often."""
    monkeypatch.setattr("kvstore.sealing.slot_table.KEYRING_STEP_PAGES_MIN", 1)


def prepared() -> tuple[bytes, dict[Name, bytes | None]]:
    """A keyring with keys of two tenants, some of them erased, and its keys."""
    ring, file = new_keyring(SLOTS_MAX)
    ring.ensure(OLD)
    ring.erase(ERASED)
    return bytes(file.durable), keys_of(ring, [*OLD, *NEW])


def steps_of(change: Change, image: bytes) -> int:
    """The number of writes and syncs of a change, with those of the opening."""
    file = Memory(image)
    change.act(opened(file, slots_max=SLOTS_MAX))
    return len(file.done)


def reopened(file: Memory | bytes, change: Change) -> Keyring:
    """Open with the file's master key; after an interrupted rotation it is the old one or the new one."""
    try:
        return opened(file, slots_max=SLOTS_MAX)
    except WrongMasterKey:
        assert change.is_with_master
        return opened(file, change.is_with_master, slots_max=SLOTS_MAX)


def check(ring: Keyring, change: Change, before: dict[Name, bytes | None], *, acknowledged: bool) -> None:
    """Each key is old or new, and no acknowledged one is missing."""
    now = keys_of(ring, [*before, *change.makes])
    for name, key in before.items():
        if name in change.erases:
            assert now[name] in ((None,) if acknowledged else (key, None)), name
        elif name not in change.makes:
            assert now[name] == key, name
    if acknowledged:
        assert all(now[name] for name in change.makes)
    assert ring.status().damaged == 0


@pytest.mark.parametrize("what", CHANGES)
def test_after_a_stop_at_any_step_each_key_is_old_or_new(what: str) -> None:
    change = CHANGES[what]
    image, before = prepared()
    total = steps_of(change, image)
    chance = random.Random(what)
    for steps in range(total + 1):
        for end in range(ENDS):
            file = Memory(image, steps)
            acknowledged = True
            try:
                change.act(opened(file, slots_max=SLOTS_MAX))
            except PowerLost:
                acknowledged = False
            assert acknowledged == (steps == total)
            left: Memory | bytes
            if end % 3 == 0:
                left = file.after_kill(chance)
            elif end % 3 == 1:
                left = file.after_power_loss(chance)
            else:  # a process dies, the next one finishes what it can, and then the power goes
                left = file.after_kill(chance)
                left.steps = chance.randrange(6)
                with suppress(PowerLost):
                    reopened(left, change)
                left = left.after_power_loss(chance)
            ring = reopened(left, change)
            check(ring, change, before, acknowledged=acknowledged)
            if ring._header.master_id == master().id:
                change.act(ring)  # again
            check(ring, change, before, acknowledged=True)
            made = keys_of(ring, change.makes)
            durable = ring._file.durable  # type: ignore[attr-defined]
            last = opened(bytes(durable), change.is_with_master, slots_max=SLOTS_MAX)
            check(last, change, before, acknowledged=True)
            assert keys_of(last, change.makes) == made
            assert last.status().rotating == ()


@pytest.mark.parametrize("what", ["ensure", "ensure what was erased"])
def test_a_key_written_by_a_killed_process_is_durable_before_the_next_one_uses_it(what: str) -> None:
    change = CHANGES[what]
    image, _ = prepared()
    chance = random.Random(what)
    found = 0
    for steps in range(steps_of(change, image)):
        for _ in range(ENDS):
            file = Memory(image, steps)
            with pytest.raises(PowerLost):
                change.act(opened(file, slots_max=SLOTS_MAX))
            left = file.after_kill(chance)
            given = {
                name: key
                for name, key in keys_of(opened(left, slots_max=SLOTS_MAX), change.makes).items()
                if key
            }
            found += len(given)
            assert keys_of(opened(left.after_power_loss(chance), slots_max=SLOTS_MAX), list(given)) == given
    assert found


@pytest.mark.parametrize("meanwhile", ["ensure", "erase", "erase a tenant", "rotate the master"])
def test_other_changes_during_an_interrupted_rotation(meanwhile: str) -> None:
    """A tenant with two keys can do all that others can, and its rotation is finished afterwards."""
    rotate, change = CHANGES["rotate a tenant"], CHANGES[meanwhile]
    image, before = prepared()
    chance = random.Random(meanwhile)
    seen = 0
    for steps in range(1, steps_of(rotate, image)):
        file = Memory(image, steps)
        with pytest.raises(PowerLost):
            rotate.act(opened(file, slots_max=SLOTS_MAX))
        half = file.after_power_loss(chance)
        ring = opened(half, slots_max=SLOTS_MAX)
        seen += bool(ring.status().rotating)
        total = steps_of(change, half)
        for inner in range(total + 1):
            file = Memory(half, inner)
            acknowledged = True
            try:
                change.act(opened(file, slots_max=SLOTS_MAX))
            except PowerLost:
                acknowledged = False
            ring = reopened(file.after_power_loss(chance), change)
            check(ring, change, before, acknowledged=acknowledged)
            ring.rotate_tenant(ACME)
            check(ring, change, before, acknowledged=acknowledged)
            assert ring.status().rotating == ()
    assert seen


def stopped(what: str, image: bytes, chance: random.Random) -> list[bytes]:
    """The possible files after a change was interrupted at each of its steps."""
    change = CHANGES[what]
    left = []
    for steps in range(steps_of(change, image)):
        file = Memory(image, steps)
        with pytest.raises(PowerLost):
            change.act(opened(file, slots_max=SLOTS_MAX))
        left += [file.after_power_loss(chance) for _ in range(ENDS)]
    return left


def test_an_interrupted_rotation_of_the_master_key_leaves_one_copy_of_each_key() -> None:
    image, _ = prepared()
    live = opened(image, slots_max=SLOTS_MAX).status().live
    counts = set()
    for left in stopped("rotate the master", image, random.Random(1)):
        file = Memory(left)
        counts.add(left.count(b"LIVE"))
        ring = reopened(file, CHANGES["rotate the master"])
        assert ring.status().live == file.durable.count(b"LIVE") == live
    assert max(counts) > live  # some had twins


def test_an_interrupted_erasure_of_a_tenant_is_finished_by_the_next_opening() -> None:
    """As soon as its own key is destroyed; its domains' keys are overwritten as well."""
    image, before = prepared()
    seen = set()
    for left in stopped("erase a tenant", image, random.Random(1)):
        file = Memory(left)
        ring = opened(file, slots_max=SLOTS_MAX)
        is_gone = ACME not in [tenant for tenant, _ in ring.status().tenants]
        seen.add(is_gone)
        names = users(*range(40))
        assert keys_of(ring, names) == ({name: None if is_gone else before[name] for name in names})
        assert file.durable.count(b"GONE") == (41 if is_gone else len(ERASED))
        own, *domains = ring.erase_tenant(ACME)  # as it is to be repeated
        assert own.number is not None
        named = {(one.tenant, one.domain): one.id for one in domains}
        were = {name for name in names if before[name] is not None}
        assert named.keys() >= were, "the receipt names all keys that were destroyed"
        assert None not in named.values()
    assert seen == {True, False}


def test_an_erasure_is_durable_before_it_is_acknowledged() -> None:
    """Whatever sectors of the file the drive has after a power loss, none has the key."""
    image, _ = prepared()
    chance = random.Random(1)
    for act, names in (
        (CHANGES["erase"].act, CHANGES["erase"].erases),
        (CHANGES["erase a tenant"].act, CHANGES["erase a tenant"].erases),
    ):
        file = Memory(image)
        ring = opened(file, slots_max=SLOTS_MAX)
        slots = [found for name in names for found in ring._slots.find_all(*name)]
        sealed = [slot.sealed[12:] for _, slot in slots if any(slot.sealed)]
        assert all(one in image for one in sealed)
        act(ring)
        for _ in range(20):
            left = file.after_power_loss(chance)
            assert not [one for one in sealed if one in left]


def test_an_interrupted_creation_leaves_no_keyring_or_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keyring_path(tmp_path)
    for name in ("open", "write", "fsync", "link"):
        real = getattr(os, name)

        def stop(*_: object, **__: object) -> object:
            raise PowerLost

        monkeypatch.setattr(os, name, stop)
        with pytest.raises(PowerLost):
            Keyring.create(path, master(), STORE)
        monkeypatch.setattr(os, name, real)
        with pytest.raises(NoKeyring):
            Keyring.open(path, master(), STORE)
    Keyring.create(path, master(), STORE)
    Keyring.open(path, master(), STORE).close()
