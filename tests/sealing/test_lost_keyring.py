"""A keyring that is lost, old, or has other keys: the node doesn't start, and drops nothing unless told to."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kvcli.running import Status
from kvstore.cli import main
from kvstore.commands.doctor import check_keyring
from kvstore.errors import ConfigError, NoKeyring, WrongKeyring
from kvstore.miss import Miss
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.masters import new_master_file, open_master
from kvstore.sealing.store_keys import keys_opener
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.fsck import check
from tests.storage.rig import TENANT, StoreRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.storage.store import Store

PAYLOAD = b"what the user said, word by word" * 300
DOMAIN = b"a domain of hers"


class Ring(StoreRig):
    """A store with a keyring in its folder; `option` is its master key, if it is given any."""

    option: str | None = None

    def open(self, **_: object) -> Store:
        opener = keys_opener(self.data, self.option)
        self.keyring = None if opener is None else type("Opener", (), {"open": staticmethod(opener)})()
        return super().open()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """A closed store with block 1 in the clear and block 2 encrypted."""
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    new_master_file(tmp_path / "master.key")
    rig = Ring(tmp_path / "data")
    rig.open()
    assert rig.put(1, PAYLOAD).error is None
    rig.store.close()
    rig.option = f"file:{tmp_path / 'master.key'}"
    rig.open()
    assert rig.put(2, PAYLOAD, domain=DOMAIN).error is None
    rig.store.close()
    yield rig
    rig.store.close()


def command(rig: Ring, action: str, *more: str) -> int:
    return main(["keys", action, "--data", str(rig.data), "--master-key", str(rig.option), *more])


def drive_of(rig: Ring) -> bytes:
    return (rig.data / "drive-0.kv").read_bytes()


def killed(rig: Ring) -> None:
    assert rig.store.keys is not None
    rig.store.keys.close()
    rig.kill()


def is_there(rig: Ring, number: int) -> bool:
    done, payload = rig.get(number)
    assert isinstance(done.miss, Miss) or payload == PAYLOAD
    return done.miss is None


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("scanned", [True, False])
def test_a_store_with_a_lost_keyring_is_not_opened(rig: Ring, *, with_key: bool, scanned: bool) -> None:
    path, option = keyring_path(rig.data), rig.option
    path.rename(rig.data / "away")
    if scanned:
        shutil.rmtree(rig.data / "index-0")
    before = drive_of(rig)
    if not with_key:
        rig.option = None
    for _ in range(2):
        with pytest.raises(NoKeyring, match=r"keyring.*kvstore keys new-keyring"):
            rig.open()
        with pytest.raises(NoKeyring, match=r"restore"):
            check(rig.data, repair=True, open_keys=keys_opener(rig.data, rig.option))
        assert drive_of(rig) == before
        assert not path.exists()
    (rig.data / "away").rename(path)
    rig.option = option
    rig.open()
    assert is_there(rig, 1)
    assert is_there(rig, 2)


def test_status_and_doctor_report_that_a_keyring_is_older_or_lost(
    rig: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keyring_path(rig.data)
    older = path.read_bytes()
    rig.open()
    assert main(["keys", "status", "--data", str(rig.data)]) == 0, "beside a running node, too"
    assert [*check_keyring(rig.data)] == []
    rig.store.close()
    newest = path.read_bytes()
    capsys.readouterr()
    path.write_bytes(older)
    with pytest.raises(WrongKeyring, match="is an older copy") as refused:
        rig.open()
    (found,) = check_keyring(rig.data)
    assert (found.status, found.found) == ("fail", str(refused.value))
    for more in ((), ("--json",)):
        assert main(["keys", "status", "--data", str(rig.data), *more]) == Status.NO
        assert str(refused.value) in capsys.readouterr().out
    path.unlink()
    (found,) = check_keyring(rig.data)
    assert (found.status, found.found.startswith(f"There is no keyring {path}")) == ("fail", True)
    path.write_bytes(newest)
    rig.open()
    assert is_there(rig, 2)


def test_a_missing_master_key_option_is_an_error(rig: Ring) -> None:
    rig.option = None
    with pytest.raises(ConfigError, match="give their master key"):
        rig.open()


def test_a_new_keyring_accepts_the_loss_once_confirmed(rig: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    rig.open()
    for number in range(3, 6):
        assert rig.put(number, PAYLOAD, domain=DOMAIN).error is None
    rig.store.close()
    assert command(rig, "new-keyring", "--yes") == 2
    assert "There is a keyring" in capsys.readouterr().err
    keyring_path(rig.data).unlink()
    before = drive_of(rig)
    assert command(rig, "new-keyring") == 3
    said = capsys.readouterr().out
    assert "4 encrypted records, 64 KiB, can't be read" in said
    assert "--yes" in said
    assert drive_of(rig) == before
    assert not keyring_path(rig.data).exists()
    assert command(rig, "new-keyring", "--yes") == 0
    assert "is a new keyring" in capsys.readouterr().out
    rig.open()
    assert rig.store.statistics().blocks == 1
    assert is_there(rig, 1), "it was never encrypted"
    assert not any(is_there(rig, number) for number in range(2, 6))
    free_before = rig.store.statistics().free_bytes
    assert rig.put(2, PAYLOAD, domain=DOMAIN).error is None
    assert rig.store.statistics().free_bytes < free_before
    rig.store.close()
    rig.open()
    assert is_there(rig, 2)
    rig.store.close()
    assert check(rig.data, payloads=True, open_keys=keys_opener(rig.data, rig.option)).damage == []


def test_a_plain_store_has_nothing_to_give_up(
    tmp_path: Path, rig: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Ring(tmp_path / "plain")
    plain.open()
    plain.store.close()
    plain.option = rig.option
    assert command(plain, "new-keyring", "--yes") == 2
    assert "No record" in capsys.readouterr().err
    assert main(["keys", "new-keyring", "--data", str(tmp_path / "no"), "--master-key", str(rig.option)]) == 2


def test_an_older_copy_of_the_keyring_is_recognized(rig: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    path = keyring_path(rig.data)
    shutil.copy(path, rig.data / "copy")
    rig.open()
    assert rig.put(3, PAYLOAD, domain=b"of another user.").error is None
    rig.store.close()
    path.unlink()
    shutil.copy(rig.data / "copy", path)
    before = drive_of(rig)
    with pytest.raises(WrongKeyring, match=r"an older copy.*kvstore keys accept-keyring"):
        rig.open()
    assert drive_of(rig) == before
    assert command(rig, "accept-keyring") == 3
    assert "1 encrypted records" in capsys.readouterr().out
    assert command(rig, "accept-keyring", "--yes") == 0
    rig.open()
    assert is_there(rig, 1)
    assert is_there(rig, 2)
    assert not is_there(rig, 3)


def test_a_copy_from_the_last_run_is_older_even_after_a_clean_stop(rig: Ring) -> None:
    rig.open()
    shutil.copy(keyring_path(rig.data), rig.data / "copy")
    rig.store.close()
    (rig.data / "copy").rename(keyring_path(rig.data))
    with pytest.raises(WrongKeyring, match="older copy"):
        rig.open()


def test_a_copy_from_before_the_last_start_is_older_even_if_the_node_was_killed(rig: Ring) -> None:
    shutil.copy(keyring_path(rig.data), rig.data / "copy")
    rig.open()
    assert rig.put(3, PAYLOAD, domain=b"of another user.").error is None
    killed(rig)
    keyring_path(rig.data).rename(rig.data / "newest")
    (rig.data / "copy").rename(keyring_path(rig.data))
    with pytest.raises(WrongKeyring, match="older copy"):
        rig.open()
    (rig.data / "newest").rename(keyring_path(rig.data))
    rig.open()
    assert is_there(rig, 3)


def test_a_killed_node_starts_again(rig: Ring) -> None:
    rig.open()
    assert rig.put(3, PAYLOAD, domain=b"of another user.").error is None
    killed(rig)
    rig.open()
    assert is_there(rig, 2)
    assert is_there(rig, 3)


def test_other_keys_of_the_same_store_and_of_another_are_refused(rig: Ring) -> None:
    path = keyring_path(rig.data)
    store_uuid = drive_of(rig)[16:32]
    path.unlink()
    Keyring.create(path, open_master(str(rig.option)), store_uuid)
    with pytest.raises(WrongKeyring, match=r"has the id .*encrypted with"):
        rig.open()
    path.unlink()
    Keyring.create(path, open_master(str(rig.option)), b"another store...")
    with pytest.raises(WrongKeyring, match="is of store"):
        rig.open()
    assert TENANT not in path.read_bytes()


def test_rotations_keep_what_the_drives_know(rig: Ring, tmp_path: Path) -> None:
    new_master_file(tmp_path / "new.key")
    new = f"file:{tmp_path / 'new.key'}"
    assert command(rig, "rotate-tenant") == 0
    assert command(rig, "rotate-master", "--new-master-key", new) == 0
    rig.option = new
    rig.open()
    assert is_there(rig, 2)


def test_giving_up_may_be_interrupted(rig: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring_path(rig.data).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.storage.giving_up.write_superblock", _stopped)
        assert command(rig, "new-keyring", "--yes") == 130
    with pytest.raises(NoKeyring):
        rig.open()
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.commands.keys_command.Keyring.create", _stopped)
        assert command(rig, "new-keyring", "--yes") == 130
    rig.open()  # nothing says any more that there were keys
    assert is_there(rig, 1)
    assert not is_there(rig, 2)


def _stopped(*_: object) -> None:
    raise KeyboardInterrupt
