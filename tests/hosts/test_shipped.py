"""The commands of `deploy/`, unchanged, move blocks between hosts, through firewalls that open their ports."""

from __future__ import annotations

import re
import secrets
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.deploy.files import CONTAINERFILE, DEPLOY, ROOT, commands
from tests.hosts.conftest import START_S, TOKEN

if TYPE_CHECKING:
    from tests.hosts.conftest import Site

WRITTEN, EXACT = ["WRITTEN"] * 8, ["exact"] * 8
NAMES = ["container", "systemd beyond loopback"]


def accepting(ranges: str) -> str:
    return "\n".join(f"tcp dport {one} accept" for one in re.findall(r"\b\d{4,5}(?:-\d{4,5})?\b", ranges))


def firewall_of(name: str) -> str:
    """Firewall rules that open the ports named by this file of deploy/."""
    if name == "container":
        return accepting(re.findall(r"^EXPOSE (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    return (DEPLOY / "nftables" / "kvstore.nft").read_text()


def name_of_blocks() -> str:
    return secrets.token_hex(8)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_move_between_hosts_over_both_families_of_ip(site: Site, name: str) -> None:
    site.node.firewall(firewall_of(name))
    node = site.start_node(commands()[name])
    for ip in (site.node.ipv4, f"[{site.node.ipv6}]"):
        one, two = (site.caller(host, f"{ip}:7070") for host in (site.one, site.two))
        blocks = name_of_blocks()
        assert one("put", blocks, 8) == WRITTEN
        assert two("get", blocks, 8) == EXACT
        assert one("get", blocks, 8) == EXACT
        for client in (one, two):
            client.close()
        assert site.ask(f"https://{ip}:9100/readyz") == (200, "ready\n")
        status, text = site.ask(f"https://{ip}:9100/metrics", TOKEN)
        assert (status, "kvstore_" in text) == (200, True)
    assert node.end() == 0


def test_the_unit_as_shipped_serves_its_own_machine(site: Site) -> None:
    site.node.firewall()
    node = site.start_node(commands()["systemd"])
    client = site.caller(site.node, "127.0.0.1:7070", ca=None, token_file=None)
    blocks = name_of_blocks()
    assert client("put", blocks, 8) == WRITTEN
    assert client("get", blocks, 8) == EXACT
    client.close()
    assert node.end() == 0


def test_names_of_both_families_are_reached_whichever_grpc_uses(site: Site) -> None:
    site.node.firewall(firewall_of("container"))
    node = site.start_node(commands()["container"])
    for host, target in ((site.one, "node:7070"), (site.node, "localhost:7070"), (site.node, "node:7070")):
        client = site.caller(host, target)
        blocks = name_of_blocks()
        assert client("put", blocks, 8) == WRITTEN
        assert client("get", blocks, 8) == EXACT
        client.close()
    assert node.end() == 0


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "sockets"])
def test_blocks_move_over_other_providers_too(site: Site, provider: str, version: int) -> None:
    """`tcp` alone offers everything needed since libfabric 1.18, and is then the default."""
    site.node.firewall(firewall_of("container"))
    settings = {"provider": provider}
    if provider == "sockets":  # it alone connects back to clients
        settings["fabric_ports"] = "7071-7199"
        for host in (site.one, site.two):
            host.firewall(accepting("7071-7199"))
    node = site.start_node([*commands()["container"], "--provider", provider])
    ip = site.node.ipv4 if version == 4 else f"[{site.node.ipv6}]"
    one, two = (site.caller(host, f"{ip}:7070", **settings) for host in (site.one, site.two))
    blocks = name_of_blocks()
    assert one("put", blocks, 8) == WRITTEN
    assert two("get", blocks, 8) == EXACT
    for client in (one, two):
        client.close()
    for host in (site.one, site.two):
        host.firewall()
    assert node.end() == 0


def test_two_hosts_exchange_blocks_with_the_commands_of_the_page(site: Site) -> None:
    page = (ROOT / "docs" / "operating.md").read_text().split("## Two hosts")[1].split("## Ports")[0]
    said = re.findall(r"^(node|client)\$ (.*)$", page, re.MULTILINE)
    assert len(said) < 10
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    site.node.firewall(firewall_of("container"))
    folders = {"node": site.node.folder / "data" / "page", "client": site.one.folder / "data"}
    folders["node"].mkdir()
    (folders["client"] / "blocks.py").write_text(program)
    *making, serve = [command for where, command in said if where == "node"]
    for command in making:
        done = site.node.start("bash", "-c", f"cd /data/page && {{ {command}; }} >&2 && echo made")
        assert done.line(START_S) == "made"
        done.end()
    node = site.node.start("bash", "-c", f"cd /data/page && exec {serve}")
    assert node.line(START_S).startswith("ready ")
    copy, run_it = [command for where, command in said if where == "client"]
    for name in re.findall(r"node:(\S+)", copy):
        shutil.copy(folders["node"] / name, folders["client"] / name)
    client = site.one.start("bash", "-c", f"cd /data && PYTHONPATH={ROOT} {run_it}")
    assert "WRITTEN" in client.line(START_S)
    assert client.line(START_S).startswith("[Hit(")
    assert client.wait() == 0  # it has compared every byte
    client.end()
    assert node.end() == 0
