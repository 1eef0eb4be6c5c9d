"""Hosts on one wire: each a network namespace with a firewall, folders of its own and a file of host names.

`make test-hosts` runs all of this inside a network and mount namespace of its own (`tools/test_hosts.sh`), so nothing
of it is seen outside, and all of it is gone when the last process ends.

What always holds: a host is removed by its name and its processes are ended by their ids; a firewall lets nothing in
but what it was told, answers to what went out, and what finds neighbours (IPv6 has no ARP).
What it doesn't do: delay; `tests.hosts.slow` does.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
SECRETS = "/etc/kvstore"
_RUN_S = 30.0
_BRIDGE = "wire"
# A root of its own for each process: the machine's folders, with those that deploy/ names taken from the host's.
_ENTER = f"""
set -eu
host=$1 root=$1/root; shift
mount -t tmpfs none "$root"
for at in /*; do
  case $at in /etc | /opt | /data | /proc) ;; *)
    if [ -L "$at" ]; then cp -P "$at" "$root$at"
    elif [ -d "$at" ]; then mkdir -p "$root$at" && mount --rbind "$at" "$root$at"; fi ;;
  esac
done
mkdir -p "$root/proc" "$root/data" "$root/opt/triggerkv/bin" "$root/etc"
mount --rbind /proc "$root/proc"
mount --bind "$host/data" "$root/data"
mount --bind {ROOT}/.venv/bin "$root/opt/triggerkv/bin"
for at in /etc/ssl /etc/alternatives /etc/ld.so.cache /etc/passwd /etc/group /etc/nsswitch.conf; do
  [ ! -e "$at" ] || cp -a "$at" "$root/etc/"
done
touch "$root/etc/hosts"
mount --bind "$host/../hosts" "$root/etc/hosts"
mkdir "$root{SECRETS}"
mount --bind "$host/secrets" "$root{SECRETS}"
mount -t tmpfs none "$root/var/lib"
mkdir "$root/var/lib/kvstore"
mount --bind "$host/data" "$root/var/lib/kvstore"
export PATH={ROOT}/.venv/bin:$PATH HOME=/tmp
cd "{ROOT}"
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "{ROOT}" "$@"
"""


def run(*words: str, given: str = "") -> str:
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Process:
    """A process on a host, which takes commands and answers in lines."""

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )

    def tell(self, line: str) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self, within_s: float) -> str:
        """Its next line; the test fails if there is none in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            came = selector.select(within_s)
        said = self._process.stdout.readline() if came else ""
        assert said, f"nothing came within {within_s} s\n{self.log.read_text()[-3000:]}"
        return said.rstrip("\n")

    def wait(self, within_s: float = _RUN_S) -> int:
        """Wait for its end; returns its exit status."""
        return self._process.wait(within_s)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, *, kill: bool = False) -> int:
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        try:
            status = self._process.wait(_RUN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        return status


class Host:
    def __init__(self, network: Network, name: str, number: int, mtu: int) -> None:
        self.name, self._network, self._processes = name, network, list[Process]()
        self.ipv4, self.ipv6 = f"10.77.0.{number}", f"fd77::{number:x}"
        self.folder = network.folder / name
        for part in ("data", "secrets", "root"):
            (self.folder / part).mkdir(parents=True)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", self.plug, "type", "veth", "peer", "name", "eth0", "netns", name)
        self.ip("link", "set", "lo", "up")
        self.ip("link", "set", "eth0", "mtu", str(mtu), "up")
        for address in (f"{self.ipv4}/24", f"{self.ipv6}/64"):
            self.give(address)
        run("ip", "link", "set", self.plug, "mtu", str(mtu), "master", _BRIDGE, "up")

    @property
    def plug(self) -> str:
        """Its end of the cable, at the bridge."""
        return f"to-{self.name}"

    def ip(self, *words: str) -> str:
        """Change its addresses or links."""
        return run("ip", "-n", self.name, *words)

    def give(self, address: str) -> None:
        """Add an address, at once and without duplicate address detection."""
        self.ip("address", "add", address, "dev", "eth0", *(("nodad",) if ":" in address else ()))

    def sent_bytes(self) -> int:
        """The number of bytes sent to it over the wire."""
        told = json.loads(run("ip", "-j", "-s", "link", "show", self.plug))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def unplug(self) -> None:
        """Disconnect it: its packets are lost without an error."""
        run("ip", "link", "set", self.plug, "down")

    def plug_in(self) -> None:
        run("ip", "link", "set", self.plug, "up")

    def firewall(self, allowed: str = "", *, lossy_per_mille: int = 0, cut: str = "") -> None:
        """Let in what these rules of nftables accept, and nothing else; of all that comes lose so much.

        Whatever comes to the ports `cut` is answered with a reset, and ends connections that stand.
        """
        reset = f"iif != lo tcp dport {cut} reject with tcp reset" if cut else ""
        loss = f"iif != lo numgen random mod 1000 < {lossy_per_mille} drop" if lossy_per_mille else ""
        run(
            *("ip", "netns", "exec", self.name, "nft", "-f", "-"),
            given=f"""
            table inet host
            delete table inet host
            table inet host {{
              chain input {{
                type filter hook input priority 0; policy drop;
                {loss}
                {reset}
                ct state established,related accept
                iif lo accept
                icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, packet-too-big }} accept
                {allowed}
              }}
            }}
            """,
        )

    def start(self, *words: str, environment: dict[str, str] | None = None) -> Process:
        own = (
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _ENTER,
            "enter",
            str(self.folder),
        )
        enter = ("ip", "netns", "exec", self.name, *own)
        process = Process((*enter, *words), self.folder / "log", environment)
        self._processes.append(process)
        return process

    def python(self, module: str, *words: str) -> Process:
        """Run one of the tests' own programs on it."""
        return self.start(sys.executable, "-m", module, *words)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def remove(self) -> None:
        for process in self._processes:
            process.end(kill=True)
        run("ip", "link", "delete", self.plug)  # the kernel takes its time over a namespace's own
        run("ip", "netns", "delete", self.name)


class Network:
    """A bridge, and the hosts on it."""

    def __init__(self, folder: Path, mtu: int = 1500) -> None:
        self.folder, self._mtu, self.hosts = folder, mtu, dict[str, Host]()
        (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        run("ip", "link", "add", _BRIDGE, "mtu", str(mtu), "type", "bridge")
        run("ip", "link", "set", _BRIDGE, "up")

    def host(self, name: str) -> Host:
        self.hosts[name] = Host(self, name, len(self.hosts) + 1, self._mtu)
        return self.hosts[name]

    def names(self, **addresses: str) -> None:
        """Set the addresses of names on all hosts, in the file that their processes have open."""
        lines = [f"{address} {name}\n" for name, all_of in addresses.items() for address in all_of.split()]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))

    def close(self) -> None:
        """Delete all hosts and the bridge."""
        for host in self.hosts.values():
            host.remove()
        run("ip", "link", "delete", _BRIDGE)


def until(what: str, within_s: float, happened: object) -> float:
    """Wait until a condition holds; returns after how many seconds."""
    began = time.monotonic()
    assert callable(happened)
    while not happened():
        assert time.monotonic() - began < within_s, f"{what} did not happen within {within_s} s"
        time.sleep(0.05)
    return time.monotonic() - began
