"""The files in deploy/ use options that `kvstore` has, are valid by their schemas, and install in a clean folder."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml

from kvstore.cli import _parser
from kvstore.serve_options import settings
from tests.deploy.files import (
    COMPOSE_NODES,
    CONTAINERFILE,
    DEPLOY,
    ROOT,
    UNIT,
    commands,
    compose,
    kubernetes,
    stateful_set,
)
from tests.readme import environment

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import NodeConfig
    from kvstore.demo.node_process import NodeProcess

KUBERNETES_VERSION = "1.37"
EXPOSURE_MAX = 2.0


def _config(name: str) -> NodeConfig:
    """The configuration that a node makes of one of the commands; ConfigError if it would not start."""
    return settings(_parser().parse_args(commands()[name][1:])).node()


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_flag_is_accepted_by_a_node(name: str) -> None:
    config = _config(name)
    assert config.port == {"compose two": 7270, "compose three": 7470}.get(name, 7070)
    assert config.host == "127.0.0.1" or (config.tls_certificate and config.tls_key and config.tenants)


def test_the_manifests_match_the_schemas_of_kubernetes() -> None:
    kinds = []
    for document in kubernetes():
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        kinds.append(document["kind"])
    assert sorted(kinds) == sorted(["NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"] * 2)


def test_a_mistake_in_a_manifest_is_detected() -> None:
    document = stateful_set()
    document["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_ports_probes_and_volumes_belong_together() -> None:
    spec = stateful_set()["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    config = _config("kubernetes")
    assert config.http is not None
    assert config.tls_certificate is not None
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.port, "http": config.http[1]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = "/readyz" if probe == "readinessProbe" else "/healthz"
        assert container[probe]["httpGet"] == {"path": path, "port": "http", "scheme": "HTTPS"}
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {str(config.data), str(config.tls_certificate.parent)}
    assert spec["securityContext"]["runAsUser"] == int(
        re.findall(r"^USER (\d+)$", CONTAINERFILE, re.MULTILINE)[0]
    )


def test_compose_names_existing_files_and_three_nodes() -> None:
    document = compose()
    nodes = [one for one in document["services"].values() if one.get("image") == "triggerkv"]
    assert len(nodes) == len(COMPOSE_NODES)
    assert {one["volumes"][0].split(":")[0] for one in nodes} == {*COMPOSE_NODES}
    assert set(document["volumes"]) == {*COMPOSE_NODES, "etcd"}
    for service in document["services"].values():
        build = service.get("build")
        if build is not None:
            assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).resolve().is_file()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("..") or source.endswith(".yaml"):  # the others are volumes, and secrets
                assert (DEPLOY / "compose" / source).exists(), source


def test_prometheus_scrapes_the_nodes_of_compose() -> None:
    document = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    (job,) = document["scrape_configs"]
    https = [_config(f"compose {name}").http for name in COMPOSE_NODES]
    assert job["static_configs"][0]["targets"] == [
        f"localhost:{http[1]}" for http in https if http is not None
    ]
    assert (job["scheme"], job["authorization"]["type"]) == ("https", "Bearer")


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze: apt-get install systemd"
)
def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/triggerkv/bin/kvstore", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout
    level = re.search(r"exposure level for \S+: (\S+)", judged)
    assert level is not None
    assert float(level[1]) <= EXPOSURE_MAX


def test_a_reload_leaves_a_node_without_tenants_alive(node: NodeProcess) -> None:
    assert node._process is not None
    node._process.send_signal(signal.SIGHUP)
    while "settings were reloaded" not in node.log():
        assert node._process.poll() is None
    assert node._process.poll() is None


def _pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+) \\$", path.read_text(), re.MULTILINE))


def test_each_package_has_the_digests_of_its_files() -> None:
    """Once one package of a list has a digest, pip accepts none without."""
    for name in ("requirements-dev.txt", "requirements-engines.txt", "deploy/requirements.txt"):
        entries = re.split(r"(?m)^(?=[a-z])", re.sub(r"(?m)^#.*\n", "", (ROOT / name).read_text()))[1:]
        assert entries
        assert all("--hash=sha256:" in entry for entry in entries)


def test_the_container_contains_the_tested_packages() -> None:
    pinned, tested = _pins(DEPLOY / "requirements.txt"), _pins(ROOT / "requirements-dev.txt")
    assert pinned.items() <= tested.items()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split("[<>=]", one)[0] for one in wanted} <= pinned.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_steps_of_the_container_file_install_a_node_in_a_clean_folder(
    wheel: Path, tmp_path: Path
) -> None:
    """The first step is that of the wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / wheel.name).symlink_to(wheel)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    pip = f"{sys.executable} -m pip --python {venv}/bin/python"  # one in the folder would be installed first: seconds
    clean = environment(tmp_path)
    clean["PATH"] = f"{venv / 'bin'}:{clean['PATH']}"
    steps = [
        step for step in re.findall(r"^RUN (.*)$", CONTAINERFILE, re.MULTILINE) if step.startswith("pip ")
    ]
    assert len(steps) == 3
    for step in [*steps[1:], "kvstore serve --help", "kvstore doctor --json --data ."]:
        command = step.replace("/wheels", str(wheels)).replace(" deploy/", f" {DEPLOY}/")
        command = re.sub("^pip ", f"{pip} ", command)
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    shutil.rmtree(venv)
