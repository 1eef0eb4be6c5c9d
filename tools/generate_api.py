"""Generates `docs/api.md` from the docstrings of the public API: `make api`. A test compares the page with the code."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PAGE", "main", "page", "public_classes", "public_methods"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"

# The modules that users import, and of each what stands in the page; none named: all that it exports.
_MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kvstore.client", ()),
    ("kvstore.names", ("block_key",)),
    ("kvstore.layout", ("Layout",)),
    ("kvstore.durability", ()),
    ("kvstore.miss", ()),
    ("nic_offload.flags", ("FlagWords", "FlagWord")),
    ("nic_offload.fabric", ("Region",)),
    ("nic_offload.pieces", ("Pieces",)),
    ("kvstore.testing", ()),
    ("kvstore.errors", ()),
)
_LINE_MAX = 100
# Called from inside the package, across modules.
_INSIDE = {
    *("Arrivals.dropped", "Arrivals.forgotten", "Arrivals.stored"),
    *("ClusterBlock.copied", "RegisteredMemory.copied", "Nodes.placed_as", "FlagWord.place"),
    *("Layout.first_head", "Layout.heads"),
}
_FIRST = ("Client", "Block")  # before the others, which follow by name

_HEAD = """\
# API reference

Generated from the docstrings by `make api`; do not edit. [client.md](client.md) shows how the parts go together.

What is not on this page is not public, and may change without notice. `kvstore.__version__` is the version.
`AsyncClient`, `AsyncClusterClient`, `Block`, `Client`, `ClusterClient`, `Durability`, `FlagWords`, `Hit`, `KvError`,
`Miss`, `MissReason` and `block_key` can be imported from `kvstore` too.

A test runs all examples against a real node. A method's example continues the one of its class, and that one continues
the example of the class that makes its objects: `Session` that of `Client`, `Resuming` that of `Session`. Those with
`await` run as printed in `python -m asyncio`.
"""


def page() -> str:
    """The text of the page."""
    return (
        "\n".join([_HEAD, *(line for name, only in _MODULES for line in _module(name, only))]).rstrip() + "\n"
    )


def public_classes() -> Iterator[tuple[str, type]]:
    """The classes of the page, by name."""
    for module, only in _MODULES:
        for name, what in _members(module, only):
            if inspect.isclass(what):
                yield name, what


def public_methods(name: str, kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A class's methods on the page, by name; properties are none."""
    for member, found in vars(kind).items():
        is_method = isinstance(found, (classmethod, staticmethod)) or inspect.isfunction(found)
        if is_method and not member.startswith("_") and f"{name}.{member}" not in _INSIDE:
            yield member, getattr(kind, member)


def _members(name: str, only: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(name)
    if name == "kvstore.errors":  # the tree says it all
        return
    names = only or (
        *filter(module.__all__.__contains__, _FIRST),
        *sorted(set(module.__all__) - set(_FIRST)),
    )
    for one in names:
        yield one, getattr(module, one)


def _module(name: str, only: tuple[str, ...]) -> Iterator[str]:
    yield f"## {name}\n"
    if name == "kvstore.errors":
        yield from _prose(inspect.getdoc(importlib.import_module(name)) or "")
    for one, what in _members(name, only):
        yield from _member(one, what)


def _member(name: str, what: object) -> Iterator[str]:
    yield f"### {name}\n"
    if not inspect.isclass(what):
        yield from _function(name, what)
        return
    is_made = not issubclass(what, int) and not (what.__init__.__doc__ or "").endswith(" makes it.")
    if is_made:
        yield from _signature(name, what)
    yield from _prose(inspect.getdoc(what) or "")
    if is_made and "__init__" in vars(what):
        yield from _prose(inspect.cleandoc(what.__init__.__doc__ or ""))
    methods = dict(public_methods(name, what))
    for member, found in vars(what).items():
        if isinstance(found, property) and not member.startswith("_") and f"{name}.{member}" not in _INSIDE:
            yield f"#### {name}.{member}\n"
            yield from _prose(inspect.getdoc(found) or "")
        elif member in methods:
            yield f"#### {name}.{member}()\n"
            yield from _function(f"{name}.{member}", methods[member])
    if issubclass(what, int):
        yield from (f"- `{one.name}`" for one in what)  # type: ignore[attr-defined]
        yield ""


def _function(name: str, what: object) -> Iterator[str]:
    yield from _signature(name, what)
    yield from _prose(inspect.getdoc(what) or "")


def _signature(name: str, what: object) -> Iterator[str]:
    signature = inspect.signature(what)  # type: ignore[arg-type]
    shown: list[str] = []
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in shown):
            shown.append("*")
        shown.append(_plain(str(one)))
    returns = signature.return_annotation
    end = ")" if returns is signature.empty or inspect.isclass(what) else f") -> {returns}"
    line = f"{name}({', '.join(shown)}{end}"
    if len(line) > _LINE_MAX:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in shown), end])
    yield f"```python\n{line}\n```\n"


def _plain(parameter: str) -> str:
    """A parameter with its annotation as in the source."""
    parameter = re.sub(r": (?:ForwardRef\()?'([^']*)'\)?", r": \1", parameter)
    return re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", parameter)  # a member of an enumeration


def _prose(text: str) -> Iterator[str]:
    """Paragraphs as they are; examples, and what is indented, in fences."""
    for part in re.split(r"\n\n", text.strip()):
        if part.startswith(">>> "):
            yield f"```pycon\n{part}\n```\n"
        elif part.startswith("    "):
            yield f"```text\n{inspect.cleandoc(part)}\n```\n"
        elif part:
            yield f"{part}\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
