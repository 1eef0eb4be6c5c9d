"""The fuzzed parsers: for each a function of bytes that returns, or raises an error of the tree.

What always holds: nothing here listens, and files are written only to the run's own folder. Any other exception of a
parser is a finding, and so is a result that its own writer would not have written.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from nic_offload._core import ffi

from kvstore.client.session_file import Content, Reader, Writer
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, Corrupt, KvError
from kvstore.limits import BATCH_BLOCKS_MAX, FABRIC_CALL_BYTES, HTTP_REQUEST_BYTES_MAX, PAGE_BYTES
from kvstore.node.http import _Bad, _is_address, _metadata, _read
from kvstore.node.tenants import Tenants, credentials_of
from kvstore.storage.index_file import DATA_NAME, check_structure
from kvstore.storage.store import Store
from kvstore.wire import fabric_call, manifest, parts, record
from kvstore.wire.lookups_pb2 import LookupsByCaller
from kvstore.wire.traceparent import TRACEPARENT_HEADER, parent_in
from nic_offload.checksum import crc32c
from nic_offload.vault import KeyName, RecordCipher, Vault, row_of
from sim.replay.workload import read_trace
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SEEDS", "TARGETS", "WORDS"]

_FOLDER: Final = Path(tempfile.mkdtemp(prefix="kvstore-fuzz-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_CODEC: Final = record.HeaderCodec(bytes(32), bytes(16))


def fabric_calls(data: bytes) -> None:
    """A call that a client has put into the node's memory, and an answer that a node has put into a client's."""
    summed = crc32c(data[4:]).to_bytes(4, "little") + data[4:]
    long = summed[:4] + len(data).to_bytes(4, "little") + (1).to_bytes(8, "little") + summed[16:]
    for told in (data, crc32c(long[4:]).to_bytes(4, "little") + long[4:]):
        with suppress(KvError):
            call, rows = fabric_call.read_call(told, 1)
            assert len(rows) <= BATCH_BLOCKS_MAX
            assert all(isinstance(name, str) for name, _ in call.metadata)
        with suppress(KvError):
            fabric_call.leases_of(told, 1)
        with suppress(KvError):
            fabric_call.count_of(told, 1)
    assert 0 <= fabric_call.length_said(data[: fabric_call.LENGTH_END]) <= FABRIC_CALL_BYTES
    with suppress(KvError):
        fabric_call.metadata_of(data)


def grpc_fields(data: bytes) -> None:
    """Messages that the node parses itself, and headers."""
    with suppress(KvError, DecodeError):
        list(parts.parse_put(data).parts())
    with suppress(KvError, DecodeError):
        list(parts.got_parts(data))
    with suppress(DecodeError):
        LookupsByCaller.FromString(data)
    parent_in([(TRACEPARENT_HEADER, data.decode("latin-1"))])


def http(data: bytes) -> None:
    """A request, up to the authentication of its caller."""

    async def read() -> None:
        reader = asyncio.StreamReader(limit=HTTP_REQUEST_BYTES_MAX)
        reader.feed_data(data + b"\r\n\r\n")
        reader.feed_eof()
        with suppress(_Bad, asyncio.IncompleteReadError):
            _, _, _, headers = await _read(reader)
            _is_address(headers.get("host", ""))
            credentials_of(_metadata(headers), {})

    asyncio.run(read())


def tenants(data: bytes) -> None:
    path = _FOLDER / "tenants.toml"
    path.write_bytes(data)
    with suppress(ConfigError):
        assert Tenants(bytes(16), SystemClock()).load(path)


class _Unsummed(Reader):
    """A reader that accepts any checksum, so that mutations reach the code after the check."""

    def _read_checked(self, length: int, what: str) -> bytes:
        return self._read(length + 4, what)[:length]


def sessions(data: bytes) -> None:
    """A session in a file, and one as stored on the drive."""
    for read in (Reader, _Unsummed):
        with suppress(KvError):
            reader = read(io.BytesIO(data))
            for _ in reader.blocks():
                pass
            reader.read_end()
    found = manifest.parse_manifest(data)
    assert found is None or manifest.pack_manifest(found) == data


def traces(data: bytes) -> None:
    """A trace of requests, in both formats."""
    for name in ("t.jsonl", "t.csv"):
        path = _FOLDER / name
        path.write_bytes(data)
        with suppress(OutOfRange):
            assert read_trace(path)


def records(data: bytes) -> None:
    """A header page of the drive, and a superblock."""
    page = data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
    fixed, sum_at = page[: record._FIXED.size], record._SUPERBLOCK.size
    _CODEC.parse(data, 0, 0)
    _CODEC.parse(fixed + _CODEC._tag(fixed, 0), 0, 0)
    record.parse_superblock(page)
    summed = crc32c(page[:sum_at]).to_bytes(4, "little")
    record.parse_superblock(page[:sum_at] + summed + page[sum_at + 4 :])
    record.foreign_version(page)


_NAMES: Final = (bytes(32), bytes(16), bytes(16))
_VAULT: Final = Vault(4)
_CIPHER: Final = RecordCipher(_VAULT, bytes(range(32)), bytes(16), bytes(16))
_PLAIN: Final = bytes(range(250)) * 20
_PLACE: Final = 1 << 20
_TAG: Final = slice(record._FIXED.size, record._FIXED.size + 16)
_EXPIRES: Final = slice(24, 32)  # of an encrypted header: it may be put off in place
_RESERVED: Final = slice(80, 104)
_ENCRYPTED_BYTES: Final = 208  # of its page, with its tags


@cache
def _an_encrypted_record() -> bytes:
    for number in (1, 2):
        _VAULT.put(bytes(16), bytes([number] * 16), KeyName(number, number), bytes([number] * 32))
    source, target = bytearray(PAGE_BYTES) + _PLAIN, bytearray(3 * PAGE_BYTES)
    where = [int(ffi.cast("uintptr_t", ffi.from_buffer(one))) for one in (source, target)]
    header = (record.RECORD_MAGIC, record.FORMAT_VERSION, 1, len(_PLAIN), *_NAMES, 9, 0, crc32c(_PLAIN))
    assert _CIPHER.encrypt(
        [row_of(record._FIXED.format[1:]).pack(*where, _PLACE, 1, 1, len(target), *header)]
    )
    return bytes(target)


def encrypted_records(data: bytes) -> None:
    """A record, with bytes of it changed, by somebody who has the header's key or who has not, where its keys are.

    What can be opened is the block that was put, and nothing else.
    """
    whole = _an_encrypted_record()
    spoilt = bytearray(whole)
    for at in range(1, len(data) - 2, 3):
        spoilt[int.from_bytes(data[at : at + 2], "little") % len(spoilt)] = data[at + 2]
    if data[:1] > b"\x7f":
        spoilt[_TAG] = _CIPHER.tag(bytes(spoilt[: _TAG.start]), _PLACE)
    said = int.from_bytes(spoilt[12:16], "little")
    memory = int(ffi.cast("uintptr_t", ffi.from_buffer(spoilt)))
    changed = bytes(spoilt)
    opened = _CIPHER.decrypt(_PLACE, memory, said if said <= len(spoilt) - PAGE_BYTES else len(_PLAIN))
    if opened is not None:
        kept = bytearray(changed[: PAGE_BYTES + len(_PLAIN)])
        for free in (_EXPIRES, _RESERVED, _TAG):
            kept[free] = whole[free]
        assert kept[:_ENCRYPTED_BYTES] == whole[:_ENCRYPTED_BYTES], "all else is authenticated by its key"
        assert kept[PAGE_BYTES:] == whole[PAGE_BYTES : PAGE_BYTES + len(_PLAIN)]
        assert spoilt[PAGE_BYTES : PAGE_BYTES + len(_PLAIN)] == _PLAIN


@cache
def _an_index() -> bytes:
    with Store.open(_FOLDER / "store", capacity_bytes=16 << 20, clock=SystemClock()):
        pass
    data = (_FOLDER / "store" / "index-0" / DATA_NAME).read_bytes()
    shutil.rmtree(_FOLDER / "store")
    return data


def index(data: bytes) -> None:
    """The file of an index with changed bytes: three bytes of the input give the place, one the value."""
    folder, spoilt = _FOLDER / "index", bytearray(_an_index())
    folder.mkdir(exist_ok=True)
    for at in range(0, len(data) - 3, 4):
        spoilt[int.from_bytes(data[at : at + 3], "little") % len(spoilt)] = data[at + 3]
    (folder / DATA_NAME).write_bytes(spoilt)
    with suppress(Corrupt):
        check_structure(folder)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    one.__name__: one
    for one in (
        fabric_calls,
        grpc_fields,
        http,
        tenants,
        sessions,
        traces,
        records,
        encrypted_records,
        index,
    )
}
_SESSION_FILE: Final = io.BytesIO()
_WRITER: Final = Writer(_SESSION_FILE, Content(bytes(16), [manifest.Turn(0, 16, 1)], [bytes(32)]))
_WRITER.block(0, b"block")
_WRITER.end()
_MANIFEST: Final = manifest.Manifest(
    *_NAMES[1:], (), (bytes(32),), (manifest.Turn(0, 16, 1),), b"label", 5, 1
)
_HEADERS: Final = (
    b"Host",
    b"Authorization",
    b"Cookie",
    b"Origin",
    b"Connection",
    b"Content-Length",
    b"Accept",
)
# From where mutation begins: inputs that each parser takes, or nearly.
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "fabric_calls": (bytes(64), bytes(16) + b"\1" + bytes(47) + bytes(64), bytes(24)),
    "grpc_fields": (
        bytes.fromhex("0a0461636d65100222080a040a02aaaa1200"),
        b"00-0123456789abcdef0123456789abcdef-0123456789abcdef-01",
    ),
    "http": (
        b"GET /metrics?after=ab&x=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic YTpi",
        b"HEAD / HTTP/1.0\r\nAuthorization: Bearer x",
        *(b"GET / HTTP/1.1\r\n" + header + b": \x80\xff" for header in _HEADERS),
        b"GET / HTTP/1.1\r\nAuthorization: Basic \x80",  # not ASCII: once an error of our own
        b"GET /?%80=%ff&%zz=\x80 HTTP/1.1\r\nHost: localhost",
    ),
    "tenants": (
        b'[a]\ntokens_sha256 = ["' + b"0" * 64 + b'"]\nrequests_per_s = 5\nbytes = 1\nobserver = true\n',
        b'[b]\ncertificates = ["c"]\n',
    ),
    "sessions": (_SESSION_FILE.getvalue(), manifest.pack_manifest(_MANIFEST), bytes(100)),
    "traces": (
        b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n',
        b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n1,a,1,m,5,5\n",
    ),
    "records": (
        record._FIXED.pack(record.RECORD_MAGIC, record.FORMAT_VERSION, 1, 4096, *_NAMES, 1, 0, 0),
        record.pack_superblock(
            record.Superblock(bytes(16), bytes(16), 0, bytes(32), 1 << 24, 1, 0, 9, 0, 0, 0, 0, 1)
        )[:256],
        bytes(200),
    ),
    "encrypted_records": (b"\0", b"\xff", b"\xff\x18\0\1", b"\0\0\0\0", b"\xff\0\x10\1", b"\xff\x20\0\2"),
    "index": (bytes(8), b"\x00\x10\x00\xff", b"\x08\x20\x00\x01" * 3),
}
# What a parser looks for, and mutation alone would hardly make: names, signs, and what is at the edge of what can be.
_ODD: Final = (b"\x80", b"\xff", b"\xc3\xa9", b"\0", b"-1", b"1e999", b"9" * 40, b"NaN")
WORDS: Final[dict[str, tuple[bytes, ...]]] = {
    "fabric_calls": (
        b"traceparent",
        b"x-kvstore-session",
        *((1 << bit).to_bytes(8, "little") for bit in range(0, 64, 9)),
    ),
    "grpc_fields": (b"00-", b"-01", b"\x0a\x10", b"\x12\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
    "http": (
        b"GET ",
        b"HEAD ",
        b" HTTP/1.1\r\n",
        *(one + b": " for one in _HEADERS),
        b"Basic ",
        b"Bearer ",
        b"%",
        *_ODD,
    ),
    "tenants": (
        b"tokens_sha256",
        b"certificates",
        b"requests_per_s",
        b"bytes",
        b"observer",
        b"[[",
        b"true",
        *_ODD,
    ),
    "sessions": (
        b"tkvsess\x01",
        b"tkv end\x01",
        *((1 << bit).to_bytes(8, "little") for bit in range(0, 64, 9)),
    ),
    "traces": (
        *(b'"' + one + b'": ' for one in (b"timestamp", b"input_length", b"output_length", b"hash_ids")),
        b"Timestamp",
        b"Session ID",
        b"Request tokens",
        b"[" * 50,
        b"{}",
        *_ODD,
    ),
    "records": (b"TKVRECRD", b"TKVDRIVE", *((1 << bit).to_bytes(8, "little") for bit in range(0, 64, 9))),
    "encrypted_records": tuple(
        at.to_bytes(2, "little") for at in (0, 12, 16, 24, 32, 40, 48, 64, 104, 120, 4096)
    ),
    "index": (b"\0\0\0", b"\xff\xff\xff\xff", b"\0\x10\0\0"),
}
assert SEEDS.keys() == TARGETS.keys() == WORDS.keys()
