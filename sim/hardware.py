"""The speeds of the parts on KV's path: one set of numbers for `kvsim curve`, `replay` and `plan`, with their ranges.

What always holds: the preset `fair` and the default cluster use these numbers only, so a single message takes as long
in the closed form as in the event model with nothing else under way. A number's name ends with its unit. Its range
covers such parts in other machines; its source is given beside it.

What it doesn't do: know your machine. `kvsim calibrate` measures one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sim.units import OutOfRange, plain, require

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HARDWARE", "SPREADS", "Hardware", "Spread", "accepted", "changed"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds and costs of a transfer's stops, in the order of a put."""

    pcie_bytes_per_s: float = 55e9  # each direction, by root
    pcie_latency_s: float = 1e-6
    trigger_message_s: float = 1e-6
    cpu_message_s: float = 1e-5  # CPU path: the software of one message
    host_copy_bytes_per_s: float = 10e9  # CPU path: one thread's copy
    nic_message_s: float = 5e-7
    link_bits_per_s: float = 100e9
    link_latency_s: float = 2e-6
    node_memory_bytes_per_s: float = 50e9
    drive_message_s: float = 5e-6
    drive_write_bytes_per_s: float = 2.34e9
    drive_read_bytes_per_s: float = 5.22e9
    drive_write_latency_s: float = 2e-5
    drive_read_latency_s: float = 8e-5


HARDWARE = Hardware()


class Spread(NamedTuple):
    """The range of a number on other hardware, and the source of ours."""

    low: float
    high: float
    source: str


_ASSUMED = "assumed: "
SPREADS = {
    "pcie_bytes_per_s": Spread(25e9, 110e9, _ASSUMED + "PCIe 5 x16; 4 to 6"),
    "pcie_latency_s": Spread(3e-7, 2e-6, _ASSUMED + "the paper prints 32 ns"),
    "trigger_message_s": Spread(1e-7, 1e-5, _ASSUMED + "no NIC that fires by itself was measured"),
    "cpu_message_s": Spread(1e-6, 5e-5, _ASSUMED + "a polled verb to a call of a server"),
    "host_copy_bytes_per_s": Spread(4e9, 40e9, _ASSUMED + "one thread to four (kvstore bench memory)"),
    "nic_message_s": Spread(1e-7, 2e-6, _ASSUMED + "a descriptor"),
    "link_bits_per_s": Spread(25e9, 800e9, "the paper states 100 Gb/s"),
    "link_latency_s": Spread(5e-7, 1e-5, _ASSUMED + "the paper prints 1.21 ps"),
    "node_memory_bytes_per_s": Spread(1e10, 4e11, _ASSUMED + "a few channels of DDR5"),
    "drive_message_s": Spread(1e-6, 2e-5, _ASSUMED + "one io_uring request"),
    "drive_write_bytes_per_s": Spread(1e9, 1.2e10, "the paper's fit, at its intercept"),
    "drive_read_bytes_per_s": Spread(3e9, 1.4e10, "the paper's fit, at its intercept"),
    "drive_write_latency_s": Spread(1e-5, 1e-4, _ASSUMED + "a drive with a protected cache"),
    "drive_read_latency_s": Spread(5e-5, 2e-4, _ASSUMED + "flash"),
}

_COUNTS_MAX = {"engines": 4096, "gpus_per_engine": 64, "nodes": 1024, "drives_per_node": 128}


def accepted(name: str) -> tuple[str, float, float]:
    """Unit and accepted range of a number, by the suffix of its name."""
    if name in _COUNTS_MAX:
        return f"a number of {name.partition('_')[0]}", 1, _COUNTS_MAX[name]
    if name == "prefill_engines":
        return "a number of engines", 0, _COUNTS_MAX["engines"]
    if name == "step_tokens":
        return "a number of tokens", 1, 10**6
    if name == "gpu_mfu":
        return "a share", 0.001, 1
    for ending, unit, low, high in (
        ("_usd_per_hour", "US dollars an hour", 0, 1e6),
        ("_bits_per_s", "bits a second", 1e6, 1e15),
        ("_bytes_per_s", "bytes a second", 1e3, 1e15),
        ("_flops_per_s", "floating-point operations a second", 1e9, 1e20),
        ("_bytes", "bytes", 0, 1e18),
        ("_s", "seconds", 0, 100),
    ):
        if name.endswith(ending):
            return unit, low, high
    first, _, per = name.partition("_per_")  # the other names are counts: links_per_node, decode_slots
    return f"a number of {first if per else name.rpartition('_')[2]}", 1, 4096


Record = TypeVar("Record")


def changed(record: Record, assignments: Iterable[tuple[str, object]], source: str) -> Record:
    """Put values into a record of such numbers by name; whole numbers stay whole."""
    known = {field.name: field.type for field in fields(record)}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for name, given in assignments:
        if name not in known:
            raise OutOfRange(source, repr(name), "a name of the cluster", "one of " + ", ".join(known))
        unit, low, high = accepted(name)
        try:
            value = float(str(given))
        except ValueError:
            raise OutOfRange(
                f"{source} {name}", repr(given), unit, f"from {plain(low)} to {plain(high)}"
            ) from None
        require(f"{source} {name}", value, unit, low, high)
        if known[name] == "int" and value != int(value):
            raise OutOfRange(f"{source} {name}", repr(given), unit, "a whole number")
        values[name] = int(value) if known[name] == "int" else value
    return replace(record, **values)  # type: ignore[type-var]
