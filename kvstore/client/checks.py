"""Checks of a client's arguments, before anything is sent: an invalid batch raises one typed error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.client.blocks import Block, pieces_of, regions_of, whole_of
from kvstore.config import counted, show_size
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, NotRegistered
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    KEY_BYTES,
    LEASE_TIMEOUT_MS_MAX,
    SESSION_LABEL_BYTES_MAX,
    SLOTS_PER_CLIENT_MAX,
    TIMEOUT_S_MAX,
)
from kvstore.names import SHARED, UNSAID, fits_domain, is_in_domain
from nic_offload.counter import Counter
from nic_offload.errors import shown
from nic_offload.flags import FlagWord, FlagWords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.grpc_blocks import Data
    from nic_offload.fabric import Fabric, Region

__all__ = [
    "are_pieces",
    "check_armed",
    "check_between",
    "check_blocks",
    "check_buffer",
    "check_domain",
    "check_gets",
    "check_how",
    "check_key",
    "check_keys",
    "check_lease",
    "check_length",
    "check_lengths",
    "check_list",
    "check_memory",
    "check_name",
    "check_number",
    "check_placed",
    "check_reserved",
    "check_slots",
    "check_wanted",
    "checked_puts",
    "checked_timeout",
    "view_of",
]

_key, _length, _domain = attrgetter("key"), attrgetter("length"), attrgetter("domain")
_LENGTH = "A block's length"
_IS_PART = "A part of a block can be fetched, but not put."
_FLAGS = (FlagWord, Counter)


def check_list(given: object, of: str) -> None:
    """Raise for anything but a list. A single key counts as none, although Python can iterate over it."""
    if type(given) is list or type(given) is tuple:
        return
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray, memoryview)):
        kind = type(given).__name__
        raise InvalidArgument(f"Expected a list of {of}, not {kind}; put a single one into a list.")


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise for anything but a list of keys. Wrong lengths with a plausible total are left to the node."""
    check_list(keys, "keys")
    try:
        is_good = len(b"".join(keys)) == KEY_BYTES * len(keys)  # 10 ns a key
        is_good &= list(map(type, keys)).count(bytes) == len(keys)  # and not a bytearray; 15 ns
    except TypeError:
        is_good = False
    if not is_good:
        for key in keys:
            check_key(key)


def check_key(key: object) -> None:
    """Raise for anything but a key."""
    if not isinstance(key, bytes):
        raise InvalidArgument(f"A block's key is {KEY_BYTES} bytes, not {type(key).__name__}.")
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"A block's key has {KEY_BYTES} bytes, not {len(key)}.")


def check_lengths(lengths: Sequence[int] | None, keys: Sequence[bytes]) -> None:
    """Raise unless there is one length per key, or none at all."""
    if lengths is None:
        return
    check_list(lengths, "lengths")
    if lengths and len(lengths) != len(keys):
        raise InvalidArgument(
            f"Each key needs its length: {counted(len(keys), 'key')}, {counted(len(lengths), 'length')}."
        )
    for length in lengths:
        check_number(_LENGTH, length, 64)


def check_wanted(wanted: Sequence[tuple[bytes, int]]) -> None:
    """Raise for anything but a list of keys, each with the length of its block."""
    check_list(wanted, "keys with lengths")
    for one in wanted:
        key, length = _pair(one, "length")
        check_key(key)
        check_length(length)


def check_length(length: int) -> None:
    """Raise for anything but the length of a block."""
    check_between("A block's length", length, BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)


def checked_puts(blocks: Iterable[tuple[bytes, Data]]) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the same blocks; raise at the first that is not a key and its data."""
    if not isinstance(blocks, Iterable):
        check_list(blocks, "keys with data")
    for one in blocks:
        key, data = _pair(one, "data")
        check_key(key)
        yield key, view_of(data)


def view_of(data: Data) -> memoryview:
    """A block's bytes, its pieces joined."""
    try:
        if isinstance(data, (list, tuple)):
            data = b"".join(map(_plain, data))
        view = _plain(data).cast("B")
    except (TypeError, ValueError, BufferError):
        raise InvalidArgument("A block's data is contiguous bytes, or a list of such pieces.") from None
    if not BLOCK_BYTES_MIN <= len(view) <= BLOCK_BYTES_MAX:
        raise InvalidArgument(f"A block has 1 byte to {show_size(BLOCK_BYTES_MAX)}, not {len(view)} bytes.")
    return view


def check_buffer(memory: object) -> None:
    """Raise for anything but memory that gets can write to."""
    try:
        view = _plain(memory)
    except (TypeError, ValueError):
        kind = type(memory).__name__
        raise InvalidArgument(
            f"Memory to register is a writable buffer, such as a bytearray, not {kind}."
        ) from None
    if not view.nbytes:
        raise InvalidArgument("Memory to register has no bytes.")
    if view.readonly:
        kind = type(memory).__name__
        raise InvalidArgument(
            f"Memory to register must be writable, such as a bytearray; this {kind} is read-only."
        )
    if not view.c_contiguous:
        raise InvalidArgument("Memory to register is contiguous; this has gaps between its elements.")


def _plain(memory: Any) -> memoryview:
    """Its bytes. Raises for an array of Python's objects, whose bytes are references."""
    view = memoryview(memory)
    if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):  # such as `T{i:Old:O:new:}`
        raise InvalidArgument(
            "An array of Python objects can't be stored: its bytes are only references to them."
        )
    return view


def _pair(given: Any, other: str) -> tuple[Any, Any]:
    try:
        key, value = given
    except (TypeError, ValueError):
        kind = type(given).__name__
        raise InvalidArgument(f"Each block is given as its key and its {other}, not as {kind}.") from None
    return key, value


def _count(blocks: Sequence[Block], blocks_max: int, what: str) -> None:
    check_list(blocks, "blocks")
    if not 1 <= len(blocks) <= blocks_max:
        raise InvalidArgument(f"{what} 1 to {blocks_max} blocks, not {len(blocks)}.")


def check_blocks(blocks: Sequence[object], kind: type = Block) -> None:
    """Raise for anything but a list of such blocks."""
    check_list(blocks, "blocks")
    others = sorted({type(one).__name__ for one in blocks if not isinstance(one, kind)})
    if others:
        raise InvalidArgument(
            f"Expected a list of {kind.__name__} objects; it contains {' and '.join(others)}."
        )


def are_pieces(blocks: Sequence[Block]) -> bool:
    """Whether any of these is a block of pieces. Raises for anything but a list of blocks."""
    check_list(blocks, "blocks")
    try:
        return any(map(pieces_of, blocks))
    except AttributeError:  # so the check costs blocks nothing
        check_blocks(blocks)
        raise


def check_placed(block: object, number: int, key: bytes) -> None:
    """Raise for anything but a destination of this block of a session, as the caller's `place` returned it."""
    if not isinstance(block, Block):
        kind = type(block).__name__
        raise InvalidArgument(f"`place` returns a Block for each block of the session, not {kind}.")
    if block.key != key:
        raise InvalidArgument(f"Block {number} of the session was given a destination under another key.")


def check_memory(fabric: Fabric, blocks: Sequence[Block]) -> list[Region]:
    """Return the memory of these blocks; raise for any that is not, or no longer, registered here."""
    known = fabric.regions
    try:
        regions = regions_of(blocks)
    except AttributeError:
        check_blocks(blocks)
        raise
    for one in regions:
        if one.handle is None or one not in known:
            raise NotRegistered("A block's memory is not registered with this client.")
    return regions


def check_gets(fabric: Fabric, blocks: Sequence[Block], blocks_max: int) -> list[Region]:
    """Return the memory of these blocks; raise if they can't be got."""
    _count(blocks, blocks_max, "A call takes")
    regions = check_memory(fabric, blocks)
    if not all(map(_key, blocks)):
        raise InvalidArgument("A block without a key can only be armed, and must be named before it fires.")
    return regions


def _check_put(blocks: Sequence[Block], regions: Sequence[Region]) -> None:
    if any(map(whole_of, blocks)):
        raise InvalidArgument(_IS_PART)
    _check_host(regions)


def _check_host(regions: Sequence[Region]) -> None:
    for one in regions:
        if one.gpu is not None:
            raise InvalidArgument("A block is put from the host's memory: copy it from the GPU's first.")


def check_domain(key: bytes, domain: bytes) -> None:
    """Raise if a block is put into another erase domain than the one its key was made for."""
    if fits_domain(key, domain):
        return
    if domain not in (UNSAID, SHARED):
        raise InvalidArgument(
            "The block's key was not made for its erase domain: use kvstore.names.in_domain(key, domain)."
        )
    raise InvalidArgument("The block's key belongs to an erase domain; say which one, by its `domain`.")


def _check_domains(blocks: Sequence[Block]) -> None:
    if any(map(_domain, blocks)) or any(map(is_in_domain, map(_key, blocks))):
        for one in blocks:
            if one.key:  # else it is checked when it is named
                check_domain(one.key, one.domain)


def check_reserved(fabric: Fabric, blocks: Sequence[Block]) -> None:
    """Raise if slots can't be reserved for these."""
    _check_put(blocks, check_gets(fabric, blocks, BATCH_BLOCKS_MAX))
    _check_domains(blocks)


def check_armed(fabric: Fabric, blocks: Sequence[Block], blocks_max: int, bytes_max: int) -> None:
    """Raise if puts of these can't be armed."""
    if type(blocks) is not list or not 1 <= len(blocks) <= blocks_max:
        _count(blocks, blocks_max, "A batch of puts has")
    regions = check_memory(fabric, blocks)
    for one in blocks:  # one loop: for a few blocks it takes half as long as one for each question
        if one.length > bytes_max:
            _refuse_length(blocks, bytes_max)
        if one.whole:
            raise InvalidArgument(_IS_PART)
        if one.key and (one.domain or is_in_domain(one.key)):  # one without a key is checked when it is named
            check_domain(one.key, one.domain)
    _check_host(regions)


def _refuse_length(blocks: Sequence[Block], bytes_max: int) -> NoReturn:
    largest = max(map(_length, blocks))
    raise InvalidArgument(
        f"The client was opened for blocks of up to {bytes_max} bytes, and one has {largest}."
    )


def check_name(what: str, name: object) -> None:
    """Raise for a name that no session can have, such as one that Python decoded from invalid UTF-8."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what} is a str, not {type(name).__name__}.")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{what}, {name!a}, is not valid text: it has half of a surrogate pair."
        ) from None
    if not 1 <= size <= SESSION_LABEL_BYTES_MAX:
        raise InvalidArgument(f"{what} has 1 to {SESSION_LABEL_BYTES_MAX} bytes in UTF-8, not {size}.")


def check_between(what: str, number: int, least: int, most: int) -> int:
    """Return the number; raise for anything but a whole number within these bounds."""
    try:
        if least <= index(number) <= most:
            return number
    except TypeError:
        pass
    raise InvalidArgument(f"{what} must be {least} to {most}, not {shown(number)}.")


def check_number(what: str, number: int, bits: int = 32) -> int:
    """Return the number; raise if a field of this width can't hold it."""
    return check_between(what, number, 0, (1 << bits) - 1)


def check_slots(slots: int, block_bytes_max: int) -> None:
    """Raise for slots that no node gives a client."""
    check_between("The number of a client's slots", slots, 1, SLOTS_PER_CLIENT_MAX)
    check_between("The length of a client's longest block", block_bytes_max, BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)


def check_how(flag: object, durability: object) -> None:
    """Raise for an invalid flag or durability."""
    if not (flag is None or isinstance(flag, _FLAGS)):
        if isinstance(flag, FlagWords):
            raise InvalidArgument("A flag is one word of FlagWords, such as flags[0], not the FlagWords.")
        raise InvalidArgument(f"A flag is one word of FlagWords or a Counter, not {type(flag).__name__}.")
    if not isinstance(durability, Durability):
        raise InvalidArgument(f"A durability is a Durability, such as WRITTEN, not {shown(durability)}.")


def checked_timeout(timeout_s: float, what: str = "A timeout") -> float:
    """A timeout in seconds, limited to the longest possible one. Raise for a negative one."""
    wanted = "a number of seconds"
    try:
        if timeout_s >= 0:  # which NaN is not
            return float(min(timeout_s, TIMEOUT_S_MAX))
        if timeout_s < 0:
            wanted = "0 or more seconds"
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(f"{what} is {wanted}, not {shown(timeout_s)}.")


def check_lease(lease_ms: int, what_lasts: str) -> None:
    """Raise for a time longer than any lease or armed put may last."""
    if not 1 <= lease_ms <= LEASE_TIMEOUT_MS_MAX:
        raise InvalidArgument(f"{what_lasts} 1 to {LEASE_TIMEOUT_MS_MAX} ms, not {shown(lease_ms)}.")
