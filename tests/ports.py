"""Ports for servers that tests start, end and start again.

What always holds: they are below the kernel's ephemeral ports, and of the processes of a user no two are given the same
one within thousands. One that was only found to be free may be another's before its server listens.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_BEGIN, _COUNT_MIN = 18_000, 4_000
_COUNTER: Final = Path(tempfile.gettempdir()) / f"triggerkv-tests-port-{os.getuid()}"


def next_port() -> int:
    """The next port on which no process listens."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = max(ephemeral, _BEGIN + _COUNT_MIN)
    with _COUNTER.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        port = int(counter.read() or _BEGIN)
        while True:
            port = port + 1 if _BEGIN <= port + 1 < end else _BEGIN
            with suppress(OSError), socket.socket() as trial:
                trial.bind(("127.0.0.1", port))
                counter.truncate(0)
                counter.write(str(port))
                return port
