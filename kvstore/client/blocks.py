"""What a client says about a block, and what it learns about it: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.errors import KeyTaken, ProtocolError
from kvstore.limits import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, KEY_BYTES
from kvstore.names import layout_fingerprint

if TYPE_CHECKING:
    from kvstore.durability import Durability
    from kvstore.errors import KvError
    from nic_offload.fabric import Region

__all__ = ["Block", "HasFingerprint", "Hit", "PutResult", "fingerprint_of"]


@dataclass(frozen=True, slots=True)
class Block:
    """A block and the registered memory where its bytes are, or shall be."""

    key: bytes  # 32 bytes, see `kvstore.names.block_key`; none: it is armed now and named later, by `ArmedPuts.name`
    region: Region
    offset: int
    length: int
    threshold: int = 1  # a put fires when the flag word is at least this

    def __post_init__(self) -> None:
        """Refuse what no node would take, before anything is sent."""
        if self.key and len(self.key) != KEY_BYTES:
            raise ProtocolError(f"A block's key has {KEY_BYTES} bytes, not {len(self.key)}.")
        if not BLOCK_BYTES_MIN <= self.length <= BLOCK_BYTES_MAX:
            raise ProtocolError(
                f"A block has {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX} bytes, not {self.length}."
            )
        if not 0 <= self.offset <= self.region.length - self.length:
            raise ProtocolError(
                f"Bytes {self.offset} to {self.offset + self.length} are not in the registered region,"
                f" which has {self.region.length}."
            )


@dataclass(frozen=True, slots=True)
class Hit:
    """The block's bytes are in the client's memory, checked."""

    key: bytes


class PutResult(NamedTuple):
    """How a put ended. Times are nanoseconds of CLOCK_MONOTONIC, 0 where a thing did not happen."""

    key: bytes
    durability: Durability | None  # what was reached; None if nothing was
    error: KvError | None
    already_stored: bool = False  # under this key: nothing was sent, and nobody has compared the bytes
    fired_ns: int = 0  # the flag was seen
    landed_ns: int = 0
    durable_ns: int = 0  # acknowledged as durable as was asked

    @property
    def has_block(self) -> bool:
        """Whether a block is stored under the key, be it one with other bytes (KeyTaken), put by somebody before."""
        return self.error is None or isinstance(self.error, KeyTaken)


class HasFingerprint(Protocol):
    """What stands for how the bytes of a block are laid out: a `Layout`, or what is known of one."""

    @property
    def fingerprint(self) -> bytes:
        """Its digest."""
        ...


def fingerprint_of(layout: HasFingerprint | bytes) -> bytes:
    """The digest of what decides how the bytes are laid out."""
    return layout_fingerprint(layout) if isinstance(layout, bytes) else layout.fingerprint
