"""The settings of a node: one table for flags, variables and the file; the first of these that sets one applies."""

from __future__ import annotations

import argparse
import os
import signal
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import main
from kvstore.config import NodeConfig, UpkeepConfig, shown_apart
from kvstore.durability import Durability
from kvstore.errors import ConfigError, NotAuthenticated
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from kvstore.serve_options import (
    OPTIONS,
    Settings,
    add_options,
    check_machine,
    defaults_shown,
    read_file,
    settings,
)
from tests.conftest import small_client, small_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.demo.node_process import NodeProcess

KEY = block_key(b"settings")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Reads the settings of a command line, without variables from the environment."""
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("TRIGGERKV_SERVE_CONFIG", raising=False)

    def read(*arguments: str) -> Settings:
        parser = argparse.ArgumentParser()
        add_options(parser)
        return settings(parser.parse_args(arguments))

    return read


def test_the_first_place_that_has_a_setting_counts(
    told: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('data = "kept"\nhot = "1GiB"\ncapacity = "2GiB"\nlisten = "127.0.0.1:1"\nui = true\n')
    monkeypatch.setenv("TRIGGERKV_SERVE_HOT", "2GiB")
    monkeypatch.setenv("TRIGGERKV_SERVE_LISTEN", "127.0.0.1:2")
    values = told("--config", str(file), "--listen", "127.0.0.1:3").values
    assert values["listen"] == ("127.0.0.1", 3)
    assert values["hot"] == 2 << 30
    assert values["capacity"] == 2 << 30
    assert values["data"] == tmp_path / "kept"  # beside the file, wherever the process runs
    assert values["ui"] is True
    assert values["eviction"] == "lru"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("--cluster", "10.0.0.2:2379"), "names no cluster; write HOST:PORT"),
        (("--cluster", "10.0.0.2/chat"), "is not an address of a node"),
        (("--cluster", "e:1/a b"), "A cluster's name has letters"),
        (("--cluster", "e:1/x", "--cluster-user", "u"), "needs the file with its password"),
        (("--cluster", "e:1/x", "--cluster-ca", "c", "--cluster-key", "k"), "needs its key, and the key"),
        (("--cluster-user", "u"), "--cluster-user needs --cluster"),
        (("--cluster-zone", "a"), "--cluster-zone needs --cluster"),
        (("--cluster", "e:1/x", "--cluster-zone", "a" * 65), "--cluster-zone has at most 64"),
        (("--cluster", "e:1/x", "--cluster-zone", "a\nb"), "--cluster-zone has at most 64"),
        (("--cluster", "e:1/x", "--cluster-address", "h"), "is not an address of a node"),
        (
            (
                "--cluster",
                "e:1/x",
                "--listen",
                "0.0.0.0:1",
                "--tenants",
                "t",
                "--tls-cert",
                "c",
                "--tls-key",
                "k",
            ),
            "is no address for clients: set --cluster-address",
        ),
        (
            ("--cluster", "e:1/x", "--listen", "127.0.0.1:1", "--cluster-address", "0.0.0.0:7070"),
            "0.0.0.0:7070 is no address for clients: --cluster-address is one of this host",
        ),
        *(
            (
                ("--cluster", "e:1/x", "--listen", "127.0.0.1:1", "--cluster-address", f"{every}:7070"),
                "is no address for clients: --cluster-address is one of this host",
            )
            for every in ("[::]", "[::0]", "[::ffff:0.0.0.0]", "0", "0x0.0")
        ),
    ],
)
def test_an_impossible_cluster_is_refused_in_one_sentence(
    told: Callable[..., Settings], said: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        told("--data", "d", *said).node()


def test_each_option_can_be_set_in_each_place(
    told: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "data": "d", "drive": "a:1GiB", "without_drive": "2", "listen": "[::1]:5", "capacity": "3GiB", "hot": "4GiB",
        "eviction": "s3fifo", "provider": "net", "tenants": "t", "tls_cert": "c", "tls_key": "k", "tls_clients": "ca",
        "audit": "log", "events": "ipc://x", "events_replay": "ipc://y", "events_as": "arrays", "http": "127.0.0.1:9",
        "otel": "http://h:1", "master_key": "file:k", "fabric_address": "h", "fabric_ports": "7071-7080",
        "cluster": "e:1,e:2/x", "cluster_address": "h:5", "cluster_zone": "rack 1",
        "cluster_ca": "eca", "cluster_cert": "ec", "cluster_key": "ek", "cluster_user": "u", "cluster_password": "p",
            "cluster_replicas": "2", "cluster_secret": "s", "cluster_nodes_ca": "nca",
        "fabric_clients": "10.0.0.0/8", "log_level": "debug", "log_format": "json",
    }  # fmt: skip
    switches = {option.name for option in OPTIONS if option.is_switch}
    assert texts.keys() | switches == {option.name for option in OPTIONS}
    flags: list[str] = [_flag(name) for name in switches]
    for name, text in texts.items():
        flags += [_flag(name), text]
    by_flags = told(*flags).values
    for name in switches:
        monkeypatch.setenv(f"TRIGGERKV_SERVE_{name.upper()}", "true")
    for name, text in texts.items():
        monkeypatch.setenv(f"TRIGGERKV_SERVE_{name.upper()}", text)
    assert told().values == by_flags
    for name in texts.keys() | switches:
        monkeypatch.delenv(f"TRIGGERKV_SERVE_{name.upper()}")
    many = {option.name for option in OPTIONS if option.is_many}
    lines = [f"{name} = true" for name in switches]
    lines += [
        f'{name} = ["{text}"]' if name in many else f'{name} = "{text}"' for name, text in texts.items()
    ]
    (tmp_path / "node.toml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert told("--config", "node.toml").values == by_flags


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_printed_settings_are_the_defaults(
    told: Callable[..., Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--print-defaults"]) == 0
    printed = capsys.readouterr().out
    assert printed == defaults_shown()
    (tmp_path / "node.toml").write_text(printed)
    assert Settings.of(read_file(tmp_path / "node.toml")).values == told().values
    everything = "\n".join(line.removeprefix("#") if " = " in line else line for line in printed.splitlines())
    assert tomllib.loads(everything).keys() == {option.name for option in OPTIONS}
    assert main(["config", "--check", str(tmp_path / "node.toml")]) == 0


def test_a_valid_file_for_which_this_machine_lacks_memory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('hot = "9999GiB"\n')
    assert main(["config", "--check", str(file)]) == 3
    valid, told = capsys.readouterr().out.splitlines()
    assert valid == f"{file}: valid"
    assert "would not start with it: --hot 9.8 TiB exceeds" in told


def test_sizes_that_would_look_the_same_are_shown_in_bytes() -> None:
    assert shown_apart(4 << 20, 8 << 20) == ("4 MiB", "8 MiB")
    assert shown_apart(4 << 20, (4 << 20) + 1) == ("4194304 bytes", "4194305 bytes")
    assert shown_apart(14 << 20, 15 << 20) == ("14 MiB", "15 MiB")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("data = ", "is not TOML"),
        ("dat = 1", "an unknown setting: dat"),
        ("ui = 1", "ui in .* is true or false"),
        ('drive = "x"', "drive in .* is a list"),
        ("hot = true", "hot in .* is a text or a whole number, not bool"),
        ('hot = "much"', "hot in .*'much' is not a size"),
        ('hot = "1MiB"', "hot memory must be at least"),
        ('listen = "0.0.0.0:7070"', "does not listen on 0.0.0.0 without --tls-cert"),
        ('log_level = "loud"', "log_level in .* debug or info"),
        ('tls_cert = "c.pem"', "needs its key"),
        ('http = "127.0.0.1:7070"', "can't both use 7070"),
        ('http = "127.0.0.1:7"\nlisten = "127.0.0.1:7"', "can't both use 7 on 127.0.0.1"),
        ('events_replay = "ipc://y"', "needs published events: set --events"),
        ('events = "ipc://y"\nevents_replay = "ipc://y"', "not both on ipc://y"),
        (r'data = "\u0000"', "data in .* contains a NUL"),
        (r'tls_cert = "\u0000"', "tls_cert in .* contains a NUL"),
        (r'drive = ["a\u0000:1GiB"]', "drive in .* contains a NUL"),
        ('data = "~nosuchuser/x"', "data in .* an unknown user"),
        ("data = " + "[" * 3000, "nested too deeply"),
        ("hot = " + "9" * 5000, "is not TOML"),
        ("hot = 0x" + "f" * 5000, "hot in .* has more than 18 digits"),
        (f'hot = "{"9" * 5000}"', "hot in .* larger than any drive"),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text + "\n")
    assert main(["config", "--check", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvstore: ")
    assert len(said.splitlines()) == 1
    with pytest.raises(ConfigError, match=why):
        Settings.of({"data": tmp_path} | read_file(file)).node()


def test_a_drive_named_twice_is_refused(told: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    one, other, another = (f"--drive={tmp_path / name}:64MiB" for name in ("drive", "link", "more"))
    assert len(told("--data=node", one, another).node().drives) == 2
    for again in (one, other):
        with pytest.raises(ConfigError, match=rf"--drive names {tmp_path}/drive twice\."):
            told("--data=node", one, again).node()


def test_memory_that_differs_slightly_is_shown_in_bytes() -> None:
    has_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(
        ConfigError, match=rf"--hot {has_bytes + 1} bytes exceeds .* memory, {has_bytes} bytes\."
    ):
        check_machine(NodeConfig(Path("node"), hot_bytes=has_bytes + 1))


@pytest.mark.parametrize(
    ("listen", "http", "can"),
    [
        (("0.0.0.0", 7), ("127.0.0.1", 7), False),
        (("127.0.0.1", 7), ("::", 7), False),
        (("127.0.0.1", 7), ("127.0.0.2", 7), True),
        (("127.0.0.1", 7), ("127.0.0.1", 8), True),
        (("127.0.0.1", 0), ("127.0.0.1", 0), True),
    ],
)
def test_grpc_and_http_have_a_port_each(
    listen: tuple[str, int], http: tuple[str, int], *, can: bool, tmp_path: Path
) -> None:
    files: dict[str, Any] = dict.fromkeys(("tls_cert", "tls_key", "tenants"), tmp_path)
    told = Settings.of({"data": tmp_path, "listen": listen, "http": http, **files})
    if can:
        assert told.node().http == http
    else:
        with pytest.raises(ConfigError, match="need separate ports"):
            told.node()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UI", "perhaps"),
        ("WITHOUT_DRIVE", "1,x"),
        ("WITHOUT_DRIVE", "9" * 5000),
        ("HOT", "much"),
        ("HOT", "9" * 5000),
        ("LISTEN", "127.0.0.1:" + "9" * 5000),
    ],
)
def test_an_invalid_variable_is_named(
    told: Callable[..., Settings], name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TRIGGERKV_SERVE_{name}", text)
    with pytest.raises(ConfigError, match=f"TRIGGERKV_SERVE_{name}"):
        told()


def test_a_variable_that_is_not_an_option_is_refused(
    told: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIGGERKV_SERVE_LISTN", "")  # empty is not set, as everywhere
    monkeypatch.setenv("TRIGGERKV_NODE", "of-a-client:1")
    told()
    monkeypatch.setenv("TRIGGERKV_SERVE_LISTN", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="an unknown setting: TRIGGERKV_SERVE_LISTN"):
        told()


def test_a_node_without_a_folder_is_refused(told: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match="Set the node's folder"):
        told().node()


def test_changed_settings_are_listed_by_when_they_take_effect() -> None:
    before: Any = Settings.of({"data": Path("x"), "hot": 1})
    after = Settings.of({"data": Path("x"), "hot": 2, "log_level": "debug"})
    assert before.changed(after) == (["log_level"], ["hot"])


def test_a_node_reloads_its_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('log_level = "warning"\n')
    with small_node(tmp_path / "node", arguments=("--config", str(file))) as node:
        for text, said in (
            ('log_level = "info"\n', "log_level changed"),
            (
                'log_level = "info"\neviction = "s3fifo"\n',
                "eviction changed; a restart is needed",
            ),
            ("log_level = 1\n", "The settings are unchanged"),
        ):
            file.write_text(text)
            os.kill(node.pid, signal.SIGHUP)
            until_s = time.monotonic() + 20
            while said not in node.log():
                assert time.monotonic() < until_s, node.log()


def _say(node: NodeProcess, file: Path, text: str, said: str) -> None:
    """Change the file, have the node read it again, and wait for one more line `said` in its log."""
    before = node.log().count(said)
    file.write_text(text)
    os.kill(node.pid, signal.SIGHUP)
    until_s = time.monotonic() + 20
    while node.log().count(said) == before:
        assert time.monotonic() < until_s, node.log()
        time.sleep(0.01)


def test_access_to_an_open_node_changes_only_at_a_restart(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme-1")}"]\n')
    file = tmp_path / "node.toml"
    file.write_text('log_level = "info"\n')
    with small_node(tmp_path / "node", arguments=("--config", str(file))) as node:
        for times_said in (1, 2):
            _say(node, file, 'tenants = "tenants.toml"\n', "reloaded: nothing changed")
            assert node.log().count("stays open to all callers until it is restarted") == times_said
            with small_client(node.target) as client:
                assert client.put_inline(KEY, b"x") is Durability.WRITTEN
        _say(node, file, 'log_level = "info"\n', "reloaded: nothing changed")
        assert node.log().count("stays open to all") == 2


def test_a_node_whose_tenants_setting_is_removed_keeps_its_tenants(tmp_path: Path) -> None:
    tenants, file = tmp_path / "tenants.toml", tmp_path / "node.toml"
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme-1")}"]\n')
    file.write_text('tenants = "tenants.toml"\n')
    with small_node(tmp_path / "node", arguments=("--config", str(file))) as node:
        _say(node, file, 'log_level = "info"\n', "keeps its current ones until it is restarted")
        with small_client(node.target) as client, pytest.raises(NotAuthenticated):
            client.put_inline(KEY, b"x")
        tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme-2")}"]\n')
        _say(node, file, 'tenants = "tenants.toml"\n', "1 tenants")
        with small_client(node.target, token="acme-2") as client:
            assert client.put_inline(KEY, b"x") is Durability.WRITTEN


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_secret_readable_by_every_user_is_reported(tmp_path: Path, mode: int, *, is_open: bool) -> None:
    path = tmp_path / "secret"
    path.write_text("s" * 32)
    path.chmod(mode)
    assert UpkeepConfig(2, path).is_secret_open == is_open
