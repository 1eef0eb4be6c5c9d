"""Exported and imported sessions are equal byte for byte, and nothing of an incomplete file is imported."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.cli import main
from kvstore.client.session_file import Content, Reader, Writer
from kvstore.errors import LayoutError, NoSession, SessionFileError, SessionRefused
from kvstore.miss import Miss
from kvstore.names import block_key
from kvstore.wire.manifest import Turn
from tests.conftest import small_client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import Client
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

SIZE = 3000
KEYS = [block_key(bytes([number])) for number in range(5)]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE + number)


@pytest.fixture
def ada(node: NodeInProcess) -> Iterator[Client]:
    """A tenant's client with a session of five blocks, one of them twice."""
    with small_client(node.target, tenant="acme", layout=b"bf16") as client:
        for number, key in enumerate(KEYS):
            client.put_inline(key, payload(number))
        chat = client.session("ada", "chat")
        chat.append(KEYS[:2], 32)
        chat.append([*KEYS[2:], KEYS[0]], 61)
        yield client


def exported(client: Client) -> bytes:
    file = io.BytesIO()
    assert client.session("ada", "chat").export(file) == 5
    return file.getvalue()


def names(client: Client, user: str) -> list[str]:
    return [one.session for one in client.sessions(user)]


def test_export_and_import_report_their_progress(ada: Client) -> None:
    written: list[tuple[int, int]] = []
    stored: list[tuple[int, int]] = []
    file = io.BytesIO()
    count = ada.session("ada", "chat").export(file, progress=lambda *told: written.append(told))
    file.seek(0)
    ada.import_session(file, "ada", "told", progress=lambda *told: stored.append(told))
    assert written == stored == [(number, count) for number in range(1, count + 1)]


def test_another_tenant_imports_the_session_as_its_own(node: NodeInProcess, ada: Client) -> None:
    file = exported(ada)
    for name in (b"acme", b"ada", b"chat"):
        assert name not in file
    with small_client(node.target, tenant="zeta", layout=b"bf16") as zeta:
        assert all(isinstance(one, Miss) for one in zeta.exists(KEYS))
        got = zeta.import_session(io.BytesIO(file), "bob", "mine")
        assert got.keys() == [*KEYS, KEYS[0]]
        assert [(one.blocks, len(one.tokens)) for one in got.info().turns] == [
            (range(2), 32),
            (range(2, 6), 61),
        ]
        for number, key in enumerate(KEYS):
            assert zeta.get_inline(key, SIZE + number) == payload(number)
        assert names(zeta, "bob") == ["mine"]
        assert got.info().expires_unix_ms == 0
    assert names(ada, "bob") == [], "the exporting tenant has nothing more than before"
    assert names(ada, "ada") == ["chat"]


def test_a_session_of_more_blocks_and_turns_than_fit_in_a_call_is_exported_and_imported(ada: Client) -> None:
    chat = ada.session("ada", "long")
    for turn in range(4):
        chat.append([KEYS[(turn + at) % 5] for at in range(700)], turn)
    file = io.BytesIO()
    assert chat.export(file) == 5
    file.seek(0)
    again = ada.import_session(file, "bob", "long")
    assert again.keys() == chat.keys()
    told = [[(one.blocks, one.tokens) for one in each.info().turns] for each in (chat, again)]
    assert told[0] == told[1]


def test_a_file_truncated_anywhere_imports_nothing(ada: Client) -> None:
    file = exported(ada)
    rng = random.Random(1)
    for end in sorted({0, 1, len(file) - 1, len(file) - 32, *(rng.randrange(len(file)) for _ in range(40))}):
        with pytest.raises(SessionFileError):
            ada.import_session(io.BytesIO(file[:end]), "bob", "cut")
    with pytest.raises(SessionFileError, match="data after the end"):
        ada.import_session(io.BytesIO(file + b"x"), "bob", "cut")
    assert names(ada, "bob") == []


def test_a_file_with_a_flipped_bit_anywhere_imports_nothing(ada: Client) -> None:
    file = exported(ada)
    rng = random.Random(2)
    for at in sorted({0, 7, 8, 30, len(file) - 1, *(rng.randrange(len(file)) for _ in range(60))}):
        flipped = bytearray(file)
        flipped[at] ^= 1 << rng.randrange(8)
        with pytest.raises((SessionFileError, LayoutError)):
            ada.import_session(io.BytesIO(bytes(flipped)), "bob", "flipped")
    assert names(ada, "bob") == []


def test_changed_bytes_are_not_put_at_all(node: NodeInProcess, ada: Client) -> None:
    file = bytearray(exported(ada))
    at = bytes(file).index(payload(1))
    file[at + 5] ^= 1
    with small_client(node.target, tenant="zeta", layout=b"bf16") as zeta:
        with pytest.raises(SessionFileError, match="Block 1"):
            zeta.import_session(io.BytesIO(bytes(file)), "bob", "changed")
        assert [isinstance(one, Miss) for one in zeta.exists(KEYS[:3])] == [False, True, True]


def test_valid_parts_in_another_order_are_refused() -> None:
    """Every CRC matches; only the digest of the whole file does not."""

    def written(payloads: list[bytes]) -> bytes:
        file = io.BytesIO()
        writer = Writer(file, Content(bytes(16), [Turn(0, 2, 1)], KEYS[:2]))
        for place, one in enumerate(payloads):
            writer.block(place, one)
        writer.end()
        return file.getvalue()

    one, two = written([b"a" * 9, b"b" * 9]), written([b"a" * 9, b"c" * 9])
    mixed = one[:-40] + two[-40:]
    reader = Reader(io.BytesIO(mixed))
    assert [got for _, got in reader.blocks()] == [b"a" * 9, b"b" * 9]
    with pytest.raises(SessionFileError, match="wrong digest"):
        reader.read_end()


def test_a_taken_name_another_layout_and_a_missing_session_are_refused(
    node: NodeInProcess, ada: Client
) -> None:
    file = exported(ada)
    with pytest.raises(SessionRefused, match="already"):
        ada.import_session(io.BytesIO(file), "ada", "chat")
    with small_client(node.target, layout=b"fp8") as other, pytest.raises(LayoutError):
        other.import_session(io.BytesIO(file), "ada", "new")
    with pytest.raises(NoSession):
        ada.session("ada", "none").export(io.BytesIO())
    ada.delete([KEYS[3]])
    unfinished = io.BytesIO()
    with pytest.raises(SessionFileError, match="Block 3"):
        ada.session("ada", "chat").export(unfinished)
    unfinished.seek(0)
    with pytest.raises(SessionFileError, match="truncated"):
        ada.import_session(unfinished, "bob", "unfinished")


def test_all_imports_are_staged_under_one_hidden_user(ada: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that encrypts creates a key for each user, and keeps its entry permanently."""
    file, named = exported(ada), list[tuple[str, str]]()
    session = ada.session
    monkeypatch.setattr(ada, "session", lambda *name: named.append(name) or session(*name))  # type: ignore[func-returns-value]
    for number in range(3):
        ada.import_session(io.BytesIO(file), "bob", f"chat {number}")
    hidden = [(user, name) for user, name in named if user != "bob"]
    assert len({user for user, _ in hidden}) == 1
    assert len({name for _, name in hidden}) == 3, "two imports at once don't meet"


def test_the_command_exports_and_imports(
    node: NodeInProcess, ada: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del ada
    path = tmp_path / "chat.tkvs"
    ours = ("--node", node.target, "--tenant", "acme", "--user", "ada", "--file", str(path))
    assert main(["sessions", "export", *ours, "--session", "chat"]) == 0
    assert [one.name for one in tmp_path.glob("chat*")] == ["chat.tkvs"]
    assert main(["sessions", "import", *ours, "--session", "again"]) == 0
    assert capsys.readouterr().out == "5 blocks exported\n6 blocks imported\n"
    assert main(["sessions", "import", *ours, "--session", "again"]) == 1
    assert main(["sessions", "export", *ours]) == 2
    assert main(["sessions", "export", *ours, "--session", "none"]) == 3
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["sessions", "import", *ours, "--session", "third"]) == 2
    errors = capsys.readouterr().err
    assert "already" in errors
    assert "--session and --file" in errors
    assert "truncated" in errors
