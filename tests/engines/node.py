"""A node with a fixed address that can be killed, restarted and have its drive damaged; and one with TLS and tokens."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.commands.certificates_command import make
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.node.tenants import token_digest
from kvstore.wire.record import RECORD_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Check a condition repeatedly; fail when the time is over."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class Node(NodeProcess):
    def __init__(self, data: Path, *, capacity: str = "1GiB", arguments: Sequence[str] = ()) -> None:
        super().__init__(data, capacity=capacity, arguments=arguments)

    def restart(self) -> None:
        self.stop()
        self.start()

    def damage(self, fraction: float, dice: random.Random | None = None) -> int:
        """Flip a bit in this fraction of the stored payloads, of a running node or not; returns how many."""
        damaged = 0
        dice = dice or random.Random(7)
        for drive in self.data.rglob("*"):
            if not drive.is_file() or drive.stat().st_size < 1 << 20:
                continue
            content = drive.read_bytes()
            with drive.open("r+b") as file:
                for header in range(0, len(content) - HEADER_BYTES, PAGE_BYTES):
                    if not content.startswith(RECORD_MAGIC, header) or dice.random() >= fraction:
                        continue
                    at = header + HEADER_BYTES + dice.randrange(PAGE_BYTES)
                    file.seek(at)
                    file.write(bytes((content[at] ^ 1 << dice.randrange(8),)))
                    damaged += 1
        return damaged

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it, and let it continue at the end."""
        os.kill(self.pid, signal.SIGSTOP)
        until(self._is_stopped, "no thread of the node runs")  # on a busy machine some go on for a while
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class GuardedNode(Node):
    """A node with TLS that requires a token."""

    def __init__(self, data: Path) -> None:
        made = data.parent / f"{data.name} secrets"
        make(made, ["127.0.0.1"], [], days=2)
        token = secrets.token_urlsafe(32)
        (made / "token").write_text(token + "\n")
        (made / "tenants.toml").write_text(f'[acme]\ntokens_sha256 = ["{token_digest(token)}"]\n')
        tls = ("--tls-cert", str(made / "127.0.0.1.pem"), "--tls-key", str(made / "127.0.0.1.key"))
        super().__init__(data, arguments=(*tls, "--tenants", str(made / "tenants.toml")))
        # What an engine's configuration has beside the node.
        self.trust: dict[str, Any] = {"ca": str(made / "ca.pem"), "token_file": str(made / "token")}
