"""A cluster on several hosts, and its failures: etcd of three members, nodes and clients, each on its own host.

What always holds: at most one node fails at a time, and the next failure comes when all nodes are members again and
every client reaches every node. The seed determines what fails, how, and for how long.
What it doesn't do: set a wrong clock for etcd, whose program asks the kernel without the C library.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

from kvcli.running import Status
from tests.cluster.history import Call, End, Kind
from tests.cluster.real_etcd import program
from tests.hosts.network import SECRETS, Host, Network, Process, run, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

START_S, SETTLED_S, ANSWER_S = 60.0, 90.0, 120.0
DELAY_S = 0.05
PORT = 7070
# The time of day that a node is told is off by what a file says. Python asks the C library for it.
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
static const volatile long *off;
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int told = real(id, at);
  if (!off) {
    int file = open(getenv("CHAOS_CLOCK"), O_RDONLY);
    off = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  }
  if (id == CLOCK_REALTIME && off != MAP_FAILED) at->tv_sec += *off;
  return told;
}
"""


class Etcd:
    """One member, on its host."""

    def __init__(self, host: Host, hosts: Iterable[Host]) -> None:
        self.host = host
        peers = ",".join(f"{one.name}=http://{one.ipv4}:2380" for one in hosts)
        self._words = [program(), "--name", host.name, "--data-dir", "/data/etcd", "--log-level", "error"]
        for kind, at in (
            ("listen-client-urls", 2379),
            ("advertise-client-urls", 2379),
            ("listen-peer-urls", 2380),
            ("initial-advertise-peer-urls", 2380),
        ):
            self._words += [f"--{kind}", f"http://{host.ipv4}:{at}"]
        self._words += ["--initial-cluster", peers]
        self.start()

    def start(self) -> None:
        self.process = self.host.start(*self._words)


class Node:
    """One node on its host, with the same folder after each restart."""

    def __init__(self, host: Host, etcd: str, clock: Path) -> None:
        self.host, self._etcd, self._clock = host, etcd, clock
        self.off = host.folder / "data" / "clock"
        self.set_clock(0)
        self.lives = 0
        self.start()

    @property
    def target(self) -> str:
        return f"{self.host.ipv4}:{PORT}"

    def start(self, *, fresh: bool = False) -> None:
        self.lives += fresh
        words = ["kvstore", "serve", "--data", f"/data/node{self.lives}", "--capacity", "128MiB"]
        words += ["--hot", "128MiB", "--listen", self.target, "--tenants", f"{SECRETS}/tenants.toml"]
        words += ["--tls-cert", f"{SECRETS}/tls.crt", "--tls-key", f"{SECRETS}/tls.key"]
        words += ["--cluster", f"{self._etcd}/chaos", "--cluster-replicas", "2"]
        words += ["--cluster-secret", f"{SECRETS}/secret", "--cluster-nodes-ca", f"{SECRETS}/ca.crt"]
        environment = {"LD_PRELOAD": str(self._clock), "CHAOS_CLOCK": str(self.off)}
        self.process = self.host.start(*words, environment=environment)
        assert self.process.line(START_S).startswith("ready ")

    def set_clock(self, off_s: int) -> None:
        with self.off.open("r+b" if self.off.exists() else "wb") as file:
            file.write(struct.pack("l", off_s))


class Worker:
    def __init__(self, process: Process, history: Path) -> None:
        self.process, self.history = process, history
        assert json.loads(process.line(START_S)) == "here"

    def ask(self, word: str) -> Any:
        self.process.tell(word)
        return json.loads(self.process.line(ANSWER_S))


class Chaos:
    """All hosts of one run."""

    def __init__(
        self, network: Network, seed: int, nodes: int, make_secrets: Callable[[Path, str], None]
    ) -> None:
        self.dice, self.network, folder = random.Random(seed), network, network.folder
        self._spare = [self.network.host(name) for name in ("e1", "e2", "e3")]
        ours = [self.network.host(f"n{number}") for number in range(1, nodes + 1)]
        self._one_more = self.network.host("n0")
        self._joined: Node | None = None  # on that host
        theirs = [self.network.host(f"c{number}") for number in (1, 2)]
        made = ours[0].folder / "secrets"
        make_secrets(made, ",".join(f"IP:{host.ipv4}" for host in (*ours, self._one_more)))
        (made / "secret").write_text("the nodes of this cluster know each other by this\n")
        for host in (*ours[1:], self._one_more, *theirs):
            shutil.copytree(made, host.folder / "secrets", dirs_exist_ok=True)
        for host in self.network.hosts.values():
            host.start(sys.executable, "-m", "tests.hosts.slow", "real", "eth0").wait()
        clock = folder / "clock.so"
        (folder / "clock.c").write_text(_CLOCK)
        run("gcc", "-shared", "-fPIC", "-O1", "-o", str(clock), str(folder / "clock.c"), "-ldl")
        self.etcd = [Etcd(host, self._spare) for host in self._spare]
        endpoints = ",".join(f"{host.ipv4}:2379" for host in self._spare)
        self._endpoints, self._clock = endpoints, clock
        self.nodes = [Node(host, endpoints, clock) for host in ours]
        self.workers = [
            Worker(
                host.python(
                    "tests.hosts.worker",
                    json.dumps(
                        {
                            "number": number,
                            "workers": len(theirs),
                            "prefix": f"chaos{seed}",
                            "seed": seed,
                            "nodes": [node.target for node in self.nodes],
                            "history": "/data/history",
                            "more": {"ca": f"{SECRETS}/ca.crt", "token_file": f"{SECRETS}/token"},
                        }
                    ),
                ),
                host.folder / "data" / "history",
            )
            for number, host in enumerate(theirs)
        ]

    def settled(self) -> None:
        """Wait until each client reaches every node, and has all of them on its map."""
        for worker in self.workers:
            assert worker.ask("pause") == "pause"
        for worker in self.workers:
            until(
                "all are members", SETTLED_S, lambda worker=worker: worker.ask("members") == len(self.nodes)
            )
        for worker in self.workers:
            assert worker.ask("go on") == "go on"
        until("sessions have two copies", SETTLED_S, lambda: self.workers[0].ask("sessions_alone") == 0)

    def harm(self, kind: str | None = None) -> str:
        """Inject a failure for a while, and repair it; returns its description."""
        name = kind or self.dice.choice(KINDS)
        while_s = self.dice.choice([0.3, 2.0, 4.0, 8.0])
        getattr(self, f"_{name}")(while_s)
        self.settled()
        return f"{name} {while_s} s"

    def finish(self) -> None:
        """Fill a drive or lose a node, and then read everything acknowledged or deleted."""
        if self.dice.random() < 0.5:
            self.drive_filled()
        else:
            self.dice.choice(self.nodes).process.end(kill=True)
        for worker in self.workers:
            assert worker.ask("pause") == "pause"
        for worker in self.workers:
            until("each get says something", SETTLED_S, lambda worker=worker: worker.ask("read_all") == 0)
        for worker in self.workers:
            until(
                "each session has a node that orders it",
                SETTLED_S,
                lambda worker=worker: worker.ask("silent_sessions") == 0,
            )

    def history(self) -> list[Call]:
        calls = []
        for worker in self.workers:
            for line in worker.history.read_text().splitlines():
                client, kind, key, value, began_s, ended_s, end, first = json.loads(line)
                calls.append(Call(client, Kind(kind), key, value, began_s, ended_s, End(end), first))
        return calls

    # --- harm, each for a while

    def _node_killed(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        node.process.end(kill=True)
        time.sleep(while_s)
        node.start()

    def _node_stopped(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        node.process.signal(signal.SIGSTOP)
        time.sleep(while_s)
        node.process.signal(signal.SIGCONT)

    def _node_left(self, while_s: float) -> None:
        """Stop a node in order, and start it again."""
        node = self.dice.choice(self.nodes)
        node.process.end()
        time.sleep(while_s)
        node.start()

    def _node_unplugged(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        node.host.unplug()
        time.sleep(while_s)
        node.host.plug_in()

    def _cut(
        self, host: Host, while_s: float, *, ins: Iterable[Host] = (), outs: Iterable[Host] = ()
    ) -> None:
        """Drop packets to a host from some hosts, and from it to others."""
        rules = {
            "input": [f"ip saddr {one.ipv4} drop" for one in ins],
            "output": [f"ip daddr {one.ipv4} drop" for one in outs],
        }
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority -10; {'; '.join(some)} ; }}\n"
            for hook, some in rules.items()
            if some
        )
        within = ("ip", "netns", "exec", host.name, "nft")
        run(*within, "-f", "-", given=f"table inet cut {{ {chains} }}\n")
        time.sleep(while_s)
        run(*within, "delete", "table", "inet", "cut")

    def _others(self, node: Node) -> list[Host]:
        return [host for host in self.network.hosts.values() if host is not node.host]

    def _node_deaf(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        self._cut(node.host, while_s, ins=self._others(node))

    def _node_mute(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        self._cut(node.host, while_s, outs=self._others(node))

    def _node_without_etcd(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        self._cut(node.host, while_s, ins=self._spare, outs=self._spare)

    def _node_without_another(self, while_s: float) -> None:
        node, other = self.dice.sample(self.nodes, 2)
        self._cut(node.host, while_s, ins=[other.host], outs=[other.host])

    def _client_without_node(self, while_s: float) -> None:
        node, client = self.dice.choice(self.nodes), self.network.hosts[self.dice.choice(["c1", "c2"])]
        self._cut(client, while_s, ins=[node.host], outs=[node.host])

    def _wire_slow(self, while_s: float) -> None:
        node = self.dice.choice(self.nodes)
        run("ip", "link", "add", "slow-a", "type", "veth", "peer", "name", "slow-b")
        for words in ("slow-a master wire up", "slow-b up", f"{node.host.plug} nomaster"):
            run("ip", "link", "set", *words.split())
        relaying = [sys.executable, "-m", "tests.hosts.slow", "relay", node.host.plug, "slow-b", str(DELAY_S)]
        relay = Process(relaying, self.network.folder / "relay.log")
        assert relay.line(START_S) == "here"
        time.sleep(while_s)
        relay.end()
        run("ip", "link", "delete", "slow-a")
        run("ip", "link", "set", node.host.plug, "master", "wire")

    def _etcd_killed(self, while_s: float) -> None:
        member = self.dice.choice(self.etcd)
        member.process.end(kill=True)
        time.sleep(while_s)
        member.start()

    def _etcd_stopped(self, while_s: float) -> None:
        member = self.dice.choice(self.etcd)
        member.process.signal(signal.SIGSTOP)
        time.sleep(while_s)
        member.process.signal(signal.SIGCONT)

    def _etcd_away(self, while_s: float) -> None:
        for member in self.etcd:
            member.process.signal(signal.SIGSTOP)
        time.sleep(while_s)
        for member in self.etcd:
            member.process.signal(signal.SIGCONT)

    def _clock_wrong(self, while_s: float) -> None:
        """Set a node's clock an hour off, until the next time."""
        self.dice.choice(self.nodes).set_clock(self.dice.choice([-3600, 0, 3600]))
        time.sleep(while_s)

    def _node_replaced(self, _: float) -> None:
        """Drain a node, and restart it with an empty folder; if the drain is incomplete, it stays."""
        node = self.dice.choice(self.nodes)
        may_go = self._told("drain", node)
        if may_go:
            node.process.end()
            node.start(fresh=True)
        else:
            assert self._told("join", node)

    def _node_joined(self, while_s: float) -> None:
        """Add a node with an empty folder; the next time, drain and remove it."""
        if self._joined is None:
            self._joined = Node(self._one_more, self._endpoints, self._clock)
        elif self._joined not in self.nodes:
            self._joined.start(fresh=True)
        elif self._told("drain", self._joined):
            self._joined.process.end()
            self.nodes.remove(self._joined)
            return
        else:
            assert self._told("join", self._joined)
            return
        self.nodes.append(self._joined)
        time.sleep(while_s)

    def _told(self, word: str, node: Node) -> bool:
        words = ["kvstore", "cluster", word, node.target, "--node", node.target]
        words += ["--ca", f"{SECRETS}/ca.crt", "--token-file", f"{SECRETS}/secret"]
        status = node.host.start(*words).wait(SETTLED_S)
        assert status in {Status.DONE, Status.NO}, node.host.log()[-2000:]
        return status == Status.DONE

    def drive_filled(self) -> None:
        """Fill one node's drive: its blocks are evicted there, and are on other nodes."""
        assert self.workers[0].ask(f"fill {self.dice.choice(self.nodes).target}") == "full"
        self.settled()


KINDS = (
    "node_killed",
    "node_stopped",
    "node_left",
    "node_unplugged",
    "node_deaf",
    "node_mute",
    "node_without_etcd",
    "node_without_another",
    "node_replaced",
    "node_joined",
    "client_without_node",
    "wire_slow",
    "clock_wrong",
    "etcd_killed",
    "etcd_stopped",
    "etcd_away",
)
