"""Where one client's puts by grants arrive: its slots, the rooms for blocks that arrive there, and landed blocks.

What always holds: a room is in `rooms` until its block has arrived or it is withdrawn; until then its piece of hot
memory has one user. When `close` returns, nothing is written into the slots any more.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore.durability import Durability
from kvstore.errors import Corrupt, DomainRequired, Expired, FabricError, KeyTaken
from kvstore.limits import GRANTED_SLOTS, HEADER_BYTES, PAGE_BYTES, ROOMS_MIN
from kvstore.names import SHARED
from kvstore.node.hot_pages import Piece
from kvstore.node.landing import LandingLayout
from kvstore.node.shared_slots import SharedSlots
from kvstore.storage.items import PutItem
from kvstore.wire.ack import AckCode
from nic_offload.memory import undumped
from nic_offload.receiver import Receiver
from nic_offload.sender import HEAD_PAGE_BYTES, Area

if TYPE_CHECKING:
    from kvstore.errors import KvError
    from kvstore.node.connection import Connection
    from kvstore.node.hot import HotMemory, Name
    from kvstore.node.session_traces import SessionTrace
    from kvstore.node.span_notes import PutTrace
    from nic_offload.receiver import Came, State

__all__ = ["Landed", "PutArea", "refusals"]

_DURABILITIES: Final = {int(one): one for one in Durability}
_LANDED: Final = Durability.LANDED
_SYNCED: Final = Durability.SYNCED
_TAKEN: Final = "Another block with this key is in memory."
_DIFFERED: Final = "The bytes that arrived are not those that were sent."
_EXPIRED: Final = "The block's time to live ended before it arrived."

assert HEAD_PAGE_BYTES == HEADER_BYTES == PAGE_BYTES


class Landed:
    """A block that has landed and is not known to the store yet."""

    __slots__ = (
        "area",
        "came",
        "connection",
        "durability",
        "ended_ns",
        "flag_ns",
        "is_answered",
        "is_awaited",
        "is_gone",
        "landed_ns",
        "leased_ns",
        "length",
        "name",
        "piece",
        "trace",
        "traced",
    )

    def __init__(self, area: PutArea, came: Came, piece: Piece, leased_ns: int, landed_ns: int) -> None:
        self.area = area  # the holder of the piece's memory
        self.connection = area.connection
        self.came = came
        self.piece = piece
        self.length = came.length
        self.durability = _DURABILITIES[min(came.durability, _SYNCED)]
        self.leased_ns = leased_ns  # when the first block of its batch landed,
        self.landed_ns = landed_ns  # and the last
        # When its flag was seen, if that time is from our own clock.
        fired_ns = came.fired_ns
        self.flag_ns = fired_ns if area.has_our_clock and fired_ns < came.landed_ns else 0
        self.trace: SessionTrace | None = None
        self.traced: PutTrace | None = None
        self.name: Name = (area.connection.tenant, came.key)  # its name in the index
        self.is_gone = False  # it must not be read any more
        self.is_answered = False  # by the lane,
        self.ended_ns = 0  # which was done with it then
        # Whether its client still waits for an acknowledgement.
        self.is_awaited = bool(came.is_stored) or came.durability > _LANDED

    @property
    def item(self) -> PutItem:
        """The block as the store takes it."""
        came = self.came
        return PutItem(
            self.connection.tenant,
            came.key,
            came.fingerprint,
            came.length,
            came.crc32c,
            came.address,
            came.expires_unix_ms,
            max(self.durability, Durability.WRITTEN),
            came.id,
            came.domain,
        )


class PutArea:
    """A connection's area for puts: its client's slots, and the rooms granted for blocks that arrive there."""

    def __init__(self, connection: Connection, memory: HotMemory, *, shares: bool, encrypts: bool) -> None:
        """`shares`: the client may be on this machine, and map its slots. `encrypts`: puts must name domains."""
        self.connection = connection
        self.layout = LandingLayout(GRANTED_SLOTS, connection.layout.block_bytes_max)
        self.shared: SharedSlots | None = None
        if shares:
            with suppress(FabricError):  # no descriptor is left: the client uses the fabric
                self.shared = SharedSlots(connection.fabric, self.layout.total_bytes)
        self._memory = undumped(self.layout.total_bytes) if self.shared is None else self.shared.memory
        self._region = connection.fabric.register(self._memory, endpoint=connection.endpoint)
        self.rooms: set[Piece] = set()
        self.unheard: list[Landed] = []  # not passed to the store yet
        self.target = ROOMS_MIN  # rooms that it should have
        self.fed_ns = 0  # when it last got some
        self.least_pages = 0  # of a room that was granted since all were last withdrawn
        self.idle_ticks = 0
        self.is_limited = False  # lanes accept only as many pages as were granted: these,
        self.lent_pages = 0  # including those of blocks not reported yet
        self.area = self._area(self._region.address)
        acks = connection.acks
        self.receiver = Receiver(
            connection.fabric,
            memory.shelf,
            connection.endpoint,
            connection.number,
            connection.peer,
            self.area,
            self.layout.block_bytes_max,
            connection.tenant,
            (acks.base, acks.key, acks.words),
            (AckCode.LANDED, AckCode.DIFFERS, AckCode.KEY_TAKEN, AckCode.EXPIRED, AckCode.WRITTEN),
            (self.description.flags, self.description.key),
            SHARED,
            AckCode.DOMAIN_REQUIRED if encrypts else 0,
        )

    @property
    def holder(self) -> tuple[bytes, PutArea]:
        """Its name in hot memory's shares; as an attribute it would make the area refer to itself."""
        return self.connection.tenant, self

    @property
    def has_our_clock(self) -> bool:
        """Whether the client is known to be on this machine, so that its CLOCK_MONOTONIC is ours."""
        return self.shared is not None and self.shared.is_mapped

    def given_back(self, room: int) -> Piece:
        """Return the piece of a room in which a block has arrived; it is its area's no more."""
        self.rooms.remove(Piece(room))
        return Piece(room)

    def _area(self, base: int, first_generation: int = 0) -> Area:
        layout = self.layout
        return Area(
            base + layout.flag(0),
            base + layout.header(0),
            layout.slot_bytes,
            self._region.key,
            layout.slots,
            first_generation or secrets.randbits(48) + 1,
        )

    @property
    def description(self) -> Area:
        """The area as it is described to the client."""
        return self._area(self._region.base, self.area.first_generation)

    def close(self) -> None:
        """Free the area of a connection whose endpoint is closed."""
        self.receiver.close()
        self._region.close()
        if self.shared is not None:
            self.shared.close()
        else:
            self._memory.close()


def refusals(state: State) -> list[KvError]:
    """Return the errors of the blocks that a receiver has refused."""
    refused: list[KvError] = [KeyTaken(_TAKEN)] * state.taken
    refused += [Corrupt(_DIFFERED)] * state.differed
    refused += [Expired(_EXPIRED)] * state.expired
    refused += [DomainRequired()] * state.unsaid
    return refused
