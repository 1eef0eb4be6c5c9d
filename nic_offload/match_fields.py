"""What the match-action table compares: a request's fields, and patterns over them.

An address is one integer with a leading one (`1 << 32` or `1 << 128`) before its bits. So a shift by the bits that a
prefix leaves open is the whole comparison, and IPv4 never equals IPv6. An IPv4 address inside IPv6
(`::ffff:10.0.0.1`) counts as the IPv4 address; otherwise it would bypass rules. A ternary pattern compares the leading
one, and all bits above, too.

What always holds: values are frozen and hashable; a pattern that covers less than another has the larger specificity;
an invalid text is an error of one sentence that names the field and its valid forms.

What it doesn't do: choose between patterns (`match_space` does), resolve host names, normalise user names.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, NamedTuple

from nic_offload.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

__all__ = [
    "FiveTuple",
    "Pattern",
    "Ports",
    "Prefix",
    "Request",
    "Ternary",
    "address_number",
    "parse_five",
    "parse_pattern",
    "parse_text",
    "show_protocol",
]

TEXT_CHARACTERS_MAX = 256  # in a tenant, a user, a context, a model, a node, a name, a handle
BINDINGS_MAX = 16  # network 5-tuples that one entry may bind its user to
PORT_MAX = 65535
PROTOCOL_MAX = 255
PROTOCOL_BITS, PORT_BITS = 8, 16
SPECIFICITY_BITS = 33

TEXT_FIELDS = ("tenant", "user", "context", "model")
FIVE_FIELDS = ("source", "destination", "source_port", "destination_port", "protocol")
FIELDS = TEXT_FIELDS + FIVE_FIELDS

_PORT_BLOCK_BITS = 4  # blocks of ports are 1, 16, 256, 4096 wide, so that ranges need few masks
V4_BITS, _V6_BITS = 32, 128
_PREFIX_SHIFT, _PROTOCOL_SHIFT, _NAMES_SHIFT = 17, 26, 30
_PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOLS.items()}

_ADDRESS_TAKES = "an IP address such as 10.0.0.7 or 2001:db8::7"
_PREFIX_TAKES = "an IP address or a prefix such as 10.0.0.0/8 or 2001:db8::/32"
_MASKED_TAKES = "VALUE&MASK, such as"
_MASKED_ADDRESS_TAKES = f"{_MASKED_TAKES} 10.0.0.7&255.0.0.255, both IPv4 or both IPv6"
_PORT_TAKES = f"a port from 0 to {PORT_MAX}"
_RANGE_TAKES = f'a port from 0 to {PORT_MAX}, or a range such as "1024-65535"'
_PROTOCOL_TAKES = f"a number from 0 to {PROTOCOL_MAX} or one of {', '.join(_PROTOCOLS)}"

assert 2 * (PORT_MAX + 1) <= 1 << _PREFIX_SHIFT
assert 2 * (_V6_BITS + 1) < 1 << (_PROTOCOL_SHIFT - _PREFIX_SHIFT)
assert PROTOCOL_BITS + 1 < 1 << (_NAMES_SHIFT - _PROTOCOL_SHIFT)
assert len(TEXT_FIELDS) < 1 << (SPECIFICITY_BITS - _NAMES_SHIFT)


class Request(NamedTuple):
    """One request as it arrived: all nine fields, parsed. Addresses are numbers made by `address_number`."""

    tenant: str
    user: str
    context: str
    model: str
    source: int
    destination: int
    source_port: int
    destination_port: int
    protocol: int

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> Request:
        """Make a request from its text form; every field is required."""
        for name in fields:
            if name not in FIELDS:
                raise RuleError(f"A request has no field {name!r}; its fields are {', '.join(FIELDS)}.")
        for name in FIELDS:
            if name not in fields:
                raise RuleError(f"The request lacks {name}; it needs all of {', '.join(FIELDS)}.")
        where = "The request"
        return cls(
            parse_text(where, "tenant", fields["tenant"]),
            parse_text(where, "user", fields["user"]),
            parse_text(where, "context", fields["context"]),
            parse_text(where, "model", fields["model"]),
            _address(where, "source", fields["source"]),
            _address(where, "destination", fields["destination"]),
            _port(where, "source_port", fields["source_port"]),
            _port(where, "destination_port", fields["destination_port"]),
            _protocol(where, fields["protocol"]),
        )

    def show(self) -> dict[str, str]:
        """The fields as people write them."""
        shown = dict(zip(FIELDS, map(str, self), strict=True))
        shown["source"] = str(Prefix(self.source, 0))
        shown["destination"] = str(Prefix(self.destination, 0))
        shown["protocol"] = show_protocol(self.protocol)
        return shown


class Prefix(NamedTuple):
    """The addresses whose number, shifted right by `shift`, is `value`."""

    value: int
    shift: int

    @property
    def length(self) -> int:
        """The number of fixed bits: 8 in 10.0.0.0/8."""
        return self.value.bit_length() - 1

    def covers(self, number: int) -> bool:
        """Whether an address is inside."""
        return number >> self.shift == self.value

    def __str__(self) -> str:
        bits = self.length + self.shift
        number = (self.value << self.shift) - (1 << bits)
        kind = ipaddress.IPv4Address if bits == V4_BITS else ipaddress.IPv6Address
        return str(kind(number)) if not self.shift else f"{kind(number)}/{self.length}"


class Ports(NamedTuple):
    """The ports from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def block_shift(self) -> int:
        """The shift of the smallest block that contains these ports; 16 is all ports."""
        bits = (self.low ^ self.high).bit_length()
        return -(-bits // _PORT_BLOCK_BITS) * _PORT_BLOCK_BITS

    @property
    def is_block(self) -> bool:
        """Whether these ports are that whole block, so that the shift alone decides."""
        return self.high - self.low + 1 == 1 << self.block_shift

    @property
    def numbers(self) -> int:
        """How many ports it covers."""
        return self.high - self.low + 1

    def covers(self, number: int) -> bool:
        """Whether a port is inside."""
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Ternary(NamedTuple):
    """The numbers that are `value` in all bits but the `open` ones; an address has its leading one in `value`.

    The open bits are no run from bit 0: that is a prefix, or ports from one to another.
    """

    value: int
    open: int
    bits: int  # of the field

    @property
    def length(self) -> int:
        """The number of fixed bits."""
        return self.bits - self.open.bit_count()

    @property
    def numbers(self) -> int:
        """How many numbers it covers."""
        return 1 << self.open.bit_count()

    def covers(self, number: int) -> bool:
        """Whether a number of the field is one of these."""
        return number & ~self.open == self.value

    def __str__(self) -> str:
        mask = (1 << self.bits) - 1 & ~self.open
        if self.bits <= PORT_BITS:
            return f"{self.value}&{mask:#x}"
        kind = ipaddress.IPv4Address if self.bits == V4_BITS else ipaddress.IPv6Address
        return f"{kind(self.value - (1 << self.bits))}&{kind(mask)}"


class FiveTuple(NamedTuple):
    """A pattern over the network 5-tuple; None is any."""

    source: Prefix | Ternary | None = None
    destination: Prefix | Ternary | None = None
    source_port: Ports | Ternary | None = None
    destination_port: Ports | Ternary | None = None
    protocol: int | Ternary | None = None

    def matches(self, request: Request) -> bool:
        """Whether the request's 5-tuple matches."""
        source, destination, source_port, destination_port, protocol = self
        return (
            (source is None or source.covers(request[4]))
            and (destination is None or destination.covers(request[5]))
            and (source_port is None or source_port.covers(request[6]))
            and (destination_port is None or destination_port.covers(request[7]))
            and (protocol is None or request[8] == protocol or _covers(protocol, request[8]))
        )

    @property
    def specificity(self) -> int:
        """The fixed bits of the protocol, then those of both addresses, then the ports excluded by both patterns."""
        addresses = sum(address.length + 1 for address in self[:2] if address is not None)
        ports = sum(PORT_MAX + 1 - ports.numbers for ports in self[2:4] if ports is not None)
        protocol = self.protocol.length if isinstance(self.protocol, Ternary) else PROTOCOL_BITS
        given = 0 if self.protocol is None else protocol + 1
        return given << _PROTOCOL_SHIFT | addresses << _PREFIX_SHIFT | ports

    def show(self) -> dict[str, str]:
        """The fields that are given, as people write them."""
        shown = {name: str(value) for name, value in zip(FIVE_FIELDS, self, strict=True) if value is not None}
        if isinstance(self.protocol, int):
            shown["protocol"] = show_protocol(self.protocol)
        return shown


def _covers(protocol: int | Ternary, number: int) -> bool:
    return isinstance(protocol, Ternary) and protocol.covers(number)


_ANY = FiveTuple()


class Pattern(NamedTuple):
    """What an entry matches; None is any. With `bind`, one of those 5-tuples must match, and `five` is any."""

    tenant: str | None = None
    user: str | None = None
    context: str | None = None
    model: str | None = None
    five: FiveTuple = _ANY
    bind: tuple[FiveTuple, ...] = ()

    @property
    def specificity(self) -> int:
        """How many of the four names are given, then the 5-tuple's own; with bindings, the least specific one's."""
        names = sum(name is not None for name in self[:4])
        five = min((bound.specificity for bound in self.bind), default=self.five.specificity)
        return names << _NAMES_SHIFT | five

    def show(self) -> dict[str, str]:
        """The fields that are given, as people write them, without bindings."""
        names = zip(TEXT_FIELDS, self[:4], strict=True)
        return {name: text for name, text in names if text is not None} | self.five.show()


def parse_pattern(where: str, fields: Mapping[str, object]) -> Pattern:
    """Parse a pattern from a TOML table; `where` begins the sentence of any error."""
    tenant, user, context, model = (
        parse_text(where, name, fields[name]) if name in fields else None for name in TEXT_FIELDS
    )
    bind = fields.get("bind", [])
    if not isinstance(bind, list) or not all(isinstance(item, dict) for item in bind):
        raise RuleError(
            f'{where}: bind takes a list of 5-tuples, such as [{{ source = "10.0.0.0/8" }}], not {bind!r}.'
        )
    if "bind" in fields and not 1 <= len(bind) <= BINDINGS_MAX:
        raise RuleError(f"{where}: bind takes from 1 to {BINDINGS_MAX} network 5-tuples, not {len(bind)}.")
    bound = tuple(_parse_binding(where, number, item) for number, item in enumerate(bind, 1))
    return Pattern(tenant, user, context, model, parse_five(where, fields), bound)


def _parse_binding(where: str, number: int, fields: Mapping[str, object]) -> FiveTuple:
    here = f"{where}, binding {number}"
    for name in fields:
        if name not in FIVE_FIELDS:
            raise RuleError(f"{here}: there is no field {name!r}; it takes {', '.join(FIVE_FIELDS)}.")
    return parse_five(here, fields)


def parse_five(where: str, fields: Mapping[str, object]) -> FiveTuple:
    """Parse the network 5-tuple of a table; an absent field is any."""
    return FiveTuple(
        _addresses(where, "source", fields["source"]) if "source" in fields else None,
        _addresses(where, "destination", fields["destination"]) if "destination" in fields else None,
        _ports(where, "source_port", fields["source_port"]) if "source_port" in fields else None,
        _ports(where, "destination_port", fields["destination_port"])
        if "destination_port" in fields
        else None,
        _protocols(where, fields["protocol"]) if "protocol" in fields else None,
    )


def parse_text(where: str, field: str, value: object) -> str:
    """Parse a name, which is compared literally."""
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_CHARACTERS_MAX or not value.isprintable():
        raise RuleError(
            f"{where}: {field} takes a text of 1 to {TEXT_CHARACTERS_MAX} printable characters, not {_short(value)}."
        )
    if value == "*":
        raise RuleError(f'{where}: {field} takes a name; to match any, leave the field out instead of "*".')
    return value


def show_protocol(number: int) -> str:
    """The protocol's name, if it has one here."""
    return _PROTOCOL_NAMES.get(number, str(number))


def address_number(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """The address as one integer with a leading one; see the top of this file."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return 1 << _V6_BITS | int(address)
        address = address.ipv4_mapped
    return 1 << V4_BITS | int(address)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - what a line has room for


def _refuse(where: str, field: str, takes: str, value: object) -> RuleError:
    return RuleError(f"{where}: {field} takes {takes}, not {_short(value)}.")


def _address(where: str, field: str, value: object) -> int:
    if isinstance(value, str) and "%" not in value:  # an address with a zone differs on every machine
        try:
            return address_number(ipaddress.ip_address(value))
        except ValueError:
            pass
    raise _refuse(where, field, _ADDRESS_TAKES, value)


def _is_masked(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and "&" in value


def _is_run(open_bits: int) -> bool:
    """Whether these are the lowest bits, as a prefix leaves them open, or none."""
    return not open_bits & (open_bits + 1)


def _addresses(where: str, field: str, value: object) -> Prefix | Ternary:
    """Parse an address, a prefix, or VALUE&MASK."""
    if not _is_masked(value):
        return _prefix(where, field, value)
    try:
        number, mask = (ipaddress.ip_address(text.strip()) for text in value.split("&"))
    except ValueError:
        raise _refuse(where, field, _MASKED_ADDRESS_TAKES, value) from None
    is_mapped = isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None
    if number.version != mask.version or is_mapped or "%" in value:
        raise _refuse(where, field, _MASKED_ADDRESS_TAKES, value)
    bits = number.max_prefixlen
    _check_masked(where, field, value, int(number) & ~int(mask))
    open_bits = (1 << bits) - 1 & ~int(mask)
    if _is_run(open_bits):
        shift = open_bits.bit_length()
        return Prefix((1 << bits | int(number)) >> shift, shift)
    return Ternary(1 << bits | int(number), open_bits, bits)


def _masked_number(where: str, field: str, value: str, bits: int) -> Ternary:
    """Parse VALUE&MASK of numbers, decimal or as 0x..."""
    top = (1 << bits) - 1
    number, _, mask = (_whole_or_hex(text.strip(), top) for text in value.partition("&"))
    if number is None or mask is None:
        raise _refuse(where, field, f"{_MASKED_TAKES} 16&0xfe, both from 0 to {top}", value)
    _check_masked(where, field, value, number & ~mask)
    return Ternary(number, top & ~mask, bits)


def _whole_or_hex(text: str, top: int) -> int | None:
    if re.fullmatch(r"0x[0-9a-fA-F]{1,4}", text):
        number = int(text, 16)
        return number if number <= top else None
    return _whole(text, top)


def _check_masked(where: str, field: str, value: str, outside: int) -> None:
    if outside:
        raise RuleError(
            f"{where}: {field} takes a VALUE with no bits set outside its MASK, not {_short(value)}."
        )


def _prefix(where: str, field: str, value: object) -> Prefix:
    if not isinstance(value, str) or "%" in value:
        raise _refuse(where, field, _PREFIX_TAKES, value)
    try:
        network = ipaddress.ip_network(value, strict=False)
        given = ipaddress.ip_address(value.partition("/")[0])
    except ValueError:
        raise _refuse(where, field, _PREFIX_TAKES, value) from None
    if given != network.network_address:
        raise RuleError(
            f"{where}: {field} takes a prefix with no bits set after its length; write {network} instead of"
            f" {value!r}."
        )
    shift = network.max_prefixlen - network.prefixlen
    number = address_number(network.network_address)
    return Prefix(number >> shift, shift)


def _whole(value: object, top: int) -> int | None:
    """The number from 0 to `top` that this is, or that its text says."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(top)):
        value = int(value)
    return value if type(value) is int and 0 <= value <= top else None


def _port(where: str, field: str, value: object) -> int:
    port = _whole(value, PORT_MAX)
    if port is None:
        raise _refuse(where, field, _PORT_TAKES, value)
    return port


def _ports(where: str, field: str, value: object) -> Ports | Ternary | None:
    """Parse a range, or VALUE&MASK; all ports is any."""
    if _is_masked(value):
        masked = _masked_number(where, field, value, PORT_BITS)
        if not _is_run(masked.open):
            return masked
        value = f"{masked.value}-{masked.value | masked.open}"
    first, dash, last = value.partition("-") if isinstance(value, str) else (value, "", "")
    low = _whole(first, PORT_MAX)
    high = _whole(last, PORT_MAX) if dash else low
    if low is None or high is None:
        raise _refuse(where, field, _RANGE_TAKES, value)
    if low > high:
        raise RuleError(f"{where}: {field} takes a range from low to high; write {high}-{low}.")
    return None if (low, high) == (0, PORT_MAX) else Ports(low, high)


def _protocols(where: str, value: object) -> int | Ternary | None:
    """Parse a protocol, or VALUE&MASK; all protocols is any."""
    if not _is_masked(value):
        return _protocol(where, value)
    masked = _masked_number(where, "protocol", value, PROTOCOL_BITS)
    if masked.open == PROTOCOL_MAX:
        return None
    return masked if masked.open else masked.value


def _protocol(where: str, value: object) -> int:
    named = _PROTOCOLS.get(value.lower()) if isinstance(value, str) else None
    number = _whole(value, PROTOCOL_MAX) if named is None else named
    if number is None:
        raise _refuse(where, "protocol", _PROTOCOL_TAKES, value)
    return number
