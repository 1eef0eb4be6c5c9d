"""`kvstore keys`: makes a master key; shows, rotates and replaces the keys of a node.

    kvstore keys new-master /etc/triggerkv/master.key
    kvstore keys status --data ./node
    kvstore keys rotate-master --data ./node --master-key file:OLD --new-master-key file:NEW
    kvstore keys rotate-tenant --data ./node --master-key file:KEY --tenant 5f1c...
    kvstore keys new-keyring --data ./node --master-key file:KEY --yes

What always holds: no key is printed, and nothing that the source of a key returned. `status` needs no key and works
beside a running node. A running node rotates its keys itself, for a caller that has its master key; otherwise the
command locks and opens the keyring, which completes an interrupted change. `new-keyring` and `accept-keyring` give
nothing up without `--yes`.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvcli.progress import bars
from kvcli.running import Status
from kvstore.commands.keyring_check import marks_of
from kvstore.config import counted, show_size
from kvstore.errors import ConfigError
from kvstore.limits import TENANT_BYTES
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import read_root, read_status, why_not_the_drives
from kvstore.sealing.keys_protocol import find_control, proof
from kvstore.sealing.masters import check_master, new_master_file, open_master
from kvstore.storage.giving_up import EncryptedStore
from nic_offload.aead import wipe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvstore.sealing.keyring_state import KeyringStatus

__all__ = ["run"]

T = TypeVar("T")
Clear: TypeAlias = "Mapping[int, tuple[int, str]]"


def run(arguments: argparse.Namespace) -> int:
    """Execute the action; returns the exit status."""
    if arguments.action == "new-master":
        return _new_master(_given(arguments.file, "new-master needs a FILE."))
    if arguments.file is not None:
        raise ConfigError(f"{arguments.action} takes no FILE.")
    data = _given(arguments.data, f"{arguments.action} needs --data.")
    if not data.is_dir():
        raise ConfigError(f"There is no data folder {data}.")
    if arguments.action == "status":
        return _status(data, arguments.master_key, as_json=arguments.json)
    option = _given(arguments.master_key, f"{arguments.action} needs --master-key.")
    if arguments.action == "rotate-master":
        return _rotate_master(
            data, option, _given(arguments.new_master_key, "rotate-master needs --new-master-key.")
        )
    if arguments.action == "rotate-tenant":
        tenant = None if arguments.tenant is None else _tenant_id(arguments.tenant)
        return _rotate_tenant(data, option, tenant)
    with EncryptedStore(data) as store:
        if arguments.action == "new-keyring":
            return _new_keyring(store, data, option, is_sure=arguments.yes)
        return _accept_keyring(store, data, option, is_sure=arguments.yes)


def _given(value: T | None, sentence: str) -> T:
    if value is None:
        raise ConfigError(sentence)
    return value


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _new_master(path: Path) -> int:
    _print(f"{path}: {new_master_file(path)}")
    return 0


def _opened(data: Path, option: str) -> Keyring:
    """Open the keyring; its master key is wiped when it is closed."""
    path = keyring_path(data)
    store_uuid = read_status(path).store_uuid
    master = open_master(option)
    try:
        return Keyring.open(path, master, store_uuid)
    finally:
        master.close()


def _status(data: Path, option: str | None, *, as_json: bool) -> int:
    marks = marks_of(data)  # first: a start changes the keyring before the drives
    node = find_control(data)
    status = read_status(keyring_path(data))
    clear: Clear = {}
    if node is not None:  # without the keys, moved slots look intact
        clear, status = node.clear, status._replace(damaged=max(status.damaged, node.damaged))
        node.close()
    elif option is not None:
        with _opened(data, option) as keyring:
            status = keyring.status()
    why_not = why_not_the_drives(status.mark, marks)
    if as_json:
        _print(json.dumps(_document(status, clear, why_not), indent=2))
    else:
        _print("\n".join(_lines(status, clear, why_not)))
    return Status.NO if status.damaged or why_not else Status.DONE


def _document(status: KeyringStatus, clear: Clear, why_not: str | None) -> dict[str, object]:
    return {
        "store": status.store_uuid.hex(),
        "master_key": status.master_id,
        "created_unix_ms": status.made_ms,
        "bytes": status.size_bytes,
        "keys": {
            "live": status.live,
            "erased": status.erased,
            "damaged": status.damaged,
            "free": status.free,
        },
        "tenants": [{"id": tenant.hex(), "version": version} for tenant, version in status.tenants],
        "rotating_tenants": [tenant.hex() for tenant in status.rotating],
        "in_the_clear": [
            {"drive": drive, "bytes": size, "why_not": why} for drive, (size, why) in sorted(clear.items())
        ],
        "copy_on_write": status.copies_on_write,
        "mismatch": why_not,
    }


def _lines(status: KeyringStatus, clear: Clear, why_not: str | None) -> list[str]:
    lines = [
        f"store       {status.store_uuid.hex()}",
        f"master key  {status.master_id}",
        f"size        {show_size(status.size_bytes)}",
        f"keys        {status.live} live, {status.erased} erased, {status.damaged} damaged, {status.free} free",
    ]
    lines += [f"tenant      {tenant.hex()}  key version {version}" for tenant, version in status.tenants]
    lines += [
        f"drive {drive}     {show_size(size)} at most in the clear, being encrypted. {why}".rstrip()
        for drive, (size, why) in sorted(clear.items())
        if size
    ]
    lines += [
        f"The rotation of tenant {tenant.hex()} was interrupted; `kvstore keys rotate-tenant` finishes it."
        for tenant in status.rotating
    ]
    if status.copies_on_write is not None:
        lines.append(
            f"The keyring is on {status.copies_on_write}, which keeps data that was overwritten: an erased key may stay"
            " there. Move the data folder to ext4 or XFS."
        )
    if why_not is not None:
        lines.append(why_not)
    if status.damaged:
        lines.append(
            "Blocks encrypted with a damaged key can't be decrypted, and no key is rotated: restore a copy of the"
            " keyring, or give these keys up (`kvstore keys accept-keyring` on the stopped node)."
        )
    return lines


def _proof(data: Path, option: str, challenge: bytes) -> str:
    """Prove to a node that we have its master key."""
    with closing(open_master(option)) as master:
        root = read_root(keyring_path(data), master)
    try:
        return proof(root, challenge).hex()
    finally:
        wipe(root)


def _rotate_master(data: Path, option: str, new_option: str) -> int:
    check_master(new_option)
    if (node := find_control(data)) is not None:
        with closing(node):
            shown = _proof(data, option, node.challenge)
            key_id = node.ask(do="rotate-master", new_master_key=new_option, proof=shown)
        _print(
            f"The running node's keyring is sealed with master key {key_id} now; start it with that from now on."
        )
        return 0
    with _opened(data, option) as keyring:
        new = open_master(new_option)
        try:
            keyring.rotate_master(new)
        finally:
            new.close()
        _print(f"The keyring is sealed with master key {new.id} now.")
    return 0


def _rotate_tenant(data: Path, option: str, wanted: bytes | None) -> int:
    if (node := find_control(data)) is not None:
        with closing(node):
            shown = _proof(data, option, node.challenge)
            named = None if wanted is None else wanted.hex()
            for tenant, count in node.ask(do="rotate-tenant", tenant=named, proof=shown).items():
                _print(f"{tenant}: {counted(count, 'key')} wrapped by a new key")
        return 0
    with _opened(data, option) as keyring:
        known = [one for one, _ in keyring.status().tenants]
        if wanted is not None and wanted not in known:
            raise ConfigError(f"The keyring has no tenant {wanted.hex()}; `kvstore keys status` lists them.")
        for one in known if wanted is None else [wanted]:
            _print(f"{one.hex()}: {counted(keyring.rotate_tenant(one), 'key')} wrapped by a new key")
    return 0


def _new_keyring(store: EncryptedStore, data: Path, option: str, *, is_sure: bool) -> int:
    path = keyring_path(data)
    if path.exists():
        raise ConfigError(f"There is a keyring {path}; to go on with it, use accept-keyring.")
    with closing(open_master(option)) as master:  # it is checked to be a keyring before anything is given up
        if not _given_up(store, _knows_none, is_sure=is_sure):
            return Status.NO
        Keyring.create(path, master, store.store_uuid)
    _print(f"{path} is a new keyring, sealed with master key {master.id}.")
    return Status.DONE


def _accept_keyring(store: EncryptedStore, data: Path, option: str, *, is_sure: bool) -> int:
    path = keyring_path(data)
    with closing(open_master(option)) as master, Keyring.open(path, master, store.store_uuid) as keyring:
        is_its = {mark.id for mark in store.marks} == {keyring.store_key_id}
        is_known = keyring.has if is_its else _knows_none
        damaged = keyring.status().damaged
        if damaged:
            _print(f"{damaged} slots of the keyring are damaged.")
        # The slots go first: without its mark on the drives, this command wouldn't be taken a second time.
        if not _given_up(store, is_known, keyring.give_up_damaged, is_sure=is_sure):
            return Status.NO
    _print(f"{path} is the store's keyring from now on.")
    return Status.DONE


def _knows_none(_: int, __: bytes) -> bool:
    return False


def _given_up(
    store: EncryptedStore,
    is_known: Callable[[int, bytes], bool],
    first: Callable[[], object] = lambda: None,
    *,
    is_sure: bool,
) -> bool:
    with bars() as progress:
        lost = store.lost(is_known, progress)
    _print(
        f"{lost.records} encrypted records, {show_size(lost.size_bytes)}, can't be read without the lost keys."
    )
    if is_sure:
        first()
        store.give_up()
    else:
        _print("Restore the keyring if you can; --yes gives them up.")
    return is_sure


def _tenant_id(text: str) -> bytes:
    try:
        tenant = bytes.fromhex(text)
    except ValueError:
        tenant = b""
    if len(tenant) != TENANT_BYTES:
        raise ConfigError(
            f"--tenant takes {2 * TENANT_BYTES} hexadecimal digits, as `kvstore keys status` shows them."
        )
    return tenant
