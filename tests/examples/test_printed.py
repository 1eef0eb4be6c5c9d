"""The examples that need no engine, run as printed, each against nodes of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cassini.build import build
from tests.cluster.real_etcd import program
from tests.deploy.test_promtool import promtool
from tests.examples.printed import EXAMPLES, ROOT, Command, check, commands, cpp_environment, run

NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENOTCACHED")
README = (EXAMPLES / "README.md").read_text()
LISTED = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", README, re.MULTILINE)


def test_commands_are_parsed_as_printed() -> None:
    text = '"""Says what.\n\n    $ serve &\n    $ a \\\n        b\n    1\n    2 ...\n"""\n\n    $ no\n'
    assert commands(text) == [
        Command("serve &", ()),
        Command("a \\\n    b", ("1", "2 ...")),
    ]
    assert commands("// x\n//\n//     $ a\n//     b\n//\n// $ no") == [Command("a", ("b",))]


def test_the_table_names_every_example_and_each_has_its_commands() -> None:
    assert len(LISTED) == 13
    assert all(name == target and (EXAMPLES / target).is_file() for name, target in LISTED)
    programs = {path for kind in ("py", "ts", "cc", "ipynb") for path in EXAMPLES.rglob(f"*.{kind}")}
    listed = {EXAMPLES / name for name, _ in LISTED}
    assert {path for path in programs if not {"node_modules", "build"} & set(path.parts)} <= listed
    for name, _ in LISTED:
        if not name.endswith("ipynb"):
            assert commands((EXAMPLES / name).read_text()), name


@pytest.mark.parametrize(
    "name",
    ["first_put.py", "chat_resume.py", "tls_between_hosts.py", "captured_step.py", "scattered_pages.py"],
)
def test_an_example_runs_as_printed(name: str, tmp_path: Path) -> None:
    check(name, run(name, tmp_path))


@pytest.mark.parametrize("errors_count", ["0", "1"])
def test_a_stream_that_rings_a_nics_doorbell_fires_scattered_pages(errors_count: str, tmp_path: Path) -> None:
    """The same example on the software Cassini, whose counters have doorbells."""
    done = run(
        "scattered_pages.py",
        tmp_path,
        TRIGGERKV_LIBFABRIC=str(build()),
        SOFT_CASSINI_FLUSH_MS="20",
        SOFT_CASSINI_ERRORS_COUNT=errors_count,
    )
    check("scattered_pages.py", done)


def test_an_example_that_prints_something_else_fails(tmp_path: Path) -> None:
    done = run("first_put.py", tmp_path)
    with pytest.raises(AssertionError, match="is not in"):
        check("first_put.py", done._replace(printed=done.printed.replace("True", "False")))


def test_the_cluster_runs_as_printed(tmp_path: Path) -> None:
    program()  # or the test is skipped
    check("cluster.py", run("cluster.py", tmp_path))


@pytest.mark.timeout(180)
def test_the_client_in_typescript_runs_as_printed(tmp_path: Path) -> None:
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)} here: apt-get install nodejs npm")
    done = run("typescript/client.ts", tmp_path, timeout_s=150)
    if any(word in done.said for word in NO_REGISTRY):
        pytest.skip(
            "the npm registry can't be reached, and .cache/npm lacks packages: run it once with a network"
        )
    check("typescript/client.ts", done)


@pytest.mark.timeout(180)
def test_the_client_in_cpp_runs_as_printed(tmp_path: Path) -> None:
    more = cpp_environment()
    path = more.get("PATH", os.environ["PATH"])
    tools = ("g++", "pkg-config", "protoc", "grpc_cpp_plugin")
    missing = [name for name in tools if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(
            f"there is no {' and no '.join(missing)} here: make grpc-cpp, apt-get install g++ pkg-config"
        )
    if not Path("/usr/include/openssl/sha.h").exists():
        pytest.skip("there is no openssl/sha.h here: apt-get install libssl-dev")
    check("cpp/client.cc", run("cpp/client.cc", tmp_path, words=None, timeout_s=150, **more))


def test_prometheus_scrapes_the_example_and_a_node_exports_what_the_dashboard_uses(tmp_path: Path) -> None:
    check("monitoring/compose.yaml", run("monitoring/compose.yaml", tmp_path))
    folder = EXAMPLES / "monitoring"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    deployed = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["image"] == deployed["services"][name]["image"]
        for volume in service["volumes"]:
            assert (folder / volume.split(":")[0]).resolve().exists(), volume
    scrape = yaml.safe_load((folder / "prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert f"--http {target}" in commands((folder / "compose.yaml").read_text())[0].line
    assert f'job="{job["job_name"]}"' in (ROOT / "deploy/prometheus/alerts.yaml").read_text()
    shutil.copy(ROOT / "deploy/prometheus/alerts.yaml", tmp_path)
    shutil.copy(folder / "prometheus.yaml", tmp_path)
    done = promtool("check", "config", tmp_path / "prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "capacity_planning.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    assert not any(one["outputs"] for one in cells), "what a run printed is not kept"
    source = "\n".join("".join(one["source"]) for one in cells)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cheapest: triggered" in done.stdout
