"""Which blocks a tier holds, and which are evicted when it is full, in the order of a policy.

The policy is the store's own object (`lru`, `s3fifo`, or `package.module:Class`), because a simulator with its own
eviction would only describe itself. It gets the same calls as in the store: `admitted`, `inherited`, `touched`,
`evicted`, `candidate`. `Lru` here replaces the store's where the store is not installed.

What always holds: there are never more blocks than the capacity, each in one row. A sequence is used from its tail to
its head, and the blocks before new ones count as used with them, so the tail is evicted first.

What it doesn't do: pins. A block that is being fetched was just touched, so in practice no policy evicts it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Catalogue", "Lru", "Policy", "Steps", "policy_maker"]

_STEPS = 1 << 20  # more than any policy needs for one candidate


class Steps:
    """The steps that a policy may still take in one call."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Policy(Protocol):
    """The part of the store's policies that a simulator needs; the store's has more calls."""

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Add a new block, which has not been used yet."""
        ...

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Order a row right after `place`, whose uses counted for it too."""
        ...

    def touched(self, rows: Sequence[int]) -> None:
        """Note that blocks were used, in this order."""
        ...

    def evicted(self, row: int, name64: int) -> None:
        """Take out a row that was evicted to make room."""
        ...

    def candidate(self, steps: Steps) -> int:
        """The row to evict first, or -1."""
        ...


class Lru:
    """Evict the least recently used."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Add a row as the most recently used one."""
        del pages, name64
        self._rows[row] = None

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Put a row after `place`, the most recently used one: it was just admitted, or put there itself."""
        del pages
        assert next(reversed(self._rows)) == place
        self._rows.move_to_end(row)

    def touched(self, rows: Sequence[int]) -> None:
        """Move each to the end."""
        move = self._rows.move_to_end
        for row in rows:
            move(row)

    def evicted(self, row: int, name64: int) -> None:
        """Take a row out."""
        del name64
        del self._rows[row]

    def candidate(self, steps: Steps) -> int:
        """The least recently used row."""
        del steps
        return next(iter(self._rows), -1)


_CALLS = ("admitted", "inherited", "touched", "evicted", "candidate")  # of a policy

# The store's policies, by the names that its users know. They are imported by name because the simulator imports
# nothing from the store: it runs without it.
STORE_POLICIES = {
    "lru": "kvstore.storage.eviction.lru:Lru",
    "s3fifo": "kvstore.storage.eviction.s3fifo:S3Fifo",
}


def _with_calls(found: Any) -> Any:
    lacks = [call for call in _CALLS if not callable(getattr(found, call, None))]
    if lacks:
        raise TypeError(f"it has no {', '.join(lacks)}")
    return found


def policy_maker(name: str) -> Callable[[int], Policy]:
    """Find a policy by its name; the maker is given the capacity in pages, a page a block."""
    if name == "lru" and not _is_there("kvstore.storage.eviction"):
        return lambda _: Lru()
    name = STORE_POLICIES.get(name, name)
    module, _, attribute = name.partition(":")
    try:
        found = _with_calls(getattr(importlib.import_module(module), attribute))
        takes_capacity = any(
            parameter.default is parameter.empty
            for parameter in inspect.signature(found).parameters.values()
            if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        )
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        accepted = "lru, s3fifo, or package.module:Class of one with the store's interface"
        raise OutOfRange("--policy", f"{name!r} ({error})", "an eviction policy", accepted) from error

    def make(capacity_pages: int) -> Policy:
        try:
            made: Policy = found(capacity_pages) if takes_capacity else found()
        except (TypeError, ValueError) as error:
            accepted = "a class that is made with its capacity in pages, or with nothing"
            raise OutOfRange("--policy", f"{name!r} ({error})", "an eviction policy", accepted) from error
        return made

    return make


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class Catalogue:
    """The blocks of one tier."""

    def __init__(self, policy: Policy, capacity_blocks: int) -> None:
        self._policy = policy
        self._capacity_blocks = capacity_blocks
        self._row_of: dict[int, int] = {}
        self._block_in: list[int] = []
        self._free: list[int] = []
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, block: int) -> bool:
        return block in self._row_of

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here, without a gap; they count as used now."""
        rows = []
        row_of = self._row_of
        for block in blocks:
            row = row_of.get(block)
            if row is None:
                break
            rows.append(row)
        if rows:
            rows.reverse()
            self._policy.touched(rows)
        return len(rows)

    def admit(self, blocks: Sequence[int], begin: int = 0) -> None:
        """Add those from `begin` on that are not stored yet, evicting others.

        The blocks before them count as used too, because these depend on them.
        """
        if self._capacity_blocks == 0:
            return
        row_of = self._row_of
        place = -1
        for i in range(len(blocks) - 1, begin - 1, -1):
            block = blocks[i]
            if block in row_of:
                continue
            if len(row_of) >= self._capacity_blocks and not self._evict():
                return
            place = self._free.pop() if self._free else len(self._block_in)
            if place == len(self._block_in):
                self._block_in.append(block)
            self._block_in[place] = block
            row_of[block] = place
            self._policy.admitted(place, 1, block)
        if place < 0:
            return
        for i in range(begin - 1, -1, -1):
            row = row_of.get(blocks[i])
            if row is not None:
                self._policy.inherited(row, 1, place)
                place = row

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that those of the blocks that are here have been used now."""
        row_of = self._row_of
        rows = [row_of[block] for block in reversed(blocks) if block in row_of]
        if rows:
            self._policy.touched(rows)

    def _evict(self) -> bool:
        row = self._policy.candidate(Steps(_STEPS))
        if row < 0:
            return False
        block = self._block_in[row]
        self._policy.evicted(row, block)
        del self._row_of[block]
        self._free.append(row)
        self.evicted += 1
        return True
