"""A master key that stays in HashiCorp Vault's transit engine, which wraps and unwraps over HTTP.

    POST /v1/MOUNT/encrypt/NAME   {"plaintext": BASE64, "associated_data": BASE64}  ->  {"data": {"ciphertext": ...}}
    POST /v1/MOUNT/decrypt/NAME   {"ciphertext": ..., "associated_data": BASE64}    ->  {"data": {"plaintext": BASE64}}

The key in Vault must be of a type that authenticates associated data (aes256-gcm96, its default, or
chacha20-poly1305). It may be rotated in Vault at any time: a ciphertext names the key's version.

What always holds: an answer within the deadline or MasterKeyUnavailable; TLS is verified, no proxy is used and no
redirect followed; no part of an answer is in an error. The token is read from its file for each call, so it may be
renewed there. What it doesn't do: renew the token, or wipe copies of a key in Python's JSON and TLS code.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from base64 import b64decode, b64encode
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.config_files import read_pem, read_text
from kvstore.errors import ConfigError, MasterKeyUnavailable, WrongMasterKey
from kvstore.limits import (
    MASTER_ID_BYTES_MAX,
    MASTER_WRAPPED_BYTES_MAX,
    VAULT_ANSWER_BYTES_MAX,
    VAULT_CALL_MS,
)
from nic_offload import aead
from nic_offload.secret_keys import key_of

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = ["VaultKey", "VaultMaster"]

_OK: Final = 200
_BAD_REQUEST: Final = 400
_ADVICE: Final = {
    403: "its token may not use this key, or has expired",
    404: "there is no such key, or transit is mounted elsewhere",
    503: "it is sealed or in maintenance",
}


class VaultKey(NamedTuple):
    """The address of Vault, and the key in it."""

    host: str
    port: int
    is_tls: bool
    mount: str
    name: str
    token: Path  # a file
    ca: Path | None = None  # the CA of Vault's certificate, instead of the system's
    namespace: str = ""

    @property
    def id(self) -> str:
        """Identifies the key, independently of Vault's address."""
        inner = f"{self.namespace}/{self.mount}/{self.name}".strip("/")
        return f"vault:{inner}".encode()[:MASTER_ID_BYTES_MAX].decode("utf-8", "ignore")


class VaultMaster:
    """A master key in Vault."""

    def __init__(self, key: VaultKey) -> None:
        self._key = key
        self.id = key.id

    def __repr__(self) -> str:
        return f"VaultMaster({self.id})"

    def wrap(self, associated: bytes, key: Buffer) -> bytes:
        """Have Vault encrypt a key."""
        asked = {"plaintext": b64encode(key).decode(), "associated_data": b64encode(associated).decode()}
        text = self._call("encrypt", asked).get("ciphertext")
        wrapped = text.encode("ascii", "replace") if isinstance(text, str) else b""
        if not 0 < len(wrapped) <= MASTER_WRAPPED_BYTES_MAX:
            raise self._failed("its answer has no wrapped key of a length that a keyring takes")
        return wrapped

    def unwrap(self, associated: bytes, wrapped: bytes) -> memoryview:
        """Have Vault decrypt a key."""
        asked = {
            "ciphertext": wrapped.decode("ascii", "replace"),
            "associated_data": b64encode(associated).decode(),
        }
        text = self._call("decrypt", asked).get("plaintext")
        try:
            key = bytearray(b64decode(text, validate=True)) if isinstance(text, str) else bytearray()
        except ValueError:
            key = bytearray()
        if len(key) != aead.KEY_BYTES:
            raise self._failed("its answer has no key")
        return key_of(key)

    def close(self) -> None:
        """Do nothing: there is nothing to wipe."""

    def _failed(self, how: str) -> MasterKeyUnavailable:
        where = f"{self._key.host}:{self._key.port}"
        return MasterKeyUnavailable(
            f"Vault at {where} can't use key {self._key.mount}/{self._key.name}: {how}."
        )

    def _call(self, what: str, asked: dict[str, str]) -> dict[str, Any]:
        call = _Call(self._key, what, asked)
        call.start()
        call.join(VAULT_CALL_MS / 1000)
        if call.is_alive():
            call.abandon()
            raise self._failed(f"no answer within {VAULT_CALL_MS / 1000:g} s")
        if call.broken:
            raise self._failed(call.broken)
        if call.status == _BAD_REQUEST and what == "decrypt":
            raise WrongMasterKey(
                f"Vault's key {self.id} did not wrap this key, or no longer allows that version."
            )
        if call.status != _OK:
            advice = _ADVICE.get(call.status)
            raise self._failed(
                f"it answered with status {call.status}" + (f", so {advice}" if advice else "")
            )
        try:
            data = json.loads(call.answer)["data"]
        except (ValueError, KeyError, TypeError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise self._failed("its answer is not one of the transit engine")
        return data


class _Call(Thread):
    """One call, on a thread of its own, because a name look-up has no deadline."""

    def __init__(self, key: VaultKey, what: str, asked: dict[str, str]) -> None:
        super().__init__(name="kv-vault", daemon=True)
        self._key = key
        self._what = what
        self._body = json.dumps(asked)
        self._connection: http.client.HTTPConnection | None = None
        self.status = 0
        self.answer = b""
        self.broken = ""  # why there is no answer

    def run(self) -> None:
        """Make the call."""
        try:
            self._make()
        except ssl.SSLCertVerificationError as error:
            self.broken = f"its certificate can't be verified ({error.verify_message})"
        except OSError as error:
            self.broken = error.strerror or type(error).__name__
        except (http.client.HTTPException, ValueError) as error:
            self.broken = f"its answer is not HTTP ({type(error).__name__})"

    def _make(self) -> None:
        key = self._key
        timeout_s = VAULT_CALL_MS / 1000
        try:
            token = read_text(key.token).strip()
            ca = None if key.ca is None else read_pem(key.ca).decode("ascii", "ignore")
        except ConfigError as error:
            self.broken = str(error).rstrip(".")
            return
        if key.is_tls:
            trusted = ssl.create_default_context(cadata=ca)
            self._connection = http.client.HTTPSConnection(
                key.host, key.port, timeout=timeout_s, context=trusted
            )
        else:
            self._connection = http.client.HTTPConnection(key.host, key.port, timeout=timeout_s)
        try:
            headers = {
                "X-Vault-Token": token,
                "X-Vault-Request": "true",
            }
            if key.namespace:
                headers["X-Vault-Namespace"] = key.namespace
            path = f"/v1/{key.mount}/{self._what}/{key.name}"
            self._connection.request("POST", path, body=self._body, headers=headers)
            response = self._connection.getresponse()
            self.status = response.status
            self.answer = response.read(VAULT_ANSWER_BYTES_MAX)
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """Make a late call end soon."""
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
