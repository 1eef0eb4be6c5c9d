"""Exit statuses of `kvstore`: the same mistake, failure or miss ends each command alike, with `--json` too."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcli.running import Status
from kvstore.cli import main
from tests.ports import next_port

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

CALLS = {
    "put": ["put", "name:put", str(Path(__file__))],
    "get": ["get", "name:none"],
    "delete": ["delete", "name:none"],
    "pin": ["pin", "name:none"],
    "watch": ["watch", "--seconds", "0.1"],
    "erase": ["erase", "--user", "nobody"],
    "sessions": ["sessions", "--user", "nobody"],
    "export": ["sessions", "export", "--user", "nobody", "--session", "none", "--file", "{}/out"],
    "trace": ["trace", "none", "--user", "nobody"],
    "explain": ["explain", "none"],
    "stats": ["stats"],
    "drives": ["drives"],
    "cluster": ["cluster", "status"],
    "plan": ["cluster", "plan", "127.0.0.1:9"],
    "top": ["top", "--once", "--interval", "0.1"],
}
NO = {"get", "delete", "pin", "export", "trace", "explain", "cluster", "plan"}  # of a node that has nothing
IMPORT = ["sessions", "import", "--user", "ada", "--session", "chat"]


@pytest.mark.parametrize("name", CALLS)
def test_commands_that_call_a_node_share_the_exit_statuses(
    name: str, shared_node: NodeProcess, tenant: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [one.replace("{}", str(tmp_path)) for one in CALLS[name]]

    def ends(*more: str, node: str = shared_node.target) -> tuple[int, str, str]:
        status = main([*command, "--node", node, "--json", *more])
        return status, *capfd.readouterr()

    status, out, _ = ends("--tenant", tenant)
    assert status == (Status.NO if name in NO else Status.DONE)
    assert out or name == "watch", "a program gets an object, whatever the answer is"
    json.loads(out or "{}")

    away, unusable = f"127.0.0.1:{next_port()}", tmp_path / "ca.pem"
    unusable.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for expected, (status, out, err) in (
        (Status.FAILED, ends(node=away)),
        (Status.USAGE, ends(node="no port")),
        (Status.USAGE, ends("--tenant", "no name!")),
        (Status.USAGE, ends("--token-file", str(tmp_path / "none"))),
        (Status.USAGE, ends("--ca", str(tmp_path / "none"))),
        (Status.USAGE, ends("--ca", str(unusable))),
        (Status.USAGE, ends("--call-timeout-ms", "0")),
    ):
        assert status == expected, err
        # What gRPC logs before that is off in a process of the command's own.
        assert err.splitlines()[-1] == f"kvstore: {json.loads(out)['message']}"


@pytest.mark.parametrize("name", ["export", "trace"])
def test_the_error_names_the_missing_session(
    name: str, shared_node: NodeProcess, tenant: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [one.replace("{}", str(tmp_path)) for one in CALLS[name]]
    assert main([*command, "--node", shared_node.target, "--tenant", tenant]) == Status.NO
    said = f"kvstore: On {shared_node.target}: The user 'nobody' has no session 'none'.\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("file", "status", "error"),
    [("/dev/full", Status.FAILED, "KvError"), ("{}", Status.USAGE, "ConfigError")],
)
def test_an_unwritable_file_is_a_json_object_too(
    file: str, status: Status, error: str, shared_node: NodeProcess, tenant: str, tmp_path: Path, capfd: Any
) -> None:
    reach = ["--node", shared_node.target, "--tenant", tenant, "--json"]
    assert main(["put", "name:full", __file__, *reach]) == Status.DONE
    capfd.readouterr()
    assert main(["get", "name:full", file.replace("{}", str(tmp_path)), *reach]) == status
    assert json.loads(capfd.readouterr().out)["error"] == error


@pytest.mark.parametrize(
    "command",
    [
        ["get", "name:\udcff"],
        ["delete", "name:a", "name:\udcff"],
        ["explain", "\udcff"],
        ["sessions", "--user", "\udcff"],
        ["put", "name:a", __file__, "--user", "\udcff"],
    ],
)
def test_an_argument_that_is_not_utf_8_is_a_json_object_too(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == Status.USAGE
    told = json.loads(capfd.readouterr().out)
    assert told == {"error": "UsageError", "message": "An argument is not valid UTF-8."}


def test_a_file_name_may_be_any_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fsck", str(tmp_path / "\udcff")]) == Status.USAGE
    assert "There is no data folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["pin", "name:a", "--seconds", "0"], "--seconds takes 1 to 600, not 0."),
        (["watch", "--seconds", "-1"], "--seconds must be more than 0 and at most 86400, not -1."),
        (["top", "--interval", "0"], "--interval takes 0.1 to 3600 seconds, not 0."),
        (["certificates", "{}/certs", "--days", "0"], "--days takes 1 to 3650, not 0."),
        (["stats", "--call-timeout-ms", "-1"], "--call-timeout-ms takes 1 to 600000, not -1."),
        (["stats", "--get-timeout-ms", "600001"], "--get-timeout-ms takes 1 to 600000, not 600001."),
        (
            ["serve", "--data", "{}/node", "--listen", "127.0.0.1:99999"],
            "--listen takes a port of 0 to 65535, not 99999.",
        ),
        (
            ["serve", "--data", "{}/node", "--http", "127.0.0.1:-1"],
            "--http takes a port of 0 to 65535, not -1.",
        ),
        (
            ["put", "name:", __file__],
            "A key is 64 hexadecimal digits, or name:TEXT, and name: is followed by no text.",
        ),
    ],
)
def test_an_impossible_value_is_reported_with_its_option(
    command: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([one.replace("{}", str(tmp_path)) for one in command]) == Status.USAGE
    assert capfd.readouterr().err == f"kvstore: {says}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_drive_without_room_is_a_failure_before_anything_is_created(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "node"
    assert main(["serve", "--data", str(data), "--capacity", "15TiB", "--listen", "127.0.0.1:0"]) == 1
    assert "set a smaller --capacity" in capfd.readouterr().err
    assert not data.exists()


@pytest.mark.parametrize(
    ("command", "module", "says"),
    [
        (
            ["demo", "--data", "{}"],
            "demo.demo.DRIVE_CAPACITY_BYTES_DEFAULT",
            "name a folder elsewhere with --data.",
        ),
        (
            ["bench", "path", "--data", "{}"],
            "bench.measure._CAPACITY",
            "name a folder elsewhere with --data.",
        ),
    ],
)
def test_a_trial_without_room_names_its_own_option(
    command: list[str],
    module: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"kvstore.{module}", "15TiB" if module.endswith("_CAPACITY") else 15 << 40)
    assert main([one.replace("{}", str(tmp_path)) for one in command]) == Status.FAILED
    err = capfd.readouterr().err
    assert err.startswith("kvstore: A drive of 15 TiB has no room on the file system of ")
    assert err.endswith(f"{says}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_stopped_during_its_start_is_a_success(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.serve_options.check_machine", lambda _: signal.raise_signal(number))
    assert main(["serve", "--data", str(tmp_path / "node"), "--listen", "127.0.0.1:0"]) == Status.DONE
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["fsck", "{}/none"], Status.USAGE),
        (["fsck", "{}"], Status.USAGE),
        (["keys", "status", "--data", "{}/none"], Status.USAGE),
        (["keys", "status", "--data", "{}"], Status.USAGE),
        (["doctor", "--data", "{}/none"], Status.USAGE),
        (["bench", "--data", "{}/none"], Status.USAGE),
        (["config", "--check", "{}/none"], Status.USAGE),
        (["match", "{}/none"], Status.USAGE),
        ([*IMPORT, "--file", "{}/none"], Status.USAGE),
        ([*IMPORT, "--file", __file__], Status.USAGE),
        (["certificates", "{}", "--node", "no name"], Status.USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unusable_files_and_folders(
    command: list[str], status: Status, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([one.replace("{}", str(tmp_path)) for one in command]) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("kvstore: ")
    assert err.count("\n") == 1
