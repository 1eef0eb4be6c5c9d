"""`kvstore keys`: the keys that it makes, shows and rotates, and its exit statuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.cli import main
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.masters import open_master
from tests.sealing.rig import ACME, STORE, ZETA, at, keys_of, users

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.sealing.keyring import Name

NAMES = [*users(1, 2), *users(1, tenant=ZETA)]


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A master key that the command made, as an option."""
    assert main(["keys", "new-master", str(tmp_path / "master.key")]) == 0
    return f"file:{tmp_path / 'master.key'}"


@pytest.fixture
def keys(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> dict[Name, bytes | None]:
    """The domain keys of the keyring in `tmp_path`."""
    capsys.readouterr()
    Keyring.create(keyring_path(tmp_path), open_master(key), STORE)
    with Keyring.open(keyring_path(tmp_path), open_master(key), STORE) as keyring:
        keyring.ensure([*NAMES, *users(3)])
        keyring.erase(users(3))
        return keys_of(keyring, NAMES)


def test_a_new_master_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.key"
    assert main(["keys", "new-master", str(path)]) == 0
    out = capsys.readouterr().out
    assert out == f"{path}: {open_master(f'file:{path}').id}\n"
    assert path.read_text().strip() not in out
    assert main(["keys", "new-master", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["keys", "new-master"]) == 2


def test_the_state_needs_no_key(
    tmp_path: Path, key: str, keys: dict[Name, bytes | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys
    assert main(["keys", "status", "--data", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "6 live, 1 erased, 0 damaged" in text
    assert f"tenant      {ACME.hex()}  key version 1" in text
    assert main(["keys", "status", "--data", str(tmp_path), "--master-key", key, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["store"] == STORE.hex()
    assert said["master_key"] == open_master(key).id
    assert said["tenants"] == [{"id": ACME.hex(), "version": 1}, {"id": ZETA.hex(), "version": 1}]


def test_damage_is_status_3(
    tmp_path: Path, keys: dict[Name, bytes | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys
    path = keyring_path(tmp_path)
    image = bytearray(path.read_bytes())
    image[8192 + 3 * 128 + 20] ^= 1
    path.write_bytes(image)
    assert main(["keys", "status", "--data", str(tmp_path)]) == 3
    assert "1 damaged" in capsys.readouterr().out


def test_swapped_slots_are_damage_if_the_key_is_known(
    tmp_path: Path, key: str, keys: dict[Name, bytes | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys
    path = keyring_path(tmp_path)
    with Keyring.open(path, open_master(key), STORE) as keyring:
        one, two = (made.number for made in keyring.ensure(users(1, 2)))
    image = bytearray(path.read_bytes())
    image[at(one)], image[at(two)] = image[at(two)], image[at(one)]
    path.write_bytes(image)
    where = ["--data", str(tmp_path), "--master-key", key]
    assert main(["keys", "status", *where]) == 3
    assert "2 damaged" in capsys.readouterr().out
    assert main(["keys", "rotate-tenant", *where]) == 1
    assert "2 slots of the keyring are damaged" in capsys.readouterr().err


def test_keys_are_rotated_and_domains_keep_theirs(
    tmp_path: Path, key: str, keys: dict[Name, bytes | None], capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"file:{tmp_path / 'new.key'}"
    assert main(["keys", "new-master", str(tmp_path / "new.key")]) == 0
    where = ["--data", str(tmp_path)]
    capsys.readouterr()
    assert main(["keys", "rotate-tenant", *where, "--master-key", key, "--tenant", ACME.hex()]) == 0
    assert capsys.readouterr().out == f"{ACME.hex()}: 2 keys wrapped by a new key\n"
    assert main(["keys", "rotate-tenant", *where, "--master-key", key]) == 0
    assert main(["keys", "rotate-master", *where, "--master-key", key, "--new-master-key", new]) == 0
    assert open_master(new).id in capsys.readouterr().out
    assert main(["keys", "status", *where, "--master-key", key]) == 1
    assert "is sealed with master key" in capsys.readouterr().err
    with Keyring.open(keyring_path(tmp_path), open_master(new), STORE) as keyring:
        assert keys_of(keyring, NAMES) == keys
        assert keyring.status().tenants == ((ACME, 3), (ZETA, 2))
        assert main(["keys", "rotate-tenant", *where, "--master-key", new]) == 1
        assert "Another process has the keyring" in capsys.readouterr().err
        assert main(["keys", "status", *where]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["status"], 2, "needs --data"),
        (["rotate-master", "--data", "D"], 2, "needs --master-key"),
        (["rotate-master", "--data", "D", "--master-key", "KEY"], 2, "needs --new-master-key"),
        (["rotate-tenant", "--data", "D", "--master-key", "KEY", "--tenant", "acme"], 2, "32 hexadecimal"),
        (["rotate-tenant", "--data", "D", "--master-key", "KEY", "--tenant", "00" * 16], 2, "has no tenant"),
        (["status", "FILE", "--data", "D"], 2, "takes no FILE"),
        (["status", "--data", "none"], 2, "There is no data folder"),
        (["status", "--data", "D", "--master-key", "nonsense"], 2, "A master key is file:PATH"),
    ],
)
def test_a_missing_file_is_one_sentence(
    tmp_path: Path,
    key: str,
    keys: dict[Name, bytes | None],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    says: str,
) -> None:
    assert keys
    before = keyring_path(tmp_path).read_bytes()
    given = {"D": str(tmp_path), "KEY": key}
    assert main(["keys", *(given.get(one, one) for one in arguments)]) == status
    assert says in capsys.readouterr().err
    assert keyring_path(tmp_path).read_bytes() == before
