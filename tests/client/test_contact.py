"""Errors when a node can't be reached: which step failed, and what to try."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING
from unittest.mock import Mock

import grpc
import pytest

from kvstore.cli import main
from kvstore.client import Client
from kvstore.client.contact import Step, broken_step, explained, steps
from kvstore.client.own_address import OwnSide
from kvstore.errors import FabricUnavailable, NodeUnavailable
from kvstore.reach import Reach
from kvstore.wire.status import error_from_rpc, words_of
from tests.conftest import small_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 30.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    assert main(["certificates", str(folder), "--node", "127.0.0.1", "--client", "acme"]) == 0
    assert main(["certificates", str(folder / "other"), "--client", "acme"]) == 0
    return folder


def over_tls(pki: Path, *more: str) -> tuple[str, ...]:
    return ("--tls-cert", str(pki / "127.0.0.1.pem"), "--tls-key", str(pki / "127.0.0.1.key"), *more)


@pytest.fixture(scope="module")
def secure(pki: Path, module_folder: Path) -> Iterator[NodeProcess]:
    with small_node(module_folder / "secure", arguments=over_tls(pki)) as node:
        yield node


@pytest.fixture(scope="module")
def strict(pki: Path, module_folder: Path) -> Iterator[NodeProcess]:
    arguments = over_tls(pki, "--tls-clients", str(pki / "ca.pem"))
    with small_node(module_folder / "strict", arguments=arguments) as node:
        yield node


def listening(answer: bytes) -> Iterator[str]:
    """A server that answers each connection in the same way, and is not a node."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def web_server() -> Iterator[str]:
    yield from listening(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def free_port() -> Iterator[str]:
    """A port on which no process listens, and which no other process gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _names(reach: Reach) -> list[tuple[str, bool]]:
    return [(step.name, step.is_done) for step in steps(reach)]


def test_all_steps_to_reach_a_node_succeed(shared_node: NodeProcess, secure: NodeProcess, pki: Path) -> None:
    plain = [("name", True), ("connection", True), ("protocol", True)]
    assert _names(Reach((shared_node.target,))) == plain
    over = [("name", True), ("connection", True), ("TLS", True)]
    assert _names(Reach((secure.target,), ca=pki / "ca.pem")) == over


def test_a_required_certificate_is_a_step(strict: NodeProcess, pki: Path) -> None:
    with_one = Reach((strict.target,), ca=pki / "ca.pem", certificate=pki / "acme.pem", key=pki / "acme.key")
    assert broken_step(with_one) is None
    without = broken_step(Reach((strict.target,), ca=pki / "ca.pem"))
    assert without is not None
    assert without.said == "the node requires a client certificate"
    foreign = broken_step(
        Reach(
            (strict.target,),
            ca=pki / "ca.pem",
            certificate=pki / "other" / "acme.pem",
            key=pki / "other" / "acme.key",
        )
    )
    assert foreign is not None
    assert foreign.said == "the node rejects this client's certificate"


def test_each_failure_has_its_own_message(
    shared_node: NodeProcess, secure: NodeProcess, pki: Path, web_server: str, free_port: str
) -> None:
    port = secure.target.rpartition(":")[2]
    cases: list[tuple[Reach, str, str, str]] = [
        (Reach(("nobody.invalid:1",)), "name", "has no address", "Is the name right"),
        (Reach((free_port,)), "connection", "Connection refused", "Is the node running"),
        (Reach((web_server,)), "protocol", "an HTTP port", "the gRPC port"),
        (Reach((secure.target,)), "protocol", "uses TLS, and this client does not", "ca"),
        (Reach((shared_node.target,), tls=True), "TLS", "does not use TLS", "Leave out tls."),
        (Reach((shared_node.target,), ca=pki / "ca.pem"), "TLS", "does not use TLS", "Leave out ca."),
        (Reach((secure.target,), tls=True), "TLS", "self-signed|unable to get", "Set its CA"),
        (Reach((secure.target,), ca=pki / "other" / "ca.pem"), "TLS", "is not valid", "Set its CA"),
        (Reach((f"127.0.0.2:{port}",), ca=pki / "ca.pem"), "connection", "refused", "this its port"),
    ]
    said: set[str] = set()
    for reach, name, words, advice in cases:
        step = next(step for step in steps(reach, WAIT_S) if not step.is_done)
        assert step.name == name
        assert any(word in step.said for word in words.split("|")), step
        assert advice in step.advice
        said.add(step.said)
    assert len(said) >= len(cases) - 2


def test_a_name_that_is_not_in_the_certificate_is_reported(secure: NodeProcess, pki: Path) -> None:
    port = secure.target.rpartition(":")[2]
    step = broken_step(Reach((f"localhost:{port}",), ca=pki / "ca.pem"))
    assert step is not None
    assert "certificate is not valid" in step.said
    assert ".." not in str(step)
    assert "a name from the node's certificate" in step.advice


def test_a_silent_node_costs_a_step_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        for reach in (Reach((target,)), Reach((target,), tls=True)):
            found = list(steps(reach, 0.05))
            assert [step.is_done for step in found] == [True, True, False]
            assert "does not answer. It may be hung or overloaded." in str(found[-1])
        error = explained("A call", Reach((target,), call_timeout_ms=100), NodeUnavailable("it timed out"))
        assert str(error).startswith(f"A call failed: {target}: the node accepted the connection and does")


@pytest.mark.parametrize("call", ["statistics", "attach"])
def test_a_call_that_finds_no_node_reports_the_failed_step(
    call: str, free_port: str, secure: NodeProcess
) -> None:
    for target, words in ((free_port, "Is the node running"), (secure.target, "uses TLS")):
        with Client(target) as client, pytest.raises(NodeUnavailable) as raised:
            getattr(client, call)()
        assert target in str(raised.value)
        assert words in str(raised.value)
        for raw in ("ipv4:", "last error", "StatusCode", "errno"):
            assert raw not in str(raised.value)


def test_a_status_that_times_out_reports_the_failed_step(free_port: str) -> None:
    with Client(free_port) as client, pytest.raises(NodeUnavailable, match="Is the node running"):
        client.status(wait_s=0.2)


def test_the_doctor_reports_each_step_to_reach_a_node(
    shared_node: NodeProcess, free_port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--node", shared_node.target]) == 0
    said = capsys.readouterr().out
    assert "5 ok, 1 warn, 0 fail" in said
    assert "warn  the node's encryption" in said  # which it has none of
    assert main(["doctor", "--node", free_port]) == 3
    said = capsys.readouterr().out
    assert "Is the node running" in said
    assert "No call reaches the node." in said
    assert "The network works." not in said
    assert "fabric" not in said


def test_the_doctor_reports_a_missing_fabric(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client would continue over gRPC."""

    def missing(_: OwnSide, **_how: bool) -> None:
        raise FabricUnavailable("libfabric could not be loaded; install libfabric1.")

    monkeypatch.setattr(OwnSide, "open_fabric", missing)
    assert main(["doctor", "--node", shared_node.target]) == 3
    said = capsys.readouterr().out
    assert "fail  fabric" in said
    assert "install libfabric1" in said
    monkeypatch.setenv("TRIGGERKV_TRANSPORT", "grpc")
    assert main(["doctor", "--node", shared_node.target]) == 0
    assert "warn  fabric" in capsys.readouterr().out


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., str]]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[acme]\ntokens_sha256 = ["00"]\n'.replace("00", "0" * 64))
    with small_node(tmp_path / "node", arguments=("--tenants", str(tenants))) as node:
        yield lambda: node.target


def test_the_doctor_distinguishes_a_wrong_token_from_a_wrong_address(
    guarded: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("wrong")
    assert main(["doctor", "--node", guarded(), "--token-file", str(tmp_path / "token")]) == 3
    said = capsys.readouterr().out
    assert "fail  tenant" in said
    assert "fabric" not in said


def test_a_step_reads_as_a_sentence() -> None:
    assert str(Step("name", False, "x has no address", "Is it right?")) == "x has no address. Is it right?"
    assert str(Step("name", True, "x is y")) == "x is y."


def test_proxies_from_the_environment_are_not_used(
    shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(shared_node.target) as client:
        assert client.status().version


class _FailedCall(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A call that failed."""


@pytest.mark.parametrize(
    ("code", "detail", "words"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "Stream removed (recvmsg:Connection timed out (110))",
            "the connection to the node was lost",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: tcp handshaker shutdown",
            "no connection to the node",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "What the node says.", "What the node says."),
    ],
)  # fmt: skip
def test_users_see_no_grpc_internals(code: grpc.StatusCode, detail: str, words: str) -> None:
    failure = Mock(spec=_FailedCall)
    failure.code.return_value, failure.details.return_value = code, detail
    failure.trailing_metadata.return_value = ()
    assert words_of(failure) == words
    assert words in str(error_from_rpc("Attaching", failure))


def test_a_node_that_dies_right_after_it_was_reached_is_a_failed_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a system error, which a call would raise instead of its own."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: socket.socket())
    *_, connection, last = steps(Reach(("127.0.0.1:1",)), WAIT_S)
    assert (connection.name, connection.is_done) == ("connection", True)
    assert (last.name, last.is_done) == ("protocol", False)
    assert "the connection was closed" in last.said
