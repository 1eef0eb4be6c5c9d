"""Authenticated encryption: AES-256-GCM from OpenSSL's libcrypto or Intel's IPSec-MB (`aead.c`).

What always holds: a library that fails a test vector is not used; no byte of a message with a wrong tag is returned.
What it doesn't do: prevent the use of a nonce twice with one key, which would expose both messages.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from nic_offload._core import ffi, lib
from nic_offload.errors import KvError
from nic_offload.secret_keys import new_key, wipe

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "KEY_BYTES",
    "NONCE_BYTES",
    "TAG_BYTES",
    "NotAuthentic",
    "available",
    "check",
    "library",
    "seal",
    "unseal",
    "unseal_key",
    "wipe",
]

KEY_BYTES: int = lib.TK_AEAD_KEY
NONCE_BYTES: int = lib.TK_AEAD_NONCE
TAG_BYTES: int = lib.TK_AEAD_TAG


class NotAuthentic(KvError):
    """A sealed message was changed, or sealed with another key, nonce or associated data."""


def available() -> str | None:
    """Return why this machine has no encryption; None if it has."""
    code, message = _load()
    return message if code else None


def library() -> str:
    """The name of the library that encrypts. Fails if there is none."""
    code, message = _load()
    assert not code, message
    return message


def seal(key: Buffer, nonce: bytes, associated: bytes, data: Buffer) -> bytes:
    """Encrypt; returns the encrypted bytes and their tag."""
    view = ffi.from_buffer(data)
    out = bytearray(len(view) + TAG_BYTES)
    of, kept = _of(key, nonce, associated)
    check(lib.tk_aead_encrypt(of, view, len(view), ffi.from_buffer(out)))
    del kept
    return bytes(out)


def unseal(key: Buffer, nonce: bytes, associated: bytes, sealed: Buffer) -> bytearray:
    """Decrypt into memory that can be wiped; NotAuthentic if the bytes, the tag or the key is wrong."""
    view = ffi.from_buffer(sealed)
    out = bytearray(max(len(view) - TAG_BYTES, 0))
    of, kept = _of(key, nonce, associated)
    check(lib.tk_aead_decrypt(of, view, len(view), ffi.from_buffer(out)))
    del kept
    return out


def unseal_key(key: Buffer, nonce: bytes, associated: bytes, sealed: Buffer) -> memoryview:
    """Decrypt a key into locked memory, which the caller wipes; NotAuthentic as above, and if it is not a key."""
    view = ffi.from_buffer(sealed)
    if len(view) != KEY_BYTES + TAG_BYTES:
        raise NotAuthentic("A sealed key has another length.")
    out = new_key()
    of, kept = _of(key, nonce, associated)
    try:
        check(lib.tk_aead_decrypt(of, view, len(view), ffi.from_buffer(out)))
    except BaseException:
        wipe(out)
        raise
    del kept
    return out


def _load() -> tuple[int, str]:
    message = ffi.new("char[]", lib.TK_AEAD_MESSAGE)
    return lib.tk_aead_load(message), ffi.string(message).decode()


def _of(key: Buffer, nonce: bytes, associated: bytes) -> tuple[object, object]:
    keyed = ffi.from_buffer(key)
    assert (len(keyed), len(nonce)) == (KEY_BYTES, NONCE_BYTES)
    of = ffi.gc(ffi.new("struct tk_aead *"), lambda one: lib.tk_wipe(one, ffi.sizeof("struct tk_aead")))
    ffi.memmove(of.key, keyed, KEY_BYTES)
    ffi.memmove(of.nonce, nonce, NONCE_BYTES)
    kept = ffi.from_buffer(associated)
    of.associated, of.associated_bytes = int(ffi.cast("uintptr_t", kept)), len(associated)
    return of, kept


def check(code: int) -> None:
    """Raise the error for a result of the core, which is 0 or a negative errno."""
    if code == -errno.EBADMSG:
        raise NotAuthentic("Sealed bytes were changed, or belong to another key or place.")
    if code == -errno.ENOENT:
        raise KvError(f"There is no encryption: {available()}.")
    if code == -errno.ENOMEM:
        raise MemoryError
    assert not code, code
