"""`kvstore certificates`: makes a CA, and certificates of nodes and clients that it signs.

    kvstore certificates certs --node storage-1,10.0.0.5 --client engine-1.acme

makes `certs/ca.pem` with its key unless they exist, `storage-1.pem` for a node that is reached as `storage-1` or
10.0.0.5, and `engine-1.acme.pem`, the name of a client in a node's tenants file; each with its key beside it.

What always holds: an existing file is not overwritten; keys are readable by their owner only; a node's certificate is
not accepted from a client, nor the other way round. The command `openssl` signs.

What it doesn't do: renew or revoke. A certificate is valid for `--days`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.config_files import read_file
from kvstore.errors import ConfigError
from kvstore.limits import OPENSSL_TIMEOUT_S
from kvstore.writable_folder import writable_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["make"]

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,62})", re.ASCII)
_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_USAGE: Final = {"node": "serverAuth", "client": "clientAuth"}


def _openssl(*arguments: str | Path) -> None:
    try:
        ran = subprocess.run(
            ["openssl", *map(str, arguments)],  # noqa: S607 - the machine's own
            capture_output=True,
            check=False,
            text=True,
            timeout=OPENSSL_TIMEOUT_S,
            umask=0o077,
        )
    except FileNotFoundError:
        raise ConfigError("There is no openssl on this machine; apt-get install openssl.") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"openssl {arguments[0]} did not end within {OPENSSL_TIMEOUT_S} s.") from None
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"openssl {arguments[0]} failed: {last}")


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _file_name(name: str) -> str:
    return name.replace(":", "_")  # an IPv6 address


def _checked(names: str) -> list[str]:
    """The names of one certificate, the first of which its files have."""
    parts = [part.strip() for part in names.split(",")]
    for part in parts:
        if _alternative(part).startswith("DNS:") and not _NAME.fullmatch(part):
            raise ConfigError(f"{part!r} is neither a host name nor an address.")
    return parts


def make(folder: Path, nodes: Sequence[str], clients: Sequence[str], days: int) -> int:
    """Make the requested files; returns the exit status."""
    wanted = [("node", _checked(one)) for one in nodes] + [("client", _checked(one)) for one in clients]
    stems = ["ca", *(_file_name(names[0]) for _, names in wanted)]
    if len(set(stems)) < len(stems):
        raise ConfigError("Two certificates would have the same file name.")
    writable_folder(folder)
    for stem in stems[1:]:
        for path in (folder / f"{stem}.pem", folder / f"{stem}.key"):
            if path.exists():
                raise ConfigError(f"{path} already exists and is not overwritten.")
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        _authority(folder, Path(unfinished), days)
        for kind, names in wanted:
            _sign(folder, Path(unfinished), kind, names, days)
    return 0


def _authority(folder: Path, unfinished: Path, days: int) -> None:
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() and key.exists():
        for path in (certificate, key):
            _refuse_unless_whole(path)
        return
    if certificate.exists() or key.exists():
        raise ConfigError(f"Of {certificate} and {key} only one exists.")
    _openssl(
        "req", "-x509", *_KEY, "-sha256", "-days", str(days), "-subj", "/CN=triggerkv authority",
        "-addext", "basicConstraints=critical,CA:TRUE,pathlen:0", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", unfinished / "ca.key", "-out", unfinished / "ca.pem",
    )  # fmt: skip
    _put_in_place(unfinished, folder, "ca")


def _sign(folder: Path, unfinished: Path, kind: str, names: Sequence[str], days: int) -> None:
    stem = _file_name(names[0])
    request, says = unfinished / "request", unfinished / "says"
    says.write_text(
        f"basicConstraints=critical,CA:FALSE\nextendedKeyUsage={_USAGE[kind]}\n"
        f"subjectAltName={','.join(map(_alternative, names))}\n"
    )
    _openssl("req", *_KEY, "-subj", f"/CN={names[0]}", "-keyout", unfinished / f"{stem}.key", "-out", request)
    _openssl(
        "x509", "-req", "-sha256", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
        "-set_serial", str(int.from_bytes(os.urandom(16)) >> 1), "-days", str(days), "-extfile", says,
        "-out", unfinished / f"{stem}.pem",
    )  # fmt: skip
    _put_in_place(unfinished, folder, stem)


def _refuse_unless_whole(path: Path) -> None:
    """Openssl ends with 0 on a full disk as well."""
    if not read_file(path).rstrip().endswith(b"-----"):
        raise ConfigError(f"{path} is not complete. Is the disk full?")


def _put_in_place(unfinished: Path, folder: Path, stem: str) -> None:
    for end in (".key", ".pem"):
        _refuse_unless_whole(unfinished / f"{stem}{end}")
    for end, mode in ((".key", 0o600), (".pem", 0o644)):
        (unfinished / f"{stem}{end}").chmod(mode)
        (unfinished / f"{stem}{end}").rename(folder / f"{stem}{end}")
        print(folder / f"{stem}{end}")  # noqa: T201 - its output
