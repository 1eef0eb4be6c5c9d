"""A provider that hangs: every call returns, and memory that the hung thread may touch stays.

The progress thread is held inside a signal handler that waits for another signal, so it hangs in the middle of whatever
it does, just as one does that spins on a lock of a peer that died.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nic_offload import fabric as fabric_module
from nic_offload.errors import FabricStuck
from nic_offload.fabric import Fabric
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredNotify, arm
from tests.nic_offload.rig import PAGE, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER_MS = 600
_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p
_HANG, _GO_ON = signal.SIGUSR1, signal.SIGUSR2
_PAUSE = 34  # the system call, on x86-64

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="knows the number of the system call pause on x86-64 only"
)


def _address(name: str) -> int:
    address = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _read(path: str) -> str:
    """The kernel's text about a thread; empty once it has ended."""
    with suppress(OSError):
        return Path("/proc/self/task", path).read_text(encoding="ascii")
    return ""


def _threads() -> set[int]:
    """The progress threads of this process."""
    tasks = [task.name for task in Path("/proc/self/task").iterdir()]
    return {int(task) for task in tasks if _read(f"{task}/comm").strip() == "triggerkv"}


def _hangs(thread: int) -> bool:
    return _read(f"{thread}/syscall").startswith(f"{_PAUSE} ")


def set_handlers() -> None:
    """Both signals get handlers in C, which need no interpreter: one waits for a signal, one does nothing.

    They stay: a signal that is on its way when its handler goes ends the process.
    """
    _libc.signal(_HANG, _address("pause"))
    _libc.signal(_GO_ON, _address("getpid"))


@contextmanager
def hanging(thread: int) -> Iterator[Callable[[], None]]:
    """The thread hangs until the returned function is called, or the `with` block ends."""

    def go_on() -> None:
        if _hangs(thread):
            _libc.tgkill(os.getpid(), thread, _GO_ON)
            wait_until(lambda: not _hangs(thread), "the thread goes on")

    set_handlers()
    _libc.tgkill(os.getpid(), thread, _HANG)
    wait_until(lambda: _hangs(thread), "the thread hangs")
    try:
        yield go_on
    finally:
        go_on()


def _gone(thread: int) -> bool:
    return thread not in _threads()


def _open() -> tuple[Fabric, int]:
    before = _threads()
    fabric = Fabric("net", address="127.0.0.1", answer_timeout_ms=ANSWER_MS)
    (thread,) = _threads() - before
    return fabric, thread


def _fails_at_once(call: Callable[[], object]) -> bool:
    began = time.monotonic()
    with pytest.raises(FabricStuck):
        call()
    return time.monotonic() - began < ANSWER_MS / 1000


def test_an_unanswered_call_times_out_and_later_ones_fail_at_once() -> None:
    fabric, thread = _open()
    with fabric, hanging(thread) as go_on:
        began = time.monotonic()
        with pytest.raises(FabricStuck, match="hangs"):
            fabric.open_endpoint()
        assert ANSWER_MS / 1000 <= time.monotonic() - began < WAIT_S
        for call in (
            fabric.open_endpoint,
            fabric.flush,
            lambda: fabric.cancel([1]),
            lambda: fabric.add_peer(b"x" * 16),
        ):
            wait_until(
                partial(_fails_at_once, call), "it fails at once; each time it would wait as the first did"
            )
        go_on()
        wait_until(lambda: _gone(thread), "a thread that was given up ends when it can")


def test_a_doorbell_belongs_to_its_owner_once_the_thread_is_past_it() -> None:
    """It may be about to read a ring: by then the number could be that of another file."""
    before = _threads()
    with Fabric("net", address="127.0.0.1") as fabric:
        (thread,) = _threads() - before
        heard, rung = os.pipe2(os.O_NONBLOCK)
        fabric.listen(heard, is_pipe=True)
        ignores = threading.Thread(target=fabric.ignore, args=(heard,))
        with hanging(thread) as go_on:
            ignores.start()
            ignores.join(0.1)
            assert ignores.is_alive()
            go_on()
            ignores.join(WAIT_S)
            assert not ignores.is_alive()
        os.write(rung, b"x")
        sleeps = fabric.statistics().sleeps
        wait_until(lambda: fabric.statistics().sleeps >= sleeps + 3, "it rests")
        assert os.read(heard, 2) == b"x"
        os.close(heard)
        os.close(rung)


def test_nothing_is_armed_on_a_hanging_fabric() -> None:
    fabric, thread = _open()
    with fabric, FlagWords.create(1) as words, fabric.open_counter(words[0]) as counter:
        endpoint = fabric.open_endpoint()
        peer = fabric.add_peer(endpoint.address())
        with hanging(thread):
            with pytest.raises(FabricStuck):
                endpoint.close()
            notify = TriggeredNotify(
                tag=1,
                endpoint=endpoint,
                peer=peer,
                target=0,
                target_key=0,
                value=1,
                trigger=counter,
                threshold=1,
            )
            with pytest.raises(FabricStuck):
                arm(fabric, [notify])


@pytest.mark.timeout(240)
def test_a_thread_that_hangs_in_its_search_for_sockets_blocks_no_caller() -> None:
    """In a process of its own: no signal handler of Python interrupts a call that never returns."""
    code = (
        "import os, resource, socket\n"
        "from tests.nic_offload import test_stuck\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "one = socket.create_server(('127.0.0.1', 0))\n"
        "for _ in range(min(most - 500, 4000)):\n"  # it looks at each, most of the time
        "    os.dup(one.fileno())\n"
        "test_stuck.ANSWER_MS = 1000\n"
        "for number in range(8):\n"
        "    fabric, thread = test_stuck._open()\n"
        "    endpoint = fabric.open_endpoint()\n"
        "    test_stuck.time.sleep(number / 800)\n"
        "    with test_stuck.hanging(thread), test_stuck.pytest.raises(test_stuck.FabricStuck):\n"
        "        endpoint.close()\n"
        "    with test_stuck.suppress(test_stuck.FabricStuck):\n"  # it is busy looking
        "        fabric.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200)
    assert done.returncode == 0


def test_a_fabric_closed_while_it_hangs_keeps_its_memory() -> None:
    fabric, thread = _open()
    memory = allocate(PAGE)
    region = fabric.register(memory)
    with hanging(thread) as go_on:
        with pytest.raises(FabricStuck):
            fabric.close()
        assert fabric.closed
        with pytest.raises(BufferError):
            memory.close()  # the thread, or the provider, may still write to it
        assert region in fabric.regions
        go_on()
        wait_until(lambda: _gone(thread), "a thread that was given up ends when it can")
    assert fabric in fabric_module._given_up


def test_a_late_call_is_not_executed_afterwards() -> None:
    """A call reported as failed stays failed: the thread sees that it was abandoned and skips it."""
    fabric, thread = _open()
    with fabric, FlagWords.create(1) as words, fabric.open_counter(words[0]) as counter:
        counter.add(7)
        with hanging(thread), pytest.raises(FabricStuck):
            counter.reset()
        wait_until(lambda: _gone(thread), "a thread that was given up ends when it can")
        assert words[0].load() == 7


def test_a_process_whose_fabric_hangs_ends() -> None:
    code = (
        "import sys\n"
        "from tests.nic_offload import test_stuck\n"
        "fabric, thread = test_stuck._open()\n"
        "endpoint = fabric.open_endpoint()\n"
        "test_stuck.set_handlers()\n"
        "test_stuck._libc.tgkill(test_stuck.os.getpid(), thread, test_stuck._HANG)\n"
        "test_stuck.wait_until(lambda: test_stuck._hangs(thread), 'the thread hangs')\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S)
    assert done.returncode == 7
