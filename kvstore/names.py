"""Fixed-size names of blocks, tenants, users, sessions and layouts, as used on the wire and on the drive.

Every name is a BLAKE2b digest over length-prefixed parts, so two different lists of parts never give the same input.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from kvstore.errors import InvalidArgument
from kvstore.limits import (
    DOMAIN_BYTES,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    SESSION_BYTES,
    SESSION_LABEL_BYTES_MAX,
    TENANT_BYTES,
    USER_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "SHARED",
    "TENANTS_NAME",
    "UNSAID",
    "block_key",
    "block_keys",
    "check_domain_name",
    "domain_of",
    "domain_tag",
    "domain_tag_in",
    "fits_domain",
    "in_domain",
    "is_in_domain",
    "is_tenant",
    "layout_fingerprint",
    "session_name",
    "tenant_name",
    "user_name",
]

UNSAID: Final = b""  # no domain: the put named no owner
SHARED: Final = b"shared by tenant"  # the domain of blocks shared by all users of a tenant; never a default
assert len(SHARED) == DOMAIN_BYTES
TENANTS_NAME: Final = "A tenant's name has 1 to 64 letters, digits, dots, dashes and underscores."
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOBODYS: Final = (UNSAID, SHARED)
_MARK: Final = b"tkvdom"  # the end of the keys of blocks in other domains
_OF_KEYS: Final = b"triggerkv key"
_TAG_BYTES: Final = 6  # before it: which domain


def _digest(purpose: bytes, size_bytes: int, parts: Iterable[bytes]) -> bytes:
    state = blake2b(digest_size=size_bytes, person=purpose)
    for part in parts:
        try:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        except (BufferError, TypeError):
            raise InvalidArgument(f"A part of a name is bytes, not {type(part).__name__}.") from None
    return state.digest()


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except AttributeError:
        raise InvalidArgument(f"A name is a str, not {type(name).__name__}.") from None
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"The name {name!a} is not valid text: it contains half of a surrogate pair."
        ) from None


def block_key(*parts: bytes) -> bytes:
    """The key of a block whose bytes are determined by these parts: the engine's chained hash, the model, ...

    >>> len(block_key(b"my model", b"hash of the tokens"))
    32
    """
    return _digest(_OF_KEYS, KEY_BYTES, parts)


def block_keys(first: bytes, others: Iterable[bytes]) -> list[bytes]:
    """`block_key` of the first part and each of the others, for many blocks at less cost.

    >>> block_keys(b"my model", [b"a", b"b"]) == [block_key(b"my model", b"a"), block_key(b"my model", b"b")]
    True
    """
    state = blake2b(digest_size=KEY_BYTES, person=_OF_KEYS)
    keys = []
    try:
        state.update(len(first).to_bytes(8, "little") + first)
        for other in others:
            one = state.copy()
            one.update(len(other).to_bytes(8, "little") + other)
            keys.append(one.digest())
    except TypeError:
        raise InvalidArgument("The parts of names are bytes, one part for each name.") from None
    return keys


def layout_fingerprint(*parts: bytes) -> bytes:
    """The fingerprint of how a block's bytes are laid out; a get under another layout is a miss."""
    return _digest(b"triggerkv layout", FINGERPRINT_BYTES, parts)


def is_tenant(name: str) -> bool:
    """Whether a tenant can have this name."""
    return _TENANT.fullmatch(name) is not None


def tenant_name(tenant: str, salt: bytes) -> bytes:
    """A tenant's name on the drive. The salt is the store's, so a stolen drive doesn't reveal whose blocks it has."""
    return _digest(b"triggerkv tenant", TENANT_BYTES, [salt, _encoded(tenant)])


def user_name(tenant: bytes, user: str) -> bytes:
    """A user's name on the drive; `tenant` is from `tenant_name`, so this name is salted as well."""
    return _digest(b"triggerkv user", USER_BYTES, [tenant, _encoded(user)])


def domain_of(user: str) -> bytes:
    """The erase domain of a user's blocks: which of their tenant's keys encrypts them.

    The user's name has 1 to 128 bytes in UTF-8, as in `erase_user`.
    """
    name = _encoded(user)
    if not 1 <= len(name) <= SESSION_LABEL_BYTES_MAX:
        raise InvalidArgument(f"A user's name has 1 to {SESSION_LABEL_BYTES_MAX} bytes, not {len(name)}.")
    return _digest(b"triggerkv domain", DOMAIN_BYTES, [name])


def in_domain(key: bytes, domain: bytes) -> bytes:
    """The key of a block in an erase domain: the same prefix in two domains is two blocks.

    >>> ada, key = domain_of("ada"), block_key(b"my model", b"the tokens of the first page")
    >>> in_domain(key, ada) != in_domain(key, domain_of("grace")) != key
    True
    >>> in_domain(key, SHARED) == key
    True
    """
    if domain in _NOBODYS:
        return key
    check_domain_name(domain)
    size = KEY_BYTES - _TAG_BYTES - len(_MARK)
    return _digest(b"triggerkv in dom", size, [key, domain]) + domain_tag(domain) + _MARK


def check_domain_name(domain: bytes) -> None:
    """Raise for an invalid domain. 16 zeros are invalid: over the fabric they mean that no domain was named."""
    if not isinstance(domain, bytes):
        raise InvalidArgument(f"An erase domain is bytes, not {type(domain).__name__}.")
    if domain and len(domain) != DOMAIN_BYTES:
        raise InvalidArgument(f"An erase domain has {DOMAIN_BYTES} bytes, not {len(domain)}.")
    if domain and not any(domain):
        raise InvalidArgument("An erase domain can't be all zeros: use SHARED, or domain_of(user).")


def is_in_domain(key: bytes) -> bool:
    """Whether `in_domain` made this key, for any domain."""
    return key.endswith(_MARK)


def domain_tag(domain: bytes) -> bytes:
    """The tag in the keys of a domain's blocks. Two domains have the same tag with a probability of 2^-48."""
    return _digest(b"triggerkv dom of", _TAG_BYTES, [domain])


def domain_tag_in(key: bytes) -> bytes | None:
    """The domain's tag in a key that `in_domain` made; None for any other key."""
    return key[-_TAG_BYTES - len(_MARK) : -len(_MARK)] if is_in_domain(key) else None


def fits_domain(key: bytes, domain: bytes) -> bool:
    """Whether a block may be put into this domain: a key from `in_domain` only into its own, any other into none."""
    tag = domain_tag_in(key)
    if tag is None or domain in _NOBODYS:
        return tag is None and domain in _NOBODYS
    return tag == domain_tag(domain)


def session_name(user: bytes, session: str) -> bytes:
    """A session's name on the drive; `user` is from `user_name`."""
    return _digest(b"triggerkv sessio", SESSION_BYTES, [user, _encoded(session)])
