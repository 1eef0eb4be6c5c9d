"""The discrete-event core: trains of messages through resources that queue (`events.h` says what always holds).

A resource has servers; a route is a list of stops at resources, each with what a message costs there; a train
is a number of messages at regular intervals, or a list of them. The driver runs the core until the next train has
finished, and adds the trains that follow from it.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from sim.replay._events import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["LOTS", "MESSAGE", "Events", "Step", "Usage", "scatter"]

LOTS: int = lib.EVENTS_LOTS
# A message of a list takes the stops of the route `first`, then those of `then`; -1 is none.
MESSAGE = np.dtype(
    [("start_s", "f8"), ("units", "f8"), ("pages", "f8"), ("first", "i4"), ("then", "i4")], align=True
)


class Step(NamedTuple):
    """One stop: a message of u units in p pages holds a server for `p * overhead_s + u * s_per_unit`, then `latency_s`.

    One that cuts through serves a message while the stop before it does.
    """

    resource: int
    overhead_s: float = 0.0
    s_per_unit: float = 0.0
    latency_s: float = 0.0
    cuts_through: bool = False


class Usage(NamedTuple):
    """What a resource has done so far."""

    busy_s: float
    waited_s: float
    waited_max_s: float
    units: float
    served: int
    servers: int

    def utilisation(self, duration_s: float) -> float:
        """Share of the time in which its servers had work."""
        return self.busy_s / (self.servers * duration_s) if duration_s > 0 else 0.0


class Events:
    """One run; `bin_s` above 0 keeps how busy each resource was over time."""

    def __init__(self, bin_s: float = 0.0) -> None:
        self._core = lib.events_open(bin_s)
        if self._core == ffi.NULL:
            raise MemoryError
        self._note = ffi.new("struct events_note *")
        self._train = ffi.new("struct events_train *")
        self._times = ffi.new("double[2]")

    def add_resource(self, servers: int = 1) -> int:
        """Add a resource with this many servers; returns its number."""
        return _checked(lib.events_add_resource(self._core, servers))

    def add_route(self, steps: Sequence[Step]) -> int:
        """Add a route; returns its number."""
        rows = ffi.new("struct events_step[]", len(steps))
        for row, step in zip(rows, steps, strict=True):
            row.resource, row.overhead_s = step.resource, step.overhead_s
            row.s_per_unit, row.latency_s = step.s_per_unit, step.latency_s
            row.cuts_through = step.cuts_through
        return _checked(lib.events_add_route(self._core, rows, len(steps)))

    def add_train(
        self,
        start_s: float,
        units: float,
        route: int,
        *,
        count: int = 1,
        interval_s: float = 0.0,
        routes: int = 1,
        offset: int = 0,
        kind: int = 0,
    ) -> int:
        """Send `count` messages over `routes` routes in turn; give the train's number."""
        train = self._train
        train.start_s, train.interval_s, train.units, train.count = start_s, interval_s, units, count
        train.route_first, train.route_count, train.route_offset, train.kind = route, routes, offset, kind
        return _checked(lib.events_add_train(self._core, train))

    def add_list(self, messages: npt.NDArray[np.void], kind: int = 0) -> int:
        """Send these messages, of the type `MESSAGE`, in the order of their start; give the train's number."""
        rows = ffi.from_buffer("struct events_message[]", messages)
        return _checked(lib.events_add_list(self._core, rows, len(messages), kind))

    def reserve(self, resource: int, ready_s: float, service_s: float) -> tuple[float, float]:
        """Take the first free server from a time on; returns begin and end."""
        times = self._times
        _checked(lib.events_reserve(self._core, resource, ready_s, service_s, times, times + 1))
        return times[0], times[1]

    def run(self, until_s: float) -> tuple[float, int] | None:
        """Run until a train has finished, and return its time and number; or until `until_s`, and return None."""
        if _checked(lib.events_run(self._core, until_s, self._note)):
            return self._note.time_s, self._note.train
        return None

    def stream(
        self,
        start_s: npt.NDArray[np.float64],
        units: npt.NDArray[np.float64],
        routes: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.float64]:
        """Single messages in the order of time; returns when each has finished."""
        done_s = np.empty(len(start_s))
        arrays: list[Any] = [
            ffi.from_buffer("double[]", np.ascontiguousarray(start_s, dtype=np.float64)),
            ffi.from_buffer("double[]", np.ascontiguousarray(units, dtype=np.float64)),
            ffi.from_buffer("int32_t[]", np.ascontiguousarray(routes, dtype=np.int32)),
        ]
        _checked(lib.events_stream(self._core, *arrays, len(start_s), ffi.from_buffer("double[]", done_s)))
        return done_s

    def usage(self, resource: int) -> Usage:
        """What a resource has done so far."""
        out = ffi.new("struct events_usage *")
        _checked(lib.events_usage_of(self._core, resource, out))
        return Usage(out.busy_s, out.waited_s, out.waited_max_s, out.units, out.served, out.servers)

    def busy_bins(self, resource: int) -> npt.NDArray[np.float64]:
        """Seconds of service in each bin of time."""
        bins = np.zeros(lib.EVENTS_BINS_MAX)
        count = lib.events_bins_of(self._core, resource, ffi.from_buffer("double[]", bins), len(bins))
        return bins[: _checked(count)]

    def backlog(self, kind: int) -> npt.NDArray[np.float64]:
        """The most units of trains of a kind that were under way, in each bin of time."""
        bins = np.zeros(lib.EVENTS_BINS_MAX)
        count = lib.events_backlog_of(self._core, kind, ffi.from_buffer("double[]", bins), len(bins))
        return bins[: _checked(count)]

    def close(self) -> None:
        """Free the memory."""
        if self._core != ffi.NULL:
            lib.events_close(self._core)
            self._core = ffi.NULL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scatter(
    blocks: Sequence[int],
    layers: int,
    parts: int,
    ranks: int,
    home_of_lot: npt.NDArray[np.int32],
    drives: int,
) -> npt.NDArray[np.int64]:
    """Count the pages of some blocks by part of the layers, rank and drive, in this order in one row."""
    assert len(home_of_lot) == LOTS
    counts = np.zeros(parts * ranks * drives, dtype=np.int64)
    lib.events_scatter(
        ffi.from_buffer("int64_t[]", np.array(blocks, dtype=np.int64)),
        len(blocks),
        layers,
        parts,
        ranks,
        ffi.from_buffer("int32_t[]", home_of_lot),
        drives,
        ffi.from_buffer("int64_t[]", counts),
    )
    return counts


def _checked(code: int) -> int:
    if code == -errno.ENOMEM:
        raise MemoryError
    assert code >= 0, f"the event core refuses what it is given: {code}"
    return code
