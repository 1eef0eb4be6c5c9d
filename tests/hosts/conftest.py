"""Four hosts: a node's, two clients', and one that monitors; certificates by openssl, tenants with tokens."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.clock import SystemClock
from kvstore.node.tenants import token_digest
from kvstore.storage.store import Store
from tests.hosts.network import SECRETS, Host, Network, Process, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MIB = 1 << 20
START_S = 40.0
ANSWER_S = 60.0
TOKEN = f"{SECRETS}/token"
CA = f"{SECRETS}/ca.crt"
# So a node that was told to make a drive of 100 GiB finds one that is there already, and goes on with it.
DRIVE_BYTES = 256 * MIB


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything outside of the sandbox: these tests would make namespaces on the machine itself."""
    if os.environ.get("TRIGGERKV_HOSTS") != "1":
        reason = "needs network namespaces of its own: make test-hosts"
        for item in items:
            if "tests/hosts" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


def make_secrets(folder: Path, names: str) -> None:
    """Make the files of docs/security.md: an authority, a node's certificate, a tenant with a token."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    ca, ca_key = folder / "ca.crt", folder / "ca.key"
    crt, key = folder / "tls.crt", folder / "tls.key"
    run("openssl", "req", "-x509", *curve, "-subj", "/CN=triggerkv", "-keyout", str(ca_key), "-out", str(ca))
    signed = ("-CA", str(ca), "-CAkey", str(ca_key), "-addext", f"subjectAltName={names}")
    run(
        "openssl", "req", "-x509", *curve, "-subj", "/CN=node", *signed, "-keyout", str(key), "-out", str(crt)
    )
    token = secrets.token_urlsafe(32)
    (folder / "token").write_text(token + "\n")
    digest = token_digest(token)
    (folder / "tenants.toml").write_text(f'[acme]\ntokens_sha256 = ["{digest}"]\nobserver = true\n')
    shutil.copy(ca, folder / "authorities.crt")


class Site:
    """All hosts, and what tests need most often."""

    def __init__(self, folder: Path, mtu: int) -> None:
        self.network = Network(folder, mtu)
        self.node, self.one, self.two, self.monitor = (
            self.network.host(name) for name in ("node", "one", "two", "monitor")
        )
        ips = [ip for host in self.network.hosts.values() for ip in (host.ipv4, host.ipv6)]
        moved = ["10.77.0.100", "fd77::100"]
        names = ["DNS:node", "DNS:localhost", *(f"IP:{ip}" for ip in (*ips, *moved))]
        made = self.node.folder / "secrets"
        make_secrets(made, ",".join(names))
        for host in (self.one, self.two, self.monitor):
            for name in ("ca.crt", "token"):
                shutil.copy(made / name, host.folder / "secrets" / name)
            host.firewall()
        self.network.names(node=f"{self.node.ipv4} {self.node.ipv6}")
        with Store.open(self.node.folder / "data", capacity_bytes=DRIVE_BYTES, clock=SystemClock()):
            pass

    def start_node(self, words: Sequence[str], *, ready: bool = True) -> Process:
        """Run a node by this command; by default, wait until it is ready."""
        process = self.node.start(*words)
        if ready:
            assert process.line(START_S).startswith("ready ")
        return process

    def caller(self, host: Host, target: str, **settings: object) -> Caller:
        """A client on a host, with the CA and the tenant's token unless `settings` has others."""
        over_tls = {"ca": CA, "token_file": TOKEN}
        told = {"target": target, **over_tls, **settings}
        process = host.python(
            "tests.hosts.caller", json.dumps({k: v for k, v in told.items() if v is not None})
        )
        return Caller(process)

    def ask(self, url: str, *more: str) -> tuple[int, str]:
        """Request a page from the monitoring host."""
        process = self.monitor.python("tests.hosts.monitor", url, CA, *more)
        status, text = json.loads(process.line(ANSWER_S))
        process.end()
        return status, text


class Caller:
    """A client that runs on a host."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert json.loads(process.line(START_S)) == "here"

    def begin(self, *words: object) -> None:
        """Start an action without waiting for its result."""
        self._process.tell(json.dumps(words))

    def end(self, within_s: float = ANSWER_S) -> tuple[Any, float]:
        """The result of the action, and its duration in seconds."""
        answer, took_s = json.loads(self._process.line(within_s))
        return answer, took_s

    def __call__(self, *words: object) -> Any:
        """Run an action; returns its result."""
        self.begin(*words)
        return self.end()[0]

    def close(self) -> None:
        self._process.end()


@pytest.fixture(scope="module", params=[1500])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for each module; a test leaves no process behind."""
    made = Site(tmp_path_factory.mktemp("site"), request.param)
    yield made
    made.network.close()
