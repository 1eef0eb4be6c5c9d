"""`kvstore match`, by its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.cli import main
from kvstore.commands.match_command import parse_request
from kvstore.errors import RuleError
from tests.nic_offload.test_match_file import example

if TYPE_CHECKING:
    from pathlib import Path

ALICE = (
    "tenant=acme,user=alice,context=chat-17,model=llama-3-70b,source=10.1.2.3,destination=10.9.0.1,"
    "source_port=40000,destination_port=443,protocol=tcp"
)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "rules.toml"
    path.write_text(example())
    return str(path)


def _out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["match", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_rules_are_shown_in_order_of_precedence(rules: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _out(capsys, rules).splitlines()
    assert [line.split()[0] for line in lines[:7]] == ["priority", "guard", "1000", "200", "150", "100", "0"]
    assert {line.find("acme", 30) for line in lines if "bob" in line} == {lines[0].index("tenant")}
    assert lines[5].endswith("10.0.0.0/8 port 1024-65535  * port 443  tcp       fetch")
    assert "  alice, chat 17: source 10.1.0.0/16, destination_port 443, protocol tcp" in lines
    assert lines[-1] == "Rules: 5. Guards: 1. Masks: 6."


def test_a_request_shows_its_hit_and_the_entries_that_lost(
    rules: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _out(capsys, rules, "--request", ALICE)
    assert out.endswith(
        "\n"
        "The request hits 'alice, chat 17': prefetch, route(node-2); sessions 'acme/alice'.\n"
        "Considered:\n"
        "       200  alice, chat 17       wins\n"
        "     guard  guard of acme/alice  lets pass: one of the user's bindings\n"
        "       100  acme                 loses: lower priority\n"
        "         0  rest                 loses: lower priority\n"
    )


def test_a_spoofed_request_is_reported_as_denied(rules: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = _out(capsys, rules, "--request", ALICE.replace("10.1.2.3", "10.2.2.3"))
    assert "The request hits 'guard of acme/alice': deny; " in out
    assert "       200  alice, chat 17       does not match: not one of its bindings\n" in out


def test_a_request_without_a_hit_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    out = _out(capsys, str(path), "--request", ALICE)
    assert out.endswith("\nThe request hits nothing.\nNo rule matched in part.\n")


def test_the_json_has_the_same_content(rules: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(_out(capsys, rules, "--json", "--request", ALICE))
    names = [entry["name"] for entry in document["entries"]]
    assert names == ["guard of acme/alice", "misused", "alice, chat 17", "bob", "acme", "rest"]
    assert document["entries"][2]["bind"][1] == {"source": "2001:db8:a::/48"}
    assert document["entries"][2]["actions"] == ["prefetch", "route(node-2)"]
    assert document["hit"] == 2
    assert document["sessions"] == "acme/alice"
    assert [item["outcome"] for item in document["considered"]] == [
        "won",
        "passed",
        "lower_priority",
        "lower_priority",
    ]
    assert document["request"]["source"] == "10.1.2.3"
    assert document["statistics"]["masks"] == 6
    assert "hit" not in json.loads(_out(capsys, rules, "--json"))


@pytest.mark.parametrize(
    ("text", "request_text", "message"),
    [
        (None, None, "could not be read: No such file"),
        ("[[rule]]\n", None, "Rule 1 (line 1): actions takes a list"),
        (
            '[[rule]]\nactions = ["fetch"]\n' * 2,
            None,
            "same match and priority",
        ),
        ("", "tenant", "takes FIELD=VALUE"),
        ("", "user=a,user=b", "gives user twice"),
        ("", "user=a", "The request lacks tenant"),
        ("", "colour=a", "no field 'colour'"),
    ],
)
def test_an_error_is_one_sentence_and_status_2(
    text: str | None,
    request_text: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "rules.toml"
    if text is not None:
        path.write_text(text)
    more = [] if request_text is None else ["--request", request_text]
    assert main(["match", str(path), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvstore: ")
    assert message in err
    assert err.count("\n") == 1


def test_rules_that_are_not_utf_8_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(b"# \xff")
    assert main(["match", str(path)]) == 2
    assert "is not UTF-8: byte 2 is invalid." in capsys.readouterr().err


def test_a_comma_in_a_value_is_part_of_it() -> None:
    asked = parse_request(ALICE.replace("user=alice", "user=Doe, Jane,context-less"))
    assert asked.user == "Doe, Jane,context-less"
    with pytest.raises(RuleError, match="lacks protocol"):
        parse_request(ALICE.removesuffix(",protocol=tcp"))
