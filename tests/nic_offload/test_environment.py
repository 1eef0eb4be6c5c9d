"""Loading libfabric and opening a fabric leaves the environment as it was: others in the process read it too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cassini.build import build

OPEN = """
import ctypes, sys
c = ctypes.CDLL(None)
c.getenv.restype = ctypes.c_char_p
def variables():
    at, found = ctypes.POINTER(ctypes.c_char_p).in_dll(c, "environ"), []
    while at[len(found)] is not None:
        found.append(at[len(found)])
    return found
before = variables()
from nic_offload.fabric import Fabric
fabrics = [Fabric(name, address="127.0.0.1") for name in sys.argv[1:] * 2]
assert variables() == before, set(variables()) ^ set(before)
for fabric in fabrics:
    fabric.close()
assert variables() == before
print(len(before) > 3)
"""


def opens(*providers: str, **more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *providers],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.mark.parametrize("chosen", [{}, {"FI_SOCKETS_PE_WAITTIME": "3", "IPATH_NO_BACKTRACE": "0"}])
def test_the_environment_is_unchanged(chosen: dict[str, str]) -> None:
    opens("net", "sockets", **chosen)


def test_the_environment_is_unchanged_on_a_cassini() -> None:
    opens("cxi", TRIGGERKV_LIBFABRIC=str(build()))
