"""The cost of holding KV in GPUs: the totals that the paper's Table I prints, and the correct ones.

The table is read from a file, because a printed total can only be checked against its print. What always holds: the
correct total is count times price, in whole cents, and is shown beside the printed one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from sim.parameter_files import read_rows
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COLUMNS", "CostRow", "gpus_for", "read_cost_table"]

COLUMNS = ("gpu", "count", "price_usd", "printed_total_usd")
_ROWS_MAX = 10_000
_GPUS_MAX = 10**9
_USD_MAX = Decimal(10**15)


@dataclass(frozen=True, slots=True)
class CostRow:
    """One line of such a table."""

    gpu: str
    count: int
    price_usd: Decimal
    printed_total_usd: Decimal

    @property
    def right_total_usd(self) -> Decimal:
        """The sum of the line."""
        return (self.count * self.price_usd).quantize(Decimal("0.01"))

    @property
    def holds(self) -> bool:
        """Whether the printed total is right to its last digit."""
        exponent = self.printed_total_usd.as_tuple().exponent
        step = Decimal(1).scaleb(exponent) if isinstance(exponent, int) else Decimal(1)
        return abs(self.right_total_usd - self.printed_total_usd) <= step / 2


def _usd(where: str, text: str) -> Decimal:
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 <= value <= _USD_MAX:
        raise OutOfRange(where, repr(text), "US dollars", f"a number from 0 to {_USD_MAX:.0e}")
    return value


def read_cost_table(path: Path) -> list[CostRow]:
    """Read a CSV file with the columns of `COLUMNS`."""
    rows = read_rows("--gpu-cost", path, COLUMNS, _ROWS_MAX)
    found = []
    for line, row in enumerate(rows, start=2):
        where = f"--gpu-cost {path.name}:{line}"
        count = str(row["count"]).strip()
        if not count.isdecimal():
            raise OutOfRange(
                f"{where} count", repr(row["count"]), "a number of GPUs", f"from 1 to {_GPUS_MAX}"
            )
        require(f"{where} count", int(count), "a number of GPUs", 1, _GPUS_MAX)
        found.append(
            CostRow(
                str(row["gpu"]).strip(),
                int(count),
                _usd(f"{where} price_usd", str(row["price_usd"])),
                _usd(f"{where} printed_total_usd", str(row["printed_total_usd"])),
            )
        )
    return found


def gpus_for(kv_bytes: int, weight_bytes: float, gpu_bytes: int) -> int:
    """How many GPUs hold a model and its KV, using all of their memory."""
    require("--gpu-memory", gpu_bytes, "bytes", 1e9, 1e13)
    return math.ceil((kv_bytes + weight_bytes) / gpu_bytes)
