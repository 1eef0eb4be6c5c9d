"""A fetch in progress, and groups of fetches that are handed to a reader together (`kvstore.node.fetching`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import PAGE_BYTES
from kvstore.node.landing import pages_of

if TYPE_CHECKING:
    from kvstore.node.connection import Connection
    from kvstore.node.fair_queue import Holder
    from kvstore.node.hot_pages import Piece
    from kvstore.node.lookup_progress import Looking
    from kvstore.node.session_traces import SeenGet
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry
    from kvstore.storage.sends import Send

__all__ = ["Fetch", "FetchRequest", "Group"]


class FetchRequest(NamedTuple):
    """A block that a client requests, and its target."""

    key: bytes
    fingerprint: bytes
    length: int
    target: int
    target_key: int
    ack_word: int
    ack_generation: int
    skip: int = 0
    part: int = 0  # how many bytes are sent, after the first `skip`; 0: all
    shares: bool = False  # the client prefers to read them in the hot memory
    seen: SeenGet | None = None  # the trace of its get

    @property
    def sent_bytes(self) -> int:
        """How many bytes are sent."""
        return self.part or self.length


@dataclass(slots=True)
class Fetch:
    """The fetch of one block."""

    connection: Connection
    request: FetchRequest
    looking: Looking
    at: int  # its position in the look-up
    tag: int
    queued_ns: int
    size_bytes: int = field(init=False)  # memory that it uses
    piece: Piece | None = None
    hot: bool = False  # the piece was there before
    generation: int = 0  # of the record in it
    sending: bool = False
    cancelled: bool = False
    is_reported: bool = False  # its cancellation was reported: its look-up no longer waits for it
    entry: Entry | None = None  # of the block that a reader will read,
    group: Group | None = None  # and with which it was handed over
    late: bool = False  # it has ended, but still has its memory

    @property
    def name(self) -> tuple[bytes, bytes]:
        """The name of the requested block, as in the index."""
        return self.connection.tenant, self.request.key

    @property
    def tenant(self) -> bytes:
        """The tenant whose turn it takes."""
        return self.connection.tenant

    @property
    def flow(self) -> int:
        """The connection of its tenant on which it arrived."""
        return self.connection.number

    @property
    def holder(self) -> Holder:
        """The holder of its memory."""
        return self.tenant, self.flow

    def __post_init__(self) -> None:
        self.size_bytes = pages_of(self.request.length) * PAGE_BYTES


class Group:
    """Fetches of one connection whose records one reader reads in one turn."""

    __slots__ = ("connection", "drive", "fetches", "is_sent", "late", "payload_bytes", "send", "size_bytes")

    def __init__(self, drive: Drive, connection: Connection) -> None:
        self.drive = drive
        self.connection = connection
        self.fetches: list[tuple[Fetch, Entry]] = []
        self.size_bytes = self.payload_bytes = 0
        # Those whose memory is freed when the drive is done with it; None: the drive is done.
        self.late: list[Fetch] | None = []
        self.is_sent = False  # or never to be sent
        self.send: Send | None = None
