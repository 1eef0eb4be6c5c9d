"""Files named by options: their size is bounded, and one that can't be read is an error in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvstore.cli
import sim.cli
from kvcli.input_file import open_input, read_input
from kvstore.config_files import read_toml
from kvstore.errors import ConfigError
from kvstore.limits import INPUT_FILE_BYTES_MAX

SERVE = ["serve", "--data", "{}/node", "--listen", "127.0.0.1:0"]
CLIENT = ["stats", "--node", "127.0.0.1:1"]
COMMANDS = [
    ["match", "{file}"],
    ["config", "--check", "{file}"],
    [*SERVE, "--config", "{file}"],
    [*SERVE, "--tenants", "{file}"],
    [*SERVE, "--tls-cert", "{file}", "--tls-key", "{file}"],
    [*SERVE, "--cluster", "127.0.0.1:1/x", "--cluster-ca", "{file}"],
    [*SERVE, "--cluster", "127.0.0.1:1/x", "--cluster-user", "x", "--cluster-password", "{file}"],
    [*SERVE, "--cluster", "127.0.0.1:1/x", "--cluster-replicas", "2", "--cluster-secret", "{file}"],
    [*SERVE, "--cluster", "127.0.0.1:1/x", "--cluster-replicas", "2", "--cluster-nodes-ca", "{file}"],
    [*CLIENT, "--tls", "--token-file", "{file}"],
    [*CLIENT, "--ca", "{file}"],
    [*CLIENT, "--tls", "--certificate", "{file}", "--key", "{file}"],
]
SIMULATIONS = [
    ["replay", "{file}.csv"],
    ["replay", "{file}.jsonl"],
    ["plan", "--cluster", "{file}"],
    ["kv", "--config", "{file}"],
    ["plan", "--profile", "{file}"],
    ["replay", "{}/good.csv", "--timings", "{file}"],
    ["kv", "--gpu-cost", "{file}"],
    ["calibrate", "fit", "{file}"],
    ["calibrate", "check", "{file}"],
]
NOT_REGULAR = "it is not a regular file"


def test_a_device_a_pipe_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (Path("/dev/zero"), NOT_REGULAR),
        (tmp_path / "pipe", NOT_REGULAR),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(OSError, match=why):
            open_input(path, 1)


def test_no_more_than_the_bound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert read_input(path, 1 << 20) == bytes(1 << 20)
    with pytest.raises(OSError, match=r"it is larger than 0\.5 MiB"):
        read_input(path, 1 << 19)
    assert Path("/proc/self/maps").stat().st_size == 0
    with pytest.raises(OSError, match="it is larger than"):
        read_input(Path("/proc/self/maps"), 16)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text("a = 1")
    (tmp_path / "link").symlink_to("file.toml")  # as Kubernetes shows secrets
    assert read_toml(tmp_path / "link") == {"a": 1}
    with pytest.raises(ConfigError, match="could not be read: No such file"):
        read_toml(tmp_path / "none")


def _is_refused(
    command: list[str], path: Path, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main = sim.cli.main if command in SIMULATIONS else kvstore.cli.main
    assert main([part.replace("{file}", str(path)).replace("{}", str(tmp_path)) for part in command]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert why in err
    assert err.count("\n") == 1
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("command", [*COMMANDS, *SIMULATIONS], ids=" ".join)
def test_a_command_reads_no_device_and_no_oversized_file(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.csv").write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n")
    for name in ("null", "null.csv", "null.jsonl"):
        (tmp_path / name).symlink_to("/dev/null")
        with (tmp_path / name.replace("null", "large")).open("wb") as file:
            file.truncate(INPUT_FILE_BYTES_MAX + 1 if name == "null" else (2 << 30) + 1)
    _is_refused(command, tmp_path / "null", NOT_REGULAR, tmp_path, capfd)
    _is_refused(command, tmp_path / "large", "it is larger than ", tmp_path, capfd)
