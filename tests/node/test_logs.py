"""The node's log: one line per event with its subject, and a limit for each kind."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.limits import LOG_KINDS_MAX, LOG_LINES_PER_S
from kvstore.node.logs import about, begin_logging
from tests.storage.fakes import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("kvstore.node.example")


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield FakeClock()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_time_level_and_subject(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging(clock, "info", "text")
    log.info("attached with %d slots", 16, extra=about(connection=3, tenant="acme"))
    log.debug("not this one")
    (line,) = capsys.readouterr().err.splitlines()
    when, level, *rest = line.split(" ")
    assert len(when) == len("2026-01-02T03:04:05.678Z")
    assert level == "info"
    assert rest == ["connection=3", "tenant=acme", "attached", "with", "16", "slots"]


def test_lines_for_programs_are_json(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging(clock, "debug", "json")
    try:
        open("/nowhere/at/all")  # noqa: PTH123, SIM115 - to fail
    except OSError:
        log.exception("a block was not kept", extra=about(request="r\n1"))
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["from"], told["request"]) == ("error", "kvstore.node.example", "r\n1")
    assert told["message"].startswith("a block was not kept: Traceback")
    assert told.keys() == {"time", "level", "from", "request", "message"}


def test_external_data_stays_on_its_line(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging(clock, "info", "text")
    log.info("%s", "a\nb\x1b[2Jc", extra=about(tenant="t\r\n2026-01-01T00:00:00.000Z info forged"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said
    assert "\r" not in said


def test_lines_of_one_kind_are_limited_per_second_and_the_rest_counted(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_logging(clock, "info", "text")
    for number in range(LOG_LINES_PER_S + 7):
        log.warning("client %d did it again", number)
    log.warning("something else")
    for _ in range(LOG_LINES_PER_S + 7):
        log.error("errors are always written")
    said = capsys.readouterr().err.splitlines()
    assert sum("did it again" in line for line in said) == LOG_LINES_PER_S
    assert sum("something else" in line for line in said) == 1
    assert sum("always written" in line for line in said) == LOG_LINES_PER_S + 7
    clock.now_ms += 1000
    log.warning("client %d did it again", 99)
    assert capsys.readouterr().err.endswith("client 99 did it again (and 7 more like this, left out)\n")


def test_kinds_are_bounded(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging(clock, "info", "text")
    (rate,) = logging.getLogger().handlers[0].filters
    for number in range(2 * LOG_KINDS_MAX):
        log.info(f"kind {number}")  # noqa: G004 - as somebody might
    assert len(rate._seen) <= LOG_KINDS_MAX  # type: ignore[union-attr]
    capsys.readouterr()


def test_it_writes_to_the_standard_error_of_its_start(clock: FakeClock) -> None:
    begin_logging(clock, "info", "text")
    assert [handler.stream for handler in logging.getLogger().handlers] == [sys.stderr]  # type: ignore[attr-defined]


def test_a_caller_that_leaves_is_not_an_error_of_the_node(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_logging(clock, "info", "text")
    log.error("ExecuteBatchError raised in core by servicer method [%s]", "/kvstore.v1.Blocks/Exists")
    log.error("Unexpected [%s] raised by servicer method", "KeyError")
    (line,) = capsys.readouterr().err.splitlines()
    assert "KeyError" in line
