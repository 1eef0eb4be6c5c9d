"""How KV leaves a GPU when the provider cannot read its memory: through slots of page-locked host memory.

Of libfabric's software providers only `shm` takes GPU memory. With the others a block goes in two hops: the GPU
copies it into a slot here and rings the slot's flag word, both on the application's stream, and the put that was
armed on the slot beforehand leaves. The agent drives, and not the application: it calls nothing after `stage`.

    slot = staging.reserve(length)             # or StagingFull
    with fabric.open_counter(slot.word) as copied:
        arm(fabric, [TriggeredPut(..., region, slot.source, length, ..., trigger=copied, threshold=slot.threshold)])
    staging.stage(slot, tensor.data_ptr(), length, stream)
    ...                                        # the put's final event comes
    staging.release(slot)

What always holds: a slot is used again only after its put was reported as ended *and* no copy into it is still
waiting in a stream; the second is known from the slot's word alone, which nobody but that stream rings. Each
use of a slot has a threshold of its own, one above the last. Bounded: past `slots`, StagingFull.

What it doesn't do: copy what is not contiguous; know when a put has ended (its events do); work inside a graph,
whose frozen arguments would name one use of one slot for ever.
"""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi
from nic_offload.cuda import CudaFlags, MappedMemory
from nic_offload.errors import KvError, StagingFull
from nic_offload.flags import FlagWords
from nic_offload.handle import Handle
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

    from nic_offload.flags import FlagWord

__all__ = ["PinnedStaging", "SlotRing", "StagingSlot", "Use"]

SLOTS_MAX = 4096
_PAGE_BYTES = 4096


class _State(enum.Enum):
    """Where a slot is in its life."""

    FREE = "free"
    RESERVED = "reserved"  # its put is armed, or about to be
    STAGED = "staged"  # the copy and the ring are in a stream, or done
    DRAINING = "draining"  # its put has ended before its word was rung: the copy may still come


class Use(NamedTuple):
    """One use of a slot: the value that its word has once the copy is done."""

    slot: int
    threshold: int


class SlotRing:
    """Which slots are free; no I/O. `rung` says what value the word of a slot has."""

    def __init__(self, slots: int, rung: Callable[[int], int]) -> None:
        self._rung = rung
        self._states = [_State.FREE] * slots
        self._thresholds = [0] * slots
        self._free = deque(range(slots))  # the slot that has been free for longest comes first
        self._draining: list[int] = []

    @property
    def free_count(self) -> int:
        """How many slots `reserve` would give now."""
        self._drain()
        return len(self._free)

    def reserve(self) -> Use:
        """Take a slot for one put."""
        if not self._free:
            self._drain()
        if not self._free:
            raise StagingFull(
                f"All {len(self._states)} staging slots are taken; wait for a put to end, or stage with more."
            )
        index = self._free.popleft()
        self._states[index] = _State.RESERVED
        self._thresholds[index] += 1
        return Use(index, self._thresholds[index])

    def stage(self, use: Use) -> None:
        """The copy is about to be queued; once a use."""
        self._check(use, (_State.RESERVED,), "staged")
        self._states[use.slot] = _State.STAGED

    def release(self, use: Use) -> None:
        """The use's put has ended, whether it went out, failed or was never armed."""
        self._check(use, (_State.RESERVED, _State.STAGED), "released")
        if self._states[use.slot] is _State.STAGED and self._rung(use.slot) < use.threshold:
            self._states[use.slot] = _State.DRAINING
            self._draining.append(use.slot)
        else:
            self._give_back(use.slot)

    def _check(self, use: Use, states: tuple[_State, ...], doing: str) -> None:
        known = 0 <= use.slot < len(self._states) and self._thresholds[use.slot] == use.threshold
        state = self._states[use.slot] if known else _State.FREE
        if state not in states:
            was = f"it is {state.value}" if known else "that use of it is over"
            raise KvError(f"Slot {use.slot} can't be {doing}: {was}.")

    def _drain(self) -> None:
        still: list[int] = []
        for index in self._draining:
            if self._rung(index) < self._thresholds[index]:
                still.append(index)
            else:
                self._give_back(index)
        self._draining = still

    def _give_back(self, index: int) -> None:
        self._states[index] = _State.FREE
        self._free.append(index)


class StagingSlot(NamedTuple):
    """What a put is armed with, and what `stage` and `release` take."""

    use: Use
    source: int  # the address at which the put reads
    word: FlagWord  # a counter over it fires the put
    threshold: int


class PinnedStaging(Handle):
    """Slots of page-locked memory, each with a flag word. Register `memory` with the fabric once."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if not 1 <= slots <= SLOTS_MAX:
            raise KvError(f"A staging buffer has from 1 to {SLOTS_MAX} slots, not {slots}.")
        if slot_bytes < 1 or slot_bytes % _PAGE_BYTES:
            raise KvError(f"A staging slot has whole pages of {_PAGE_BYTES} bytes, not {slot_bytes} bytes.")
        with contextlib.ExitStack() as handles:
            self._words = handles.enter_context(FlagWords.create(slots))
            self._flags = handles.enter_context(CudaFlags(self._words))
            self.memory = allocate(slots * slot_bytes)
            pin = ffi.from_buffer(self.memory)
            self._address = int(ffi.cast("uintptr_t", pin))
            ffi.release(pin)
            self._mapped = handles.enter_context(MappedMemory(self._address, slots * slot_bytes))
            self._handles = handles.pop_all()
        self.slots = SlotRing(slots, lambda index: self._words[index].load())
        self.slot_bytes = slot_bytes
        self._runtime = self._mapped.cupy.cuda.runtime

    def reserve(self, length: int) -> StagingSlot:
        """Take a slot for a block of this length."""
        self._check_length(length)
        use = self.slots.reserve()
        source = self._address + use.slot * self.slot_bytes
        return StagingSlot(use, source, self._words[use.slot], use.threshold)

    def stage(self, slot: StagingSlot, device_address: int, length: int, stream: Any = None) -> None:
        """Queue the copy and the ring behind what the stream does already; the block is read when it runs.

        Where CUDA refuses, the slot is not used again, since it is unknown what was queued.
        """
        self._check_length(length)
        self.slots.stage(slot.use)
        with self._mapped.on(stream) as current:
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(slot.source, device_address, length, kind, current.ptr)
        self._flags.ring(slot.use.slot, slot.threshold, stream=stream)

    def release(self, slot: StagingSlot) -> None:
        """The put that was armed on the slot has had its final event, or was never armed."""
        self.slots.release(slot.use)

    def close(self) -> None:
        """Wait for the GPU and unmap; end the puts and the region over `memory` before."""
        self._handles.close()

    def _check_length(self, length: int) -> None:
        if not 1 <= length <= self.slot_bytes:
            raise KvError(f"A staging slot takes from 1 to {self.slot_bytes} bytes, not {length}.")
