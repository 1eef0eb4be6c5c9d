"""The audit log: callers admitted and refused, and removals. One line of JSON each.

    {"at_ms": 1763716000000, "what": "attach", "tenant": "acme", "peer": "ipv4:10.0.0.7:50112", "outcome": "ok", ...}

What always holds: a call's line is in the file before the call is answered. Lines are rate limited, per tenant or
source, so no caller can fill the drive or hide another's line (the next line counts those left out): strangers have
half of the lines of refusals and removals, whatever tenant they claim to be, and a source is an IPv4 address or the
/64 of an IPv6 one. A receipt is never left out, and survives power loss before it is given, in a file that can be
synced (a pipe can't): without its line, the erasure waits, or is refused. The file's name is synced before anything is
written. It contains no token and no memory key. If it can't be written, the node continues, and warns once.
What it doesn't do: log puts and gets, which are too many; `kvstore explain` and the metrics cover them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from threading import Lock
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.limits import AUDIT_LINES_OF_ONE_PER_S, AUDIT_LINES_PER_S, AUDIT_NAMES_MAX
from kvstore.node.connection_guard import source_of
from kvstore.node.fabric_address import ip_of_peer
from kvstore.synced_files import sync_folder
from nic_offload.handle import Handle
from nic_offload.sockaddr import ip_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.clock import Clock

__all__ = ["Audit"]

log = logging.getLogger(__name__)

_SECOND_NS = 1_000_000_000
_HTTP = "http:"
_TENANT = "tenant "  # no address begins like this
_NEW_LINE = b"\n"


class Audit(Handle):
    """An audit log; without a file, lines are discarded."""

    def __init__(self, clock: Clock, path: Path | None) -> None:
        self._clock = clock
        self._fd = -1
        self._second = 0
        self._lines: dict[str, int] = {}  # lines of this second, by `_tenant` or `_source`
        self._of_strangers = 0
        self._connections: dict[str, int] = {}  # lines of this second, by tenant
        self._left_out = 0
        self._failed = False
        self._is_cut = False  # the last line has no end
        self._syncing = Lock()
        self.lines = 0  # written
        self._lost = 0  # this many of them, from the first on, may never reach the drive
        self._is_file = False
        if path is not None:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                status = os.fstat(self._fd)
                size, self._is_file = status.st_size, stat.S_ISREG(status.st_mode)
                if self._is_file:
                    sync_folder(path.parent)
                self._is_cut = size > 0 and os.pread(self._fd, 1, size - 1) != _NEW_LINE
            except OSError as error:
                raise ConfigError(f"The audit log {path} can't be written: {error.strerror}.") from error

    def note(self, what: str, *, tenant: str, peer: str, **more: str | int) -> bool:
        """Record an action. False if it could not be written."""
        return self._write({"what": what, "tenant": tenant, "peer": peer, "outcome": "ok", **more})

    def sync(self, line: int) -> bool:
        """Sync; return whether the line with this number survives power loss now. It may be slow; any thread.

        A failed sync may lose other lines too. The next sync gets no error for them, so it doesn't vouch for them.
        """
        with self._syncing:
            try:
                if self._is_file:
                    os.fsync(self._fd)
            except OSError as error:
                log.warning("The audit log can't be synced: %s.", error.strerror)
                self._lost = self.lines
            return line > self._lost or not self._is_file

    def has_room(self, tenant: str) -> bool:
        """Return whether a tenant may write another line this second; if so, one is reserved for it."""
        return self._fd < 0 or self._takes(_tenant(tenant))

    def connected(self, what: str, *, tenant: str, peer: str, connection: int) -> None:
        """Record that a connection began or ended. These have a limit of their own: a restart brings many at once."""
        self._look_at_clock()
        lines = self._connections[tenant] = self._connections.get(tenant, 0) + 1
        if lines > AUDIT_LINES_OF_ONE_PER_S:
            self._left_out += 1
            return
        self.note(what, tenant=tenant, peer=peer, connection=connection, **self._left_out_before())

    def removed(self, what: str, *, tenant: str, peer: str, names: Sequence[bytes], **more: int) -> None:
        """Record that a tenant removed blocks or sessions of its own; of many, the first are named."""
        if self._is_too_much(_tenant(tenant)):
            return
        named = ",".join(name.hex() for name in names[:AUDIT_NAMES_MAX])
        self._write(
            {
                "what": what,
                "tenant": tenant,
                "peer": peer,
                "outcome": "ok",
                "named": len(names),
                "names": named,
                **more,
                **self._left_out_before(),
            }
        )

    def refused(self, what: str, *, tenant: str, peer: str, why: str, is_proved: bool = False) -> None:
        """Record that a caller was refused; `is_proved`: it is authenticated as this tenant."""
        if self._is_too_much(_tenant(tenant) if is_proved else _source(peer)):
            return
        self._write(
            {
                "what": what,
                "tenant": tenant,
                "peer": peer,
                "outcome": "refused",
                "why": why,
                **self._left_out_before(),
            }
        )

    def _is_too_much(self, of: str) -> bool:
        """Whether a line must be left out; counts it if so."""
        takes = self._takes(of)
        self._left_out += not takes
        return not takes

    def _takes(self, of: str) -> bool:
        """Accept a line, unless this second's limit is used up: the caller's own, that of strangers, or that of all."""
        self._look_at_clock()
        is_stranger = not of.startswith(_TENANT)
        mine, all_lines = self._lines.get(of, 0), sum(self._lines.values())
        is_full = all_lines >= AUDIT_LINES_PER_S or (
            is_stranger and self._of_strangers >= AUDIT_LINES_PER_S // 2
        )
        if mine >= AUDIT_LINES_OF_ONE_PER_S or is_full:
            return False
        self._lines[of] = mine + 1
        self._of_strangers += is_stranger
        return True

    def _look_at_clock(self) -> None:
        second = self._clock.monotonic_ns() // _SECOND_NS
        if second != self._second:
            self._second, self._lines, self._connections, self._of_strangers = second, {}, {}, 0

    def _left_out_before(self) -> dict[str, int]:
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}

    def _write(self, line: dict[str, str | int]) -> bool:
        if self._fd < 0:
            return True
        text = json.dumps({"at_ms": self._clock.wall_ms(), **line}, separators=(",", ":")) + "\n"
        data = (_NEW_LINE if self._is_cut else b"") + text.encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            why = error.strerror
        else:
            self._is_cut = written < len(data)
            self.lines += 1
            why = os.strerror(errno.ENOSPC) if self._is_cut else None
        if why is not None and not self._failed:
            log.warning("The audit log can't be written: %s.", why)
        self._failed = why is not None
        return not self._failed

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _tenant(name: str) -> str:
    return _TENANT + name


def _source(peer: str) -> str:
    """The part of a peer's address that stays the same when it connects again."""
    host, ip = peer.rpartition(":")[0], ip_of_peer(peer)
    if ip is None and host.startswith(_HTTP):
        ip = ip_of(host.removeprefix(_HTTP).partition("%")[0])
    return host or peer if ip is None else source_of(ip)
