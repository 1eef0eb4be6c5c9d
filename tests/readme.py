"""Reads the shell commands of a page, and makes the clean copy that they are run in.

A command is a line of a fenced `console` block that begins with `$ `, or any line of a fenced `sh` block that is
neither empty nor a comment. Lines without `$ ` after a command are output, and are not compared.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["clean_copy", "commands", "environment"]

_BUILT_FOLDERS = {".venv", ".venv-engines", ".git", "build", "dist", "__pycache__", ".cache"}
_BUILT_SUFFIXES = {".so", ".o", ".pyc"}
_BUILT_FILES = {
    "nic_offload/_core.c",
    "kvstore/storage/_uring.c",
    "kvstore/storage/keep/_keep.c",
    "sim/replay/_events.c",
}
_FENCE = re.compile(r"^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of a page, in order, exactly as printed."""
    found = []
    for kind, block in _FENCE.findall(text):
        for line in block.splitlines():
            if kind == "console" and line.startswith("$ "):
                found.append(line[2:].strip())
            elif kind == "sh" and line.strip() and not line.lstrip().startswith("#"):
                found.append(line.strip())
    return found


def clean_copy(root: Path, copy: Path) -> Path:
    """The files that git would check out of this work tree, with its uncommitted changes and without build products."""
    for name in _listed_by_git(root) or _found(root):
        source, target = root / name, copy / name
        if source.is_file():  # a file that was deleted and not committed is still in the index
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return copy


def _listed_by_git(root: Path) -> list[str]:
    """The files that git knows or would add; none without git or its work tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(set(listed.stdout.decode().split("\0")) - {""})


def _found(root: Path) -> list[str]:
    """The files of an unpacked archive, without those that a build or a test has made."""
    names = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        built = _BUILT_FOLDERS.intersection(name.parts) or name.suffix in _BUILT_SUFFIXES
        if path.is_file() and not built and name.as_posix() not in _BUILT_FILES:
            names.append(name.as_posix())
    return names


def environment(copy: Path) -> dict[str, str]:
    """The environment of this process, without the variables that a venv, make or pytest has set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "MAKE", "VIRTUAL_ENV", "PYTHON", "TRIGGERKV")) and name != "MFLAGS"
    }
    folders = kept.get("PATH", "").split(os.pathsep)
    kept["PATH"] = os.pathsep.join(folder for folder in folders if "/.venv/" not in f"{folder}/")
    kept["PWD"] = str(copy)
    return kept
