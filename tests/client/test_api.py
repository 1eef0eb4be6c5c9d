"""The public API as `help` shows it: each method says what it does, and has an example, which runs as printed."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import io
import re
import sys
from contextlib import redirect_stdout
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

import kvstore.client
from kvstore.client import AsyncClient, AsyncClusterClient, Block, Client, ClusterClient, Nodes
from kvstore.errors import Closed, KvError, StorageError, UsageError
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from tests.conftest import small_client
from tools.generate_api import public_classes, public_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.demo.node_process import NodeProcess

KEY = block_key(b"the api")
METHODS = [(name, method) for name, kind in public_classes() for method, _ in public_methods(name, kind)]
FUNCTIONS = (kvstore.client.as_request, block_key)
_MADE_BY = re.compile(r"`(\w+)(?:\.\w+)?`.* makes it\.$")
_PARSER = doctest.DocTestParser()


class Shell:
    """Runs the examples of docstrings, also `await` outside of a function, as in `python -m asyncio`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._names_of: dict[str, dict[str, Any]] = {}
        self.classes = dict(public_classes())

    def run(self, text: str | None, names: dict[str, Any], of: str) -> dict[str, Any]:
        """Run a docstring's examples; returns these names and those that they define."""
        names = dict(names)
        for example in _PARSER.get_examples((text or "").replace("127.0.0.1:7070", self._target), of):
            code = compile(example.source, of, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "displayhook", sys.__displayhook__)  # prints values
                result = FunctionType(code, names)()
                if inspect.iscoroutine(result):
                    self._loop.run_until_complete(result)
            assert out.getvalue() == example.want, f"{of}: {example.source}"
        return names

    def names_of(self, name: str) -> dict[str, Any]:
        """The names that the example of a class defines, and those of the class that makes its objects."""
        if name not in self._names_of:
            kind = self.classes[name]
            made = _MADE_BY.match(vars(kind).get("__init__", kind).__doc__ or "")
            maker = "Client" if made is None or made.group(1) == name else made.group(1)
            before = {} if name == "Client" else self.names_of(maker)
            self._names_of[name] = self.run(kind.__doc__, before, name)
        return self._names_of[name]

    def close(self) -> None:
        for names in reversed(self._names_of.values()):
            for one in names.values():
                if isinstance(one, AsyncClient | AsyncClusterClient):
                    self._loop.run_until_complete(one.close())
                elif isinstance(one, Client | ClusterClient | Nodes | FlagWords):
                    one.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture(scope="module")
def shell(shared_node: NodeProcess) -> Iterator[Shell]:
    shell = Shell(shared_node.target)
    yield shell
    shell.close()


def test_the_program_in_the_example_runs(shell: Shell) -> None:
    shell.run(kvstore.client.__doc__, {}, "kvstore.client")


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_each_public_method_has_an_example(shell: Shell, name: str, method: str) -> None:
    assert ">>> " in getattr(shell.classes[name], method).__doc__, f"{name}.{method} has no example"


@pytest.mark.parametrize("name", [name for name, _ in public_classes()])
def test_the_example_of_each_class_runs_as_printed(shell: Shell, name: str) -> None:
    assert shell.names_of(name)["client"]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_the_example_of_each_method_runs_as_printed(shell: Shell, name: str, method: str) -> None:
    shell.run(getattr(shell.classes[name], method).__doc__, shell.names_of(name), f"{name}.{method}")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_example_of_each_function_runs_as_printed(shell: Shell, function: Callable[..., object]) -> None:
    assert ">>> " in (function.__doc__ or "")
    shell.run(function.__doc__, shell.names_of("Client"), function.__name__)


def test_all_operations_of_a_client_are_methods_of_its_class(shared_node: NodeProcess) -> None:
    with small_client(shared_node.target) as client:
        grafted = [name for name in vars(client) if not name.startswith("_")]
    assert grafted == []
    assert all(vars(Client)[name].__doc__ for name in vars(Client) if not name.startswith("_"))


@pytest.mark.parametrize(
    "call",
    [
        lambda client, _: client.attach(),
        lambda client, _: client.register(bytearray(16)),
        lambda client, block: client.put([block]),
        lambda client, block: client.arm([block]),
        lambda client, block: client.reserve([block]),
        lambda client, block: client.get([block]),
        lambda client, block: client.getting([block]),
        lambda client, _: client.put_inline(KEY, b"x"),
        lambda client, _: client.get_inline(KEY, 1),
        lambda client, _: client.put_many_inline([(KEY, b"x")])[0].error,
        lambda client, _: list(client.get_many_inline([(KEY, 1)])),
        lambda client, _: client.exists([KEY]),
        lambda client, _: client.prefix([KEY]),
        lambda client, _: client.explain([KEY]),
        lambda client, _: client.pin([KEY]),
        lambda client, _: client.prefetch([KEY]),
        lambda client, _: client.delete([KEY]),
        lambda client, _: client.session("ada", "chat").append([KEY], tokens=1),
        lambda client, _: list(client.sessions("ada")),
        lambda client, _: client.status(),
        lambda client, _: client.statistics(),
        lambda client, _: client.looked_up(),
        lambda client, _: next(client.watch(timeout_s=1.0)),
    ],
)
@pytest.mark.parametrize("was_used", [True, False])
def test_calls_on_a_closed_client_raise_closed(
    shared_node: NodeProcess, call: Callable[[Client, Block], object], *, was_used: bool
) -> None:
    with small_client(shared_node.target) as client:
        block = Block(KEY, client.register(bytearray(16)), 0, 16)
        if was_used:
            client.attach()
    try:
        error = call(client, block)
    except KvError as raised:
        error = raised
    assert isinstance(error, Closed), error
    assert str(error) == "The client is closed."
    client.close()  # once more is nothing


def test_a_usage_error_is_not_a_failure_of_a_drive_or_a_peer() -> None:
    for kind in UsageError.__subclasses__():
        assert not issubclass(kind, StorageError)
    assert {one.__name__ for one in UsageError.__subclasses__()} == {
        "Closed",
        "ConfigError",
        "InvalidArgument",
        "NotRegistered",
    }
