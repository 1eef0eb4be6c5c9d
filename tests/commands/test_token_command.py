"""`kvstore token`: what it prints, and the file with a token."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from kvcli.running import Status
from kvstore.cli import main
from kvstore.node.tenants import token_digest

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_token_is_printed_with_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token"]) == 0
    (_, token), (_, digest) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert digest == token_digest(token)


def test_a_token_file_is_readable_only_by_its_owner_and_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    assert main(["token", "--out", str(file)]) == 0
    token = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert capsys.readouterr().out == f"sha256  {token_digest(token.strip())}\n"
    for wrong in (file, tmp_path / "none" / "token"):
        assert main(["token", "--out", str(wrong)]) == Status.USAGE
        assert str(wrong) in capsys.readouterr().err
    assert file.read_text() == token
