"""Rules from TOML: the page's own example, and errors that say where and what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nic_offload import match_action, match_fields, match_file, match_space
from nic_offload.errors import RuleError
from nic_offload.match_action import Action, ActionKind, Table
from nic_offload.match_file import parse_rules
from nic_offload.match_rule import PRIORITY_DEFAULT
from tests.nic_offload.matching import request

PAGE = Path(__file__).resolve().parents[2] / "docs" / "match-action.md"


def example() -> str:
    found = re.search(
        r"<!-- example -->\n```toml\n(.*?)```\n<!-- end of example -->", PAGE.read_text(), re.DOTALL
    )
    assert found is not None
    return found[1]


def test_the_pages_example_does_what_the_page_says() -> None:
    rules = parse_rules(example())
    assert [rule.name for rule in rules] == ["alice, chat 17", "bob", "misused", "acme", "rest"]
    assert rules[0].actions == (Action(ActionKind.PREFETCH), Action(ActionKind.ROUTE, "node-2"))
    assert rules[0].sessions == "acme/alice"
    assert rules[3].priority == PRIORITY_DEFAULT
    table = Table()
    table.replace(rules)
    alice = {"context": "chat-17", "model": "llama-3-70b"}
    asked = {
        "alice, chat 17": request(**alice),
        "guard of acme/alice": request(**alice, source="10.2.0.1"),
        "bob": request(user="bob"),
        "misused": request(user="bob", source="192.0.2.7"),
        "acme": request(user="carol"),
        "rest": request(user="carol", source_port=80),
    }
    for name, one in asked.items():
        entry = table.match(one, 1)
        assert entry is not None
        assert entry.name == name


def test_the_page_names_every_field_action_and_bound() -> None:
    text = PAGE.read_text()
    for name in (*match_file._RULE_FIELDS, *(kind.value for kind in ActionKind if kind.value != "route")):
        assert f"`{name}`" in text, name
    assert "{ route = " in text
    for bound in (match_action.ENTRIES_MAX, match_action.MASKS_MAX, match_space.ENTRIES_PER_KEY_MAX):
        assert f"{bound:,}" in text
    assert f"{match_fields.BINDINGS_MAX} tables" in text


def test_an_empty_text_has_no_rules() -> None:
    assert parse_rules("") == []


GOOD = '[[rule]]\nname = "first"\nactions = ["fetch"]\n\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", r"The rules are not TOML: .*line 1.*\."),
        ("x = 1", r"The rules contain 'x'; only \[\[rule\]\] is allowed\."),
        ("[rule]\nactions = []", r"A rule begins with \[\[rule\]\], in double brackets\."),
        ("rule = [1]", r"A rule begins with \[\[rule\]\], in double brackets\."),
        (
            GOOD + "[[rule]]\nsorce = 5",
            r"Rule 2 \(line 5\): there is no field 'sorce'; a rule takes name, priority, tenant,.*\.",
        ),
        (GOOD + "  [[ rule ]]\nname = 5", r"Rule 2 \(line 5\): name takes a text of .* not 5\."),
        (
            GOOD + GOOD,
            r"Rule 2 \(line 5\): name must be unique; Rule 1 \(line 1\) has 'first' too\.",
        ),
        ('[[rule]]\nname = "n"', r"Rule 1 \(line 1\), 'n': actions takes a list, each item one of fetch.*\."),
        ("[[rule]]\nactions = []", r"Rule 1 \(line 1\): actions takes 1 to 8 actions, not 0\."),
        (
            '[[rule]]\nactions = ["drop"]',
            r"Rule 1 \(line 1\): actions takes one of fetch, .*, count, or \{ route = \"NODE\" \}, not 'drop'\.",
        ),
        ('[[rule]]\nactions = ["route"]', r"Rule 1 \(line 1\): actions takes .*, not 'route'\."),
        ("[[rule]]\nactions = [{ route = 5 }]", r"Rule 1 \(line 1\): route takes a text .*, not 5\."),
        (
            '[[rule]]\nname = "a: b"\nactions = ["deny", "fetch"]',
            r"Rule 1 \(line 1\), 'a: b': deny must be last, .*\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\npriority = "high"',
            r"Rule 1 \(line 1\): priority takes a whole number from 0 to 65535, not 'high'\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\npriority = 70000',
            r"Rule 1 \(line 1\): priority takes a number from 0 to 65535, not 70000\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\nsource = "10.0.0.1/8"',
            r"Rule 1 \(line 1\): source takes a prefix with no bits set after its length; write 10\.0\.0\.0/8 .*\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\nbind = { source = "10.0.0.1" }',
            r"Rule 1 \(line 1\): bind takes a list of 5-tuples.*\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\nbind = []',
            r"Rule 1 \(line 1\): bind takes from 1 to 16 network 5-tuples, not 0\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\ntenant = "t"\nuser = "u"\nbind = [{ user = "x" }]',
            r"Rule 1 \(line 1\), binding 1: there is no field 'user'; it takes source, .*\.",
        ),
        (
            '[[rule]]\nactions = ["fetch"]\ntenant = "t"\nuser = "u"\nbind = [{ protocol = 6 }, { source = 1 }]',
            r"Rule 1 \(line 1\), binding 2: source takes an IP address .*\.",
        ),
    ],
)
def test_an_error_says_in_one_sentence_where_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rules(text)
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


def test_a_header_inside_a_long_text_costs_only_its_line() -> None:
    text = '[[rule]]\nname = """\\\n[[rule]]\n"""\nactions = []\n'
    with pytest.raises(RuleError, match=r"Rule 1: name takes"):
        parse_rules(text)
