"""Each file of `deploy/` provides what a node needs: addresses, mounts, io_uring, locked memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import _parser
from kvstore.serve_options import settings
from tests.deploy.files import (
    COMPOSE_NODES,
    CONTAINERFILE,
    ENVIRONMENT_FILE,
    UNIT,
    commands,
    compose,
    kubernetes,
    stateful_set,
)

if TYPE_CHECKING:
    from kvstore.config import NodeConfig

POD: dict[str, Any] = stateful_set()["spec"]["template"]["spec"]
UNIT_SAYS = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
BUILT, RUN = re.split(r"^FROM .*$", CONTAINERFILE, flags=re.MULTILINE)[1:]


def config(name: str) -> NodeConfig:
    return settings(_parser().parse_args(commands()[name][1:])).node()


def folders(name: str) -> set[str]:
    """The folders in which a command makes a node look for its files."""
    told = config(name)
    files = [told.tls_certificate, told.tls_key, told.tenants]
    if told.cluster is not None and told.cluster.upkeep is not None:
        files += [told.cluster.upkeep.secret_path, told.cluster.upkeep.nodes_ca]
    return {str(told.data), *(str(file.parent) for file in files if file is not None)}


@pytest.mark.parametrize("name", sorted(commands().keys() - {"systemd"}))
def test_a_node_listens_on_all_addresses_of_its_machine(name: str) -> None:
    told = config(name)
    assert told.http is not None
    assert {told.host, told.http[0]} <= {"0.0.0.0", "::"}


@pytest.mark.parametrize("node", COMPOSE_NODES)
def test_compose_mounts_the_folders_in_its_nodes_settings(node: str) -> None:
    mounts = dict(volume.split(":")[:2] for volume in compose()["services"][node]["volumes"])
    assert mounts == {node: "/data", "./secrets": "/etc/kvstore"}
    assert set(mounts.values()) == folders(f"compose {node}")


def test_the_containers_own_command_mounts_the_folders_in_its_settings() -> None:
    assert set(re.findall(r"-v [\w./]+:(/[\w/]+)", CONTAINERFILE)) == folders("container")


def test_kubernetes_mounts_existing_volumes() -> None:
    (container,) = POD["containers"]
    claims = [claim["metadata"]["name"] for claim in stateful_set()["spec"]["volumeClaimTemplates"]]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"data": "/data", "secrets": "/etc/kvstore"}
    assert {*claims, *volumes} == mounts.keys()
    assert not next(one for one in container["volumeMounts"] if one["name"] == "data").get("readOnly")
    # The node's user reads the secret and writes the drive by the group that both have.
    secret = volumes["secrets"]["secret"]
    assert (secret["secretName"], oct(secret["defaultMode"])) == ("kvstore", "0o440")
    assert POD["securityContext"]["fsGroup"] == POD["securityContext"]["runAsUser"]


def test_kubernetes_finds_its_pods() -> None:
    labels = stateful_set()["spec"]["template"]["metadata"]["labels"]
    assert stateful_set()["spec"]["selector"]["matchLabels"] == labels
    (service,) = kubernetes("Service")
    assert service["spec"]["selector"] == labels
    # Clients reach each pod by its own name, and so at the address that its fabric tells.
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == stateful_set()["spec"]["serviceName"]
    told = config("kubernetes")
    assert told.http is not None
    assert [port["port"] for port in service["spec"]["ports"]] == [told.port, told.http[1]]


def test_io_uring_is_allowed_everywhere() -> None:
    for node in COMPOSE_NODES:
        assert "seccomp=unconfined" in compose()["services"][node]["security_opt"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    calls = {"io_uring_setup", "io_uring_enter", "io_uring_register"}
    allowed = next(re.finditer(r"^SystemCallFilter=([^~].*)$", UNIT.read_text(), re.MULTILINE))[1]
    assert calls | {"@memlock", "@io-event", "@system-service"} <= set(allowed.split())


def test_memory_may_be_locked_everywhere() -> None:
    for node in COMPOSE_NODES:
        assert compose()["services"][node]["ulimits"]["memlock"] == -1
    assert "IPC_LOCK" in POD["containers"][0]["securityContext"]["capabilities"]["add"]
    assert UNIT_SAYS["LimitMEMLOCK"] == "infinity"
    assert "--ulimit memlock=-1" in CONTAINERFILE


def test_the_container_has_the_libraries_and_a_folder_writable_for_its_user() -> None:
    for made, library in (
        (BUILT, "libfabric-dev"),
        (BUILT, "liburing-dev"),
        (RUN, "libfabric1"),
        (RUN, "liburing2"),
    ):
        assert re.search(rf"^RUN apt-get update && apt-get install .*\b{library}\b", made, re.MULTILINE)
    (user,) = re.findall(r"^USER (\d+)$", RUN, re.MULTILINE)
    assert f"useradd --uid {user} " in RUN
    assert f"mkdir /data && chown {user} /data" in RUN
    assert f"--user {user} " in CONTAINERFILE


def test_the_unit_may_use_its_folder_its_settings_and_the_network() -> None:
    assert Path("/var/lib", UNIT_SAYS["StateDirectory"]) == config("systemd").data
    assert UNIT_SAYS["EnvironmentFile"] == f"-/etc/kvstore/{ENVIRONMENT_FILE.name}"
    for name in ("systemd beyond loopback", "systemd in a cluster"):
        assert folders(name) == {"/var/lib/kvstore", "/etc/kvstore"}
    assert {"AF_INET", "AF_INET6"} <= set(UNIT_SAYS["RestrictAddressFamilies"].split())
    assert "PrivateNetwork" not in UNIT_SAYS
    assert {"char-infiniband rw", "char-cxi rw"} == set(
        re.findall(r"^DeviceAllow=(.*)$", UNIT.read_text(), re.MULTILINE)
    )
