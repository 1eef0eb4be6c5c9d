"""`kvstore chat`, as a user sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is in .venv-engines only: make test-engines")


@pytest.mark.timeout(300)
def test_the_chat_goes_on_in_another_process_bit_for_bit() -> None:
    command = [sys.executable, "-m", "kvstore", "chat", "--turns", "2", "--tokens", "100"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "equal, bit for bit" in said
    assert "the same." in said
    story = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True).stdout
    )
    assert story["right"]
    assert story["second"]["tokens"] == 232
    assert [turn["sent_bytes"] > 0 for turn in story["first"]["turns"]] == [True, True]
