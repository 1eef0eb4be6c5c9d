"""Clusters by the commands of `deploy/`, through its firewalls: blocks survive the loss of a node."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.clock import SystemClock
from kvstore.storage.store import Store
from tests.cluster.real_etcd import program
from tests.deploy.files import (
    COMPOSE_NODES,
    DEPLOY,
    commands,
    compose,
    etcd_of_kubernetes,
    kubernetes,
    node_of_compose,
    node_of_kubernetes,
)
from tests.hosts.conftest import CA, DRIVE_BYTES, START_S, TOKEN, Caller, make_secrets
from tests.hosts.network import Network, until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.hosts.network import Host, Process

JOINED_S = 60.0
WRITTEN, EXACT = ["WRITTEN"] * 8, ["exact"] * 8
ZONES = ("a", "a", "b")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path)
    yield made
    made.close()


def hosts(network: Network, kind: str) -> list[Host]:
    return [network.host(f"{kind}{number}") for number in range(3)]


def give_secrets(to: Sequence[Host], names: Iterable[str]) -> None:
    """Give nodes and clients the secrets named at the top of the files, with a certificate for these names."""
    made = to[0].folder / "secrets"
    make_secrets(made, ",".join(f"DNS:{name}" for name in names))
    (made / "secret").write_text(secrets.token_urlsafe(32) + "\n")
    for host in to[1:]:
        shutil.copytree(made, host.folder / "secrets", dirs_exist_ok=True)


def start(host: Host, words: Sequence[str]) -> Process:
    """Run a node by its command, with less memory and smaller drives than in production."""
    words = ["--hot=256MiB" if word.startswith("--hot=") else word for word in words]
    data = host.folder / "data"
    (at,) = [host.folder / words[i + 1][1:] for i, word in enumerate(words) if word == "--data"]
    with Store.open(data if "var" in str(at) else at, capacity_bytes=DRIVE_BYTES, clock=SystemClock()):
        pass
    return host.start(*words)


def ready(nodes: Iterable[Process]) -> None:
    for node in nodes:
        assert node.line(START_S).startswith("ready ")


def client(host: Host, node: str) -> Caller:
    told = {"nodes": [node], "ca": CA, "token_file": TOKEN}
    return Caller(host.python("tests.hosts.caller", json.dumps(told)))


def opened_by(policy: dict[str, Any], pods: dict[str, list[Host]]) -> str:
    """The firewall rules of a NetworkPolicy, by the label of the pods."""
    rules = []
    for rule in policy["spec"]["ingress"]:
        callers = [
            one for some in rule.get("from", ()) for one in pods[some["podSelector"]["matchLabels"]["app"]]
        ]
        by = f"ip saddr {{ {', '.join(one.ipv4 for one in callers)} }} " if callers else ""
        rules += [
            f"{by}tcp dport {port['port']}-{port.get('endPort', port['port'])} accept"
            for port in rule["ports"]
        ]
    return "\n".join(rules)


def outlasts_a_node(app: Caller, nodes: Sequence[Process], members: dict[str, str]) -> None:
    """All blocks put through the cluster are readable after the first node is killed."""
    until("that all nodes are members", JOINED_S, lambda: app("members") == members)
    name = secrets.token_hex(8)
    assert app("put", name, 8) == WRITTEN
    owners = app("owners", name, 8)
    assert {len(set(some)) for some in owners} == {2}
    if len(set(members.values())) > 1:
        assert all(len({members[node] for node in some}) == 2 for some in owners)
    assert app("get", name, 8) == EXACT
    nodes[0].end(kill=True)
    assert app("get", name, 8) == EXACT
    app.close()
    assert [node.end() for node in nodes[1:]] == [0] * (len(nodes) - 1)


def test_the_cluster_of_kubernetes(network: Network) -> None:
    nodes, etcds, app = hosts(network, "n"), hosts(network, "e"), network.host("app")
    addresses = {f"kvstore-{number}.kvstore": host for number, host in enumerate(nodes)}
    network.names(
        **{name: host.ipv4 for name, host in addresses.items()},
        **{f"kvstore-etcd-{number}.kvstore-etcd": host.ipv4 for number, host in enumerate(etcds)},
    )
    give_secrets([*nodes, app], addresses)
    pods = {"kvstore": nodes, "kvstore-etcd": etcds}
    for label, some in pods.items():
        (policy,) = kubernetes("NetworkPolicy", label)
        for host in some:
            host.firewall(opened_by(policy, pods))
    app.firewall()
    for number, host in enumerate(etcds):
        host.start(program(), *etcd_of_kubernetes(number))
    started = [start(host, node_of_kubernetes(number, ZONES[number])) for number, host in enumerate(nodes)]
    ready(started)
    members = {f"{name}:7070": zone for name, zone in zip(addresses, ZONES, strict=True)}
    outlasts_a_node(client(app, "kvstore-0.kvstore:7070"), started, members)


def test_the_cluster_of_systemd_units(network: Network) -> None:
    nodes, etcds, app = hosts(network, "n"), hosts(network, "e"), network.host("app")
    names = [f"node.{number}" for number in (1, 2, 3)]
    of_etcd = [f"etcd.{number}" for number in (1, 2, 3)]
    network.names(
        **{name: host.ipv4 for name, host in zip([*names, *of_etcd], [*nodes, *etcds], strict=True)}
    )
    give_secrets([*nodes, app], names)
    for host in nodes:
        host.firewall((DEPLOY / "nftables" / "kvstore.nft").read_text())
    peers = ",".join(f"{name}=http://{host.ipv4}:2380" for name, host in zip(of_etcd, etcds, strict=True))
    for name, host in zip(of_etcd, etcds, strict=True):
        told = ["--name", name, "--data-dir", "/data/etcd", "--initial-cluster", peers]
        for kind, port in (("client", 2379), ("peer", 2380)):
            advertise = "advertise-client-urls" if kind == "client" else "initial-advertise-peer-urls"
            told += [f"--listen-{kind}-urls", f"http://{host.ipv4}:{port}"]
            told += [f"--{advertise}", f"http://{host.ipv4}:{port}"]
        host.start(program(), *told)
    words = commands()["systemd in a cluster"]
    started = [
        start(host, [re.sub(r"\bnode\.1\b", name, word) for word in words])
        for name, host in zip(names, nodes, strict=True)
    ]
    ready(started)
    outlasts_a_node(client(app, "node.2:7070"), started, {f"{name}:7070": "rack-1" for name in names})


def test_the_cluster_of_compose(network: Network) -> None:
    machine, app = network.host("machine"), network.host("app")
    network.names(machine=machine.ipv4)
    give_secrets([machine, app], ["machine", "localhost"])
    head = (DEPLOY / "compose" / "compose.yaml").read_text().split("name:")[0]
    ports = re.findall(r"\b\d{4}(?:-\d{4})?\b", head)
    machine.firewall("\n".join(f"tcp dport {one} accept" for one in ports))
    app.firewall()
    machine.start(
        program(),
        *(word.replace("=/data", "=/data/etcd") for word in compose()["services"]["etcd"]["command"][1:]),
    )
    started, members = [], {}
    for name in COMPOSE_NODES:
        words = node_of_compose(name, "machine")
        words[words.index("--data") + 1] = f"/data/{name}"  # a volume of its own
        started.append(start(machine, words))
        (address,) = (word.partition("=")[2] for word in words if word.startswith("--cluster-address="))
        members[address] = ""
    ready(started)
    outlasts_a_node(client(app, "machine:7470"), started, members)
