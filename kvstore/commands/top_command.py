"""`kvstore top`: a node's activity, interval by interval, on a terminal or as a line of JSON each.

It reads the node's counters once per interval, and shows their increase. What always holds: a node that can't be
reached is reported as such, and retried; the screen is restored at the end. A terminal is not required: without one,
each view follows the one before.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

from kvstore.commands.show_commands import encryption, encryption_line, evictions, parts, reasons
from kvstore.config import counted, printable, show_size, show_time
from kvstore.errors import DeadlineExceeded, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.client import Client
    from kvstore.clock import Clock
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = ["Top", "risen", "view"]

_CLEAR = "\x1b[H\x1b[J"
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_BAR_CELLS = 30
_QUEUES = (
    "fetches_waiting",
    "gets_waiting",
    "puts_waiting",
    "puts_waiting_for_room",
    "puts_waiting_for_quota",
    "deletes_waiting",
    "session_steps_waiting",
    "wipes_waiting",
)


def risen(before: StatisticsResponse, now: StatisticsResponse, interval_s: float) -> dict[str, object]:
    """The increase of each counter over an interval, under the same names."""
    if now.uptime_ms < before.uptime_ms:  # another process: all its counts are new
        before = type(before)()

    def rate(name: str) -> float:
        rose: int = getattr(now, name) - getattr(before, name)
        return round(rose / interval_s, 1)

    return {
        "uptime_ms": now.uptime_ms,
        "interval_ms": round(interval_s * 1000),
        "puts_per_s": rate("puts"),
        "put_bytes_per_s": rate("put_bytes"),
        "puts_failed": now.puts_failed - before.puts_failed,
        "gets_per_s": round(rate("hits_memory") + rate("hits_drive"), 1),
        "got_bytes_per_s": rate("got_bytes"),
        "refused": now.refused - before.refused,
        "hits": {
            "memory": now.hits_memory - before.hits_memory,
            "drive": now.hits_drive - before.hits_drive,
        },
        "misses": _less(reasons(now), reasons(before)),
        "evictions": _less(evictions(now), evictions(before)),
        "triggers": {
            "armed": now.leases,
            "leased": now.leased - before.leased,
            "landed": now.landed - before.landed,
            "late": now.leases_expired - before.leases_expired,
        },
        "queues": {name: getattr(now, name) for name in _QUEUES},
        "tiers": {
            "memory": {"bytes": now.memory_bytes, "kept_bytes": now.memory_kept_bytes},
            "drives": {
                "bytes": now.capacity_bytes,
                "free_bytes": now.free_bytes,
                "blocks": now.blocks,
                "takes_puts": now.takes_puts,
            },
        },
        "connections": now.connections,
    }


def _less(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


def view(figures: dict[str, object], node: str, encrypts: str) -> str:
    """For people; `encrypts` is the line on encryption."""
    at = _At(figures)
    hits, missed = at.of("hits"), at.of("misses")
    asked = sum(hits.values()) + sum(missed.values())
    found = f"{100 * sum(hits.values()) / asked:.0f}% hit" if asked else "no gets"
    queues = {name.removesuffix("_waiting"): count for name, count in at.of("queues").items() if count}
    memory, drives = at.tier("memory"), at.tier("drives")
    state = "" if drives["takes_puts"] else ", which accept no puts"
    used_bytes = drives["bytes"] - drives["free_bytes"]
    seconds = at.number("interval_ms") / 1000
    up, connections = show_time(at.number("uptime_ms")), at.number("connections")
    rows = {
        "puts": f"{at.rate('puts')}, {at.number('puts_failed')} failed",
        "gets": f"{at.rate('gets', 'got_bytes')}, {at.number('refused')} refused",
        "blocks": f"{found}: {parts({**hits, **{f'MISS {name}': count for name, count in missed.items()}})}",
        "removed": parts(at.of("evictions")),
        "triggers": parts(at.of("triggers")),
        "queues": parts(queues),
        "memory": _bar(memory["kept_bytes"], memory["bytes"]),
        "drives": f"{_bar(used_bytes, drives['bytes'])}, {counted(drives['blocks'], 'block')}{state}",
        "encryption": encrypts,
    }
    head = f"node {printable(node)}, up {up}, {connections} attached; the last {seconds:.1f} s"
    return "\n".join([head, "", *(f"{name:<12}{said}" for name, said in rows.items())])


class _At:
    """Reads the result of `risen`."""

    def __init__(self, figures: dict[str, object]) -> None:
        self._figures = figures

    def number(self, name: str) -> float:
        value = self._figures[name]
        assert isinstance(value, int | float)
        return value

    def rate(self, blocks: str, of_bytes: str = "put_bytes") -> str:
        size = show_size(int(self.number(f"{of_bytes}_per_s")))
        return f"{self.number(f'{blocks}_per_s'):.0f}/s, {size}/s"

    def of(self, name: str) -> dict[str, int]:
        value = self._figures[name]
        assert isinstance(value, dict)
        return value

    def tier(self, name: str) -> dict[str, int]:
        tiers = self._figures["tiers"]
        assert isinstance(tiers, dict)
        tier: dict[str, int] = tiers[name]
        return tier


def _bar(used_bytes: int, size_bytes: int) -> str:
    part = used_bytes / size_bytes if size_bytes else 0.0
    full = round(part * _BAR_CELLS)
    return f"[{'#' * full}{'.' * (_BAR_CELLS - full)}] {show_size(used_bytes)} of {show_size(size_bytes)}"


class Top:
    """One run of the command. `pause` sleeps for a number of seconds."""

    def __init__(
        self, client: Client, node: str, clock: Clock, pause: Callable[[float], object], out: TextIO
    ) -> None:
        self._client, self._node, self._clock, self._pause, self._out = client, node, clock, pause, out

    def run(self, interval_s: float, *, once: bool, as_json: bool) -> int:
        """Show it until it is ended; returns the exit status."""
        on_screen = self._out.isatty() and not once and not as_json
        try:
            if on_screen:
                self._out.write(_ALTERNATE)
            self._show(interval_s, once=once, as_json=as_json, clear=_CLEAR if on_screen else "")
        finally:
            if on_screen:
                self._out.write(_BACK)
        return 0

    def _show(self, interval_s: float, *, once: bool, as_json: bool, clear: str) -> None:
        before, asked_ns = self._client.statistics(), self._clock.monotonic_ns()
        while True:
            self._pause(interval_s)
            now_ns = self._clock.monotonic_ns()
            try:
                now, status = self._client.statistics(), self._client.status()
            except (NodeUnavailable, DeadlineExceeded) as error:
                if once:
                    raise
                said = json.dumps({"unreachable": str(error)}) if as_json else f"{clear}{error}"
            else:
                figures = risen(before, now, max(1e-3, (now_ns - asked_ns) / 1e9))
                figures["encryption"] = encryption(status)
                said = (
                    json.dumps(figures)
                    if as_json
                    else clear + view(figures, self._node, encryption_line(status))
                )
                before, asked_ns = now, now_ns
            self._out.write(said + "\n" if as_json or clear or once else said + "\n\n")
            self._out.flush()
            if once:
                return
