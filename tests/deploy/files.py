"""The files of `deploy/`, read: what each of them has a node run with, and what it opens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "CONTAINERFILE",
    "DEPLOY",
    "ENVIRONMENT_FILE",
    "ROOT",
    "UNIT",
    "commands",
    "compose",
    "json_words",
    "kubernetes",
    "stateful_set",
]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "kvstore.service"
ENVIRONMENT_FILE = DEPLOY / "systemd" / "node.env"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def json_words(instruction: str) -> list[str]:
    """Of the Containerfile."""
    found = re.search(rf"^{instruction} (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert found is not None
    words: list[str] = yaml.safe_load(found[1])
    return words


def compose() -> dict[str, Any]:
    """All of compose.yaml."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    return document


def kubernetes(kind: str | None = None) -> list[dict[str, Any]]:
    """All manifests, or those of a kind."""
    found = [
        one
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
    ]
    return [one for one in found if kind is None or one["kind"] == kind]


def stateful_set() -> dict[str, Any]:
    """The one that there is."""
    (found,) = kubernetes("StatefulSet")
    return found


def _of_unit(settings: str) -> list[str]:
    (run,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    words = re.fullmatch(r'KVSTORE_ARGUMENTS="(.*)"', settings)
    assert words is not None
    return ["kvstore", *run.replace("$KVSTORE_ARGUMENTS", words[1]).split()[1:]]


def commands() -> dict[str, list[str]]:
    """What each of the files has a node run with, word by word."""
    entry = json_words("ENTRYPOINT")
    (container,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    (setting,) = re.findall(r"^Environment=(.*)$", UNIT.read_text(), re.MULTILINE)
    (beyond,) = re.findall(r"^KVSTORE.*$", ENVIRONMENT_FILE.read_text(), re.MULTILINE)
    services = compose()["services"]
    return {
        "container": entry + json_words("CMD"),
        "compose one": entry + services["one"]["command"],
        "compose two": entry + services["two"]["command"],
        "kubernetes": entry + container["args"],
        "systemd": _of_unit(setting),
        "systemd beyond loopback": _of_unit(beyond),
    }
