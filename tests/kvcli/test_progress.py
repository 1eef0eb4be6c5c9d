"""The bar of what takes long: where it is shown, and what it says."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from kvcli.progress import bar

if TYPE_CHECKING:
    import pytest


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_says_how_long_it_will_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now_s = _Terminal(), [100.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = bar("replay", lambda: now_s[0])
    now_s[0] += 0.9
    progress(0.2)
    assert terminal.getvalue() == "", "what is over in a second has no bar"
    now_s[0] += 0.1
    progress(0.0)
    assert "0 %" in terminal.getvalue()
    assert "left" not in terminal.getvalue(), "nothing is known yet"
    now_s[0] = 110.0
    progress(0.25)
    assert "25 %, 30 s left" in terminal.getvalue()
    progress(1.0)
    assert terminal.getvalue().endswith("\r\033[K"), "it is gone when the work is done"


def test_what_was_over_at_once_wipes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar("replay", lambda: 0.0)(1.0)
    assert terminal.getvalue() == ""


def test_what_is_piped_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    bar("replay")(0.5)
    assert pipe.getvalue() == ""
