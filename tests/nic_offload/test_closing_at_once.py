"""Regions that any thread closes while another thread closes their fabric."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import Fabric

CLOSE_AT_ONCE = """
import threading
from nic_offload.fabric import Fabric

for _ in range(150):
    fabric = Fabric("memory")
    regions = [fabric.register(bytearray(4096)) for _ in range(60)]
    start = threading.Barrier(3)

    def close(some):
        start.wait()
        for region in some:
            region._is_idle()
            region.close()

    threads = [threading.Thread(target=close, args=(some,)) for some in (regions[:30], regions[30:])]
    for thread in threads:
        thread.start()
    start.wait()
    fabric.close()
    for thread in threads:
        thread.join()
"""


def test_a_region_can_be_closed_while_its_fabric_closes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSE_AT_ONCE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_fabric_registers_no_memory() -> None:
    fabric = Fabric("memory")
    fabric.close()
    with pytest.raises(FabricError, match="closed"):
        fabric.register(bytearray(4096))


def test_closing_a_region_waits_for_the_end_of_its_fabric() -> None:
    fabric = Fabric("memory")
    region = fabric.register(bytearray(4096))
    thread = threading.Thread(target=region.close)
    with fabric.closing:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert region.handle is None
    fabric.close()


def test_resources_returned_after_the_fabric_was_closed_need_nothing() -> None:
    """At interpreter exit fabrics are closed first, and other threads may still lose their links."""
    fabric = Fabric("net")
    hears, rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    fabric.listen(hears, is_pipe=True)
    peer = fabric.add_peer(fabric.open_endpoint().address())
    fabric.close()
    fabric.ignore(hears)
    fabric.remove_peer(peer)
    for fd in (hears, rings):
        os.close(fd)
