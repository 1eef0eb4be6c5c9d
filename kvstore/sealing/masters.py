"""The source of the master key, given by one option: `--master-key KIND:WHERE`.

    file:/etc/triggerkv/master.key      64 hexadecimal digits, or 32 bytes; no file that others can read
    credential:NAME                     the same, in a systemd credential (LoadCredential=NAME:...)
    command:/usr/bin/get-key --for kv   the same, on a command's standard output; no shell runs it
    vault:https://HOST:8200/transit/keys/NAME?token=FILE[&ca=FILE][&namespace=NAME]

Vault's transit engine keeps the master key and wraps with it; the other sources are read into this process.

What always holds: every source has a deadline; an error says which source failed and how, without any of its output.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.clock import SystemClock
from kvstore.config import environment
from kvstore.errors import ConfigError, MasterKeyUnavailable
from kvstore.limits import MASTER_COMMAND_MS, MASTER_FILE_BYTES_MAX
from kvstore.sealing.master_key import LocalMaster
from kvstore.sealing.vault_master import VaultKey, VaultMaster
from kvstore.synced_files import sync_folder
from nic_offload import aead

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock
    from kvstore.sealing.master_key import Master

__all__ = ["check_master", "new_master_file", "open_master"]

_CREDENTIALS: Final = "CREDENTIALS_DIRECTORY"
_HEX: Final = {ord(digit): value for value, digit in enumerate("0123456789abcdef")} | {
    ord(digit): value for value, digit in enumerate("ABCDEF", 10)
}
_KEY_DIGITS: Final = 2 * aead.KEY_BYTES
_ENDS: Final = (b"", b"\n", b"\r\n")


def check_master(option: str) -> None:
    """ConfigError unless the option has one of the forms; opens nothing."""
    _source(option)


def open_master(option: str, clock: Clock | None = None) -> Master:
    """The master key that an option names; ConfigError if there is none, MasterKeyUnavailable if its service fails."""
    reason = aead.available()
    if reason is not None:
        raise MasterKeyUnavailable(f"Nothing can be encrypted here: {reason}.")
    return _source(option)(clock or SystemClock())


def _source(option: str) -> Callable[[Clock], Master]:
    kind, _, where = option.partition(":")
    if kind == "file" and where:
        return lambda _: _from_file(Path(where), is_credential=False)
    if kind == "credential" and where and "/" not in where:
        return lambda _: _from_file(_credential(where), is_credential=True)
    if kind == "command" and _words(where):
        return lambda clock: _from_command(_words(where), clock)
    if kind == "vault":
        key = _vault(where)
        return lambda _: VaultMaster(key)
    raise ConfigError(
        "A master key is file:PATH, credential:NAME, command:COMMAND or"
        f" vault:https://HOST:PORT/transit/keys/NAME?token=FILE, not {kind[:32]!r}."
    )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        raise ConfigError(
            "The command for the master key has a quotation mark without its other one."
        ) from None


def _credential(name: str) -> Path:
    folder = environment(_CREDENTIALS)
    if not folder:
        raise ConfigError(
            f"There is no credential {name}: ${_CREDENTIALS} is not set; systemd sets it for units that have"
            f" LoadCredential={name}:PATH."
        )
    return Path(folder) / name


def _from_file(path: Path, *, is_credential: bool) -> LocalMaster:
    text = bytearray(MASTER_FILE_BYTES_MAX + 1)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not is_credential:  # systemd protects those
                _check_private(path, os.fstat(fd))
            size = os.readv(fd, [text])
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"The master key {path} could not be read: {error.strerror}.") from error
    return _local(text, size, str(path))


def _check_private(path: Path, status: os.stat_result) -> None:
    """Refuse files that others can read. A group may read a file of root's, such as a Kubernetes secret."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"The master key {path} is not a regular file.")
    allowed = 0o740 if status.st_uid == 0 != os.geteuid() else 0o700
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"The master key {path} belongs to another user.")
    if stat.S_IMODE(status.st_mode) & ~allowed:
        raise ConfigError(f"Others can read the master key {path}: chmod 600 {shlex.quote(str(path))}.")


def _from_command(words: list[str], clock: Clock) -> LocalMaster:
    text = bytearray(MASTER_FILE_BYTES_MAX + 1)
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"The command {words[0]} for the master key could not be run: {error.strerror}."
        ) from error
    deadline_ns = clock.monotonic_ns() + MASTER_COMMAND_MS * 1_000_000
    try:
        size = _read_until(process, text, clock, deadline_ns)
        is_too_long = size == len(text)  # it may be endless
        status = 0 if is_too_long else process.wait(max((deadline_ns - clock.monotonic_ns()) / 1e9, 0))
    except subprocess.TimeoutExpired:
        aead.wipe(text)
        raise MasterKeyUnavailable(
            f"The command {words[0]} for the master key did not end within {MASTER_COMMAND_MS // 1000} s."
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if status:
        aead.wipe(text)
        raise MasterKeyUnavailable(f"The command {words[0]} for the master key ended with status {status}.")
    return _local(text, size, f"that {words[0]} printed")


def _read_until(process: subprocess.Popen[bytes], text: bytearray, clock: Clock, deadline_ns: int) -> int:
    """Read the output to its end, or until it is longer than a key; returns the number of bytes."""
    assert process.stdout is not None
    out = process.stdout.fileno()
    size = 0
    waiting = select.poll()
    waiting.register(out, select.POLLIN)
    with memoryview(text) as view:
        while size < len(text):
            left_ms = (deadline_ns - clock.monotonic_ns()) / 1e6
            if left_ms <= 0 or not waiting.poll(left_ms):
                raise subprocess.TimeoutExpired(process.args, 0)
            with view[size:] as rest:
                got = os.readv(out, [rest])
            if not got:
                break
            size += got
    return size


def _local(text: bytearray, size: int, where: str) -> LocalMaster:
    """A master key of 32 bytes or 64 digits; the text is wiped."""
    try:
        key = _parsed(text, size)
    finally:
        aead.wipe(text)
    if key is None:
        raise ConfigError(
            f"The master key {where} has neither {_KEY_DIGITS} hexadecimal digits nor 32 bytes."
        )
    if len(set(key)) == 1:
        raise ConfigError(
            f"The master key {where} is one byte repeated; `kvstore keys new-master` makes one."
        )
    return LocalMaster(key)


def _parsed(text: bytearray, size: int) -> bytearray | None:
    if size == aead.KEY_BYTES:
        return text[:size]
    if size < _KEY_DIGITS or bytes(text[_KEY_DIGITS:size]) not in _ENDS:
        return None
    key = bytearray(aead.KEY_BYTES)
    for at in range(aead.KEY_BYTES):
        high, low = _HEX.get(text[2 * at]), _HEX.get(text[2 * at + 1])
        if high is None or low is None:
            aead.wipe(key)
            return None
        key[at] = high << 4 | low
    return key


def _vault(where: str) -> VaultKey:
    url = urlsplit(where)
    try:
        given = parse_qs(url.query, strict_parsing=bool(url.query))
        port = url.port
    except ValueError:
        given, port = {"": []}, None
    mount, _, name = url.path.strip("/").removeprefix("v1/").rpartition("/keys/")
    known = given.keys() <= {"token", "ca", "namespace"} and "token" in given
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or not mount
        or not name
        or not known
        or url.username
    ):
        raise ConfigError(
            "Vault's key is vault:https://HOST:PORT/transit/keys/NAME?token=FILE, and may have &ca=FILE and"
            " &namespace=NAME."
        )
    if url.scheme == "http" and url.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"Vault at {url.hostname} needs https: without TLS it may only be on this machine.")
    return VaultKey(
        host=url.hostname,
        port=port or (443 if url.scheme == "https" else 80),
        is_tls=url.scheme == "https",
        mount=unquote(mount),
        name=unquote(name),
        token=Path(given["token"][0]),
        ca=Path(given["ca"][0]) if "ca" in given else None,
        namespace=given.get("namespace", [""])[0],
    )


def new_master_file(path: Path) -> str:
    """Make a file with a random master key; returns the key's id. An existing file is not changed."""
    key = bytearray(aead.KEY_BYTES)
    with Path("/dev/urandom").open("rb", buffering=0) as source:
        source.readinto(key)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, key.hex().encode() + b"\n")
            os.fsync(fd)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_folder(path.parent)
    except FileExistsError:
        raise ConfigError(f"{path} already exists and is not overwritten.") from None
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error.strerror}.") from error
    master = LocalMaster(key)
    master.close()
    return master.id
