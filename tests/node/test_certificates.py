"""SIGHUP reads certificates again: new connections get the new one, and an invalid file changes nothing."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import main
from kvstore.client import Client
from kvstore.errors import NodeUnavailable
from kvstore.limits import INPUT_FILE_BYTES_MAX
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

HTTP_S = 10.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, each with certificates of the node and of a client."""
    folder = tmp_path_factory.mktemp("pki")
    for name in ("one", "two"):
        asked = ["--node", "127.0.0.1", "--client", "acme"]
        assert main(["certificates", str(folder / name), *asked]) == 0
    return folder


def give(folder: Path, made: Path) -> None:
    """Copy an authority's certificates to where the node reads them."""
    for name, there in (("127.0.0.1.pem", "node.pem"), ("127.0.0.1.key", "node.key"), ("ca.pem", "ca.pem")):
        shutil.copy(made / name, folder / there)


def options(folder: Path) -> list[str]:
    return ["--tls-cert", str(folder / "node.pem"), "--tls-key", str(folder / "node.key")]


@pytest.fixture
def tls_node(pki: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    give(tmp_path, pki / "one")
    arguments = (*options(tmp_path), "--http", "127.0.0.1:0")
    with small_node(tmp_path / "node", arguments=arguments) as process:
        yield process


def reload(node: NodeProcess, said: str) -> None:
    before = node.log().count(said)
    os.kill(node.pid, signal.SIGHUP)
    wait_until(lambda: node.log().count(said) == before + 1, said)


def is_taken(node: NodeProcess, made: Path, **more: Any) -> bool:
    """Whether the node accepts a client that trusts this authority."""
    with Client(node.target, ca=made / "ca.pem", **more) as client:
        try:
            client.statistics()
        except NodeUnavailable:
            return False
    return True


def is_taken_by_http(node: NodeProcess, made: Path) -> bool:
    (url,) = {word for word in node.log().split() if word.startswith("https://")}
    context = ssl.create_default_context(cafile=made / "ca.pem")
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=HTTP_S, context=context) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            return False
        raise


def test_new_connections_use_the_new_certificate(tls_node: NodeProcess, pki: Path, tmp_path: Path) -> None:
    one, two = pki / "one", pki / "two"
    with Client(tls_node.target, ca=one / "ca.pem") as early:
        early.attach()
        for made, other in ((two, one), (one, two)):  # more than once
            give(tmp_path, made)
            assert is_taken(tls_node, other)  # until it is told to
            reload(tls_node, "The certificates were reloaded")
            for taken in (is_taken, is_taken_by_http):
                assert taken(tls_node, made)
                assert not taken(tls_node, other)
        give(tmp_path, two)
        reload(tls_node, "The certificates were reloaded")
        early.statistics()
        assert early.is_attached  # over the connection that it has


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("node.pem", b"what is this\n", "node.pem contains no certificate in PEM."),
        ("node.key", b"", "node.key contains no key in PEM."),
        ("node.pem", None, "node.pem could not be read: No such file or directory."),
        ("node.key", "two/127.0.0.1.key", "node.key is not the key of"),
        (
            "node.pem",
            bytes(INPUT_FILE_BYTES_MAX + 1),
            "node.pem could not be read: it is larger than 16 MiB.",
        ),
    ],
    ids=["no certificate", "no key", "no file", "another key", "too large"],
)
def test_an_invalid_file_leaves_the_current_certificate_in_place(
    tls_node: NodeProcess, pki: Path, tmp_path: Path, name: str, content: bytes | str | None, said: str
) -> None:
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((pki / content).read_bytes() if isinstance(content, str) else content)
    reload(tls_node, said)
    (line,) = [line for line in tls_node.log().splitlines() if said in line]
    assert line.endswith("The certificates are unchanged.")
    assert is_taken(tls_node, pki / "one")
    assert is_taken_by_http(tls_node, pki / "one")


def test_authorities_of_clients_are_reloaded(pki: Path, tmp_path: Path) -> None:
    one, two = pki / "one", pki / "two"
    give(tmp_path, one)
    arguments = (*options(tmp_path), "--tls-clients", str(tmp_path / "ca.pem"))
    shown = {made: {"certificate": made / "acme.pem", "key": made / "acme.key"} for made in (one, two)}
    with small_node(tmp_path / "node", arguments=arguments) as node:
        assert is_taken(node, one, **shown[one])
        assert not is_taken(node, one, **shown[two])
        shutil.copy(two / "ca.pem", tmp_path / "ca.pem")
        reload(node, "The certificates were reloaded")
        assert is_taken(node, one, **shown[two])
        assert not is_taken(node, one, **shown[one])
        assert not is_taken(node, one)  # who has none


def test_tls_is_switched_on_or_off_only_at_a_start(pki: Path, tmp_path: Path) -> None:
    give(tmp_path, pki / "one")
    paths = f'tls_cert = "{tmp_path}/node.pem"\ntls_key = "{tmp_path}/node.key"\n'
    file = tmp_path / "node.toml"
    for before, after, said in (
        (paths, "", "The certificates are unchanged."),
        (paths, f'{paths}tls_clients = "{tmp_path}/ca.pem"\n', "The certificates are unchanged."),
        ("", paths, "Turning TLS on or off needs a restart."),
    ):
        file.write_text(before)
        with small_node(tmp_path / "node", arguments=("--config", str(file))) as node:
            file.write_text(after)
            reload(node, said)
            with Client(node.target, ca=pki / "one" / "ca.pem" if before else None) as client:
                client.statistics()
        (tmp_path / "node.log").unlink()
