"""The node's log: one line per event, with time and level and, where known, connection, tenant and request.

`log.info("attached", extra=about(connection=3, tenant="acme"))` gives a line its subject. In text this precedes the
message; in JSON it has fields of its own.

What always holds: one event is one line, whatever it contains, and foreign text can't move a terminal's cursor. Of one
kind of message at most `LOG_LINES_PER_S` are written per second; the rest are counted, and reported with the next line
of that kind. Errors and above are always written, except gRPC's traceback for an answer whose caller has left: that is
no error of the node, and clients can cause any number of them.

What it doesn't do: rotate files. It writes to standard error, as service managers and container engines expect.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvstore.config import printable
from kvstore.limits import LOG_KINDS_MAX, LOG_LINES_PER_S

if TYPE_CHECKING:
    from kvstore.clock import Clock

__all__ = ["about", "begin_logging"]

_CALLER_HAS_GONE: Final = "ExecuteBatchError raised in core"  # the start of gRPC's message
_FIELDS: Final = ("connection", "tenant", "request")


def about(**fields: Any) -> dict[str, Any]:
    """The subject of a log line, as its `extra`: a connection's number, a tenant's name, a request's id."""
    assert fields.keys() <= set(_FIELDS)
    return fields


def _when(record: logging.LogRecord) -> str:
    return f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03}Z"


def _of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) not in {None, ""}}


def _message(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += f": {formatter.formatException(record.exc_info)}"
    return text


class _Text(logging.Formatter):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={value}" for name, value in _of(record).items())
        text = _message(record, self).replace("\n", " | ")
        return printable(f"{_when(record)} {record.levelname.lower()}{said} {text}")


class _Json(logging.Formatter):
    """For programs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _when(record), "level": record.levelname.lower(), "from": record.name, **_of(record)}
        return json.dumps({**line, "message": _message(record, self)}, default=str)


class _Rate(logging.Filter):
    """Limits the lines of each kind per second. A kind is a message before its values are inserted."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[
            str, tuple[int, int, int]
        ] = {}  # second, lines in it, lines left out since the last report

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        if record.levelno >= logging.ERROR:
            return not kind.startswith(_CALLER_HAS_GONE)
        second = self._clock.monotonic_ns() // 1_000_000_000
        since, lines, left_out = self._seen.get(kind, (second, 0, 0))
        if since != second:
            lines = 0
        if lines >= LOG_LINES_PER_S:
            self._seen[kind] = (second, lines, left_out + 1)
            return False
        if kind not in self._seen and len(self._seen) >= LOG_KINDS_MAX:
            self._seen.clear()
        self._seen[kind] = (second, lines + 1, 0)
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out} more like this, left out)"
            record.args = ()
        return True


def begin_logging(clock: Clock, level: str, form: str) -> None:
    """Write the process's log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    handler.addFilter(_Rate(clock))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
