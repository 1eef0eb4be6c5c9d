"""Labels of sessions: never in an index in the clear once a store has keys, and lost with their user's key."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import QuotaExceeded
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.labels import LOST_LABEL, Labels
from nic_offload import aead
from tests.storage.fake_keys import FakeKeyring, FakeKeys
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig
from tests.storage.test_encrypting import (
    LABEL,
    TURNS_MAX,
    encrypted,
    is_marked,
    is_sound,
    opened,
    payload,
    turn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW, OTHER_ROW = b"r" * 48, b"s" * 48


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    yield rig
    rig.store.close()


@pytest.fixture
def keys() -> Iterator[FakeKeys]:
    ring = FakeKeyring()
    for number in range(8):  # more than the vault has places
        ring.make(TENANT, b"user %11d" % number)
    keys = FakeKeys(ring)
    yield keys
    keys.close()


def labels_of(rig: StoreRig) -> list[bytes | None]:
    return [one.label for one in rig.store.manifests.of_user(TENANT, USER)]


def in_index(rig: StoreRig, text: str) -> bool:
    return any(text.encode() in file.read_bytes() for file in (rig.data / "index-0").iterdir())


def fill(rig: StoreRig) -> None:
    for number in range(4):
        assert rig.put(number, payload(number)).error is None
    assert rig.append(1, range(4), label=LABEL).error is None


def test_a_label_is_never_unencrypted_in_the_index_and_is_lost_with_its_users_key(rig: StoreRig) -> None:
    fill(opened(rig))
    assert rig.fork(2, 1, 4, label="and of the other").error is None
    assert sorted(filter(None, labels_of(rig))) == [LABEL.encode(), b"and of the other"]
    rig.store.close()
    assert not in_index(rig, LABEL)
    assert not in_index(rig, "and of the other")
    opened(rig)
    assert sorted(filter(None, labels_of(rig))) == [LABEL.encode(), b"and of the other"]
    rig.store.close()
    assert rig.keyring is not None
    rig.keyring.erase(TENANT, USER)
    opened(rig)
    assert labels_of(rig) == [None, None]


def test_an_index_that_had_unencrypted_labels_is_overwritten_and_rebuilt(rig: StoreRig) -> None:
    rig.open()
    fill(rig)
    rig.store.close()
    assert in_index(rig, LABEL)
    old = (rig.data / "index-0" / "data.mdb").open("rb")  # its bytes, when it has no name any more
    opened(rig)
    assert labels_of(rig) == [LABEL.encode()], "while it is in the clear"
    encrypted(rig)
    assert is_sound(rig), "which opens it once more"
    assert labels_of(rig) == [LABEL.encode()]
    rig.store.close()
    assert not in_index(rig, LABEL)
    with old:
        assert not any(old.read())
    opened(rig)
    assert not rig.store.statistics().rebuilt, "that happens once"


def test_unencrypted_labels_leave_the_index_at_the_first_opening_with_keys(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the drive is still unencrypted; an erasure finds none, wherever in the file."""
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    rig.open()
    fill(rig)
    for number in range(2, 40):  # rows move in their pages, and pages are freed
        assert rig.fork(number, 1, 4, label=f"{LABEL} {number}").error is None
        assert rig.append(number, [0], label=f"{LABEL} {number}").error is None
    for number in range(20, 40):
        rig.remove(number)
    wanted = sorted([LABEL.encode(), *(f"{LABEL} {number}".encode() for number in range(2, 20))])
    rig.store.close()
    old = (rig.data / "index-0" / "data.mdb").open("rb")
    opened(rig)
    assert not rig.store.statistics().rebuilt
    assert rig.store.statistics().blocks == 4
    assert sorted(filter(None, labels_of(rig))) == wanted
    assert not in_index(rig, LABEL)
    with old:
        assert not any(old.read()), "the file before it is overwritten"
    for number in range(4):
        assert rig.get(number)[1] == payload(number)
    assert rig.fork(50, 1, 4, label=f"{LABEL} 50").error is None
    rig.kill()
    assert not in_index(rig, LABEL)
    opened(rig)
    assert not rig.store.statistics().rebuilt, "it is taken as it was left"
    assert sorted(filter(None, labels_of(rig))) == sorted([*wanted, f"{LABEL} 50".encode()])
    assert rig.keyring is not None
    rig.store.close()
    rig.keyring.erase(TENANT, USER)
    opened(rig)
    assert set(labels_of(rig)) == {None}, "as those that were never in the clear"


def test_no_end_of_a_label_is_left_in_the_unused_end_of_a_page_either(rig: StoreRig) -> None:
    """LMDB reuses memory of other pages for the rows of long sessions, and writes and copies whole pages."""
    rig.open()
    for session in range(5):
        blocks = range(300 * session, 300 * (session + 1))
        for number in blocks:
            assert rig.put(number, b"x").error is None
        for first in blocks[::50]:
            assert rig.append(session, range(first, first + 50), label=f"label {session} of it").error is None
    rig.store.close()
    assert in_index(rig, " of it")
    opened(rig)
    assert not in_index(rig, " of it")


def test_an_opening_that_cannot_create_keys_keeps_labels_and_reports_it(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    rig.open()
    fill(rig)
    rig.store.close()
    with monkeypatch.context() as patch:
        patch.setattr(FakeKeys, "ensure", lambda *given: given[-1](QuotaExceeded("The tenant has too many.")))
        opened(rig)
        assert labels_of(rig) == [LABEL.encode()]
        rig.store.close()
    assert "until the next start: The tenant has too many" in caplog.text
    assert in_index(rig, LABEL)
    opened(rig)
    assert labels_of(rig) == [LABEL.encode()]
    assert not in_index(rig, LABEL)


def test_while_an_index_may_have_unencrypted_labels_a_drive_counts_as_unencrypted(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Encrypting, "step", lambda _: None)
        rig.open()
        fill(rig)
        for session in range(2, 60):  # more pages with labels than the next process writes anew
            assert rig.fork(session, 1, 4, label=LABEL).error is None
        for session in range(2, 60):
            assert rig.remove(session).error is None
        rig.store.close()
    with monkeypatch.context() as patch:
        patch.setattr(FakeKeys, "ensure", lambda *given: given[-1](QuotaExceeded("The tenant has too many.")))
        opened(rig)
    for _ in range(TURNS_MAX):
        turn(rig)
        if not rig.drive._encrypting.is_active:
            break
    assert not is_marked(rig), "the drive has nothing in the clear"
    statistics = rig.store.statistics()
    assert statistics.clear_bytes
    assert "until the next start" in statistics.clear_why
    rig.store.close()
    assert in_index(rig, LABEL), "in pages that LMDB has freed"
    old = (rig.data / "index-0" / "data.mdb").open("rb")  # its bytes, when it has no name any more
    opened(rig)
    with old:
        assert not any(old.read())
    statistics = rig.store.statistics()
    assert statistics.rebuilt, "the index is not one that a drive with nothing in the clear keeps"
    assert (statistics.clear_bytes, statistics.clear_why) == (0, "")
    assert labels_of(rig) == [LABEL.encode()]
    assert not in_index(rig, LABEL)


@pytest.mark.parametrize("step", ["overwrite", "shutil.rmtree", "Index"])
def test_an_interrupted_opening_is_continued(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    rig.open()
    fill(rig)
    rig.store.close()
    with monkeypatch.context() as patch:
        patch.setattr(f"kvstore.storage.clear_labels.{step}", died, raising=False)
        with pytest.raises(Died):
            opened(rig)
    opened(rig)
    assert labels_of(rig) == [LABEL.encode()]
    for number in range(4):
        assert rig.get(number)[1] == payload(number)
    assert not in_index(rig, LABEL) or rig.store.statistics().rebuilt


class Died(BaseException):
    pass


def died(*_: object, **__: object) -> None:
    raise Died


def test_a_sealed_label_is_of_one_session_and_no_byte_of_it_can_be_changed(keys: FakeKeys) -> None:
    labels, users = Labels(keys), [b"user %11d" % number for number in range(8)]
    sealed = [labels.seal(TENANT, user, ROW, user + b" said") for user in users]
    assert [labels.unseal(ROW, one) for one in sealed] == [user + b" said" for user in users]
    assert labels.unseal(OTHER_ROW, sealed[0]) is None
    assert labels.seal(TENANT, users[0], ROW, users[0] + b" said") != sealed[0], "each has its own nonce"
    for at in range(1, len(sealed[0])):
        changed = bytearray(sealed[0])
        changed[at] ^= 1
        assert labels.unseal(ROW, bytes(changed)) is None
    for length in range(1, len(sealed[0])):
        assert labels.unseal(ROW, sealed[0][:length]) is None
    assert labels.unseal(ROW, labels.seal(TENANT, users[0], ROW, b"")) == b""


def test_without_a_key_nothing_is_written_unencrypted(keys: FakeKeys) -> None:
    assert Labels(keys).seal(TENANT, b"of no key at all", ROW, b"what") == LOST_LABEL
    assert Labels(keys).unseal(ROW, LOST_LABEL) is None
    assert Labels(None).seal(TENANT, USER, ROW, b"what") == b"what"


def test_a_label_is_sealed_as_the_page_says_each_under_its_own_key(keys: FakeKeys) -> None:
    user = b"user %11d" % 3
    name, secret = keys.ring.keys[TENANT, user]
    row = TENANT + user + b"s" * 16
    nonces = set()
    for _ in range(8):
        sealed = Labels(keys).seal(TENANT, user, row, LABEL.encode())
        nonce = sealed[13:25]
        assert sealed[:13] == b"\xff" + struct.pack("<IQ", *name)
        text_key = blake2b(nonce, digest_size=32, key=secret, person=b"tkv text").digest()
        assert aead.unseal(text_key, nonce, row, sealed[25:]) == LABEL.encode()
        nonces.add(nonce)
    assert len(nonces) == 8
