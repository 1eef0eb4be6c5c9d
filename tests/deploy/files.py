"""Reads the files of `deploy/`: the commands of nodes, and the ports that are opened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "CLUSTER_FILE",
    "COMPOSE_NODES",
    "CONTAINERFILE",
    "DEPLOY",
    "ENVIRONMENT_FILE",
    "ROOT",
    "UNIT",
    "commands",
    "compose",
    "etcd_of_kubernetes",
    "json_words",
    "kubernetes",
    "node_of_compose",
    "node_of_kubernetes",
    "stateful_set",
]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "kvstore.service"
ENVIRONMENT_FILE = DEPLOY / "systemd" / "node.env"
CLUSTER_FILE = DEPLOY / "systemd" / "cluster.env"
COMPOSE_NODES = ("one", "two", "three")
ZONE_LABEL = "topology.kubernetes.io/zone"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def json_words(instruction: str) -> list[str]:
    """The words of an instruction of the Containerfile."""
    found = re.search(rf"^{instruction} (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert found is not None
    words: list[str] = yaml.safe_load(found[1])
    return words


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    return document


def kubernetes(kind: str | None = None, name: str = "kvstore") -> list[dict[str, Any]]:
    """The manifests listed in kustomization.yaml, or those of one kind and name."""
    folder = DEPLOY / "kubernetes"
    files = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    found = [one for file in files for one in yaml.safe_load_all((folder / file).read_text())]
    return [one for one in found if kind is None or (one["kind"], one["metadata"]["name"]) == (kind, name)]


def stateful_set(name: str = "kvstore") -> dict[str, Any]:
    """The StatefulSet of the nodes, or another one."""
    (found,) = kubernetes("StatefulSet", name)
    return found


def _of_pod(name: str, number: int, zone: str) -> list[str]:
    """The arguments of a pod of a StatefulSet, with its variables in their places."""
    (container,) = stateful_set(name)["spec"]["template"]["spec"]["containers"]
    of_pod = {"metadata.name": f"{name}-{number}", f"metadata.labels['{ZONE_LABEL}']": zone}
    values = {one["name"]: of_pod[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in container["env"]}
    return [re.sub(r"\$\((\w+)\)", lambda at: values[at[1]], word) for word in container["args"]]


def etcd_of_kubernetes(number: int) -> list[str]:
    """The arguments of a member of etcd."""
    return _of_pod("kvstore-etcd", number, "")


def node_of_kubernetes(number: int, zone: str = "") -> list[str]:
    return json_words("ENTRYPOINT") + _of_pod("kvstore", number, zone)


def node_of_compose(name: str, host: str = "localhost") -> list[str]:
    """The command of a node, with its environment as options."""
    service = compose()["services"][name]
    words = [*json_words("ENTRYPOINT"), *service["command"]]
    for variable, value in service["environment"].items():
        option = variable.removeprefix("TRIGGERKV_SERVE_").lower().replace("_", "-")
        words.append(f"--{option}={value.replace('${KVSTORE_HOST:-localhost}', host)}")
    return words


def _of_unit(settings: str) -> list[str]:
    (run,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    words = re.fullmatch(r'KVSTORE_ARGUMENTS="(.*)"', settings)
    assert words is not None
    return ["kvstore", *run.replace("$KVSTORE_ARGUMENTS", words[1]).split()[1:]]


def commands() -> dict[str, list[str]]:
    """The command of a node in each of the files, as words."""
    (setting,) = re.findall(r"^Environment=(.*)$", UNIT.read_text(), re.MULTILINE)
    beyond, cluster = (
        re.findall(r"^KVSTORE.*$", file.read_text(), re.MULTILINE)[0]
        for file in (ENVIRONMENT_FILE, CLUSTER_FILE)
    )
    return {
        "container": json_words("ENTRYPOINT") + json_words("CMD"),
        **{f"compose {name}": node_of_compose(name) for name in COMPOSE_NODES},
        "kubernetes": node_of_kubernetes(0),
        "systemd": _of_unit(setting),
        "systemd beyond loopback": _of_unit(beyond),
        "systemd in a cluster": _of_unit(cluster),
    }
