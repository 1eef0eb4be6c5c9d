"""A real etcd of one member or several, as processes of the test's own on loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.nic_offload.rig import wait_until
from tests.ports import next_port

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence


def program() -> str:
    for folder in Path(__file__).resolve().parents:  # planted bugs lie in a copy of the tree, within it
        if (fetched := folder / ".cache/etcd/etcd").exists():
            return str(fetched)
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("there is no etcd: make etcd")
    return found


class EtcdMember:
    """One process of etcd, with the same ports and folder after each restart."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str] = ()) -> None:
        self.folder, self.name = folder, name
        self.port, self.peer_port = next_port(), next_port()
        self.arguments = list(arguments)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, members: Sequence[EtcdMember]) -> None:
        scheme = "https" if "--cert-file" in self.arguments else "http"
        peers = ",".join(f"{one.name}=http://127.0.0.1:{one.peer_port}" for one in members)
        command = [program(), "--name", self.name, "--data-dir", str(self.folder / self.name)]
        command += ["--listen-client-urls", f"{scheme}://{self.endpoint}"]
        command += ["--advertise-client-urls", f"{scheme}://{self.endpoint}"]
        command += ["--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}"]
        command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer_port}"]
        command += ["--initial-cluster", peers, "--log-level", "error", *self.arguments]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def answers(self) -> bool:
        with socket.socket() as trial:
            trial.settimeout(1)
            return trial.connect_ex(("127.0.0.1", self.port)) == 0


class RealEtcd:
    """All members of one etcd."""

    def __init__(self, folder: Path, members: int = 1, arguments: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.members = [EtcdMember(folder, f"etcd{number}", arguments) for number in range(members)]
        for one in self.members:
            one.start(self.members)
        for one in self.members:
            wait_until(one.answers, f"{one.name} takes calls", 30)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(one.endpoint for one in self.members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.members:
            one.kill()
