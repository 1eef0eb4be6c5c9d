"""The inputs and outputs of the store: plain values, no behaviour.

Those that are made for each block are named tuples, which Python makes several times faster than data classes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvstore.durability import Durability
    from kvstore.errors import KvError, StorageError
    from kvstore.miss import Miss
    from kvstore.storage.eviction import types as eviction
    from kvstore.storage.index import Name
    from kvstore.storage.manifests import SessionName
    from kvstore.wire.manifest import Turn

__all__ = [
    "DeleteDone",
    "DeleteItem",
    "DeletesDone",
    "DriveState",
    "GetDone",
    "GetItem",
    "GetsDone",
    "PutDone",
    "PutItem",
    "PutsDone",
    "SessionDone",
    "SessionItem",
    "SessionStep",
    "SessionsDone",
    "Statistics",
]


class PutItem(NamedTuple):
    """A block in a page-aligned slot: `[header page | payload | room to the page's end]`.

    The slot belongs to the store until the put is reported.
    """

    tenant: bytes
    key: bytes
    fingerprint: bytes
    length: int
    crc32c: int
    slot_address: int
    expires_ms: int
    durability: Durability
    tag: int
    domain: bytes = bytes(16)  # a domain of the tenant, whose key encrypts it; zeros: the tenant's own


class PutDone(NamedTuple):
    """A put has ended. Without an error, a block with its name and bytes is as durable as requested.

    Names are written once: it may be an earlier put's block, which lives at least as long as requested. If that has
    other bytes, by the CRCs, the error is KeyTaken.
    """

    tag: int
    error: KvError | None
    durability: Durability
    generation: int = 0  # of the record that was written for this put; 0: none was written for it


class GetItem(NamedTuple):
    """A block wanted in a slot of the same shape; `length` 0 takes whatever length is stored.

    If nobody requested it, reading it is no use of it, and a request finds out if it is wrong or can't be read.
    """

    tenant: bytes
    key: bytes
    fingerprint: bytes
    length: int
    slot_address: int
    slot_bytes: int
    tag: int
    is_requested: bool = True


class GetDone(NamedTuple):
    """A get has ended: a miss, or a block whose header has been checked and **whose payload has not**.

    A caller that passes the payload on must check `crc32c` over the `length` bytes after the slot's header page
    before a single byte leaves, and call `Store.quarantine` if it differs. The C core does that where it sends;
    `Store.verify_payload` does it for others.
    """

    tag: int
    miss: Miss | None
    length: int = 0
    crc32c: int = 0
    generation: int = 0
    was_read: bool = False  # from the drive, whatever came of it


class DeleteItem(NamedTuple):
    """A block to be deleted; `durability` says what the deletion must survive.

    If it is erased, its bytes must become unreadable, even on the drive: it is overwritten, unless it was encrypted
    with a key that is destroyed.
    """

    tenant: bytes
    key: bytes
    durability: Durability
    tag: int
    erased: Collection[int] | None = (
        None  # numbers of destroyed keys, as entries have them; None: it is only deleted
    )


class DeleteDone(NamedTuple):
    """A deletion has ended; `found`: whether there was anything to delete. A block that was not found is gone too."""

    tag: int
    error: StorageError | None
    found: bool
    size_bytes: int = 0  # of its record
    is_overwritten: bool = False  # it was erased, and its key was not destroyed


class SessionStep(enum.Enum):
    """A kind of change to a session."""

    APPEND = (
        enum.auto()
    )  # name these blocks as well, all of which are stored; creates the session if it doesn't exist
    TRUNCATE = enum.auto()  # keep the first blocks only
    FORK = enum.auto()  # make it a copy of the first blocks of `source`
    REMOVE = enum.auto()  # remove the session and, if requested, the blocks that nothing else names
    LIMIT = enum.auto()  # set the expiry to `expires_ms`, or to never
    PROTECT = enum.auto()  # keep this many first blocks from being evicted, over restarts too; 0: none
    EXPIRE = enum.auto()  # remove the session, if it has expired
    REWRITE = enum.auto()  # write its record again, with no change
    TAKE = (
        enum.auto()
    )  # make it what it is on another node: its first `blocks` here, then these keys, stored or not


class SessionItem(NamedTuple):
    """A step of one session; the steps of a session are executed in the order in which they arrived.

    An append is a turn, or the rest of the last one. With `first_block` it is executed only if the session has exactly
    that many blocks; if these keys are there already, it was executed before and is not executed again.
    """

    name: SessionName
    step: SessionStep
    durability: Durability
    tag: int
    keys: Sequence[bytes] = ()
    blocks: int = 0
    source: SessionName | None = None
    delete_blocks: bool = False
    first_block: int | None = None
    tokens: int = 0
    at_ms: int = 0
    continues: bool = False
    label: bytes = b""  # the label of a new session
    expires_ms: int | None = None  # when it expires; 0: never; None: unchanged
    epoch: int | None = None  # a session of another epoch counts as missing, and is removed; None: any epoch
    source_epoch: int | None = None  # the same for the fork's source
    turns: Sequence[Turn] = ()  # of a session that is taken
    protected: int = 0  # how many of its first blocks are protected, of the same
    replaces: bool = False  # it may be taken over a session of this epoch
    is_erased: bool = False  # if it is removed, its records are overwritten before the step is reported


class SessionDone(NamedTuple):
    """A step has ended: how many blocks the session names now, and which blocks nothing names any more."""

    tag: int
    error: KvError | None
    blocks: int = 0
    unreferenced: Sequence[Name] = ()


DeletesDone = Callable[[Sequence[DeleteDone]], None]
SessionsDone = Callable[[Sequence[SessionDone]], None]
PutsDone = Callable[[Sequence[PutDone]], None]
GetsDone = Callable[[Sequence[GetDone]], None]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The state of a drive, or of the store: sums, and True for what is true of any drive."""

    capacity_bytes: int
    free_bytes: int
    blocks: int
    quarantined: int
    quarantined_bytes: int
    doubted: int
    eviction: eviction.Statistics
    puts_pending: int
    waiting_for_room: int
    waiting_for_quota: int
    gets_pending: int
    deletes_pending: int
    sessions_pending: int
    wipes_pending: int
    drive_queued: int
    drive_in_flight: int
    drive_in_flight_bytes: int
    syncs: int
    takes_puts: bool
    rebuilt: bool
    clear_bytes: int  # upper bound of the bytes in the clear that are being encrypted
    clear_why: str  # why they are not being encrypted


@dataclass(frozen=True, slots=True)
class DriveState:
    """The state of one drive; without statistics it was left out of this opening."""

    number: int
    statistics: Statistics | None
    failure: str = ""  # why it accepts no more writes, or is missing
