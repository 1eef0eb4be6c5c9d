"""`kvstore certificates`: nodes and clients accept what it makes, and it overwrites nothing."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.client import Client
from kvstore.client.contact import broken_step
from kvstore.commands import certificates_command
from kvstore.errors import NodeUnavailable
from kvstore.reach import Reach
from tests.conftest import small_node


def test_a_node_and_a_client_accept_the_generated_files(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    asked = ["--node", "127.0.0.1,storage-1", "--client", "engine-1.acme"]
    assert main(["certificates", str(certs), *asked]) == 0
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[acme]\ncertificates = ["engine-1.acme"]\n')
    arguments = ("--tls-cert", str(certs / "127.0.0.1.pem"), "--tls-key", str(certs / "127.0.0.1.key"),
                 "--tls-clients", str(certs / "ca.pem"), "--tenants", str(tenants))  # fmt: skip
    with small_node(tmp_path / "node", arguments=arguments) as node:
        shown: dict[str, Any] = {
            "certificate": certs / "engine-1.acme.pem",
            "key": certs / "engine-1.acme.key",
        }
        with Client(node.target, ca=certs / "ca.pem", **shown) as client:
            client.put_inline(bytes(32), b"x")
            assert client.get_inline(bytes(32), 1) == b"x"
        as_node: dict[str, Any] = {"certificate": certs / "127.0.0.1.pem", "key": certs / "127.0.0.1.key"}
        with Client(node.target, ca=certs / "ca.pem", **as_node) as client, pytest.raises(NodeUnavailable):
            client.statistics()  # a node's certificate is no client's
        elsewhere = Reach((f"localhost:{node.target.rpartition(':')[2]}",), ca=certs / "ca.pem", **shown)
        step = broken_step(elsewhere)
        assert step is not None
        assert "a name from the node's certificate" in step.advice


def test_keys_are_readable_only_by_their_owner_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs = tmp_path / "certs"
    assert main(["certificates", str(certs), "--client", "a"]) == 0
    before = {path.name: path.read_bytes() for path in certs.iterdir()}
    assert before.keys() == {"ca.pem", "ca.key", "a.pem", "a.key"}
    assert {stat.S_IMODE((certs / name).stat().st_mode) for name in before if name.endswith(".key")} == {
        0o600
    }
    assert main(["certificates", str(certs), "--client", "a"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["certificates", str(certs), "--client", "b", "--node", "::1"]) == 0  # of the same authority
    after = {path.name: path.read_bytes() for path in certs.iterdir()}
    assert after.keys() - before.keys() == {"b.pem", "b.key", "__1.pem", "__1.key"}
    assert all(after[name] == content for name, content in before.items())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("--client", "a/b"), "is neither a host name"),
        (("--client", ""), "is neither a host name"),
        (("--client", "ca"), "the same file name"),
        (("--client", "a", "--node", "a"), "the same file name"),
        (("--client", "a", "--days", "0"), "--days"),
    ],
)
def test_an_impossible_request_is_refused_before_anything_is_created(
    tmp_path: Path, asked: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certificates", str(tmp_path / "certs"), *asked]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_a_file_truncated_by_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certs = tmp_path / "certs"

    def openssl(*arguments: str | Path) -> None:
        """A stand-in that succeeds."""
        for one in arguments:
            if isinstance(one, Path):
                one.touch()

    with monkeypatch.context() as patch:
        patch.setattr(certificates_command, "_openssl", openssl)
        assert main(["certificates", str(certs), "--client", "a"]) == 2
    assert "is not complete" in capsys.readouterr().err
    assert list(certs.iterdir()) == []
    assert main(["certificates", str(certs), "--client", "a"]) == 0
    (certs / "ca.key").write_text((certs / "ca.key").read_text()[:-40])
    assert main(["certificates", str(certs), "--client", "b"]) == 2
    assert "ca.key is not complete" in capsys.readouterr().err
