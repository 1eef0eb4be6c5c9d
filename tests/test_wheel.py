"""The wheels: importable without libfabric, small enough; adapters and kvsim have wheels of their own."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from tests.readme import environment
from tools.release import PARTS, WHEEL_BYTES_MAX, materials, split, without_comments, without_docstrings

ROOT = Path(__file__).resolve().parent.parent

DEFLATED = 1.03  # a release is packed by zopfli, whose files are smaller by this factor or more

CHECK = """
import pathlib, sys
import kvstore, nic_offload, kvstore.errors, kvstore.client, kvcli.running
home = pathlib.Path(sys.prefix)
for package in (kvstore, nic_offload, kvcli):
    assert home in pathlib.Path(package.__file__).parents, package.__file__
from nic_offload.nvrtc import KERNEL_SOURCE
assert KERNEL_SOURCE.is_file(), KERNEL_SOURCE
from nic_offload.library import load
try:
    load()
except kvstore.errors.FabricUnavailable as error:
    print("without libfabric:", error)
else:
    raise SystemExit("libfabric was found")
"""


def _metadata(name: str, version: str, files: dict[str, bytes]) -> str:
    return files[f"{name.replace('-', '_')}-{version}.dist-info/METADATA"].decode()


def test_modules_lose_their_comments_and_nothing_else() -> None:
    for path in [
        ROOT / "kvstore/limits.py",
        ROOT / "kvstore/node/granted_puts.py",
        ROOT / "nic_offload/lane.py",
    ]:
        source = path.read_bytes()
        bare = without_comments(source)
        assert ast.dump(ast.parse(bare), include_attributes=True) == ast.dump(
            ast.parse(source), include_attributes=True
        )
        assert b"  # " in source
        assert b"  # " not in bare
    assert without_comments(b"text = '# no comment'  # one\n# two\n") == b"text = '# no comment'\n\n"


def test_a_released_module_of_the_node_has_no_docstrings_and_the_same_lines() -> None:
    source = b'''"""What it is.

More of it.
"""
x = """kept"""
class A:
    """All of it."""
def f():
    """No."""
    return 1
'''
    bare = without_docstrings(source)
    assert bare == b'\n\n\n\nx = """kept"""\nclass A:\n    """All of it."""\ndef f():\n\n    return 1\n'
    source = b"""'Stays.'
def f():
    'Stays.'
    return 1
class _A:
    'No.'
    def f(self):
        'No.'
        return 1
def _g():
    'No.'
    return 1
def __h__():
    'Stays.'
    return 1
"""
    bare = without_docstrings(source, only_private=True)
    assert bare.count(b"Stays") == 3
    assert bare == source.replace(b"    'No.'", b"").replace(b"\n    \n", b"\n\n")
    ours = (ROOT / "kvstore/node/hot.py").read_bytes()
    assert without_docstrings(ours).count(b"\n") == ours.count(b"\n")


def test_each_dependency_has_both_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: of for name, of in project["optional-dependencies"].items() if name != "dev"}
    for one in [*project["dependencies"], *chain.from_iterable(extras.values())]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<\d+", one), one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_without_libfabric(wheel: Path, tmp_path: Path) -> None:
    clean = environment(tmp_path) | {"TRIGGERKV_LIBFABRIC": "/nonexistent"}

    def run(*arguments: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            arguments, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    assert wheel.name.startswith("triggerkv-")
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith((".c", ".h"))] == []
    parts = split(wheel.read_bytes())
    assert list(parts) == ["triggerkv", *PARTS]
    wheels = {}
    version = wheel.name.split("-")[1]
    told = {name: _metadata(name, version, files) for name, files in parts.items()}
    for name in PARTS:
        assert f"Requires-Dist: triggerkv=={version}\n" in told[name]
    asks_torch = [name for name in told if "torch" in told[name].partition("\n\n")[0]]
    assert asks_torch == ["triggerkv-engines"], "an extra of the adapters"
    assert told["triggerkv"].partition("\n\n")[2], "the README"
    for name, files in parts.items():
        assert [file for file in files if file.endswith((".pyi", "_build.py"))] == []
        assert b'"""The node' not in files.get("kvstore/node/hot.py", b"")
        assert b'"""A client of one node.' in files.get(
            "kvstore/client/client.py", b'"""A client of one node.'
        )
        (record,) = (data.decode() for file, data in files.items() if file.endswith("RECORD"))
        assert {line.split(",")[0] for line in record.splitlines()} == set(files)
        wheels[name] = tmp_path / "split" / wheel.name.replace("triggerkv", name.replace("-", "_"))
        wheels[name].parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheels[name], "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file, data in files.items():
                archive.writestr(file, data)
        size = wheels[name].stat().st_size
        assert size <= WHEEL_BYTES_MAX * DEFLATED, f"{name} would be too large for a release"
        bill = json.dumps(materials(name, version, files))
        assert ("sim/replay/_events" in bill) == (name == "triggerkv-sim")

    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    python = venv / "bin" / "python"
    run(sys.executable, *pip, "--python", str(python), "install", *offline, str(wheels["triggerkv"]))
    # The dependencies are the outer venv's. A .pth in it that leads back to this tree is not followed: only
    # a folder that *site* itself walks has its .pth files read.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + os.linesep)

    assert "without libfabric: libfabric could not be loaded" in run(str(python), "-c", CHECK)
    assert "usage: kvstore" in run(str(venv / "bin" / "kvstore"), "--help")
    plugins = "from importlib.metadata import entry_points as e; print(*e(group='vllm.general_plugins'))"
    assert run(str(python), "-c", plugins) == "\n"
    run(sys.executable, *pip, "--python", str(python), "install", *offline, str(wheels["triggerkv-engines"]))
    assert "kvstore.engines.vllm.plugin" in run(str(python), "-c", plugins)
    run(str(python), "-c", "import kvstore.engines.carrier")
    assert not (venv / "bin" / "kvsim").exists()
    run(sys.executable, *pip, "--python", str(python), "install", *offline, str(wheels["triggerkv-sim"]))
    assert "usage: kvsim" in run(str(venv / "bin" / "kvsim"), "--help")
    assert "triggered s" in run(str(venv / "bin" / "kvsim"), "curve")
