"""Nodes of tests are forked, because a fresh start costs half a second of CPU time more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.cli import main
from tests.conftest import small_node
from tests.warm_start import Started

if TYPE_CHECKING:
    from pathlib import Path


def test_a_node_is_forked_after_a_command_ran_in_the_test_process(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    with small_node(tmp_path / "node") as node:
        assert isinstance(node._process, Started)


def test_a_node_is_not_forked_with_other_library_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_LOG_LEVEL", "warn")
    with small_node(tmp_path / "node") as node:
        assert not isinstance(node._process, Started)
