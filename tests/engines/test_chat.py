"""`kvstore chat`, as a user sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="transformers is in .venv-engines only: make test-engines")


@pytest.mark.timeout(300)
def test_the_chat_continues_in_another_process_bit_for_bit() -> None:
    command = [sys.executable, "-m", "kvstore", "chat", "--turns", "2", "--tokens", "100"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "equal, bit for bit" in said
    assert "the same." in said
    story = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True).stdout
    )
    assert story["right"]
    assert story["second"]["tokens"] == 232
    assert (story["second"]["rule"], story["second"]["spoofed_denied"]) == ("ada's chat", True)
    assert story["second"]["read_ahead"]
    assert story["second"]["rules"]["guard of demo/ada"] == {"hits": 1, "bytes": 0}
    own = story["second"]["rules"]["ada's chat"]
    assert own["hits"] == 1
    assert own["bytes"] == sum(turn["sent_bytes"] for turn in story["first"]["turns"])
    steps = story["second"]["steps"]
    assert {one["step"] for one in steps} == set(range(1, 9)), "the eight steps"
    seen = [one["seen"] for one in steps]
    assert seen.index("prefetched") < seen.index("resuming") < seen.index("whole") < seen.index("computed")
    read = [one for one in steps if one["seen"] == "read"]
    assert all(one["unix_ms"] < steps[seen.index("resuming")]["unix_ms"] for one in read), (
        "while the user typed"
    )
    assert [turn["sent_bytes"] > 0 for turn in story["first"]["turns"]] == [True, True]
