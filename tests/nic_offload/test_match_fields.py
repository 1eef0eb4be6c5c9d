"""Edges of prefixes, ports and protocols, and how requests are read."""

from __future__ import annotations

import pytest

from nic_offload.errors import RuleError
from nic_offload.match_action import Rule, Table
from nic_offload.match_fields import TEXT_CHARACTERS_MAX, Request, parse_pattern
from tests.nic_offload.matching import BASE, request, rule


def _hits(asked: dict[str, object], **fields: object) -> bool:
    table = Table()
    table.add(_rule(**fields))
    return table.match(request(**asked), 0) is not None


def _rule(**fields: object) -> Rule:
    return rule(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "inside", "outside"),
    [
        ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255", "::ffff:1.2.3.4"], ["::", "::1", "2001:db8::1"]),
        ("::/0", ["::", "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"], ["0.0.0.0", "::ffff:1.2.3.4"]),
        ("0.0.0.0/1", ["0.0.0.0", "127.255.255.255"], ["128.0.0.0", "::"]),
        ("10.0.0.0/8", ["10.0.0.0", "10.255.255.255", "::ffff:10.1.1.1"], ["9.255.255.255", "11.0.0.0"]),
        ("10.0.0.0/31", ["10.0.0.0", "10.0.0.1"], ["10.0.0.2", "9.255.255.255"]),
        ("0.0.0.0/32", ["0.0.0.0"], ["0.0.0.1", "::"]),
        ("0.0.0.0", ["0.0.0.0"], ["0.0.0.1", "::"]),
        ("255.255.255.255/32", ["255.255.255.255"], ["255.255.255.254"]),
        ("::/128", ["::"], ["::1", "0.0.0.0"]),
        ("2001:db8::/32", ["2001:db8::", "2001:db8:ffff::1"], ["2001:db9::", "32.1.13.184"]),
        ("2001:db8::/33", ["2001:db8:7fff::"], ["2001:db8:8000::"]),
        ("::ffff:10.0.0.0/104", ["10.9.9.9", "::ffff:10.0.0.1"], ["11.0.0.0", "::a00:1"]),
        ("::ffff:0:0/96", ["0.0.0.0", "255.1.1.1"], ["::1"]),
        ("a00::/8", ["a00::", "aff::"], ["10.0.0.0"]),  # the same first byte as 10.0.0.0/8
    ],
)
def test_prefixes_contain_what_is_inside(prefix: str, inside: list[str], outside: list[str]) -> None:
    for end in ("source", "destination"):
        for address in inside:
            assert _hits({end: address}, **{end: prefix}), address
        for address in outside:
            assert not _hits({end: address}, **{end: prefix}), address


@pytest.mark.parametrize(
    ("ports", "inside", "outside"),
    [
        (0, [0], [1, 65535]),
        (65535, [65535], [0, 65534]),
        ("443", [443], [442, 444]),
        ("0-0", [0], [1]),
        ("0-65535", [0, 1, 65535], []),
        ("0-65534", [0, 65534], [65535]),
        ("1-65535", [1, 65535], [0]),
        ("1024-65535", [1024, 65535], [0, 1023]),
        ("16-31", [16, 31], [15, 32]),
        ("16-32", [16, 32], [15, 33]),
        ("15-16", [15, 16], [14, 17]),
        ("4095-4096", [4095, 4096], [4094, 4097]),
        ("0-4095", [0, 4095], [4096]),
        ("32767-32768", [32767, 32768], [32766, 32769]),
    ],
)
def test_ranges_include_both_ends(ports: str | int, inside: list[int], outside: list[int]) -> None:
    for end in ("source_port", "destination_port"):
        for port in inside:
            assert _hits({end: port}, **{end: ports}), port
        for port in outside:
            assert not _hits({end: port}, **{end: ports}), port


@pytest.mark.parametrize(
    ("field", "pattern", "inside", "outside"),
    [
        ("source", "10.0.0.7&255.0.0.255", ["10.0.0.7", "10.255.3.7"], ["11.0.0.7", "10.0.0.8", "::a00:7"]),
        ("source", "0.0.0.1&0.0.0.1", ["0.0.0.1", "::ffff:9.9.9.9"], ["0.0.0.0", "::1"]),
        ("destination", "2001::7&ffff::ff", ["2001::7", "2001:1:2::107"], ["2002::7", "2001::8", "0.0.0.7"]),
        ("destination", "::1&::1", ["::1", "ffff::3"], ["::2", "0.0.0.1", "::ffff:0.0.0.1"]),
        ("source_port", "0x1bb&0xfff", [443, 443 + 4096], [442, 4096]),
        ("destination_port", "1&1", [1, 65535], [0, 65534]),
        ("protocol", "16&0xfe", [16, 17], [6, 18, 255]),
        ("protocol", "1&1", [1, 17], [6]),
    ],
)
def test_a_ternary_mask_compares_exactly_its_bits(
    field: str, pattern: str, inside: list[object], outside: list[object]
) -> None:
    for value in inside:
        assert _hits({field: value}, **{field: pattern}), value
    for value in outside:
        assert not _hits({field: value}, **{field: pattern}), value


@pytest.mark.parametrize(
    ("field", "masked", "plain"),
    [
        ("source", "10.0.0.0&255.0.0.0", "10.0.0.0/8"),
        ("source", "10.0.0.1&255.255.255.255", "10.0.0.1"),
        ("source", "0.0.0.0&0.0.0.0", "0.0.0.0/0"),
        ("destination", "2001:db8::&ffff:ffff::", "2001:db8::/32"),
        ("source_port", "16&0xfff0", "16-31"),
        ("source_port", "6&0xfffe", "6-7"),
        ("source_port", "443&65535", 443),
        ("protocol", "6&0xff", "tcp"),
    ],
)
def test_a_mask_equal_to_a_prefix_a_range_or_a_value_is_the_same_rule(
    field: str, masked: str, plain: object
) -> None:
    assert parse_pattern("A rule", {field: masked}) == parse_pattern("A rule", {field: plain})
    table = Table()
    table.add(_rule(**{field: masked}))
    with pytest.raises(RuleError, match="has the same match"):
        table.add(_rule(**{field: plain}))


@pytest.mark.parametrize(
    ("field", "patterns"),
    [
        ("source", ["0.0.0.0/0", "0.0.0.3&0.0.0.3", "10.0.0.0/8", "10.0.0.3&255.0.0.3", "10.1.2.3"]),
        ("source_port", ["0&1", "0&3", "40000&0xff7f", 40000]),
        ("protocol", ["2&2", "6&6", "6&0x7f", "tcp"]),
    ],
)
def test_of_ternary_masks_the_one_that_compares_more_bits_wins(field: str, patterns: list[object]) -> None:
    table = Table()
    for pattern in patterns:
        entry = table.add(_rule(name=str(pattern), **{field: pattern}))
        assert table.match(request(), 1) is entry, pattern


def test_an_empty_mask_is_any() -> None:
    for field in ("source_port", "destination_port", "protocol"):
        assert parse_pattern("A rule", {field: "0&0"}) == parse_pattern("A rule", {})


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ("source", "10.0.0.7&255.0.0.255"),
        ("destination", "2001:db8::7&ffff:ffff::ffff"),
        ("source_port", "443&0xf7ff"),
        ("destination_port", "1&0x1"),
        ("protocol", "16&0xfe"),
    ],
)
def test_a_ternary_pattern_is_returned_as_it_was_written(field: str, pattern: str) -> None:
    table = Table()
    entry = table.add(_rule(**{field: pattern}))
    assert entry.pattern.show() == {field: pattern}
    assert entry.pattern == parse_pattern("A rule", {field: pattern})
    bound = table.add(_rule(tenant="acme", user="alice", bind=[{field: pattern}]))
    assert bound.pattern.bind[0].show() == {field: pattern}


def test_protocols_by_name_and_number() -> None:
    for name, number in (("tcp", 6), ("UDP", 17), ("icmpv6", 58), (0, "0"), (255, "255")):
        assert _hits({"protocol": number}, protocol=name)
        assert not _hits({"protocol": 99}, protocol=name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("source", "10.0.0.1/8", "source takes a prefix with no bits set after its length; write 10.0.0.0/8"),
        ("source", "10.0.0", "source takes an IP address or a prefix such as"),
        ("source", "10.0.0.0/33", "source takes an IP address or a prefix"),
        ("source", "fe80::1%eth0", "source takes an IP address or a prefix"),
        ("destination", 7, "destination takes an IP address or a prefix"),
        ("destination", "*", "destination takes an IP address or a prefix"),
        ("source", "10.0.0.7&255.0.0.0", "source takes a VALUE with no bits set outside its MASK"),
        ("source", "10.0.0.7&::ff", "source takes VALUE&MASK, such as 10.0.0.7&255.0.0.255"),
        ("source", "10.0.0.7&8", "source takes VALUE&MASK"),
        ("source", "::ffff:10.0.0.7&::ff", "source takes VALUE&MASK"),
        ("source", "fe80::1%eth0&::1", "source takes VALUE&MASK"),
        ("source", "1.1.1.1&1.1.1.1&1.1.1.1", "source takes VALUE&MASK"),
        ("source_port", "8&7", "source_port takes a VALUE with no bits set outside its MASK"),
        ("source_port", "1&65536", "source_port takes VALUE&MASK, such as 16&0xfe, both from 0 to 65535"),
        ("source_port", "1-2&3", "source_port takes VALUE&MASK"),
        ("destination_port", "0x1ffff&1", "destination_port takes VALUE&MASK"),
        ("protocol", "tcp&6", "protocol takes VALUE&MASK, such as 16&0xfe, both from 0 to 255"),
        ("protocol", "0x100&0x100", "protocol takes VALUE&MASK"),
        ("source_port", "9-5", "source_port takes a range from low to high; write 5-9"),
        ("source_port", 65536, "source_port takes a port from 0 to 65535, or a range"),
        ("source_port", -1, "source_port takes a port"),
        ("source_port", True, "source_port takes a port"),
        ("source_port", 4.0, "source_port takes a port"),
        ("source_port", "5-", "source_port takes a port"),
        ("destination_port", "-5", "destination_port takes a port"),
        ("destination_port", "1_0", "destination_port takes a port"),
        ("destination_port", "\u0663", "destination_port takes a port"),
        ("protocol", "quic", "protocol takes a number from 0 to 255 or one of icmp, tcp"),
        ("protocol", 256, "protocol takes a number from 0 to 255"),
        ("tenant", "", "tenant takes a text of 1 to 256"),
        ("user", "x" * (TEXT_CHARACTERS_MAX + 1), "user takes a text of 1 to 256"),
        ("user", "a\x1b[2Jb", "user takes a text of 1 to 256 printable"),
        ("context", 5, "context takes a text"),
        ("model", "*", "to match any, leave the field out"),
    ],
)
def test_an_invalid_field_is_named_with_what_it_accepts(field: str, value: object, message: str) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        parse_pattern("Rule 3", {field: value})
    text = str(caught.value)
    assert text.startswith(f"Rule 3: {field} takes ")
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 200


def test_a_request_needs_every_field_and_no_other() -> None:
    for name in BASE:
        with pytest.raises(RuleError, match=f"The request lacks {name};"):
            Request.parse({field: value for field, value in BASE.items() if field != name})
    with pytest.raises(RuleError, match="no field 'port'"):
        Request.parse(BASE | {"port": 5})
    for field, value in (("source", "10.0.0.0/8"), ("source_port", "1-2"), ("user", ""), ("protocol", "x")):
        with pytest.raises(RuleError, match=f"The request: {field} takes"):
            request(**{field: value})


def test_a_request_shows_its_text() -> None:
    assert request().show() == {name: str(value) for name, value in BASE.items()}
    assert request(source="2001:DB8::1", protocol="0").show()["source"] == "2001:db8::1"
    assert request(source="::ffff:10.0.0.1") == request(source="10.0.0.1")
    assert len({request(), request(), request(user="b")}) == 2
