"""The progress bar: where it is shown, and its text."""

from __future__ import annotations

import io
import sys

import pytest

from kvcli.progress import bar, bars


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_step_that_ended_at_once_erases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar("replay", lambda: 0.0)(1.0)
    assert terminal.getvalue() == ""


def test_piped_output_has_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    bar("replay")(0.5)
    assert pipe.getvalue() == ""


def test_each_part_of_the_work_has_a_bar_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now_s = _Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)

    def work() -> None:
        with bars(lambda: now_s[0]) as progress:
            progress("scanning", 0, 8)
            now_s[0] = 2.0
            progress("scanning", 2, 8)
            assert terminal.getvalue().startswith("\rscanning [")
            assert "25 %, 6 s left" in terminal.getvalue()
            progress("scanning", 0, 8)  # another drive
            assert terminal.getvalue().endswith("\r\033[K")
            progress("reading", 0, 4)
            now_s[0] = 4.0
            progress("reading", 1, 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert "reading" in terminal.getvalue()
    assert terminal.getvalue().endswith("s left\033[K\r\033[K")


def test_bars_in_a_pipe_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with bars(lambda: 99.0) as progress:
        progress("scanning", 1, 8)
    assert pipe.getvalue() == ""
