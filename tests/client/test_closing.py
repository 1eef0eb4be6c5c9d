"""Closing a client, or interrupting it, while a call of it is under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import FlagWords
from kvstore.client import Block, Client, core
from kvstore.errors import Closed, KvError
from kvstore.names import block_key
from nic_offload.caller import PLACES
from nic_offload.group import Group
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.demo.node_process import NodeProcess


def test_closing_a_client_ends_an_attach_to_a_node_that_hangs(node: NodeProcess) -> None:
    failures: list[KvError] = []
    client = Client(node.target, call_timeout_ms=30_000)

    def attach() -> None:
        try:
            client.attach()
        except KvError as error:
            failures.append(error)

    thread = threading.Thread(target=attach)
    stop(node.pid)
    try:
        thread.start()
        wait_until(lambda: client._core._cancel_attach is not None, "it attaches")
        began_s = time.monotonic()
        client.close()
        thread.join()
        assert time.monotonic() - began_s < 4, "it does not wait for the node"
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert isinstance(failures[0], Closed)


def test_a_client_that_is_closed_as_its_pump_wakes_for_another_reason_ends(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, wrote = os.eventfd_read, os.eventfd_write
    client = Client(node.target)
    client.attach()
    pump = client._core._pump
    closing = threading.Thread(target=client.close, daemon=True)
    rung = threading.Event()

    def ring(fd: int, value: int) -> None:
        wrote(fd, value)
        if threading.current_thread() is closing:
            rung.set()

    def read_late(fd: int) -> int:
        if threading.current_thread() is pump and not rung.is_set():
            closing.start()
            assert rung.wait(10)
        return read(fd)

    monkeypatch.setattr(os, "eventfd_write", ring)
    monkeypatch.setattr(os, "eventfd_read", read_late)
    wrote(client._core._wake_fd, 1)
    assert rung.wait(10)
    closing.join(10)
    assert not closing.is_alive()


def test_puts_that_are_abandoned_as_their_client_is_closed_end_with_it(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.eventfd_read
    client = Client(node.target, call_timeout_ms=120_000)
    client.attach()
    own = client._core

    def read_late(fd: int) -> int:
        if threading.current_thread() is own._pump:
            wait_until(lambda: own._stopping, "the client is closed")
        return read(fd)

    with FlagWords.create(1) as flags:
        region = client.register(bytearray(4096))
        puts = client.arm([Block(block_key(b"abandoned"), region, 0, 4096)], flags[0])
        monkeypatch.setattr(os, "eventfd_read", read_late)
        abandoning = threading.Thread(target=puts.abandon, daemon=True)
        abandoning.start()
        wait_until(lambda: len(own._settling) == 1, "the put is withdrawn")
        client.close()
        abandoning.join(20)
        assert not abandoning.is_alive(), "it does not wait for a call's timeout"


@pytest.mark.node("shared")
def test_an_interrupted_attach_leaves_no_link_that_is_not_looked_after(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(node.target) as client:
        with monkeypatch.context() as patched:
            patched.setattr(core, "say_first_word", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.attach()
        client.attach()
        assert client._core.proved is not None


@pytest.mark.node("shared")
def test_an_interrupted_reservation_takes_no_place_from_later_calls(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(node.target) as client, client.register(bytearray(4096)) as region:
        blocks = [Block(block_key(b"interrupted"), region, 0, 4096)]
        with monkeypatch.context() as patched:
            patched.setattr(Group, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.reserve(blocks)
        client.reserve(blocks).give_back()
        link = client._core.link
        assert link is not None
        assert link.calls is not None
        assert link.calls.caller.free_places == PLACES


_EXITS = """
import atexit, sys
from kvstore.client import Client
from kvstore.errors import KvError, NodeUnavailable
from kvstore.names import block_key

def late():  # as other threads may do it while the interpreter exits
    client._core.lose(link, NodeUnavailable("The node went away."))
    try:
        client.exists([block_key(b"any")])
    except KvError as error:
        print(link.error, type(error).__name__)

atexit.register(late)  # called last
client = Client(sys.argv[1])
client.attach()
link = client._core.link
"""


@pytest.mark.node("shared")
def test_a_client_is_closed_at_the_interpreters_exit_before_its_fabric(node: NodeProcess) -> None:
    """Another thread that ends its link after that would use what has been freed."""
    child = [sys.executable, "-c", _EXITS, node.target]
    ended = subprocess.run(child, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "The client was closed. Closed\n"


@pytest.mark.node("shared")
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.exists([block_key(b"any")]),
        lambda client: list(client.get_many_inline([(block_key(b"any"), 64)])),
        lambda client: client.status(),
    ],
    ids=["a look-up", "a stream", "its status"],
)
def test_a_client_that_is_closed_as_a_call_begins_is_closed(
    node: NodeProcess, call: Callable[[Client], object]
) -> None:
    client = Client(node.target)
    check = client._core._check_open

    def close_behind() -> None:
        check()
        client.close()

    client._core._check_open = close_behind  # type: ignore[method-assign]
    with pytest.raises(Closed):
        call(client)
