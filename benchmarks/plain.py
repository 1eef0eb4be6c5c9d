"""The speed of the provider, and of TCP, without any of our code: `plain_fabric.c` and `plain_tcp.c`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

__all__ = ["PlainFabric", "tcp_round_trip_us"]

_WAIT_S = 60.0


def _build(name: str, *libraries: str) -> Path:
    source, program = Path(__file__).with_name(f"{name}.c"), Path("build") / name
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", program, source, *libraries], check=True)
    return program.resolve()


def tcp_round_trip_us(block_bytes: int, rounds: int, *, idle_us: int = 0) -> float:
    """Send bytes one way and eight bytes back, between processes that spin or, if they idle before each, that block."""
    how = "block" if idle_us else "spin"
    command: list[str | Path] = [_build("plain_tcp"), str(block_bytes), str(rounds), how, str(idle_us)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WAIT_S)
    return int(done.stdout) / 1e3


class PlainFabric:
    """Plain writes of the provider, and words back and forth, between two processes that spin."""

    def __init__(self, provider: str) -> None:
        environment = os.environ | {"FI_SOCKETS_PE_WAITTIME": "0", "IPATH_NO_BACKTRACE": "1"}
        self._processes = [
            subprocess.Popen(
                [_build("plain_fabric", "-lfabric"), provider],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(2)
        ]
        about = [self._answer(i) for i in range(2)]
        for i in range(2):
            self._tell(i, about[1 - i])

    @property
    def pids(self) -> tuple[int, int]:
        """The processes that write and are written to."""
        return self._processes[0].pid, self._processes[1].pid

    def _tell(self, i: int, line: str) -> None:
        pipe = self._processes[i].stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()

    def _answer(self, i: int) -> str:
        pipe = self._processes[i].stdout
        assert pipe is not None
        return pipe.readline().strip()

    def gbps(self, block_bytes: int, blocks: int) -> float:
        """Write blocks one after the other, until the word after the last one has come back."""
        return block_bytes * blocks / self.write_ns(block_bytes, blocks)

    def write_ns(self, block_bytes: int, blocks: int) -> int:
        """The same in nanoseconds."""
        self._tell(1, "serve 1")
        self._tell(0, f"write {block_bytes} {blocks}")
        return int(self._answer(0))

    def one_way_us(self, rounds: int) -> float:
        """Send an 8-byte word from one process to the other."""
        self._tell(1, f"serve {rounds}")
        self._tell(0, f"word {rounds}")
        return int(self._answer(0)) / rounds / 2 / 1e3

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.wait(_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
