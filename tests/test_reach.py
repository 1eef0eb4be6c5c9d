"""The settings of a client: each comes from the first source that has it, and an invalid one is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import _parser, main
from kvstore.client import Client, Nodes
from kvstore.commands.node_commands import reach as of_command
from kvstore.engines.common_settings import EngineSettings
from kvstore.errors import ConfigError
from kvstore.limits import CONNECT_TIMEOUT_MS, FETCH_TIMEOUT_MS, REACH_TIMEOUT_MS_MAX, RPC_TIMEOUT_MS
from kvstore.reach import (
    Reach,
    credentials_of,
    reach_of_arguments,
    reach_settings,
    settings_in_effect,
    split_target,
    token_of,
)

if TYPE_CHECKING:
    from pathlib import Path

NODE = "127.0.0.1:7070"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file of settings, and no variables from the environment."""
    for name in reach_settings():
        monkeypatch.delenv(f"TRIGGERKV_{name.upper()}", raising=False)
    path = tmp_path / "client.toml"
    path.touch()
    monkeypatch.setenv("TRIGGERKV_CONFIG", str(path))
    return path


def test_each_setting_comes_from_the_first_place_that_has_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('node = "file:1"\ntenant = "of.the.file"\nprovider = "net"\nca = "ca.pem"\n')
    monkeypatch.setenv("TRIGGERKV_NODE", "variable:2")
    monkeypatch.setenv("TRIGGERKV_TENANT", "of.the.environment")
    told = Reach.of({"nodes": ["argument:3"]})
    assert told.nodes == ("argument:3",)
    assert told.tenant == "of.the.environment"
    assert told.provider == "net"
    assert told.ca == file.parent / "ca.pem"  # beside the file, wherever the process runs


def test_a_token_and_its_file_are_one_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f'node = "{NODE}"\ntoken_file = "token"\n')
    (file.parent / "token").write_text("secret of the file\n")
    assert token_of(Reach.of()) == "secret of the file"
    monkeypatch.setenv("TRIGGERKV_TOKEN", "secret of the environment")
    assert token_of(Reach.of()) == "secret of the environment"
    assert token_of(Reach.of({"token_file": str(file.parent / "token")})) == "secret of the file"
    with pytest.raises(ConfigError, match="not both"):
        Reach.of({"token": "a", "token_file": "b"})


def test_without_a_settings_file_none_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRIGGERKV_CONFIG")
    assert Reach.of({"node": NODE}).nodes == (NODE,)
    (tmp_path / ".config" / "triggerkv").mkdir(parents=True)
    (tmp_path / ".config" / "triggerkv" / "client.toml").write_text('node = "home:7070"\n')
    assert Reach.of().nodes == ("home:7070",)


def test_a_token_is_never_shown(file: Path) -> None:
    (file.parent / "token").write_text("s3cret")
    for told in (Reach((NODE,), token="s3cret"), Reach((NODE,), token_file=file.parent / "token")):
        assert token_of(told) == "s3cret"
        assert "s3cret" not in f"{told!r}{told}"
    with pytest.raises(ConfigError) as caught:
        Reach.of({"node": NODE, "token": b"s3cret"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("node", ["10.0.0.5:7070", "node.example:7070", "[fd00::1]:7070"])
def test_a_token_is_sent_beyond_this_machine_only_over_tls(node: str) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        Reach.of({"node": node, "token": "t"})
    assert Reach.of({"node": node, "token": "t", "ca": "ca.pem"}).uses_tls
    assert Reach.of({"node": node, "token": "t", "tls": True}).uses_tls
    assert not Reach.of({"node": node}).uses_tls


@pytest.mark.parametrize("node", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070"])
def test_a_token_is_sent_to_this_machine_without_tls(node: str) -> None:
    assert not Reach.of({"node": node, "token": "t"}).uses_tls


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "No node is set"),
        ({"node": NODE, "nod": 1}, "the call has no nod; it has node, nodes"),
        ({"node": NODE, "nodes": [NODE]}, "node or nodes, not both"),
        ({"nodes": []}, "1 to 64 nodes, not 0"),
        ({"nodes": [NODE, NODE]}, "listed twice"),
        ({"node": NODE, "tls": "yes"}, "tls in the call is true or false, not 'yes', which is of type str"),
        ({"node": NODE, "certificate": "c.pem"}, "needs its key"),
        (
            {"node": 7070},
            'node in the call is text such as "10.0.0.5:7070", HOST:PORT, not 7070, which is of type int',
        ),
        ({"node": "no port"}, "'no port' is not an address of a node"),
        ({"node": "::1:7070"}, "brackets around IPv6"),
        ({"node": "a b:1"}, "not an address of a node"),
        ({"node": "host:0"}, "not an address of a node"),
        ({"node": "host:65536"}, "not an address of a node"),
        ({"node": NODE, "call_timeout_ms": 0}, "call_timeout_ms is 1 to 600000 milliseconds, not 0."),
        ({"node": NODE, "call_timeout_ms": REACH_TIMEOUT_MS_MAX + 1}, "call_timeout_ms is 1 to"),
        ({"node": NODE, "call_timeout_ms": 10**5000}, "call_timeout_ms is 1 to"),
        ({"node": "host:" + "9" * 5000}, "not an address of a node"),
        ({"node": NODE, "ca": "~nosuchuser/x"}, "ca in the call begins with the home of an unknown user"),
        ({"node": NODE, "ca": "a\0"}, "ca in the call contains a NUL"),
        ({"node": NODE, "get_timeout_ms": 1.5}, "a whole number of milliseconds, not 1.5"),
        ({"node": NODE, "get_timeout_ms": True}, "a whole number of milliseconds, not True"),
        ({"node": NODE, "zone": 7}, "zone in the call is a text, not 7, which is of type int"),
        ({"node": NODE, "zone": "z" * 65}, "zone has at most 64 printable characters"),
        ({"node": NODE, "zone": "rack\n1"}, "zone has at most 64 printable characters"),
    ],
)
def test_an_impossible_value_is_refused_in_one_sentence(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Reach.of(given)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("node = ", "is not TOML"),
        ("nod = 1", r"client\.toml has no nod"),
        ("tls = 1", r"in .*client\.toml is true or"),
        ("node = " + "[" * 3000, "nested too deeply"),
        ("call_timeout_ms = " + "9" * 5000, "is not TOML"),
        ("call_timeout_ms = 0x" + "f" * 5000, "call_timeout_ms is 1 to"),
    ],
)
def test_an_unreadable_file_is_named(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        Reach.of({"node": NODE})


def test_a_missing_file_that_was_named_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGGERKV_CONFIG", "/nowhere/client.toml")
    with pytest.raises(ConfigError, match="TRIGGERKV_CONFIG names, does not exist"):
        Reach.of({"node": NODE})
    monkeypatch.setenv("TRIGGERKV_CONFIG", "~nosuchuser/client.toml")
    with pytest.raises(ConfigError, match="home of an unknown user"):
        Reach.of({"node": NODE})


@pytest.mark.parametrize(
    ("name", "text"), [("TLS", "perhaps"), ("CALL_TIMEOUT_MS", "1.5"), ("CALL_TIMEOUT_MS", "9" * 5000)]
)
def test_an_invalid_variable_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TRIGGERKV_{name}", text)
    with pytest.raises(ConfigError, match=f"TRIGGERKV_{name} is"):
        Reach.of({"node": NODE})


def test_variables_cover_all_settings_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("NODES", "a:1, b:2"),
        ("TLS", "true"),
        ("FABRIC_ADDRESS", "::1"),
    ):
        monkeypatch.setenv(f"TRIGGERKV_{name}", text)
    told = Reach.of()
    assert told.nodes == ("a:1", "b:2")
    assert (told.tls, told.fabric_address) == (True, "::1")


def test_timeouts_can_be_set_in_every_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("connect_timeout_ms", "call_timeout_ms", "get_timeout_ms")

    def told(reach: Reach) -> tuple[int, ...]:
        return tuple(getattr(reach, name) for name in names)

    assert told(Reach((NODE,))) == (CONNECT_TIMEOUT_MS, RPC_TIMEOUT_MS, FETCH_TIMEOUT_MS)
    file.write_text(f'node = "{NODE}"\n' + "".join(f"{name} = 1\n" for name in names))
    assert told(Reach.of()) == (1, 1, 1)
    for number, name in enumerate(names[:2]):
        monkeypatch.setenv(f"TRIGGERKV_{name.upper()}", str(20 + number))
    assert told(Reach.of()) == (20, 21, 1)
    assert told(Reach.of({"connect_timeout_ms": 30})) == (30, 21, 1)
    with Client(call_timeout_ms=40) as client:
        assert told(client.reach) == (20, 40, 1)
    assert told(EngineSettings.of({"get_timeout_ms": 50}, where="an engine").reach) == (20, 21, 50)
    asked = ["stats", "--connect-timeout-ms", "60", "--call-timeout-ms", "61", "--get-timeout-ms", "62"]
    assert told(of_command(_parser().parse_args(asked))) == (60, 61, 62)


def test_a_zone_has_one_name_in_every_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Reach((NODE,)).zone == ""
    file.write_text(f'node = "{NODE}"\nzone = "rack of the file"\n')
    assert Reach.of().zone == "rack of the file"
    monkeypatch.setenv("TRIGGERKV_ZONE", "rack 1")
    with Nodes(zone="rack 2") as nodes:
        assert nodes.reach.zone == "rack 2"
    assert EngineSettings.of({"replicas": 2}, where="an engine").reach.zone == "rack 1"
    assert EngineSettings.of({"zone": "rack 3"}, where="an engine").reach.zone == "rack 3"
    assert of_command(_parser().parse_args(["cluster", "status"])).zone == "rack 1"
    planned = ["cluster", "plan", "10.0.0.9:7070", "--zone", "rack 4"]
    assert of_command(_parser().parse_args(planned)).zone == "rack 1", "rack 4 is that of the planned node"


@pytest.mark.parametrize("text", ["", " \n", "two\nlines"], ids=["empty", "blank", "lines"])
def test_a_file_without_a_token_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match="does not contain a valid token"):
        token_of(Reach.of({"node": NODE, "token_file": tmp_path / "token"}))
    with pytest.raises(ConfigError, match="could not be read: No such file"):
        token_of(Reach.of({"node": NODE, "token_file": tmp_path / "none"}))


@pytest.mark.parametrize(
    ("target", "parts"),
    [("a-b.c:1", ("a-b.c", 1)), ("[::1]:7070", ("::1", 7070)), ("10.0.0.1:65535", ("10.0.0.1", 65535))],
)
def test_a_target_has_a_host_and_a_port(target: str, parts: tuple[str, int]) -> None:
    assert split_target(target) == parts


def test_a_client_takes_a_reach_or_single_settings_and_not_both(file: Path) -> None:
    file.write_text('node = "127.0.0.1:1"\ntenant = "ada"\n')
    with Client() as client:
        assert (client.target, client.tenant) == ("127.0.0.1:1", "ada")
    with Client(Reach((NODE,), tenant="bob")) as client:
        assert (client.target, client.tenant) == (NODE, "bob")
    with pytest.raises(ConfigError, match="tenant can't be given beside it"):
        Client(Reach((NODE,)), tenant="bob")
    with pytest.raises(ConfigError, match="One node is needed here"):
        Client(Reach(("a:1", "b:1")))


def test_several_nodes_share_their_settings(file: Path) -> None:
    file.write_text('nodes = ["127.0.0.1:2", "127.0.0.1:1"]\ntenant = "ada"\n')
    with Nodes() as nodes:
        assert [one.node for one in nodes.map.members] == ["127.0.0.1:1", "127.0.0.1:2"]
        assert nodes.of("user").tenant == "ada"


@pytest.mark.parametrize("setting", ["ca", "certificate"])
@pytest.mark.parametrize("content", [b"", b"\n", b"half a file"])
def test_a_file_without_a_certificate_is_refused(setting: str, content: bytes, tmp_path: Path) -> None:
    """GRPC takes an empty one as not given, and trusts the CAs that the system trusts."""
    (tmp_path / "empty.pem").write_bytes(content)
    (tmp_path / "a.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\n")
    given: dict[str, Any] = {setting: tmp_path / "empty.pem"}
    if setting == "certificate":
        given["key"] = tmp_path / "a.key"
    with pytest.raises(ConfigError, match=r"empty\.pem contains no certificate or key"):
        credentials_of(reach_of_arguments("node:7070", {**given, "tls": True}))


@pytest.mark.parametrize("token", ["two\nlines", "nön-ascii", "x" * 5000])
def test_a_token_that_no_call_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="invalid characters") as caught:
        Client("127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, f"node.{'x' * 64}.example"])
def test_a_host_name_with_invalid_labels_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of a node"):
        Client(f"{host}:7070")


def test_users_can_see_where_each_setting_comes_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('token = "secret"\ntenant = "ada"\nget_timeout_ms = 7\n')
    monkeypatch.setenv("TRIGGERKV_TENANT", "bob")
    assert main(["config", "--client"]) == 0
    text = capsys.readouterr().out
    shown = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert " ".join(shown["nodes"]) == "127.0.0.1:7070 default of commands; a Client has none"
    assert shown["tenant"] == ["bob", "the", "environment"]
    assert shown["get_timeout_ms"] == ["7", str(file)]
    assert shown["token"] == ["(not", "shown)", str(file)]
    assert "secret" not in text
    monkeypatch.setenv("TRIGGERKV_NODES", "127.0.0.1:1,127.0.0.1:2")
    assert settings_in_effect("c:3")[0] == ("nodes", "127.0.0.1:1,127.0.0.1:2", "the environment")


def test_a_library_has_no_default_node() -> None:
    with pytest.raises(ConfigError, match="No node is set"):
        Client()
    assert of_command(_parser().parse_args(["stats"])).node == "127.0.0.1:7070"


def test_an_empty_node_address_is_named_as_such() -> None:
    for node in ("", ",,", "127.0.0.1:1,"):
        with pytest.raises(ConfigError, match="A node's address is empty"):
            Reach.of({"node": node})
