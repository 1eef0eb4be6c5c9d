"""The table of ports, the defaults of the options and every file of `deploy/` agree."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from kvstore.cli import _parser
from kvstore.limits import FABRIC_PORT_FIRST, FABRIC_PORT_LAST
from kvstore.serve_options import settings
from tests.deploy.files import (
    COMPOSE_NODES,
    CONTAINERFILE,
    DEPLOY,
    ROOT,
    commands,
    compose,
    kubernetes,
    stateful_set,
)

ROW = re.compile(r"^\| (\d+)(?:-(\d+))? \| TCP \| (.*?) \| (.*?) \| `(--[\w-]+)` \|$", re.MULTILINE)


class Row(NamedTuple):
    """A range of the node's ports."""

    first: int
    last: int


def table() -> dict[str, Row]:
    rows = ROW.findall((ROOT / "docs" / "operating.md").read_text())
    return {option: Row(int(first), int(last or first)) for first, last, _, _, option in rows}


def used_by(words: list[str]) -> dict[str, Row]:
    """The ports that a command uses, by option."""
    config = settings(_parser().parse_args(words[1:])).node()
    used = {"--listen": Row(config.port, config.port)}
    if config.fabric_ports is not None:
        used["--fabric-ports"] = Row(config.fabric_ports.first, config.fabric_ports.last)
    elif config.host != "127.0.0.1":
        used["--fabric-ports"] = Row(FABRIC_PORT_FIRST, FABRIC_PORT_LAST)
    if config.http is not None:
        used["--http"] = Row(config.http[1], config.http[1])
    return used


def opened(text: str) -> set[Row]:
    """Ranges in a text, `7070` or `7071-7199`."""
    return {Row(int(a), int(b or a)) for a, b in re.findall(r"\b(\d{4,5})(?:-(\d{4,5}))?\b", text)}


def test_the_table_has_the_defaults_of_the_options() -> None:
    assert table() == {
        "--listen": Row(7070, 7070),
        "--fabric-ports": Row(FABRIC_PORT_FIRST, FABRIC_PORT_LAST),
        "--http": Row(9100, 9100),
    }
    assert used_by(["kvstore", "serve", "--data", "d"])["--listen"] == table()["--listen"]


@pytest.mark.parametrize("name", sorted(commands().keys() - {"systemd", "compose two", "compose three"}))
def test_a_file_of_deploy_uses_the_ports_of_the_table(name: str) -> None:
    assert used_by(commands()[name]) == table()


def test_the_unit_without_settings_is_on_loopback_only() -> None:
    assert used_by(commands()["systemd"]) == {"--listen": table()["--listen"]}


def test_nodes_of_compose_share_no_port_and_its_header_names_them_all() -> None:
    used = [row for name in COMPOSE_NODES for row in used_by(commands()[f"compose {name}"]).values()]
    taken = [port for row in used for port in range(row.first, row.last + 1)]
    assert len(taken) == len(set(taken))
    head = (DEPLOY / "compose" / "compose.yaml").read_text().split("name:")[0]
    named = {port for row in opened(head) for port in range(row.first, row.last + 1)}
    assert named == set(taken)
    for service in compose()["services"].values():
        assert service["network_mode"] == "host"
        assert "ports" not in service


def test_the_container_exposes_exactly_the_ports_of_the_table() -> None:
    (exposed,) = re.findall(r"^EXPOSE (.*)$", CONTAINERFILE, re.MULTILINE)
    assert opened(exposed) == set(table().values())


def test_the_policy_of_kubernetes_opens_exactly_the_ports_of_the_table() -> None:
    (policy,) = kubernetes("NetworkPolicy")
    ports = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert {Row(port["port"], port.get("endPort", port["port"])) for port in ports} == set(table().values())
    assert {port["protocol"] for port in ports} == {"TCP"}
    assert policy["spec"]["podSelector"] == stateful_set()["spec"]["selector"]


def test_the_firewall_admits_exactly_the_ports_of_the_table() -> None:
    rules = (DEPLOY / "nftables" / "kvstore.nft").read_text()
    assert opened("\n".join(re.findall(r"^tcp dport (\S+)", rules, re.MULTILINE))) == set(table().values())
