"""What the match-action table compares: a request's fields, and patterns over them.

An address is one integer with a leading one (`1 << 32` or `1 << 128`) before its bits. So a shift by the bits that a
prefix leaves open is the whole comparison, and IPv4 never equals IPv6. An IPv4 address inside IPv6
(`::ffff:10.0.0.1`) counts as the IPv4 address; otherwise it would bypass rules.

What always holds: values are frozen and hashable; a pattern that covers less than another has the larger specificity;
an invalid text is an error of one sentence that names the field and its valid forms.

What it doesn't do: choose between patterns (`match_space` does), resolve host names, normalise user names.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, NamedTuple

from nic_offload.errors import RuleError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FiveTuple",
    "Pattern",
    "Ports",
    "Prefix",
    "Request",
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
SPECIFICITY_BITS = 30

TEXT_FIELDS = ("tenant", "user", "context", "model")
FIVE_FIELDS = ("source", "destination", "source_port", "destination_port", "protocol")
FIELDS = TEXT_FIELDS + FIVE_FIELDS

_PORT_BITS = 16
_PORT_BLOCK_BITS = 4  # blocks of ports are 1, 16, 256, 4096 wide, so that ranges need few masks
_V4_BITS, _V6_BITS = 32, 128
_PREFIX_SHIFT, _PROTOCOL_SHIFT, _NAMES_SHIFT = 17, 26, 27
_PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOLS.items()}

_ADDRESS_TAKES = "an IP address such as 10.0.0.7 or 2001:db8::7"
_PREFIX_TAKES = "an IP address or a prefix such as 10.0.0.0/8 or 2001:db8::/32"
_PORT_TAKES = f"a port from 0 to {PORT_MAX}"
_RANGE_TAKES = f'a port from 0 to {PORT_MAX}, or a range such as "1024-65535"'
_PROTOCOL_TAKES = f"a number from 0 to {PROTOCOL_MAX} or one of {', '.join(_PROTOCOLS)}"

assert 2 * (PORT_MAX + 1) <= 1 << _PREFIX_SHIFT
assert 2 * (_V6_BITS + 1) < 1 << (_PROTOCOL_SHIFT - _PREFIX_SHIFT)
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

    def __str__(self) -> str:
        bits = self.length + self.shift
        number = (self.value << self.shift) - (1 << bits)
        kind = ipaddress.IPv4Address if bits == _V4_BITS else ipaddress.IPv6Address
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

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class FiveTuple(NamedTuple):
    """A pattern over the network 5-tuple; None is any."""

    source: Prefix | None = None
    destination: Prefix | None = None
    source_port: Ports | None = None
    destination_port: Ports | None = None
    protocol: int | None = None

    def matches(self, request: Request) -> bool:
        """Whether the request's 5-tuple matches."""
        source, destination, source_port, destination_port, protocol = self
        return (
            (source is None or request[4] >> source[1] == source[0])
            and (destination is None or request[5] >> destination[1] == destination[0])
            and (source_port is None or source_port[0] <= request[6] <= source_port[1])
            and (destination_port is None or destination_port[0] <= request[7] <= destination_port[1])
            and (protocol is None or request[8] == protocol)
        )

    @property
    def specificity(self) -> int:
        """Protocol given, then the fixed bits of both prefixes, then the ports excluded by both ranges."""
        prefixes = sum(prefix.length + 1 for prefix in self[:2] if prefix is not None)
        ports = sum(PORT_MAX - (ports.high - ports.low) for ports in self[2:4] if ports is not None)
        return (self.protocol is not None) << _PROTOCOL_SHIFT | prefixes << _PREFIX_SHIFT | ports

    def show(self) -> dict[str, str]:
        """The fields that are given, as people write them."""
        shown = {name: str(value) for name, value in zip(FIVE_FIELDS, self, strict=True) if value is not None}
        if self.protocol is not None:
            shown["protocol"] = show_protocol(self.protocol)
        return shown


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
        _prefix(where, "source", fields["source"]) if "source" in fields else None,
        _prefix(where, "destination", fields["destination"]) if "destination" in fields else None,
        _ports(where, "source_port", fields["source_port"]) if "source_port" in fields else None,
        _ports(where, "destination_port", fields["destination_port"])
        if "destination_port" in fields
        else None,
        _protocol(where, fields["protocol"]) if "protocol" in fields else None,
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
    return 1 << _V4_BITS | int(address)


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


def _ports(where: str, field: str, value: object) -> Ports | None:
    """Parse a range; all ports is any."""
    first, dash, last = value.partition("-") if isinstance(value, str) else (value, "", "")
    low = _whole(first, PORT_MAX)
    high = _whole(last, PORT_MAX) if dash else low
    if low is None or high is None:
        raise _refuse(where, field, _RANGE_TAKES, value)
    if low > high:
        raise RuleError(f"{where}: {field} takes a range from low to high; write {high}-{low}.")
    return None if (low, high) == (0, PORT_MAX) else Ports(low, high)


def _protocol(where: str, value: object) -> int:
    named = _PROTOCOLS.get(value.lower()) if isinstance(value, str) else None
    number = _whole(value, PROTOCOL_MAX) if named is None else named
    if number is None:
        raise _refuse(where, "protocol", _PROTOCOL_TAKES, value)
    return number
