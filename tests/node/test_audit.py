"""Lines of the audit log that could not be written whole."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.node.audit import Audit

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_line_that_was_cut_is_a_failure_and_takes_no_later_line_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is almost full: the first bytes are written, and there is no error."""
    path, write = tmp_path / "audit.jsonl", os.write
    log = Audit(SystemClock(), path)
    assert log.note("erase-domain", tenant="ada", peer="ipv4:10.0.0.7:1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:30]))
        assert not log.note("erase-domain", tenant="bob", peer="ipv4:10.0.0.7:1")
    assert log.note("erase-domain", tenant="cyd", peer="ipv4:10.0.0.7:1")
    log.close()
    with path.open("ab") as file:
        file.write(b'{"at_ms":1')  # and its node was killed
    log = Audit(SystemClock(), path)
    assert log.note("erase-domain", tenant="dan", peer="ipv4:10.0.0.7:1")
    log.close()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[at])["tenant"] for at in (0, 2, 4)] == ["ada", "cyd", "dan"]
    assert len(lines) == 5
