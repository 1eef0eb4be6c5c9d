"""Every page is reachable from the index, every link leads somewhere, and every command's flags are ones that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvstore.cli import _parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)?(?:#([^)\s]+))?\)")
_COMMAND = re.compile(r"(?:^|[\s`$])((?:\.venv/bin/)?kvstore (?:[a-z]+)[^`\n#|]*)", re.MULTILINE)


def _code(text: str) -> str:
    """The text of shell fences, and of commands in backticks."""
    fenced = re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`(kvstore [^`]+)`", text)
    return "\n".join([*(block.replace("\\\n", " ") for block in fenced), *inline])


def _commands(text: str) -> list[list[str]]:
    return [shlex.split(found.strip()) for found in _COMMAND.findall(_code(text))]


def _flags() -> dict[str, set[str]]:
    """The flags of each subcommand."""
    (subcommands,) = [
        one for one in _parser()._actions if hasattr(one, "choices") and isinstance(one.choices, dict)
    ]
    assert isinstance(subcommands.choices, dict)
    return {
        name: {flag for action in parser._actions for flag in action.option_strings}
        for name, parser in subcommands.choices.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_flags_of_commands_exist(page: Path) -> None:
    known = _flags()
    for words in _commands(page.read_text()):
        command = words[1]
        assert command in known, f"{page.name}: {' '.join(words)}"
        unknown = {word.split("=")[0] for word in words[2:] if word.startswith("--")} - known[command]
        assert not unknown, f"{page.name}: {' '.join(words)}"


def test_commands_are_detected() -> None:
    text = "```sh\n$ kvstore serve --data x \\\n  --nonsense\n```\n and `kvstore fsck FOLDER`; kvstore alone is a word"
    assert _commands(text) == [
        ["kvstore", "serve", "--data", "x", "--nonsense"],
        ["kvstore", "fsck", "FOLDER"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_have_a_target(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in _LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_index_names_every_page() -> None:
    named = {target for target, _ in _LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= named
