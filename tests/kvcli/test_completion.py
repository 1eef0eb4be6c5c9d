"""Completion offers what the parser accepts, and works in bash."""

from __future__ import annotations

import shutil
import subprocess

import pytest

import kvstore.cli
import sim.cli
from kvcli.completion import SHELLS, script

PARSERS = {"kvstore": kvstore.cli._parser, "kvsim": sim.cli._parser}


def offered(name: str, *words: str) -> list[str]:
    """The words that bash offers for the last of these."""
    line = " ".join(f"'{word}'" for word in (name, *words))
    code = (
        f"{script(PARSERS[name](), 'bash')}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
        f"_{name}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-u", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("kvstore", ["ser"], ["serve"]),
        ("kvstore", ["--v"], ["--version"]),
        ("kvstore", ["serve", "--da"], ["--data"]),
        ("kvstore", ["serve", "--data", "x", "--tl"], ["--tls-cert", "--tls-key", "--tls-clients"]),
        ("kvstore", ["sessions", "e"], ["export"]),
        ("kvstore", ["serve", "--data", "x", "--eviction", ""], ["lru", "s3fifo"]),
        ("kvstore", ["serve", "--log-level", "w"], ["warning"]),
        ("kvsim", ["curve", "--direction", ""], ["put", "get"]),
        ("kvstore", ["get", "./fi"], []),  # bash goes on with files
        ("kvsim", ["cal"], ["calibrate"]),
        ("kvsim", ["calibrate", "f"], ["fit"]),
        ("kvsim", ["calibrate", "fit", "--o"], ["--out"]),
    ],
)
def test_bash_offers_what_the_parser_accepts(name: str, words: list[str], expected: list[str]) -> None:
    assert offered(name, *words) == expected


@pytest.mark.parametrize("name", PARSERS)
def test_bash_offers_all_of_them(name: str) -> None:
    (commands,) = [one.choices for one in PARSERS[name]()._actions if isinstance(one.choices, dict)]
    assert set(offered(name, "")) == {*commands, "--help", "--version"}
    for command, parser in commands.items():
        flags = {one.option_strings[-1] for one in parser._actions if one.option_strings}
        assert set(offered(name, command, "--")) == flags


@pytest.mark.parametrize("name", PARSERS)
def test_zsh_can_parse_its_script(name: str) -> None:
    text = script(PARSERS[name](), "zsh")
    assert text.startswith(f"#compdef {name}\n")
    shell = shutil.which("zsh")
    if shell is None:
        pytest.skip("there is no zsh: apt-get install zsh")
    subprocess.run([shell, "-n"], input=text, text=True, timeout=30, check=True)


def test_there_are_two_shells() -> None:
    assert SHELLS == ("bash", "zsh")
