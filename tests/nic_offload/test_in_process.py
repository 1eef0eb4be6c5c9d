"""The provider `memory`, as far as it differs from others: the conformance suite tests what all have in common."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import MEMORY, EventKind, Fabric
from nic_offload.trigger import TriggeredPut, arm
from tests.nic_offload.rig import PAGE, Pair, Side, Way

UNTOUCHED = bytes(PAGE)


def test_it_needs_no_libfabric() -> None:
    code = f"from nic_offload.fabric import Fabric; print(Fabric({MEMORY!r}).provider)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRIGGERKV_LIBFABRIC": "/there/is/none.so"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "memory\n"


def test_an_endpoint_of_another_process_is_unreachable() -> None:
    with Side(MEMORY) as near:
        address = near.endpoint.address()
        theirs = address[:4] + (os.getpid() + 1).to_bytes(4, sys.byteorder) + address[8:]
        with pytest.raises(FabricError, match="its own process only"):
            near.fabric.add_peer(theirs)


@pytest.mark.parametrize("beyond", [1, PAGE, 1 << 40])
def test_nothing_is_written_beyond_a_region(beyond: int) -> None:
    with Pair(MEMORY) as pair:
        near, far, way = pair.near, pair.far, pair.there
        near.fill(0, b"\xff" * PAGE)
        start = way.base + far.length + beyond
        arm(near.fabric, [_put(near, way, 1, target=start)])
        assert near.final(1).kind == EventKind.FAILED
        assert far.bytes_at(far.length, PAGE) == UNTOUCHED


def test_nothing_is_written_with_a_wrong_key_or_before_a_region() -> None:
    with Pair(MEMORY) as pair:
        near, far, way = pair.near, pair.far, pair.there
        near.fill(0, b"\xff" * PAGE)
        arm(near.fabric, [_put(near, way, 1, target=way.base, key=way.key ^ 1)])
        arm(near.fabric, [_put(near, way, 2, target=way.base - 1)])
        assert {near.final(tag).kind for tag in (1, 2)} == {EventKind.FAILED}
        assert far.bytes_at(0, PAGE) == UNTOUCHED


def test_nothing_is_written_into_a_closed_region() -> None:
    with Pair(MEMORY) as pair:
        near, far, way = pair.near, pair.far, pair.there
        near.fill(0, b"\xff" * PAGE)
        far.region.close()
        arm(near.fabric, [_put(near, way, 1, target=way.base)])
        assert near.final(1).kind == EventKind.FAILED
        assert far.bytes_at(0, PAGE) == UNTOUCHED


def test_nothing_arrives_through_a_closed_endpoint() -> None:
    with Pair(MEMORY) as pair:
        near, far, way = pair.near, pair.far, pair.there
        near.fill(0, b"\xff" * PAGE)
        far.endpoint.close()
        arm(near.fabric, [_put(near, way, 1, target=way.base)])
        assert near.final(1).kind == EventKind.FAILED
        assert far.bytes_at(0, PAGE) == UNTOUCHED


@pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""), reason="ThreadSanitizer allows no threads after a fork"
)
def test_a_forked_child_has_none_of_its_parents_endpoints_and_can_open_its_own() -> None:
    with Side(MEMORY) as near:
        address = near.endpoint.address()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with Fabric(MEMORY) as own:
                    own.open_endpoint()
                    try:
                        own.add_peer(address)
                    except FabricError:
                        status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _put(near: Side, way: Way, tag: int, *, target: int, key: int = 0) -> TriggeredPut:
    return TriggeredPut(
        tag=tag,
        endpoint=way.endpoint,
        peer=way.peer,
        region=near.region,
        source=near.region.address,
        length=PAGE,
        target=target,
        target_key=key or way.key,
    )
