"""Sources of a master key: each one, its errors, and that no error shows the source's output."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, KvError, MasterKeyUnavailable, WrongMasterKey
from kvstore.sealing.master_key import LocalMaster
from kvstore.sealing.masters import check_master, new_master_file, open_master

KEY = bytes(range(32))
ID = LocalMaster(bytearray(KEY)).id


def private(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_the_id_is_a_known_one_and_no_key_is_shown() -> None:
    assert ID == "key:52d4e8d12c91efb4"
    assert repr(LocalMaster(bytearray(KEY))) == f"LocalMaster({ID})"


@pytest.mark.parametrize(
    "data", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", KEY.hex().encode() + b"\r\n"]
)
def test_a_file_has_32_bytes_or_64_digits(tmp_path: Path, data: bytes) -> None:
    master = open_master(f"file:{private(tmp_path / 'key', data)}")
    assert master.id == ID
    wrapped = master.wrap(b"what for", bytearray(32))
    assert master.wrap(b"what for", bytearray(32)) != wrapped  # each time with another nonce
    assert master.unwrap(b"what for", wrapped) == bytes(32)
    with pytest.raises(WrongMasterKey):
        master.unwrap(b"something else", wrapped)
    with pytest.raises(WrongMasterKey):
        master.unwrap(b"what for", wrapped[:-1] + bytes([wrapped[-1] ^ 1]))
    for length in range(len(wrapped)):
        with pytest.raises(WrongMasterKey):
            master.unwrap(b"what for", wrapped[:length])
    with pytest.raises(WrongMasterKey):
        LocalMaster(bytearray(range(1, 33))).unwrap(b"what for", wrapped)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        KEY[:31],
        KEY + b"\n",
        KEY.hex().encode()[:63],
        KEY.hex().encode() + b"  \n",
        b"g" * 64,
        b"\0" * 32,
        b"00" * 32,
    ],
)
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError) as refused:
        open_master(f"file:{private(tmp_path / 'key', data)}")
    assert not data or data.decode("latin1") not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "key", KEY, mode)
    with pytest.raises(ConfigError, match="Others can read"):
        open_master(f"file:{path}")
    path.chmod(0o400)
    assert open_master(f"file:{path}").id == ID


def test_a_missing_file_a_folder_and_a_pipe_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be read: No such file"):
        open_master(f"file:{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_master(f"file:{tmp_path}")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        open_master(f"file:{tmp_path / 'pipe'}")


def test_a_credential_is_where_systemd_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path / "kv-master", KEY, 0o440)  # as systemd makes them; the folder is the service's alone
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert open_master("credential:kv-master").id == ID
    with pytest.raises(ConfigError, match="could not be read"):
        open_master("credential:other")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(ConfigError, match="LoadCredential=kv-master"):
        open_master("credential:kv-master")


def test_a_command_prints_it() -> None:
    assert open_master(f"command:printf '%s\\n' {KEY.hex()}").id == ID
    assert open_master(f"command:sh -c 'printf {KEY.hex()}; sleep 0.1'").id == ID


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sh -c 'echo swordfish; echo swordfish >&2; exit 7'", "ended with status 7"),
        ("echo swordfish", "neither 64"),
        ("yes swordfish", "neither"),
        ("/nonexistent/swordfish-less --for kv", "could not be run"),
    ],
)
def test_a_failing_command_is_not_quoted(command: str, says: str) -> None:
    with pytest.raises(KvError, match=says) as failed:
        open_master(f"command:{command}")
    assert "swordfish" not in str(failed.value).replace("swordfish-less", "")


@pytest.mark.parametrize("command", ["sleep 60", "sh -c 'exec >&-; sleep 60'", "sh -c 'sleep 60 & wait'"])
def test_a_command_has_a_deadline_and_is_ended_with_its_children(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.sealing.masters.MASTER_COMMAND_MS", 200)
    started: list[int] = []
    real = os.killpg

    def ended(group: int, number: int) -> None:
        started.append(group)
        real(group, number)

    monkeypatch.setattr(os, "killpg", ended)
    begun = SystemClock().monotonic_ns()
    with pytest.raises(MasterKeyUnavailable, match="did not end within"):
        open_master(f"command:{command}")
    assert SystemClock().monotonic_ns() - begun < 20e9
    (group,) = started
    while _alive_in(group):  # until the kernel has ended what was killed
        assert SystemClock().monotonic_ns() - begun < 20e9


def _alive_in(group: int) -> list[str]:
    """Processes of a group that are not zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(entry.parent.name)
    return found


@pytest.mark.parametrize(
    "option",
    [
        "",
        "file:",
        "/etc/key",
        "credential:",
        "credential:../key",
        "command:",
        "command:echo 'a",
        "vault:https://h/transit/keys/k",
        "vault:https://h/keys/k?token=t",
        "vault:https://h/transit/k?token=t",
        "vault:ftp://h/transit/keys/k?token=t",
        "vault:https://u:p@h/transit/keys/k?token=t",
        "vault:https://h:x/transit/keys/k?token=t",
        "vault:https://h/transit/keys/k?token=t&insecure=1",
        "vault:http://elsewhere:8200/transit/keys/k?token=t",
    ],
)
def test_other_options_are_one_sentence(option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_master(option)
    assert str(refused.value).count(". ") == 0


def test_an_option_is_checked_without_opening_what_it_names() -> None:
    for option in (
        "file:/none",
        "credential:none",
        "command:/none",
        "vault:https://none.invalid:8200/transit/keys/k?token=/none",
        "vault:http://127.0.0.1:8200/v1/team/transit/keys/k?token=/none&ca=/none&namespace=n",
    ):
        check_master(option)


def test_a_new_master_key_is_readable_only_by_its_owner_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    named = new_master_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_master(f"file:{path}").id == named
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        new_master_file(path)
    assert path.read_bytes() == before
    assert new_master_file(tmp_path / "other.key") != named
