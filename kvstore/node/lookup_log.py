"""The log of look-ups on the disk: appended to by its own thread, rotated, and read when the node opens.

A frame is its length and a CRC-32 of what follows (4 bytes each, little-endian), then tenant, user and session as
digests (16 bytes each), the request's id after its length (one byte), and the look-up as in the proto. Files are
numbered upwards; the oldest is removed when there are more than `LOOKUP_LOG_FILES`.

What always holds: no caller waits for the disk; look-ups that are not written for lack of room, or because the disk
refuses, are counted. What was handed to the kernel survives SIGKILL. A tail that is torn, or otherwise invalid, ends
its file: the frames before it are valid, and new frames take its place.
What it doesn't do: survive power loss; it is never synced.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import (
    LOOKUP_ID_BYTES_MAX,
    LOOKUP_LOG_CLOSE_MS,
    LOOKUP_LOG_FILE_BYTES_MAX,
    LOOKUP_LOG_FILES,
    LOOKUP_LOG_FRAME_BYTES_MAX,
    LOOKUP_LOG_WAITING_BYTES_MAX,
    SESSION_BYTES,
    TENANT_BYTES,
    USER_BYTES,
)
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Kept", "LookupLog", "frames"]

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")
_NAMES = struct.Struct(f"<{TENANT_BYTES}s{USER_BYTES + SESSION_BYTES}sB")
_FILE = re.compile(r"lookups-(\d{8})\.log")
_CLOSE_TIMEOUT_S = LOOKUP_LOG_CLOSE_MS / 1000


class Kept(NamedTuple):
    """A stored look-up: its tenant, user and session (digests; zeros if none), its request, and its message."""

    tenant: bytes
    session: bytes
    request_id: bytes
    message: bytes

    @property
    def size_bytes(self) -> int:
        """Its size in the log."""
        return _HEAD.size + _NAMES.size + len(self.request_id) + len(self.message)

    def frame(self) -> bytes:
        """The bytes in the log."""
        names = _NAMES.pack(self.tenant, self.session, len(self.request_id))
        body = b"".join((names, self.request_id, self.message))
        return _HEAD.pack(len(body), zlib.crc32(body)) + body


def frames(data: bytes) -> Iterator[tuple[int, Kept]]:
    """The valid frames from the first on, each with its end offset."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if (
            not _NAMES.size <= length <= LOOKUP_LOG_FRAME_BYTES_MAX
            or len(body) < length
            or zlib.crc32(body) != crc
        ):
            return
        tenant, session, id_bytes = _NAMES.unpack_from(body)
        message_at = _NAMES.size + id_bytes
        if id_bytes > LOOKUP_ID_BYTES_MAX or message_at > length:
            return
        at += _HEAD.size + length
        yield at, Kept(tenant, session, body[_NAMES.size : message_at], body[message_at:])


class LookupLog(Handle):
    """The look-up log of a node. Call `load` once before the first append."""

    def __init__(self, folder: Path) -> None:
        self.unwritten = 0  # look-ups that are not in the log
        self._folder = folder
        self._fd = -1
        self._number = 1
        self._file_bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-lookups", daemon=True)

    def load(self) -> list[Kept]:
        """Load the log, oldest first, and then accept appends. If the disk refuses, the log is empty."""
        kept: list[Kept] = []
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            numbers = self._numbers()
            for number in numbers:
                good = 0
                for end, one in frames(self._path(number).read_bytes()):
                    kept.append(one)
                    good = end
                if number == numbers[-1]:
                    os.truncate(self._path(number), good)
                    self._number, self._file_bytes = number, good
        except OSError as error:
            self._fails(error)
        self._thread.start()
        return kept

    def append(self, kept: Kept) -> None:
        """Queue it to be written soon, if there is room for it."""
        frame = kept.frame()
        with self._wake:
            if self._waiting_bytes + len(frame) > LOOKUP_LOG_WAITING_BYTES_MAX:
                self.unwritten += 1
                return
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)
            self._wake.notify()

    def close(self) -> None:
        """Write queued frames, and stop, with a deadline for a stuck disk."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
                if not batch:
                    break
            try:
                self._write(b"".join(batch))
            except OSError as error:
                with self._wake:
                    self.unwritten += len(batch)
                self._fails(error)
            else:
                self._failing = False
        self._leave_file()

    def _write(self, data: bytes) -> None:
        if self._fd >= 0 and self._file_bytes + len(data) > LOOKUP_LOG_FILE_BYTES_MAX:
            self._leave_file()
            self._number, self._file_bytes = self._number + 1, 0
            for number in self._numbers()[: 1 - LOOKUP_LOG_FILES]:
                self._path(number).unlink(missing_ok=True)
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path(self._number), flags, 0o600)
        # The next write overwrites a short one: a half frame in between would hide what follows it.
        if os.pwrite(self._fd, data, self._file_bytes) != len(data):
            raise OSError(0, "it took only a part")
        self._file_bytes += len(data)

    def _leave_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _numbers(self) -> list[int]:
        found = (_FILE.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(one[1]) for one in found if one)

    def _path(self, number: int) -> Path:
        return self._folder / f"lookups-{number:08}.log"

    def _fails(self, error: OSError) -> None:
        if not self._failing:
            log.warning("The log of look-ups in %s can't be used: %s.", self._folder, error.strerror)
        self._failing = True
