"""Closing a client while a call of it is under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from kvstore.client import Client
from kvstore.errors import Closed, KvError
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
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
