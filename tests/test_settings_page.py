"""docs/settings.md lists the settings that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.cli import _parser
from kvstore.limits import LOG_LINES_PER_S
from kvstore.reach import Reach, reach_settings
from kvstore.serve_options import OPTIONS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "settings.md").read_text()
ROWS = [
    [cell.strip().strip("`") for cell in line.split("|")[1:4]]
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+` \|", line)
]


def test_the_table_has_each_setting_and_its_flag() -> None:
    assert {name for name, _, _ in ROWS} == reach_settings()
    parser = _parser()
    for _, flag, _ in ROWS:
        if flag:
            value = [] if flag == "--tls" else ["1"] if flag.endswith("-ms") else ["127.0.0.1:1"]
            parser.parse_args(["stats", flag.split()[0], *value])


def test_the_default_timeouts_are_those_of_the_table() -> None:
    default = Reach(("127.0.0.1:1",))
    told = {name: int(shown) for name, _, shown in ROWS if name.endswith("_ms")}
    assert told == {name: getattr(default, name) for name in reach_settings() if name.endswith("_ms")}


def test_settings_that_take_effect_at_once_are_named() -> None:
    for option in OPTIONS:
        if option.reloads:
            assert f"`{option.name}`" in PAGE
    assert f"at most {LOG_LINES_PER_S} lines a second" in PAGE
