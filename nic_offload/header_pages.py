"""Header pages with a keyed tag, built in batches by the C core (`header_pages.c`)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from nic_offload._core import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FIXED_BYTES", "KEY_BYTES", "NAME_BYTES", "PAGE_BYTES", "TAG_BYTES", "row_of", "write_tagged"]

PAGE_BYTES: int = lib.TK_TAGGED_PAGE
KEY_BYTES: int = lib.TK_TAGGED_KEY
NAME_BYTES: int = lib.TK_TAGGED_NAME
FIXED_BYTES: int = lib.TK_TAGGED_FIXED
TAG_BYTES: int = lib.TK_TAGGED_TAG
_PLACE = "=QQII"


def row_of(fixed: str) -> struct.Struct:
    """The struct of a page: address and number, bounds of its zeros, then fields of this little-endian format."""
    row = struct.Struct(_PLACE + fixed)
    assert row.size == ffi.sizeof("struct tk_tagged")
    return row


def write_tagged(key: bytes, name: bytes, rows: Sequence[bytes]) -> None:
    """Write pages, whose memory the caller keeps alive."""
    assert (len(key), len(name)) == (KEY_BYTES, NAME_BYTES)
    packed = ffi.from_buffer("struct tk_tagged[]", b"".join(rows))
    lib.tk_write_tagged(key, name, packed, len(rows))
