"""A word that two agents pass back and forth: the latency of a flag from its store to the landed flag.

Each side arms a chain of notifies in advance: the next one fires when the peer's word has landed. So a round is twice a
flag store that an agent sees, a put that it fires and a word that lands, and no Python runs in between.
"""

from __future__ import annotations

import select
import subprocess
import sys
from typing import Self

from nic_offload.fabric import Fabric
from nic_offload.flags import FlagWord
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredNotify, arm

__all__ = ["WordsBackAndForth", "bounce"]

_WAIT_S = 60.0
_PAGE = 4096


class _End:
    """One of the two ends."""

    def __init__(self, provider: str, *, deferred_work: bool) -> None:
        self.fabric = Fabric(provider, address="127.0.0.1", deferred_work=deferred_work)
        self.endpoint = self.fabric.open_endpoint()
        self.memory = allocate(_PAGE)
        self.region = self.fabric.register(self.memory)
        self.word = FlagWord(self.region.address)
        self.counter = self.fabric.open_counter(self.word)
        self.about = f"{self.endpoint.address().hex()} {self.region.base} {self.region.key}"
        self.passed = 0

    def meet(self, about: str) -> None:
        address, base, key = about.split()
        self._peer = self.fabric.add_peer(bytes.fromhex(address))
        self._base, self._key = int(base), int(key)

    def arm(self, rounds: int, *, first: bool) -> None:
        """Pass the word on this many times. The first end passes it on once the other has passed it back."""
        start = self._start = self.passed
        self.passed += rounds
        notifies = [
            TriggeredNotify(
                tag=i,
                endpoint=self.endpoint,
                peer=self._peer,
                target=self._base,
                target_key=self._key,
                value=i + 1,
                trigger=self.counter,
                threshold=i if first else i + 1,
                quiet=start + 1
                < i
                < start + rounds - 1,  # a reader that wakes for each would be measured too
            )
            for i in range(start, start + rounds)
        ]
        arm(self.fabric, notifies if not first else notifies[1:])
        if first:
            self._kick = notifies[0]._replace(trigger=None)

    def kick(self) -> None:
        arm(self.fabric, [self._kick])

    def wait(self) -> int:
        """Wait until the last word was passed on; return the nanoseconds since the second one."""
        ended_ns: dict[int, int] = {}
        while self.passed - 1 not in ended_ns and select.select([self.fabric], [], [], _WAIT_S)[0]:
            ended_ns |= {event.tag: event.time_ns for event in self.fabric.reap()}
        return ended_ns[self.passed - 1] - ended_ns[self._start + 1]


def bounce(provider: str, *, deferred_work: bool) -> None:
    """Run in the other process: for each number read, pass the word back that often."""
    end = _End(provider, deferred_work=deferred_work)
    with end.fabric:
        print(end.about, flush=True)
        end.meet(sys.stdin.readline())
        for line in sys.stdin:
            end.arm(int(line), first=False)
            print("armed", flush=True)
            end.wait()


class WordsBackAndForth:
    """Our end; the other one is in its own process."""

    def __init__(self, provider: str, *, deferred_work: bool = False) -> None:
        self._end = _End(provider, deferred_work=deferred_work)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from benchmarks.words import bounce; bounce({provider!r}, deferred_work={deferred_work})",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        about = self._process.stdout.readline()
        self._tell(self._end.about)
        self._end.meet(about)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def one_way_us(self, rounds: int) -> float:
        """From a flag's store to the landed flag: the mean of this many consecutive rounds."""
        assert self._process.stdout is not None
        self._tell(str(rounds))
        self._process.stdout.readline()
        self._end.arm(rounds, first=True)
        self._end.kick()
        return self._end.wait() / (rounds - 2) / 2 / 1e3

    def close(self) -> None:
        """End both processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_WAIT_S)
        self._end.fabric.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
