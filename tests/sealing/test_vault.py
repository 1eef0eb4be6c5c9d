"""A master key in Vault's transit engine, with a Vault of our own that speaks its HTTP."""

from __future__ import annotations

import json
import secrets
import ssl
from base64 import b64decode, b64encode
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import main
from kvstore.errors import MasterKeyUnavailable, WrongMasterKey
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.masters import open_master
from nic_offload import aead
from tests.sealing.rig import STORE, keys_of, users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.sealing.master_key import Master

TOKEN = "hvs.a-token-of-tests"


class FakeVault(ThreadingHTTPServer):
    """The two calls of the transit engine, as its documentation has them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Calls)
        self.versions = [secrets.token_bytes(32)]
        self.answer: tuple[int, bytes] | None = None  # instead of the right one
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.drips = False
        self.stop = Event()

    def transit(self, what: str, body: dict[str, str]) -> tuple[int, dict[str, Any]]:
        associated = b64decode(body["associated_data"])
        if what == "encrypt":
            nonce = secrets.token_bytes(12)
            sealed = nonce + aead.seal(self.versions[-1], nonce, associated, b64decode(body["plaintext"]))
            return 200, {"data": {"ciphertext": f"vault:v{len(self.versions)}:{b64encode(sealed).decode()}"}}
        _, version, text = body["ciphertext"].split(":")
        sealed = b64decode(text)
        try:
            key = aead.unseal(self.versions[int(version[1:]) - 1], sealed[:12], associated, sealed[12:])
        except aead.NotAuthentic:
            return 400, {"errors": ["cipher: message authentication failed"]}
        return 200, {"data": {"plaintext": b64encode(key).decode()}}


class _Calls(BaseHTTPRequestHandler):
    server: FakeVault

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers)))
        what, name = self.path.split("/")[-2:]
        if self.server.drips:
            self.send_response(200)
            while not self.server.stop.wait(0.02):
                self.wfile.write(b"X-More: 1\r\n")
            return
        if self.server.answer is not None:
            status, answer = self.server.answer
        elif self.headers["X-Vault-Token"] != TOKEN:
            status, answer = 403, b'{"errors":["permission denied"]}'
        elif self.path != f"/v1/transit/{what}/kv" or name != "kv":
            status, answer = 404, b'{"errors":[]}'
        else:
            status, said = self.server.transit(what, body)
            answer = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def running(context: ssl.SSLContext | None = None) -> Iterator[FakeVault]:
    server = FakeVault()
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.stop.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def vault() -> Iterator[FakeVault]:
    with running() as server:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def master_at(
    vault: FakeVault, token: Path, name: str = "kv", scheme: str = "http", more: str = ""
) -> Master:
    """The master key in that Vault."""
    return open_master(
        f"vault:{scheme}://127.0.0.1:{vault.server_port}/transit/keys/{name}?token={token}{more}"
    )


def test_a_keyring_is_sealed_by_vault_and_its_key_may_be_rotated_there(
    vault: FakeVault, token: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keyring"
    master = master_at(vault, token, more="&namespace=team")
    assert (master.id, repr(master)) == ("vault:team/transit/kv", "VaultMaster(vault:team/transit/kv)")
    Keyring.create(path, master, STORE)
    with Keyring.open(path, master, STORE) as keyring:
        keyring.ensure(users(1, 2))
        keys = keys_of(keyring, users(1, 2))
        calls = len(vault.asked)
        keyring.ensure(users(3))
        assert keys_of(keyring, users(1, 2)) == keys
        assert (
            len(vault.asked) == calls
        )  # Vault is asked when a keyring is opened and sealed anew, and not otherwise
        vault.versions.append(secrets.token_bytes(32))
        keyring.rotate_master(master)
    assert b"vault:v2:" in path.read_bytes()
    assert b"vault:v1:" not in path.read_bytes()
    with Keyring.open(path, master, STORE) as keyring:
        assert keys_of(keyring, users(1, 2)) == keys
    assert {headers["X-Vault-Namespace"] for _, headers in vault.asked} == {"team"}


def test_an_error_of_vault_is_one_sentence_and_never_quoted(vault: FakeVault, token: Path) -> None:
    master = master_at(vault, token)
    wrapped = master.wrap(b"for", bytearray(32))
    with pytest.raises(WrongMasterKey, match="vault:transit/kv did not wrap"):
        master.unwrap(b"other", wrapped)
    for status, answer, says in (
        (403, b"swordfish", "its token may not use this key"),
        (404, b"swordfish", "no such key"),
        (503, b"swordfish", "sealed"),
        (500, b"swordfish", "status 500"),
        (301, b"swordfish", "status 301"),
        (200, b"swordfish", "not one of the transit"),
        (200, b'{"data":7}', "not one of the transit"),
        (200, b'{"data":{"plaintext":"c3dvcmRmaXNo"}}', "has no key"),
        (200, b'{"data":{"plaintext":"%%%"}}', "has no key"),
        (200, b"[" * 60_000, "not one of the transit"),
    ):
        vault.answer = status, answer
        with pytest.raises(MasterKeyUnavailable, match=says) as failed:
            master.unwrap(b"for", wrapped)
        assert "swordfish" not in str(failed.value)
        assert TOKEN not in str(failed.value)
    for answer in (
        b'{"data":{"ciphertext":"' + b"x" * 181 + b'"}}',
        b'{"data":{"ciphertext":""}}',
        b'{"data":{}}',
    ):
        vault.answer = 200, answer
        with pytest.raises(MasterKeyUnavailable, match="wrapped key"):
            master.wrap(b"for", bytearray(32))
    vault.answer = None
    token.write_text("hvs.expired")
    with pytest.raises(MasterKeyUnavailable, match=r"403, so its token"):
        master.unwrap(b"for", wrapped)
    token.write_text(TOKEN)  # it is read again for each call
    assert master.unwrap(b"for", wrapped) == bytes(32)
    token.unlink()
    with pytest.raises(MasterKeyUnavailable, match="token could not be read"):
        master.unwrap(b"for", wrapped)


def test_an_absent_or_slow_vault_has_a_deadline(
    vault: FakeVault, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = master_at(vault, token)
    monkeypatch.setattr("kvstore.sealing.vault_master.VAULT_CALL_MS", 300)
    vault.drips = True
    with pytest.raises(MasterKeyUnavailable, match=r"no answer within 0\.3 s|not HTTP"):
        master.wrap(b"for", bytearray(32))
    with running() as gone:
        away = master_at(gone, token)
    with pytest.raises(MasterKeyUnavailable, match="Connection refused"):
        away.wrap(b"for", bytearray(32))


def test_tls_is_verified(token: Path, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert main(["certificates", str(certs), "--node", "127.0.0.1"]) == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "127.0.0.1.pem", certs / "127.0.0.1.key")
    with running(context) as server:
        master = master_at(server, token, scheme="https", more=f"&ca={certs / 'ca.pem'}")
        assert master.unwrap(b"for", master.wrap(b"for", bytearray(32))) == bytes(32)
        asked = len(server.asked)
        with pytest.raises(MasterKeyUnavailable, match="its certificate can't be verified"):
            master_at(server, token, scheme="https").wrap(b"for", bytearray(32))
        with pytest.raises(MasterKeyUnavailable, match="No such file"):
            master_at(server, token, scheme="https", more="&ca=/none").wrap(b"for", bytearray(32))
        assert len(server.asked) == asked  # no token was sent
