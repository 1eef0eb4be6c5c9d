"""A block as a client describes it, and the outcome of its put or get: plain values."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter, index
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.config import show_size
from kvstore.errors import InvalidArgument, KeyTaken, NotRegistered
from kvstore.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, KEY_BYTES, THRESHOLD_MAX
from kvstore.names import UNSAID, check_domain_name, is_in_domain, layout_fingerprint
from nic_offload.errors import shown
from nic_offload.fabric import hold, release
from nic_offload.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.durability import Durability
    from kvstore.errors import KvError
    from nic_offload.fabric import Region

__all__ = [
    "Block",
    "HasFingerprint",
    "Hit",
    "KnownLayout",
    "PutResult",
    "fingerprint_of",
    "hold_regions",
    "pieces_of",
    "put_into",
    "regions_of",
    "whole_of",
]


@dataclass(frozen=True, slots=True)
class Block:
    """A block, and the registered memory its bytes are in or go to.

        key        32 bytes, as `block_key` makes them; empty: it is armed now and named later (`ArmedPuts.name`)
        region     the memory, as `Client.register` returns it
        offset     where its bytes begin in the region
        length     how many they are, at most 64 MiB
        threshold  a put fires when the flag word has at least this value
        pieces     where its bytes are instead of at `offset`: see `of_pieces`
        whole      in a get of a part of a block: the length of the stored block; 0: this is all of it
        skip       in a get of a part: the bytes of the stored block before this part
        domain     the erase domain of a put (`domain_of` a user, or SHARED); empty: the client's

    A put reads the bytes when it fires: leave them alone until it has landed.
    """

    key: bytes
    region: Region
    offset: int
    length: int
    threshold: int = 1
    pieces: Pieces | None = None
    whole: int = 0
    skip: int = 0
    domain: bytes = UNSAID

    @classmethod
    def of_pieces(
        cls,
        key: bytes,
        pieces: Pieces,
        *,
        threshold: int = 1,
        whole: int = 0,
        skip: int = 0,
        domain: bytes = UNSAID,
    ) -> Block:
        """A block whose bytes are in pieces of registered memory, such as an engine's pages of each layer's K and V.

        A put gathers them when it fires; a get scatters them. The node knows nothing of pieces.

        >>> from nic_offload.pieces import Pieces
        >>> Block.of_pieces(key, Pieces.of(kv, [(0, 2048), (8192, 2048)])).length
        4096
        """
        _check_pieces(pieces)
        return cls(key, pieces.regions[0], 0, pieces.length, threshold, pieces, whole, skip, domain)

    @property
    def stored_bytes(self) -> int:
        """The length of the stored block; this may be a part of it."""
        return self.whole or self.length

    @property
    def regions(self) -> tuple[Region, ...]:
        """The registered memory where the bytes are."""
        return (self.region,) if self.pieces is None else self.pieces.regions

    def __post_init__(self) -> None:
        """Raise for a block that no node would accept, before anything is sent."""
        if not isinstance(self.key, bytes) or (self.key and len(self.key) != KEY_BYTES):
            _refuse_key(self.key)
        if not type(self.offset) is type(self.length) is type(self.threshold) is int:  # almost never
            _check_numbers(self.offset, self.length, self.threshold)
        if self.domain != UNSAID:
            check_domain_name(self.domain)
        if not 0 <= self.threshold <= THRESHOLD_MAX:
            raise InvalidArgument(
                f"A block's threshold is 0 to {THRESHOLD_MAX}, not {shown(self.threshold)}."
            )
        if not BLOCK_BYTES_MIN <= self.length <= BLOCK_BYTES_MAX:
            raise InvalidArgument(
                f"A block has 1 byte to {show_size(BLOCK_BYTES_MAX)}, not {shown(self.length)} bytes."
            )
        if self.whole or self.skip:
            _check_part(self.length, self.whole, self.skip)
        if self.pieces is not None:
            _check_pieces(self.pieces)
            if self.pieces.length != self.length:
                raise InvalidArgument(
                    f"A block of {shown(self.length)} bytes has pieces of {self.pieces.length} bytes in total."
                )
        elif not 0 <= self.offset <= getattr(self.region, "length", 0) - self.length:
            _refuse_place(self.region, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Hit:
    """The block's bytes are in the caller's memory, checked."""

    key: bytes


class PutResult(NamedTuple):
    """The result of a put. Times are nanoseconds of CLOCK_MONOTONIC; 0 if it did not happen.

        durability      what was reached; None if nothing was
        error           why it failed; None if it didn't
        already_stored  a block was stored under this key: nothing was sent, and the bytes were not compared
        fired_ns        when the flag was seen
        landed_ns       when the block was in the node's memory
        durable_ns      when it was acknowledged with the durability that was asked for

    Its `key` is that of the block.
    """

    key: bytes
    durability: Durability | None
    error: KvError | None
    already_stored: bool = False
    fired_ns: int = 0
    landed_ns: int = 0
    durable_ns: int = 0

    @property
    def has_block(self) -> bool:
        """Whether a block is stored under the key, even if an earlier put stored other bytes (KeyTaken)."""
        return self.error is None or isinstance(self.error, KeyTaken)


class HasFingerprint(Protocol):
    """Identifies how the bytes of a block are laid out: a `Layout`, or its fingerprint."""

    @property
    def fingerprint(self) -> bytes:
        """Its digest."""
        ...


class KnownLayout(NamedTuple):
    """A layout known only by its fingerprint, such as that of blocks put by another process."""

    fingerprint: bytes


def _check_part(length: int, whole: int, skip: int) -> None:
    _check_numbers(whole, skip)
    if whole > BLOCK_BYTES_MAX:
        raise InvalidArgument(
            f"The whole of a block has at most {show_size(BLOCK_BYTES_MAX)}, not {shown(whole)} bytes."
        )
    if not 0 <= skip <= whole - length:
        raise InvalidArgument(
            f"A block of {shown(whole)} bytes has no {length} bytes after the first {shown(skip)}."
        )


def _check_pieces(pieces: object) -> None:
    if not isinstance(pieces, Pieces):
        kind = type(pieces).__name__
        raise InvalidArgument(f"A block's pieces are `nic_offload.pieces.Pieces`, not {kind}.")


def _refuse_key(key: object) -> None:
    if not isinstance(key, bytes):
        raise InvalidArgument(f"A block's key is {KEY_BYTES} bytes, not {type(key).__name__}.")
    raise InvalidArgument(f"A block's key has {KEY_BYTES} bytes, not {len(key)}.")


def _refuse_place(region: object, offset: int, length: int) -> None:
    if not hasattr(region, "length"):
        kind = type(region).__name__
        raise NotRegistered(f"A block's region is what `Client.register` returns, not a {kind}.")
    raise InvalidArgument(
        f"Bytes {shown(offset)} to {shown(offset + length)} are not in the registered region,"
        f" which has {shown(region.length)}."
    )


def _check_numbers(*numbers: int) -> None:
    try:
        for number in numbers:
            index(number)
    except TypeError:
        raise InvalidArgument(
            "A block's offset, length, threshold, whole and skip are whole numbers."
        ) from None


pieces_of = attrgetter("pieces")  # for `map`, which costs a block next to nothing
whole_of = attrgetter("whole")


def regions_of(blocks: Iterable[Block]) -> list[Region]:
    """The registered memory of all of these, each once; blocks of pieces often have the same."""
    each: dict[Region, None] = {}
    last: tuple[Region, ...] = ()
    for block in blocks:
        if block.pieces is None:
            each[block.region] = None
        elif block.pieces.regions is not last:
            last = block.pieces.regions
            each.update(dict.fromkeys(last))
    return list(each)


def hold_regions(blocks: Iterable[Block]) -> ExitStack:
    """Keep the memory of all of these from being closed, until the result is closed."""
    with ExitStack() as held:
        for region in regions_of(blocks):
            hold(region)
            held.callback(release, region)
        return held.pop_all()


def put_into(blocks: Sequence[Block], domain: bytes, *, of_domains: bool = False) -> Sequence[Block]:
    """Give this domain to blocks without one (`of_domains`: only to those whose keys are made for a domain)."""
    if domain == UNSAID or not isinstance(blocks, (list, tuple)):
        return blocks
    return [
        replace(one, domain=domain)
        if isinstance(one, Block) and one.domain == UNSAID and (not of_domains or is_in_domain(one.key))
        else one
        for one in blocks
    ]


def fingerprint_of(layout: HasFingerprint | bytes) -> bytes:
    """The digest of whatever determines how the bytes are laid out."""
    if isinstance(layout, bytes):
        return layout_fingerprint(layout)
    try:
        return layout.fingerprint
    except AttributeError:
        raise InvalidArgument(f"A layout is bytes or a Layout, not {type(layout).__name__}.") from None
