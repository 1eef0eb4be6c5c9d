"""What `Client` shows: each method is the class's own, says what it does, and has an example, which is run."""

from __future__ import annotations

import doctest
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import kvstore.client
from kvstore.client import Block, Client
from kvstore.errors import Closed, KvError, StorageError, UsageError
from kvstore.names import block_key
from tests.conftest import small_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.demo.node_process import NodeProcess

KEY = block_key(b"the api")
METHODS = sorted(name for name, one in vars(Client).items() if name[0] != "_" and inspect.isfunction(one))
_PARSER = doctest.DocTestParser()


def run(text: str, names: dict[str, Any], name: str) -> dict[str, Any]:
    """Run a docstring's examples, and give what they named."""
    test = _PARSER.get_doctest(inspect.cleandoc(text), dict(names), name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    return test.globs


def test_the_program_to_copy_runs(shared_node: NodeProcess) -> None:
    assert kvstore.client.__doc__ is not None
    run(kvstore.client.__doc__.replace("127.0.0.1:7070", shared_node.target), {}, "kvstore.client")


@pytest.fixture(scope="module")
def begun(shared_node: NodeProcess) -> Iterator[dict[str, Any]]:
    """What the example of the class itself has made."""
    assert Client.__doc__ is not None
    names = run(Client.__doc__.replace("127.0.0.1:7070", shared_node.target), {}, "Client")
    yield names
    names["client"].close()


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_each_method_runs_as_printed(name: str, begun: dict[str, Any]) -> None:
    text = getattr(Client, name).__doc__
    assert ">>> " in text, f"Client.{name} has no example"
    run(text, begun, name)


def test_all_that_a_client_can_do_stands_in_its_class(shared_node: NodeProcess) -> None:
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
def test_a_client_that_is_closed_says_so(
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


def test_a_callers_mistake_is_no_failure_of_a_drive_or_a_peer() -> None:
    for kind in UsageError.__subclasses__():
        assert not issubclass(kind, StorageError)
    assert {one.__name__ for one in UsageError.__subclasses__()} == {
        "Closed",
        "InvalidArgument",
        "NotRegistered",
    }
