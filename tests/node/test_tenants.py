"""Access: the file of tenants, tokens, certificates, rates and the audit log, without a network."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, NotAuthenticated, Overloaded, TenantDenied
from kvstore.limits import AUDIT_LINES_OF_ONE_PER_S, AUDIT_LINES_PER_S, AUDIT_NAMES_MAX, TENANTS_MAX
from kvstore.node.audit import Audit
from kvstore.node.rates import Rate
from kvstore.node.tenants import Credentials, Tenants, token_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.node.tenants import Caller

SALT = b"salt of the store"


class HeldClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return self.now_ns // 10**6


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def tenants(clock: HeldClock, tmp_path: Path) -> Tenants:
    tenants = Tenants(SALT, clock)
    assert tenants.load(written(tmp_path, TWO)) == 2
    return tenants


TWO = f"""
[acme]
tokens_sha256 = ["{token_digest("acme-1")}", "{token_digest("acme-2")}"]
requests_per_s = 1000
[zeta]
tokens_sha256 = ["{token_digest("zeta")}"]
certificates = ["engine.zeta"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    return path


def by_token(tenants: Tenants, token: str, scheme: str = "Bearer") -> Caller:
    return tenants.caller([("other", b"\x00"), ("authorization", f"{scheme} {token}")], {})


def by_certificate(tenants: Tenants, *hosts: bytes, common: bytes = b"node", other: bytes = b"") -> Caller:
    alternative = (*hosts, other) if other else hosts
    told = {"peer_dns": hosts, "x509_subject_alternative_name": alternative, "x509_common_name": [common]}
    return tenants.caller([], {kind: names for kind, names in told.items() if names})


def test_a_token_identifies_one_tenant_and_no_other(tenants: Tenants) -> None:
    for token in ("acme-1", "acme-2"):
        assert by_token(tenants, token).tenant("").name == "acme"
        assert by_token(tenants, token, "bearer").tenant("acme").name == "acme"
        with pytest.raises(TenantDenied, match="is acme and may not act for 'zeta'"):
            by_token(tenants, token).tenant("zeta")
    with pytest.raises(NotAuthenticated, match="does not belong to any tenant"):
        by_token(tenants, "acme-3")
    with pytest.raises(NotAuthenticated, match="has no token"):
        tenants.caller([("authorization", "Basic acme-1")], {})
    with pytest.raises(NotAuthenticated, match="does not belong to any tenant"):
        by_token(tenants, token_digest("acme-1"))  # what stands in the file is of no use to whoever reads it


def test_a_certificate_identifies_the_tenant_by_its_name(tenants: Tenants) -> None:
    assert by_certificate(tenants, b"other", b"engine.zeta").tenant("").name == "zeta"
    assert by_certificate(tenants, common=b"engine.zeta").tenant("").name == "zeta"
    for names in ((b"acme",), (b"engine",), (b"\xff",)):
        with pytest.raises(NotAuthenticated, match="certificate does not belong"):
            by_certificate(tenants, *names)


def test_a_certificate_name_that_is_not_a_host_identifies_nobody(tenants: Tenants) -> None:
    """A mail address or a URI among the alternative names, or a common name beside alternative ones."""
    with pytest.raises(NotAuthenticated):
        by_certificate(tenants, other=b"engine.zeta")
    for more in ({"hosts": [b"other"]}, {"hosts": [], "other": b"spiffe://x/engine.zeta"}):
        with pytest.raises(NotAuthenticated):
            by_certificate(tenants, *more["hosts"], common=b"engine.zeta", other=more.get("other", b""))  # type: ignore[arg-type]


def test_a_certificate_does_not_make_up_for_an_invalid_token(tenants: Tenants) -> None:
    with pytest.raises(NotAuthenticated):
        tenants.caller([("authorization", "Bearer no")], {"x509_common_name": [b"engine.zeta"]})


def test_an_open_node_accepts_any_claimed_tenant(clock: HeldClock) -> None:
    tenants = Tenants(SALT, clock)
    assert tenants.is_open
    assert by_token(tenants, "whatever").tenant("").name == "default"
    assert by_token(tenants, "whatever").tenant("acme").name == "acme"
    with pytest.raises(TenantDenied, match="1 to 64 letters"):
        by_token(tenants, "whatever").tenant("a/b")


def test_made_up_names_on_an_open_node_are_forgotten_and_map_to_the_same_ids_again(clock: HeldClock) -> None:
    tenants = Tenants(SALT, clock)
    first = tenants.named("t0").id
    for number in range(TENANTS_MAX + 10):
        tenants.named(f"t{number}")
    assert len(tenants._known) == TENANTS_MAX
    assert tenants.named("t0").id == first


def test_names_on_the_drive_differ_by_tenant_and_by_store(
    clock: HeldClock,
) -> None:
    ids = {Tenants(salt, clock).named(name).id for salt in (b"a", b"b") for name in ("acme", "zeta")}
    assert len(ids) == 4


def test_a_reloaded_file_takes_effect(tenants: Tenants, tmp_path: Path) -> None:
    acme = by_token(tenants, "acme-1").tenant("")
    acme.rate.take(1000)
    with pytest.raises(Overloaded):
        acme.rate.take(1)
    new = f'[acme]\ntokens_sha256 = ["{token_digest("acme-2")}"]\n'
    assert tenants.load(written(tmp_path, new)) == 1
    assert tenants.admits(Credentials(token_digest("acme-2"), ()), "acme")
    assert not tenants.admits(Credentials(token_digest("zeta"), ()), "zeta")
    assert not tenants.admits(Credentials(token_digest("acme-1"), ()), "acme")
    assert not tenants.admits(Credentials(token_digest("acme-2"), ()), "zeta")
    assert by_token(tenants, "acme-2").tenant("").id == acme.id
    acme.rate.take(10**9)  # its limit is gone, also for who had the tenant in hand
    for token in ("acme-1", "zeta"):
        with pytest.raises(NotAuthenticated):
            by_token(tenants, token)


GOOD = f'tokens_sha256 = ["{token_digest("x")}"]\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 tenants"),
        ("[a", "not TOML"),
        ("a = 1", "is not a table"),
        ("[a]", "a tenant needs tokens_sha256 or certificates"),
        ('["a b"]\n' + GOOD, "letters, digits"),
        ("[a]\ntokens_sha256 = ['secret']", "64 hexadecimal digits"),
        ("[a]\ntokens_sha256 = 'x'", "a list of texts"),
        ("[a]\ncertificates = ['']", "a list of texts"),
        ("[a]\ntoken = 'x'", "no setting 'token'"),
        ("[a]\nrequests_per_s = -1\n" + GOOD, "whole number"),
        ("[a]\nrequests_per_s = true\n" + GOOD, "whole number"),
        ("[a]\nbytes = -1\n" + GOOD, "bytes is a whole number"),
        ("[a]\nbytes = '1 GiB'\n" + GOOD, "bytes is a whole number"),
        ("[a]\n" + GOOD + "[b]\n" + GOOD, "also belongs to another tenant"),
        ("[a]\ncertificates = ['n']\n[b]\ncertificates = ['n']", "also belongs to another tenant"),
    ],
)
def test_an_unusable_file_is_refused_and_changes_nothing(
    tenants: Tenants, tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        tenants.load(written(tmp_path, text))
    assert by_token(tenants, "acme-1").tenant("").name == "acme"
    assert by_certificate(tenants, b"engine.zeta").tenant("").name == "zeta"


def test_a_missing_file_is_named(tenants: Tenants, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml could not be read: No such file"):
        tenants.load(tmp_path / "nowhere.toml")


def test_a_rate_allows_its_number_and_one_second_more(clock: HeldClock) -> None:
    rate = Rate(clock, 100)
    through = 0
    for _ in range(500):  # five seconds in steps of ten milliseconds, three requests each
        for _ in range(3):
            with contextlib.suppress(Overloaded):
                rate.take(1)
                through += 1
        clock.now_ns += 10**7
    assert through == 100 + 499


def test_a_refused_call_costs_nothing_and_passes_at_the_announced_time(clock: HeldClock) -> None:
    rate = Rate(clock, 10)
    rate.take(10)
    for _ in range(100):
        with pytest.raises(Overloaded) as caught:
            rate.take(5)
        assert caught.value.retry_after_ms == 500
    clock.now_ns += 500 * 10**6 - 1
    with pytest.raises(Overloaded):
        rate.take(5)
    clock.now_ns += 1
    rate.take(5)


def test_a_call_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for_afterwards(
    clock: HeldClock,
) -> None:
    rate = Rate(clock, 10)
    rate.take(50)
    with pytest.raises(Overloaded) as caught:
        rate.take(1)
    assert caught.value.retry_after_ms == 4100
    clock.now_ns += 4100 * 10**6
    rate.take(1)


def test_no_limit_is_unlimited(clock: HeldClock) -> None:
    rate = Rate(clock, 0)
    for _ in range(10):
        rate.take(10**9)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_audit_log_records_accepted_callers_and_a_bounded_number_of_refusals(
    clock: HeldClock, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    with Audit(clock, path) as audit:
        audit.connected("attach", tenant="acme", peer="ipv4:1.2.3.4:5", connection=7)
        for _ in range(AUDIT_LINES_OF_ONE_PER_S + 30):
            audit.refused("get", tenant="zeta\n", peer="ipv4:6.6.6.6:6", why="no")
        audit.connected("detach", tenant="acme", peer="ipv4:1.2.3.4:5", connection=7)
        clock.now_ns += 10**9
        audit.refused("get", tenant="zeta", peer="ipv4:6.6.6.6:6", why="no")
    attach, *refused, detach, last = lines(path)
    assert attach == {
        "at_ms": 10**6,
        "what": "attach",
        "tenant": "acme",
        "peer": "ipv4:1.2.3.4:5",
        "outcome": "ok",
        "connection": 7,
    }
    assert len(refused) == AUDIT_LINES_OF_ONE_PER_S
    assert all(line["outcome"] == "refused" for line in refused)
    assert detach["what"] == "detach"
    assert detach["left_out"] == 30
    assert "left_out" not in last
    assert path.stat().st_mode & 0o777 == 0o600
    with Audit(clock, path) as audit:
        audit.note("attach", tenant="acme", peer="p")
    assert len(lines(path)) == AUDIT_LINES_OF_ONE_PER_S + 4, "a log is gone on with"


def test_a_caller_that_fills_the_audit_log_hides_no_lines_of_others(clock: HeldClock, tmp_path: Path) -> None:
    with Audit(clock, path := tmp_path / "audit.jsonl") as audit:
        for port in range(1000):
            audit.refused("get", tenant="", peer=f"ipv4:6.6.6.6:{port}", why="no")
        audit.refused("get", tenant="", peer="ipv4:7.7.7.7:1", why="no")
        keys = [bytes([number] * 32) for number in range(AUDIT_NAMES_MAX + 5)]
        audit.removed("delete", tenant="acme", peer="ipv4:1.2.3.4:5", names=keys, found=3)
        for host in range(1000):
            audit.refused("get", tenant="", peer=f"ipv4:8.8.{host >> 8}.{host & 255}:1", why="no")
        for host in range(1000):
            audit.refused("get", tenant="acme", peer=f"ipv6:%5Bfd00::{host:x}%5D:1", why="no")
        for port in range(AUDIT_LINES_OF_ONE_PER_S):
            audit.refused("get", tenant="zeta", peer=f"ipv4:6.6.6.6:{port}", why="no", is_proved=True)
    told = lines(path)
    assert [one["tenant"] for one in told[-AUDIT_LINES_OF_ONE_PER_S:]] == ["zeta"] * AUDIT_LINES_OF_ONE_PER_S
    strangers = [one for one in told if one["outcome"] == "refused" and one["tenant"] == ""]
    assert len(strangers) == AUDIT_LINES_PER_S // 2
    assert told[AUDIT_LINES_OF_ONE_PER_S]["peer"] == "ipv4:7.7.7.7:1"
    assert told[AUDIT_LINES_OF_ONE_PER_S]["left_out"] == 1000 - AUDIT_LINES_OF_ONE_PER_S
    removed = told[AUDIT_LINES_OF_ONE_PER_S + 1]
    assert (removed["what"], removed["tenant"], removed["named"], removed["found"]) == (
        "delete",
        "acme",
        13,
        3,
    )
    assert removed["names"] == ",".join(key.hex() for key in keys[:AUDIT_NAMES_MAX])


@pytest.mark.parametrize("peer", ["ipv6:%5Bfd00::{:x}%5D:1", "http:fd00::{:x}:80", "ipv4:1.2.3.4:{}"])
def test_the_lines_of_a_source_are_bounded_over_all_its_addresses(
    clock: HeldClock, tmp_path: Path, peer: str
) -> None:
    with Audit(clock, path := tmp_path / "audit.jsonl") as audit:
        for number in range(1, 2 * AUDIT_LINES_OF_ONE_PER_S):
            audit.refused("get", tenant="", peer=peer.format(number), why="no")
    assert len(lines(path)) == AUDIT_LINES_OF_ONE_PER_S


def test_clients_that_connect_and_leave_fill_no_drive_and_hide_nothing(
    clock: HeldClock, tmp_path: Path
) -> None:
    with Audit(clock, path := tmp_path / "audit.jsonl") as audit:
        for number in range(1000):
            audit.connected("attach", tenant=f"evil {number % 10}", peer="p", connection=number)
        audit.connected("attach", tenant="acme", peer="p", connection=1)
        audit.refused("get", tenant="acme", peer="p", why="no", is_proved=True)
        clock.now_ns += 10**9
        audit.connected("detach", tenant="evil 1", peer="p", connection=1)
    told = lines(path)
    assert len(told) == 10 * AUDIT_LINES_OF_ONE_PER_S + 3
    assert told[-3]["left_out"] == 1000 - 10 * AUDIT_LINES_OF_ONE_PER_S
    assert (told[-3]["tenant"], told[-2]["what"], told[-1]["what"]) == ("acme", "get", "detach")


def test_the_audit_log_has_room_for_a_number_of_receipts_of_each_tenant(
    clock: HeldClock, tmp_path: Path
) -> None:
    with Audit(clock, tmp_path / "audit.jsonl") as audit:
        for _ in range(AUDIT_LINES_OF_ONE_PER_S):
            assert audit.has_room("evil")
        assert not audit.has_room("evil")
        assert audit.has_room("acme")
        clock.now_ns += 10**9
        assert audit.has_room("evil")
    with Audit(clock, None) as nowhere:
        assert all(nowhere.has_room("evil") for _ in range(2 * AUDIT_LINES_PER_S))


def test_an_unwritable_audit_log_is_reported_at_the_start_and_stops_nothing_later(
    clock: HeldClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        Audit(clock, tmp_path)
    with Audit(clock, path := tmp_path / "full"):
        pass
    path.unlink()
    path.symlink_to("/dev/full")
    with Audit(clock, path) as audit:
        audit.note("attach", tenant="acme", peer="p")
        audit.note("attach", tenant="acme", peer="p")
    assert [record.getMessage() for record in caplog.records] == [
        "The audit log can't be written: No space left on device."
    ]


def test_quotas_are_keyed_by_the_names_on_the_drive_and_list_only_tenants_with_one(
    tenants: Tenants, tmp_path: Path
) -> None:
    assert tenants.quotas() == {}
    tenants.load(written(tmp_path, TWO + "bytes = 7_000_000\n"))
    assert tenants.quotas() == {tenants.named("zeta").id: 7_000_000}
