"""Completion for bash and zsh, generated from a command's own parser.

What always holds: suggestions are read from the parser itself, the values of an option with few of them included
(argparse's `choices`, or those of `offer_values`); where neither a command nor an option fits, the shell
completes file names.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SHELLS", "add_completion", "offer_values", "script"]

SHELLS = ("bash", "zsh")
_VALUES: Final[WeakKeyDictionary[argparse.Action, tuple[str, ...]]] = WeakKeyDictionary()

_BASH = """\
# bash completion for {name}: source <({name} completion bash)
_{name}() {{
    local command="" word words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$command $word" in
{steps}
        esac
    done
    case "$command" in
{words}
    esac
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
complete -o default -F _{name} {name}
"""

_ZSH = """\
#compdef {name}
# zsh completion for {name}: {name} completion zsh > a folder of $fpath/_{name}
_{name}() {{
    local command="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$command $word" in
{steps}
        esac
    done
    local -a offered
    case "$command" in
{words}
    esac
    case "$command $words[CURRENT-1]" in
{values}
    esac
    _describe '{name}' offered || _files
}}
_{name} "$@"
"""


class _Offer(NamedTuple):
    word: str
    help: str


class _Command(NamedTuple):
    path: str  # " calibrate run"; the command itself is ""
    offers: list[_Offer]
    values: dict[str, list[str]]  # of its options that have few
    commands: list[str]


def add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command that prints a script."""
    parser = commands.add_parser(
        "completion",
        help="print a script for bash or zsh that completes commands and options",
        description="Print a script that completes commands and options. For bash, source it in ~/.bashrc; for zsh,"
        " save it in a folder of $fpath, named after the command with an underscore in front.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def offer_values(action: argparse.Action, values: Sequence[str]) -> None:
    """Offer these values of an option that argparse itself doesn't check."""
    _VALUES[action] = tuple(values)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script, to be sourced by bash, or put into a folder of zsh's `fpath`."""
    known = list(_walk(parser, ""))
    steps = [
        f'            "{one.path} {name}") command="{one.path} {name}" ;;'
        for one in known
        for name in one.commands
    ]
    if shell == "bash":
        words = [
            f'        "{one.path}") words="{" ".join(offer.word for offer in one.offers)}" ;;'
            for one in known
        ]
        values = [
            f'        "{one.path} {option}") words="{" ".join(those)}" ;;'
            for one in known
            for option, those in one.values.items()
        ]
        template = _BASH
    else:
        words = [
            f'        "{one.path}") offered=({" ".join(_described(offer) for offer in one.offers)}) ;;'
            for one in known
        ]
        values = [
            f'        "{one.path} {option}") offered=({" ".join(those)}) ;;'
            for one in known
            for option, those in one.values.items()
        ]
        template = _ZSH
    parts = {"steps": steps, "words": words, "values": values}
    return template.format(name=parser.prog, **{name: "\n".join(lines) for name, lines in parts.items()})


def _walk(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    offers: list[_Offer] = []
    inner: dict[str, argparse.ArgumentParser] = {}
    values: dict[str, list[str]] = {}
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to say what it takes
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            lines = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            inner.update(action.choices)
            offers += [_Offer(name, lines.get(name, "")) for name in action.choices]
        elif action.option_strings:
            offers.append(_Offer(action.option_strings[-1], _said(action, parser)))
            if those := [str(one) for one in action.choices or _VALUES.get(action, ())]:
                values |= dict.fromkeys(action.option_strings, those)
        elif action.choices is not None:
            offers += [_Offer(str(choice), _said(action, parser)) for choice in action.choices]
    yield _Command(path, offers, values, list(inner))
    for name, one in inner.items():
        yield from _walk(one, f"{path} {name}")


def _said(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if not action.help:
        return ""
    return action.help % {**vars(action), "prog": parser.prog}


def _described(offer: _Offer) -> str:
    """A word and what it is, as `_describe` takes them, in single quotes."""
    word = offer.word.replace(":", r"\:")
    text = f"{word}:{offer.help}" if offer.help else word
    return "'" + text.replace("'", "'\\''") + "'"
